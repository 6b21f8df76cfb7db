"""What ``compose.apply`` is asked for, and a rule of what it can do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from compose.composition.options import Options
from compose.errors import ConfigError
from compose.parallel.mesh import Parallel
from compose.plan import Resolved

Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Setup:
    """A plan for a model, with the options of ``compose.apply`` on so many ranks."""

    model: nn.Module
    """The whole model, on any device."""
    resolved: Resolved
    """The plan, met with the model."""
    options: Options
    """Its degrees are known."""
    world_size: int
    """Number of ranks."""
    device_type: str
    """The type of their devices."""
    micro_batches: int = 0
    """Of one rank in a step; 0 where nobody knows yet."""

    @property
    def degrees(self) -> Parallel:
        """The table [parallel]."""
        return self.options.parallel

    @property
    def on_cuda(self) -> bool:
        """Whether the devices are GPUs."""
        return self.device_type == "cuda"


@dataclass(frozen=True)
class Rule(Generic[Asked]):
    """What must hold of a :class:`Setup`, or of a run."""

    condition: str
    """What must hold."""
    reason: str
    """Why."""
    check: Callable[[Asked], None]
    """Raises ConfigError, with the nearest legal change, where it does not hold."""
    upstream: str = ""
    """The place in PyTorch that asks for it; empty where arithmetic does."""


def problems_of(rules: Sequence[Rule[Asked]], asked: Asked) -> list[str]:
    """Return all that ``rules`` have against what is asked, one line each."""
    found: list[str] = []
    for rule in rules:
        try:
            rule.check(asked)
        except ConfigError as error:
            found += error.problems
    return list(dict.fromkeys(found))
