"""The pipeline simulator: when each action of a table runs, and what ranks wait and keep.

``python -m compose schedule`` counts time in forwards of one stage: F is 1, B is 2, its halves I and W
are 1 each, and communication is 0. The planner gives durations in seconds. Tables must pass
:func:`compose.pipeline.schedules.check_table`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import (
    ASYNCHRONOUS,
    Action,
    Table,
    build_table,
    execution_order,
    needs,
    stages_per_rank,
)

DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}
_ROUNDING = 1e-12  # of the clock, at which an action's work is done

# For each schedule the formula of its bubble, and the k of (p-1)/(k*v*m+p-1), which is the same.
_TEXTBOOK = {
    "GPipe": ("(p-1)/(m+p-1)", 1.0),
    "1F1B": ("(p-1)/(m+p-1)", 1.0),
    "Interleaved1F1B": ("(p-1)/(v*m+p-1)", 1.0),
    "LoopedBFS": ("(p-1)/(v*m+p-1)", 1.0),
    "InterleavedZeroBubble": ("(p-1)/(3*v*m+p-1)", 3.0),
    "ZBVZeroBubble": ("(p-1)/(6*m+p-1)", 3.0),
    "DualPipeV": ("(p-1)/(3*m+p-1)", 1.5),
}
_REMARKS = {
    "ZBVZeroBubble": ", and from m = 2p-1 on 0% of each rank's own span",
    "DualPipeV": ", if the forward and backward of a pair end together",
}


@dataclass(frozen=True)
class TimedAction:
    """One action on the clock."""

    rank: int
    action: Action
    start: float
    end: float


def of_run(parallel: Parallel, micro_batches: int) -> tuple[Table, str]:
    """Return the table of actions of a run with these degrees, and a title for its picture.

    The table is of one step; without a flush it is of a few, whose micro-batches are counted on.
    """
    name, ranks = parallel.pp_schedule, parallel.pp
    table, steps = build_table(name, ranks, parallel.pp_virtual_stages, micro_batches), ""
    if name in ASYNCHRONOUS:
        count = 2 * ranks if micro_batches == 1 else 3
        table, steps = build_table("1F1B", ranks, 1, count * micro_batches), f"{count} steps of "
    layers = list(parallel.pp_layers)
    return table, f"{name}: {ranks} ranks, {steps}{micro_batches} micro-batches, layers {layers}"


def simulate(
    table: Sequence[Sequence[Action]],
    duration: Callable[[Action], float] = lambda action: DURATIONS[action.kind],
    message: Callable[[int, int], float] = lambda sender, receiver: 0,
    after_result: Callable[[Action], float] = lambda action: 0,
    sharing: float = 1,
) -> list[TimedAction]:
    """Return when each action runs, in an order in which they can run.

    A rank runs its row in order. An action starts once the rank is free and its inputs have come. A
    ``message`` takes a time, but does not hold up the rank that sends it. ``after_result`` returns the
    part of an action's time in which its result is sent already, as gradients are reduced after it.
    Ranks that share processors, ``sharing`` of them each, cannot use it, and durations hold while all
    ranks work.
    """
    order = execution_order(table)
    if len(order) < sum(map(len, table)):
        raise ValueError("the schedule waits for itself")
    if sharing > 1:
        return _simulate_shared(table, duration, message, sharing)
    rank_of, last = {a: rank for rank, row in enumerate(table) for a in row}, _last_stage(table)
    free: list[float] = [0] * len(table)
    ends: dict[Action, float] = {}
    slots = []
    for action in order:
        rank = rank_of[action]
        ready = _ready(needs(action, last), rank, rank_of, ends, message)
        assert ready is not None
        start = max(free[rank], ready)
        free[rank] = start + duration(action)
        ends[action] = free[rank] - after_result(action)
        slots.append(TimedAction(rank, action, start, free[rank]))
    return slots


def _simulate_shared(
    table: Sequence[Sequence[Action]],
    duration: Callable[[Action], float],
    message: Callable[[int, int], float],
    sharing: float,
) -> list[TimedAction]:
    """Return when each action runs, if ranks that wait leave their processors to the others.

    While k of n ranks work, each is min(sharing, n / k) times as fast as while all do (generalized
    processor sharing: Parekh and Gallager 1993).
    """
    rank_of, last = {a: rank for rank, row in enumerate(table) for a in row}, _last_stage(table)
    ends: dict[Action, float] = {}
    left: dict[int, float] = {}  # work of the running action, by rank
    now, started, next_of = 0.0, [0.0] * len(table), [0] * len(table)
    slots: list[TimedAction] = []
    while len(slots) < len(rank_of):
        awaited = []
        for rank, row in enumerate(table):
            if rank in left or next_of[rank] == len(row):
                continue
            ready = _ready(needs(row[next_of[rank]], last), rank, rank_of, ends, message)
            if ready is not None and ready <= now:
                left[rank], started[rank] = duration(row[next_of[rank]]), now
            elif ready is not None:
                awaited.append(ready)
        speed = min(sharing, len(table) / max(1, len(left)))
        until = min([*awaited, *(now + work / speed for work in left.values())])
        left = {rank: work - (until - now) * speed for rank, work in left.items()}
        now = until
        for rank in [rank for rank, work in left.items() if work <= _ROUNDING * now]:
            action = table[rank][next_of[rank]]
            ends[action] = now
            slots.append(TimedAction(rank, action, started[rank], now))
            next_of[rank] += 1
            del left[rank]
    return slots


def _last_stage(table: Sequence[Sequence[Action]]) -> int:
    return max(action.stage for row in table for action in row)


def _ready(
    inputs: Sequence[set[Action]],
    rank: int,
    rank_of: dict[Action, int],
    ends: dict[Action, float],
    message: Callable[[int, int], float],
) -> float | None:
    """Return when all inputs of an action of ``rank`` have come; None if one was not sent yet."""
    ready = 0
    for options in inputs:
        come = [(ends[a], rank_of[a]) for a in options if a in ends]
        sent = [end + (message(r, rank) if r != rank else 0) for end, r in come]
        if not sent:
            return None
        ready = max(ready, *sent)
    return ready


def bubble_fraction(slots: Sequence[TimedAction]) -> float:
    """Return the idle share, 0 to 1, of all ranks' time from 0 to the last end."""
    ranks = 1 + max(slot.rank for slot in slots)
    busy = sum(slot.end - slot.start for slot in slots)
    return 1 - busy / (ranks * max(slot.end for slot in slots))


