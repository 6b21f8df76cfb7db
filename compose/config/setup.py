"""The request that ``compose.apply`` gets, and the form of a rule for it."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from torch import nn

from compose.composition import Options
from compose.config.json_files import types_of
from compose.errors import ReadWith, noted, toml_value
from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import splits_backward
from compose.plan import ResolvedPlan

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
    resolved: ResolvedPlan
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

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule runs the backward of inputs and of weights separately."""
        pp, stages, name = self.degrees.pp, self.degrees.pp_virtual_stages, self.degrees.pp_schedule
        return pp > 1 and splits_backward(name, pp, stages, self.micro_batches)


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
        types = types_of(type(table))
        for each in dataclasses.fields(table):
            value = getattr(table, each.name)
            needs = [need for need in get_args(types[each.name]) if isinstance(need, ReadWith)]
            unread = [why for need in needs if (why := need.problem(name, table))]
            if value != each.default and unread:
                yield f"{name}.{each.name}: {toml_value(value)} {unread[0]}"

    return check


_HEAD = """\
# What composes

Any product of `dp_replicate`, `dp_shard`, `cp`, `tp` and `pp` composes, with any `ep` over it, every
ZeRO stage, schedule and `cp_method`, tied and untied embeddings, and documents packed into a sequence,
unless a rule below says no. The checks of a config read the same table, `compose/config/rules.py`.
The tests prove that every mesh of 8 ranks is either refused by it or equal to one process.
`python -m compose.config.rules` prints this page. Which meshes a config allows:

```bash
python -m compose legal train.toml --world-size 8
```

| what must hold | why | forced by |
| --- | --- | --- |"""
_TAIL = """
Where the last column is empty, arithmetic asks for it. A refusal names the key, the reason and the
nearest change that helps."""


def markdown(rules: Iterable[Rule[Any]]) -> str:
    """Return the text of docs/composition.md."""
    rows = [
        f"| {rule.condition} | {rule.reason} | {rule.upstream and 'PyTorch: ' + rule.upstream} |"
        for rule in rules
    ]
    return "\n".join([_HEAD, *rows, _TAIL])
