"""What was applied to a model, for the functions that later run it."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from compose.context_parallel import Balance


@dataclass(frozen=True)
class Applied:
    """zero: the ZeRO stage. balance: how ContextParallel expects sequences to be cut."""

    zero: int = 3
    balance: Balance = "headtail"


_applied: WeakKeyDictionary[nn.Module, Applied] = WeakKeyDictionary()


def remember(model: nn.Module, applied: Applied) -> None:
    """Note what ``compose.apply`` did to ``model``."""
    _applied[model] = applied


def applied_to(model: nn.Module) -> Applied:
    """What was noted of ``model``; the defaults, which then mean nothing, if nothing was."""
    return _applied.get(model, Applied())
