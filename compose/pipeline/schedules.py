"""Pipeline schedules as tables: what each rank does, action after action.

The runtime executes a table, ``python -m compose schedule`` draws it, and a CSV file holds it. It has
one row for each pipeline rank and one cell for each action, as ``2F0``: stage 2, forward, micro-batch
0. F is a forward and B a whole backward. I is the part of a backward that computes the input's
gradient, and W the part that computes the weights' (Qi et al. 2023, arXiv:2401.10241). The tables of
named schedules are those of ``torch.distributed.pipelining``.
"""

import csv
import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from compose.errors import ConfigError, did_you_mean, read_file

# The names of schedules, and how many stages each rank holds by default.
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
ASYNCHRONOUS = {"PipeDream": 1, "PipeDream2BW": 1}
"""The same for pipelines without a flush (pipedream.py). A table has one step of theirs."""
ZERO_BUBBLE = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})
"""The schedules that split a backward into that of inputs and that of weights."""
# The schedules that are defined for this number of stages only.
_FIXED = ("GPipe", "1F1B", "ZBVZeroBubble", "DualPipeV", *ASYNCHRONOUS)
_MOST_STAGES = 1000  # on a rank: more than models have layers, and few enough to list
_ROWS = "{} rows, one for each rank; parallel.pp is {}"
_CELL = re.compile(r"([0-9]{1,18})([FBIW])([0-9]{1,18})")


@dataclass(frozen=True)
class Schedule:
    """The order in which a pipeline runs."""

    name: str = "1F1B"
    """The name of a schedule in SCHEDULES, or of a CSV file."""
    virtual_stages: int = 0
    """Stages on each rank. 0: as many as the schedule is made for."""
    layers: Sequence[int] = ()
    """Layers of each stage, in order. Empty: balanced by FLOPs."""


class Action(NamedTuple):
    """One cell: F, B, I or W of one micro-batch on one stage."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Table = list[list[Action]]
"""The actions of each pipeline rank, in order."""


def stages_per_rank(schedule: str, virtual_stages: int = 0) -> int:
    """Return how many stages each rank holds."""
    in_file = schedule.endswith(".csv")
    schedules = SCHEDULES | ASYNCHRONOUS
    if not in_file and schedule not in schedules:
        known = ", ".join(schedules)
        near = did_you_mean(schedule, schedules)
        raise ConfigError(
            f"parallel.pp_schedule: unknown schedule {schedule!r}{near} (known: {known}, or a .csv"
            " file)"
        )
    usual = schedules.get(schedule, 0)
    if schedule in _FIXED and virtual_stages not in (0, usual):
        raise ConfigError(
            f"parallel.pp_virtual_stages: {schedule} has {usual} on each rank, not {virtual_stages};"
            f" use {usual}, or another parallel.pp_schedule"
        )
    if virtual_stages > _MOST_STAGES:
        raise ConfigError(
            f"parallel.pp_virtual_stages: {virtual_stages} on each rank; use at most {_MOST_STAGES}"
        )
    if not virtual_stages and in_file:
        table = read_table(schedule)
        return max(1, len({action.stage for row in table for action in row}) // len(table))
    return virtual_stages or usual


def build_table(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> Table:
    """Return the table of a named schedule, or of a CSV file."""
    per_rank = stages_per_rank(schedule, virtual_stages)
    if schedule.endswith(".csv"):
        table = read_table(schedule)
        _check_shape(table, schedule, pp, per_rank, micro_batches)
        check_table(table, schedule)
        return table
    try:
        return [*map(list, _table_of_torch(schedule, pp, per_rank, micro_batches))]
    except ValueError as error:
        reason = str(error).strip().rstrip(".")
    who = "" if schedule in _SINGLE else "PyTorch: "
    raise ConfigError(
        f"parallel.pp_schedule: {schedule} with parallel.pp {pp} cannot run {micro_batches}"
        f" micro-batches ({who}{' '.join(reason.split())}); nearest:"
        f" {_nearest(schedule, pp, per_rank, micro_batches)}"
    )


def splits_backward(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> bool:
    """Tell whether a schedule runs, and splits the backward of inputs from that of weights."""
    try:
        if schedule.endswith(".csv"):
            table = read_table(schedule)
        else:
            # Every named schedule can run 2 pp micro-batches.
            table = build_table(schedule, pp, virtual_stages, micro_batches or 2 * pp)
    except ConfigError:
        return False
    return any(action.kind in "IW" for row in table for action in row)


def _nearest(schedule: str, pp: int, per_rank: int, micro_batches: int) -> str:
    """Return the nearest number below that can run, and the nearest above."""
    # PipeDream can run one alone.
    above = itertools.count(micro_batches + 1) if schedule != "PipeDream" else ()
    results = [
        next((n for n in numbers if _exists(schedule, pp, per_rank, n)), None)
        for numbers in (range(micro_batches - 1, 0, -1), above)
    ]
    return " or ".join(str(n) for n in results if n is not None)


def _exists(schedule: str, pp: int, per_rank: int, micro_batches: int) -> bool:
    try:
        _table_of_torch(schedule, pp, per_rank, micro_batches)
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=64)  # the planner asks for one table many times
def _table_of_torch(
    schedule: str, pp: int, per_rank: int, micro_batches: int
) -> tuple[Sequence[Action], ...]:
    if schedule in _SINGLE:
        return tuple(_SINGLE[schedule](rank, pp, micro_batches) for rank in range(pp))
    from torch.distributed.pipelining.schedules import get_schedule_class  # it imports the compiler

    # A schedule reads only these numbers of its stages until it runs.
    stage: Any = SimpleNamespace(
        group_rank=0, group_size=pp, num_stages=pp * per_rank, stage_index=0, submod=nn.Module()
    )
    # Messages are added when it runs; here they would take most of the time.
    without = {"_prepare_schedule_with_comms": lambda *unused: None}
    kind: Any = type(schedule, (get_schedule_class(schedule),), without)
    order = kind([stage] * per_rank, micro_batches).pipeline_order
    return tuple(_own_actions(order[rank]) for rank in range(pp))


def _gpipe(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Return all forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965)."""
    return [Action(rank, kind, n) for kind in "FB" for n in range(micro_batches)]


