"""The memory of a pipeline rank: what each action adds, and the peak over the schedule's own table.

A record tells what one action allocates and frees. A schedule's table tells in which order a rank runs
them, and how many are in flight. The peak follows from both.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compose.pipeline.schedules import Action
from compose.planner.recorder import FORWARD, OPTIMIZER, RECOMPUTED, Record, Segment

WEIGHTS, GRADIENTS, STATE, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
GATHERED, COMMUNICATION, TEMPORARIES, LOGITS = "gathered", "communication", "temporaries", "logits"
CATEGORIES = (
    WEIGHTS,
    GRADIENTS,
    STATE,
    ACTIVATIONS,
    GATHERED,
    COMMUNICATION,
    TEMPORARIES,
    LOGITS,
)
Bytes = Counter[str]
"""Bytes by category."""
Key = tuple[int, str, str]
"""An action of a stage: the stage, the kind F, B, I or W, and which one: first, middle or last."""
STEP: Key = (-1, "step", "last")
"""What follows the last micro-batch: clipping and the optimizer."""


@dataclass
class ActionMemory:
    """The changes that one action makes to the memory that was there before it."""

    delta: Bytes = field(default_factory=Counter)
    """Bytes that it leaves, below 0 for those that it frees."""
    peaks: dict[tuple[str, ...], Bytes] = field(default_factory=dict)
    """Bytes at the peak of each of its segments, by the keys of :func:`segment_keys`."""


@dataclass
class RankMemory:
    """The memory of one rank of a pipeline, action by action."""

    start: Bytes = field(default_factory=Counter)
    """Bytes between steps."""
    buffers: Bytes = field(default_factory=Counter)
    """Bytes of the pipeline's buffers for one micro-batch; each micro-batch has its own."""
    actions: dict[Key, ActionMemory] = field(default_factory=dict)
    """Each kind of action."""


def categorize(record: Record, output: str) -> None:
    """Give every allocation of a record its category.

    Args:
        record: The record.
        output: The module that makes the logits; empty if there is none.
    """
    segments = record.segments
    after: set[int] = set()
    logits = False
    for place, segment in enumerate(segments):
        if place and segment.action != segments[place - 1].action:
            # A backward begins with the loss of the last stage.
            logits = segment.action[1] in ("B", "I") and bool(after) and place - 1 in after
        if output and segment.unit == output:
            logits = True
        elif segment.unit:
            logits = False
        if logits:
            after.add(place)
    for each in record.allocations:
        if each.category:
            continue
        made, freed = segments[each.segment], each.freed
        if each.within == "gather":
            each.category = GATHERED
        elif each.freed_within == "reduce" != each.within:
            each.category = GRADIENTS  # of a unit that has a copy to send
        elif each.within in ("reduce", "message"):
            each.category = COMMUNICATION
        elif made.phase == OPTIMIZER:
            each.category = TEMPORARIES
        elif each.segment in after:
            each.category = LOGITS
        elif made.phase in (FORWARD, RECOMPUTED) and (freed is None or _later(segments[freed], made)):
            each.category = ACTIVATIONS
        else:
            each.category = TEMPORARIES


def _later(freed: Segment, made: Segment) -> bool:
    return (freed.action, freed.phase) != (made.action, made.phase)


def rank_memory(
    record: Record, micro_batches: int, places: Mapping[str, Sequence[str]] | None = None
) -> RankMemory:
    """Return the memory of the recorded rank, action by action.

    Args:
        record: The record, whose allocations have their categories.
        micro_batches: How many micro-batches it ran.
        places: The places of each layer, as ``reduction.places`` returns them.

    Returns:
        The memory.
    """
    found = RankMemory()
    for segment in record.segments:
        if segment.action[1] != "setup":
            found.actions[action_key(segment.action, micro_batches)] = ActionMemory()
    live: Bytes = Counter()
    keys = segment_keys(record, places or {})
    now: tuple[int, str, int] | None = None
    before: Bytes = Counter()
    for segment, place, change in record.changes:
        action = record.segments[segment].action
        category = record.allocations[place].category
        if action[1] == "setup":
            live[category] += change
            continue
        if now is None:
            # The batch, and the buffers in which a pipeline receives: each micro-batch has its own.
            found.start = Counter({c: n for c, n in live.items() if c != ACTIVATIONS})
            found.buffers[ACTIVATIONS] = live[ACTIVATIONS] // micro_batches
        if action != now:
            if now is not None:
                _leave(found, action_key(now, micro_batches), live, before)
            now, before = action, Counter(live)
        live[category] += change
        if change > 0:
            memory = found.actions[action_key(action, micro_batches)]
            above = Counter({c: live[c] - before[c] for c in live})
            for key in keys[segment]:
                if key not in memory.peaks or above.total() > memory.peaks[key].total():
                    memory.peaks[key] = above
    if now is not None:
        _leave(found, action_key(now, micro_batches), live, before)
    return found