def steady_bubble(pp: int) -> float:
    """Return the idle share of a pipeline without a flush, far from the run's two ends.

    It is that of 1F1B over all micro-batches of a run, between the end of one and of a later one.
    """
    first, last = 4 * pp, 8 * pp
    slots = simulate(build_table("1F1B", pp, 1, 12 * pp))
    ends = {s.action.micro_batch: s.end for s in slots if s.rank == 0 and s.action.kind == "B"}
    span = ends[last] - ends[first]
    return 1 - (last - first) * (DURATIONS["F"] + DURATIONS["B"]) / span


def versions(schedule: str, pp: int) -> list[int]:
    """Return how many versions of its weights each rank holds, the newest among them."""
    if schedule == "PipeDream":
        return [pp - rank for rank in range(pp)]
    return [2 if schedule in ASYNCHRONOUS else 1] * pp


def peak_in_flight(table: Table) -> list[int]:
    """Return for each rank the most pairs of stage and micro-batch whose activations it holds at once.

    A pair is held from its F until its B or W, in the order of the rank's own row.
    """
    peaks = []
    for row in table:
        held: set[tuple[int, int]] = set()
        peak = 0
        for stage, kind, micro_batch in row:
            if kind == "F":
                held.add((stage, micro_batch))
            elif kind in "BW":
                held.discard((stage, micro_batch))
            peak = max(peak, len(held))
        peaks.append(peak)
    return peaks


def textbook(
    schedule: str, pp: int, virtual_stages_per_rank: int, micro_batches: int
) -> tuple[str, float] | None:
    """Return the bubble fraction in closed form as text and value, or None for a CSV file.

    p is the number of ranks, v of stages on each, m of micro-batches. The simulated tables compare so:

    - GPipe (Huang et al. 2018, arXiv:1811.06965) and 1F1B (Narayanan et al. 2021, arXiv:2104.04473):
      equal for every m.
    - Interleaved1F1B (Narayanan et al. 2021), LoopedBFS (Lamy-Poirier 2022, arXiv:2211.05953) and
      InterleavedZeroBubble (ZB-H1 of Qi et al. 2023, arXiv:2401.10241, with v stages a rank: idle for
      (p-1)(F+I-W)): equal from m = p on, above it for fewer.
    - ZBVZeroBubble (Qi et al. 2023, section 6): the paper's 0 is that of each rank's own span, from its
      first start to its last end. Ranks start one forward after another, which leaves p-1 of the whole
      span. It is equal from m = 3p/2, rounded down, on, and above it for fewer. Own spans are full from
      2p-1 on.
    - DualPipeV (DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe gives (PP/2-1)(F&B+B-3W)
      for PP = 2p stages): idle for 2(p-1), where the overlapped pair F&B takes F+B and ends as one. A
      table runs the pair's forward first and hands its output on at once. This halves the idle time:
      (p-1)/(6m+p-1).
    """
    if schedule not in _TEXTBOOK:
        return None
    formula, work = _TEXTBOOK[schedule]
    at_work = work * stages_per_rank(schedule, virtual_stages_per_rank) * micro_batches
    return formula, (pp - 1) / (at_work + pp - 1)


def report(table: Table, schedule_name: str, virtual_stages: int) -> str:
    """Return lines for a person: bubble fraction, the textbook's formula, micro-batches in flight."""
    micro_batches = len({action.micro_batch for row in table for action in row})
    bubble, pp = bubble_fraction(simulate(table)), len(table)
    lines = [f"bubble fraction {bubble:.1%} (of the table, with F 1, I 1, W 1, B 2)"]
    if schedule_name in ASYNCHRONOUS:
        held = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(versions(schedule_name, pp)))
        lines = [
            f"bubble fraction {steady_bubble(pp):.1%} of a long run, {bubble:.1%} of the table (with F"
            " 1, B 2): no step waits for the one before",
            f"versions of the weights: {held}; gradients are of older weights than those of 1F1B",
        ]
    if result := textbook(schedule_name, len(table), virtual_stages, micro_batches):
        lines.append(f"textbook: {result[0]} = {result[1]:.1%}{_REMARKS.get(schedule_name, '')}")
    peaks = ", ".join(f"rank {rank}: {peak}" for rank, peak in enumerate(peak_in_flight(table)))
    several = len({action.stage for row in table for action in row}) > len(table)
    each = " (one for each stage that holds it)" if several else ""
    return "\n".join([*lines, f"peak micro-batches in flight: {peaks}{each}"])