def _one_forward_one_backward(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Return PipeDream-flush (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1)."""
    warmup = min(pp - 1 - rank, micro_batches)
    forwards = [Action(rank, "F", n) for n in range(micro_batches)]
    backwards = [Action(rank, "B", n) for n in range(micro_batches)]
    steady = itertools.zip_longest(forwards[warmup:], backwards)
    return forwards[:warmup] + [a for pair in steady for a in pair if a is not None]


def _pipedream(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Return 1F1B (Narayanan et al. 2019, SOSP), whose steps have one micro-batch each."""
    if micro_batches != 1:
        raise ValueError("it takes a step after each micro-batch")
    return _one_forward_one_backward(rank, pp, micro_batches)


def _pipedream_2bw(rank: int, pp: int, micro_batches: int) -> list[Action]:
    """Return 1F1B (Narayanan et al. 2021, arXiv:2006.09503)."""
    if micro_batches < pp:
        raise ValueError("two versions of the weights need at least as many as there are stages")
    return _one_forward_one_backward(rank, pp, micro_batches)


# PyTorch runs the first two without a table; its table of 1F1B lacks the last rank's first forward.
_SINGLE = {
    "GPipe": _gpipe,
    "1F1B": _one_forward_one_backward,
    "PipeDream": _pipedream,
    "PipeDream2BW": _pipedream_2bw,
}


def _own_actions(actions: Sequence[Any]) -> list[Action]:
    """Return the computing actions alone; overlapped ones run one after another on one device."""
    results: list[Action] = []
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            results += _own_actions(action.sub_actions)
        elif action.computation_type.value in ("F", "B", "I", "W"):
            results.append(
                Action(action.stage_index, action.computation_type.value, action.microbatch_index)
            )
    return results


def forwards(ranks: Sequence[int], micro_batches: int) -> list[Action]:
    """Return every forward of a pipeline that runs no backward, in an order in which they can run.

    In each turn a rank runs the deepest of its stages that has an input. So few activations wait
    between stages, and the ranks of a V-schedule are busy too.
    """
    # For each stage the micro-batches that have come to it; after the last, those that are done.
    come = [micro_batches, *[0] * len(ranks)]
    order: list[Action] = []
    while come[-1] < micro_batches:
        turn = {rank: i for i, rank in enumerate(ranks) if come[i + 1] < come[i]}
        for stage in turn.values():
            order.append(Action(stage, "F", come[stage + 1]))
            come[stage + 1] += 1
    return order


def read_table(path: str) -> Table:
    """Return the table of a CSV file: a row for each rank, cells as ``2F0``, empty cells ignored.

    Raises ConfigError if the file cannot be read, or holds something else.
    """
    try:
        rows = list(csv.reader(read_file(Path(path)).decode("utf-8").splitlines()))
    except (OSError, UnicodeError, csv.Error) as error:
        other = str(error) if isinstance(error, csv.Error) else "not a text file"
        reason = error.strerror if isinstance(error, OSError) else other
        raise ConfigError(f"parallel.pp_schedule: cannot read {path}: {reason}") from None
    table: Table = []
    for number, row in enumerate(rows):
        actions = []
        for text in filter(None, (cell.strip() for cell in row)):
            match = _CELL.fullmatch(text)
            if not match:
                raise ConfigError(
                    f"parallel.pp_schedule: {path}, row {number + 1}: {text!r} is not an action"
                    " (stage, F, B, I or W, micro-batch: 2F0)"
                )
            actions.append(Action(int(match[1]), match[2], int(match[3])))
        if actions:
            table.append(actions)
    if not table:
        raise ConfigError(f"parallel.pp_schedule: {path} holds no action")
    return table


def placement(schedule: str, pp: int, virtual_stages: int) -> list[int]:
    """Return the pipeline rank of each stage: round and round, or forward and back for V-schedules."""
    if schedule.endswith(".csv"):
        table = read_table(schedule)
        stages = {action.stage for row in table for action in row}
        if stages != set(range(len(stages))):
            raise ConfigError(
                f"parallel.pp_schedule: {schedule} has stages {_span(stages)}; count them from 0 on"
            )
        if len(table) != pp:
            raise ConfigError(f"parallel.pp_schedule: {schedule} has {_ROWS.format(len(table), pp)}")
        check_table(table, schedule)
        ranks = {action.stage: rank for rank, row in enumerate(table) for action in row}
        return [ranks[stage] for stage in range(len(ranks))]
    ranks = list(range(pp))
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return ranks + ranks[::-1]
    return ranks * stages_per_rank(schedule, virtual_stages)


def _check_shape(table: Table, name: str, pp: int, per_rank: int, micro_batches: int) -> None:
    stages = {a.stage for row in table for a in row}
    results = {a.micro_batch for row in table for a in row}
    problems = []
    if len(table) != pp:
        problems.append(_ROWS.format(len(table), pp))
    if stages != set(range(pp * per_rank)):
        problems.append(
            f"stages {_span(stages)}; parallel.pp {pp} and parallel.pp_virtual_stages ask for"
            f" 0 to {pp * per_rank - 1}"
        )
    if results != set(range(micro_batches)):
        problems.append(
            f"micro-batches {_span(results)}; train.global_batch and train.micro_batch make"
            f" {micro_batches}, 0 to {micro_batches - 1}"
        )
    if problems:
        raise ConfigError(*(f"parallel.pp_schedule: {name} has {problem}" for problem in problems))


def _span(numbers: set[int]) -> str:
    whole = numbers == set(range(len(numbers))) and numbers
    return f"0 to {max(numbers)}" if whole else ", ".join(map(str, sorted(numbers))) or "none"


def check_table(table: Table, name: str) -> None:
    """Raise ConfigError unless a table is a whole, possible step.

    Every stage runs each micro-batch forward once. Then it runs B once, or I and then W. Every stage is
    on one rank. The last stage runs forwards in order, by which PyTorch's runtime finds the losses. No
    two ranks wait for each other.
    """

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"parallel.pp_schedule: {name}: {problem}")

    rank_of: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(table):
        for a in row:
            if rank_of.setdefault(a.stage, rank) != rank:
                raise refuse(f"stage {a.stage} is on ranks {rank_of[a.stage]} and {rank}; use one")
            if a in seen:
                raise refuse(f"{a} is in the table twice")
            before = {"B": "F", "I": "F", "W": "I"}.get(a.kind)
            if before and a._replace(kind=before) not in seen:
                raise refuse(f"{a} stands before {a._replace(kind=before)}")
            seen.add(a)
    last = max(rank_of)
    kinds_of: dict[tuple[int, int], set[str]] = {}
    for a in seen:
        kinds_of.setdefault((a.stage, a.micro_batch), set()).add(a.kind)
    for stage, rank in rank_of.items():
        for micro_batch in {number for _, number in kinds_of}:
            kinds = kinds_of.get((stage, micro_batch), set())
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                raise refuse(
                    f"stage {stage} has {' and '.join(sorted(kinds)) or 'nothing'} of micro-batch"
                    f" {micro_batch}; it takes F and B, or F, I and W"
                )
        if stage == last:
            order = [a.micro_batch for a in table[rank] if (a.stage, a.kind) == (last, "F")]
            if order != sorted(order):
                raise refuse(f"stage {stage}, the last, runs its forwards out of order")
    stuck = sorted(seen.difference(execution_order(table)))
    if stuck:
        raise refuse(f"ranks wait for each other; {stuck[0]} can never run")


def needs(action: Action, last_stage: int) -> list[set[Action]]:
    """Return what must have run before an action: one action of each set."""
    stage, kind, micro_batch = action
    if kind == "F":
        return [{Action(stage - 1, "F", micro_batch)}] if stage > 0 else []
    if kind == "W":
        return [{Action(stage, "I", micro_batch)}]
    own = {Action(stage, "F", micro_batch)}
    if stage == last_stage:
        return [own]
    return [own, {Action(stage + 1, "B", micro_batch), Action(stage + 1, "I", micro_batch)}]


def execution_order(table: Sequence[Sequence[Action]]) -> list[Action]:
    """Return all actions in an order in which they can run.

    If ranks wait for each other, only the actions that can run are in it.
    """
    last = max(a.stage for row in table for a in row)
    place = [0] * len(table)
    done: dict[Action, None] = {}
    while True:
        before = len(done)
        for rank, row in enumerate(table):
            while place[rank] < len(row):
                action = row[place[rank]]
                if not all(any(a in done for a in options) for options in needs(action, last)):
                    break
                done[action] = None
                place[rank] += 1
        if len(done) == before:
            return list(done)