def _leave(found: RankMemory, key: Key, live: Bytes, before: Bytes) -> None:
    memory = found.actions[key]
    memory.delta = Counter({c: live[c] - before[c] for c in live if live[c] != before[c]})


def action_key(action: tuple[int, str, int], micro_batches: int) -> Key:
    """Return the key of an action of a record that ran ``micro_batches``."""
    stage, kind, number = action
    if kind == "step":
        return STEP
    return stage, kind, place_of(number, micro_batches)


def place_of(number: int, micro_batches: int) -> str:
    """Return whether a micro-batch is the first, the last, or one between.

    The only one counts as the last: what a step does once is done with the last.
    """
    if number == micro_batches - 1:
        return "last"
    return "first" if number == 0 else "middle"


def stand_ins(key: Key, known: Container[Key]) -> list[Key]:
    """Return the recorded actions that stand for one: itself, if it was recorded.

    A table may split the backward of a micro-batch on one rank and not on another, of which there is
    one record. Then both halves stand for a whole backward, or a whole one for its first half.
    """
    stage, kind, place = key
    if key in known:
        return [key]
    if kind == "B":
        return [(stage, "I", place), (stage, "W", place)]
    return [(stage, "B", place)] if kind == "I" else []


def segment_keys(record: Record, places: Mapping[str, Sequence[str]]) -> list[list[tuple[str, ...]]]:
    """Return for each segment what it has in common with a segment of a record with more layers.

    Args:
        record: The record.
        places: The places of each layer; other units are known by their name.

    Returns:
        The keys of each segment: its phase, a place of its unit, and its number within the unit.
    """
    counts: Counter[tuple[object, ...]] = Counter()
    keys: list[list[tuple[str, ...]]] = []
    action, unit = None, ""
    for segment in record.segments:
        if segment.action != action:
            action, unit = segment.action, ""
        unit = segment.unit or f"{unit.rstrip('+')}+"
        counts[action, unit] += 1
        number = str(counts[action, unit])
        after = "+" if unit.endswith("+") else ""
        name = unit.rstrip("+")
        keys.append([(segment.phase, p + after, number) for p in places.get(name, [name])])
    return keys


def peak(rank: RankMemory, row: Sequence[Action], micro_batches: int) -> tuple[int, Mapping[str, int]]:
    """Return the most bytes at a time over a step, and how categories shared them.

    Args:
        rank: The rank's memory.
        row: The actions of the rank in order.
        micro_batches: Micro-batches of a step.

    Returns:
        The bytes, and those of each category at that time.
    """
    return _most(moments(rank, row, micro_batches))


def moments(
    rank: RankMemory, row: Sequence[Action], micro_batches: int
) -> Iterator[tuple[int, Bytes, Bytes]]:
    """Yield the peaks of all segments of a step, in order.

    Yields:
        The bytes; those of each category before the action; and what the action adds to them. They
            change when the next are asked for.
    """
    live = Counter(rank.start)
    for category, size in rank.buffers.items():
        live[category] += size * micro_batches
    yield live.total(), live, Counter()
    keys = [(a.stage, a.kind, place_of(a.micro_batch, micro_batches)) for a in row]
    for key in (*keys, STEP):
        for each in stand_ins(key, rank.actions):
            memory = rank.actions[each]
            for above in memory.peaks.values():
                yield live.total() + above.total(), live, above
            for category, change in memory.delta.items():
                live[category] += change


def _most(found: Iterable[tuple[int, Bytes, Bytes]]) -> tuple[int, Mapping[str, int]]:
    best, at = 0, {}
    for size, live, above in found:
        if size > best:
            best, at = size, dict(live + above)
    return best, at


def recorded_peak(record: Record) -> tuple[int, Mapping[str, int]]:
    """Return the most bytes at a time of a record as it is, and how categories shared them.

    Args:
        record: The record, whose allocations have their categories.

    Returns:
        The bytes, and those of each category at that time.
    """
    return _most(recorded_moments(record))


def recorded_moments(record: Record) -> Iterator[tuple[int, Bytes, Bytes]]:
    """Yield the bytes after each change of a record as it is, as :func:`moments` does.

    Yields:
        The bytes, those of each category, and an empty counter.
    """
    live, size, none = Counter(), 0, Counter()
    for _, place, change in record.changes:
        size += change
        live[record.allocations[place].category] += change
        yield size, live, none
