"""What a rule is, and what it looks at."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from compose.config import Config, Parallel
from compose.plan import Plan


@dataclass(frozen=True)
class Case:
    """What rules look at: a config whose degrees are known, the model on meta, its plan for them."""

    config: Config
    model: nn.Module
    plan: Plan
    world_size: int

    @property
    def degrees(self) -> Parallel:
        return self.config.parallel

    @property
    def on_cuda(self) -> bool:
        return self.config.run.device != "cpu" and torch.cuda.is_available()


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
    check: Callable[[Case], None]
    upstream: str = ""
