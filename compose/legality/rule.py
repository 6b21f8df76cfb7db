"""What a rule is. It looks at a job."""

from collections.abc import Callable
from dataclasses import dataclass

from compose.config import Config
from compose.legality.job import Job


def micro_batches(config: Config) -> int:
    """Micro-batches of one rank in a step, the degrees being known; 0 where they are not whole."""
    train, ranks = config.train, config.parallel.dp_replicate * config.parallel.dp_shard
    whole, rest = divmod(train.global_batch, ranks * train.micro_batch)
    return 0 if rest else whole


@dataclass(frozen=True)
class Rule:
    """condition: what must hold. reason: why. check: raises ConfigError, with the nearest legal change,
    where it does not. upstream: where PyTorch and not arithmetic asks for it, the place."""

    condition: str
    reason: str
    check: Callable[[Job], None]
    upstream: str = ""
