"""The time of a step by a schedule's table: a rank runs its actions in order, and waits for inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compose.pipeline.schedules import Action

_ROUNDING = 1e-12  # of the clock, at which an action's work is done


@dataclass(frozen=True)
class Slot:
    """One action on the clock."""

    rank: int
    action: Action
    start: float
    """Seconds from the start of the step."""
    end: float
    """Seconds from the start of the step."""


def simulate(
    rows: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    message: Callable[[int, int], float],
    apart: Callable[[Action], tuple[float, float]] = lambda action: (0.0, 0.0),
    sharing: float = 1.0,
) -> list[Slot]:
    """Return when each action runs.

    A forward waits for that of the stage before, a backward (B or I) for that of the stage after.
    Messages do not hold up the rank that sends them.

    Args:
        rows: The actions of each rank in order.
        seconds: The time of an action.
        message: The time of a message from one rank to another.
        apart: The parts of an action's time in which it needs no input yet, and in which its result is
            sent already: weights are gathered before, and gradients reduced after it. Ranks that share
            processors cannot use these parts.
        sharing: Ranks that share one processor. The times hold while all ranks work.

    Returns:
        The slots, in no particular order.

    Raises:
        ValueError: The table waits for itself.
    """
    if sharing > 1:
        return _simulate_shared(rows, seconds, message, sharing)
    holder = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    last = max(holder)
    ends: dict[tuple[int, str, int], float] = {}
    clock, next_of = [0.0] * len(rows), [0] * len(rows)
    slots: list[Slot] = []
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while next_of[rank] < len(row):
                action = row[next_of[rank]]
                ready = _ready(action, last, holder, ends, message)
                if ready is None:
                    break
                before, after = apart(action)
                start = max(clock[rank], ready - before)
                end = start + seconds(action)
                kind = "B" if action.kind == "I" else action.kind
                ends[action.stage, kind, action.micro_batch] = end - after
                slots.append(Slot(rank, action, start, end))
                clock[rank], moved = end, True
                next_of[rank] += 1
    if any(next_of[rank] < len(row) for rank, row in enumerate(rows)):
        raise ValueError("the schedule waits for itself")
    return slots


def _simulate_shared(
    rows: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    message: Callable[[int, int], float],
    sharing: float,
) -> list[Slot]:
    """Return when each action runs, if ranks that wait leave their processors to the others.

    While k of n ranks work, each is min(sharing, n / k) times as fast as while all do (generalized
    processor sharing: Parekh and Gallager 1993).
    """
    holder = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    last, now = max(holder), 0.0
    ends: dict[tuple[int, str, int], float] = {}
    left: dict[int, float] = {}  # work of the running action, by rank
    started, next_of = [0.0] * len(rows), [0] * len(rows)
    slots: list[Slot] = []
    while any(next_of[rank] < len(row) for rank, row in enumerate(rows)):
        awaited = []
        for rank, row in enumerate(rows):
            if rank in left or next_of[rank] == len(row):
                continue
            ready = _ready(row[next_of[rank]], last, holder, ends, message)
            if ready is not None and ready <= now:
                left[rank], started[rank] = seconds(row[next_of[rank]]), now
            elif ready is not None:
                awaited.append(ready)
        if not left and not awaited:
            raise ValueError("the schedule waits for itself")
        speed = min(sharing, len(rows) / max(1, len(left)))
        until = min([*awaited, *(now + work / speed for work in left.values())])
        left = {rank: work - (until - now) * speed for rank, work in left.items()}
        now = until
        for rank in [rank for rank, work in left.items() if work <= _ROUNDING * now]:
            action = rows[rank][next_of[rank]]
            kind = "B" if action.kind == "I" else action.kind
            ends[action.stage, kind, action.micro_batch] = now
            slots.append(Slot(rank, action, started[rank], now))
            next_of[rank] += 1
            del left[rank]
    return slots


def _ready(
    action: Action,
    last: int,
    holder: dict[int, int],
    ends: dict[tuple[int, str, int], float],
    message: Callable[[int, int], float],
) -> float | None:
    """Return when an action's input is there; None if it is not known yet."""
    stage, kind, number = action.stage, action.kind, action.micro_batch
    if kind == "W" or (kind == "F" and stage == 0):
        return 0.0
    before = stage - 1 if kind == "F" else stage + 1
    if before > last:
        return ends.get((stage, "F", number))
    end = ends.get((before, "F" if kind == "F" else "B", number))
    if end is None:
        return None
    source, target = holder[before], holder[stage]
    return end + (message(source, target) if source != target else 0.0)
