"""The request that ``compose.apply`` gets, and the form of a rule for it."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from torch import nn

from compose.composition import Options
from compose.errors import ReadWith, noted, toml_value
from compose.parallel.mesh import Parallel
from compose.plan import Resolved

Asked = TypeVar("Asked")
Check = Callable[[Asked], Iterable[str] | None]
_Check = TypeVar("_Check", bound=Callable[..., Any])


@dataclass(frozen=True)
class Target:
    """The devices that a run is planned for. They may be others than this machine's."""

    device_type: str  # "cpu" or "cuda"
    float8: bool  # whether they have products of 8 bits


@dataclass(frozen=True)
class Setup:
    """A plan for a model, with the options of ``compose.apply`` and the number of ranks."""

    model: nn.Module
    """The whole model, on any device."""
    resolved: Resolved
    options: Options
    """Their degrees are known."""
    world_size: int
    device_type: str
    micro_batches: int = 0
    """Micro-batches of one rank in a step; 0 if unknown."""
    float8: bool | None = None
    """Whether the devices have products of 8 bits; None: as this machine's have."""

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
    """A condition that a :class:`Setup`, or a run, must meet."""

    condition: str
    reason: str
    check: Check[Asked]
    """Yields a line for each problem, with the nearest legal change, or raises ConfigError."""
    upstream: str = ""
    """The place in PyTorch that requires it; empty if arithmetic requires it."""


class Rules(list[Rule[Asked]]):
    """Rules in their order."""

    def add(self, condition: str, reason: str, upstream: str = "") -> Callable[[_Check], _Check]:
        """Return a decorator that makes a check the next rule."""

        def note(check: _Check) -> _Check:
            self.append(Rule(condition, reason, check, upstream))
            return check

        return note


def problems_of(rules: Sequence[Rule[Asked]], asked: Asked) -> list[str]:
    """Return one line for each problem of the setup, or the run, without repetition."""
    results: list[str] = []
    for rule in rules:
        with noted(results):
            results += rule.check(asked) or ()
    return list(dict.fromkeys(results))


def all_keys_read(name: str, table_of: Callable[[Asked], Any]) -> Check[Asked]:
    """Return the check that each key of the table ``name`` that is set is also read (``ReadWith``)."""

    def check(asked: Asked) -> Iterator[str]:
        table = table_of(asked)
        types = get_type_hints(type(table), include_extras=True)
        for each in dataclasses.fields(table):
            value = getattr(table, each.name)
            needs = [need for need in get_args(types[each.name]) if isinstance(need, ReadWith)]
            unread = [why for need in needs if (why := need.problem(name, table))]
            if value != each.default and unread:
                yield f"{name}.{each.name}: {toml_value(value)} {unread[0]}"

    return check
