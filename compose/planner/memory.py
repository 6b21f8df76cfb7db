"""The memory of a pipeline rank: what actions add, the peak over a schedule, and the allocator.

A record tells what one action allocates and frees. A schedule's table tells in which order a rank runs
them, and how many are in flight. The peak follows from both.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from compose.pipeline.schedules import Action
from compose.planner.record import FORWARD, OPTIMIZER, RECOMPUTED, Record

WEIGHTS, GRADIENTS, STATE, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
GATHERED, COMMUNICATION, TEMPORARIES, LOGITS = "gathered", "communication", "temporaries", "logits"
CATEGORIES = (WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, GATHERED, COMMUNICATION, TEMPORARIES, LOGITS)
Bytes = Counter[str]
"""Bytes by category."""
Key = tuple[int, str, str]
"""An action of a stage: the stage, the kind F, B, I or W, and which one: first, middle or last."""
STEP: Key = (-1, "step", "last")
"""The work after the last micro-batch: clipping and the optimizer."""


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


def categorize(record: Record, output: str) -> None:
    """Give every allocation of a record its category."""
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
        made = segments[each.segment]
        ended = None if each.freed is None else segments[each.freed]
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
        elif made.phase in (FORWARD, RECOMPUTED) and (
            ended is None or (ended.action, ended.phase) != (made.action, made.phase)
        ):
            each.category = ACTIVATIONS
        else:
            each.category = TEMPORARIES


def rank_memory(
    record: Record, micro_batches: int, places: Mapping[str, Sequence[str]] | None = None
) -> RankMemory:
    """Return the memory of the recorded rank, action by action."""
    result = RankMemory()
    for segment in record.segments:
        if segment.action[1] != "setup":
            result.actions[action_key(segment.action, micro_batches)] = ActionMemory()
    live: Bytes = Counter()
    keys = segment_keys(record, places or {})
    started = False
    for action, changes in groupby(record.changes, lambda change: record.segments[change[0]].action):
        if action[1] == "setup":
            for _, place, change in changes:
                live[record.allocations[place].category] += change
            continue
        if not started:
            started = True
            # The batch, and the buffers in which a pipeline receives: each micro-batch has its own.
            result.start = Counter({c: n for c, n in live.items() if c != ACTIVATIONS})
            result.buffers[ACTIVATIONS] = live[ACTIVATIONS] // micro_batches
        memory, before = result.actions[action_key(action, micro_batches)], Counter(live)
        for segment, place, change in changes:
            live[record.allocations[place].category] += change
            if change > 0:
                above = Counter({c: live[c] - before[c] for c in live})
                for key in keys[segment]:
                    if key not in memory.peaks or above.total() > memory.peaks[key].total():
                        memory.peaks[key] = above
        memory.delta = Counter({c: live[c] - before[c] for c in live if live[c] != before[c]})
    if not started:  # nothing changes in a step
        result.start = live
    return result


def action_key(action: tuple[int, str, int], micro_batches: int) -> Key:
    """Return the key of an action of a record that ran ``micro_batches``."""
    stage, kind, number = action
    if kind == "step":
        return STEP
    return stage, kind, place_of(number, micro_batches)


def place_of(number: int, micro_batches: int) -> str:
    """Return whether a micro-batch is the first, the last, or one between.

    A single one counts as the last: what a step does once is done with the last.
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
    """Return the keys of each segment, which are the same in a record with more layers."""
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
    """Return the most bytes at a time over a step, and how categories shared them."""
    most, at = 0, {}
    for size, live, above in bytes_over_step(rank, row, micro_batches, fullest=True):
        if size > most:
            most, at = size, dict(live + above)
    return most, at


def bytes_over_step(
    rank: RankMemory, row: Sequence[Action], micro_batches: int, fullest: bool = False
) -> Iterator[tuple[int, Bytes, Bytes]]:
    """Yield the peak of each segment of a step in order: bytes, those before the action, what it adds.

    With ``fullest`` only the first of each action's largest segments is yielded. The counters are used
    again for the next item.
    """
    live = Counter(rank.start)
    for category, size in rank.buffers.items():
        live[category] += size * micro_batches
    yield live.total(), live, Counter()
    added = {
        key: [(above.total(), above) for above in memory.peaks.values()]
        for key, memory in rank.actions.items()
    }
    if fullest:
        added = {key: [max(peaks, key=itemgetter(0))] for key, peaks in added.items() if peaks}
    keys = [(a.stage, a.kind, place_of(a.micro_batch, micro_batches)) for a in row]
    for key in (*keys, STEP):
        for each in stand_ins(key, rank.actions):
            now = live.total()
            for size, above in added.get(each, ()):
                yield now + size, live, above
            for category, change in rank.actions[each].delta.items():
                live[category] += change


# Sizes of CUDA's caching allocator (c10/core/AllocatorConfig.h); a test compares them with PyTorch's.
BLOCK = 512
"""Sizes are multiples of it."""
SMALL = 2**20
"""The largest size of the small pool, and the largest rest that is not split off in the large pool."""
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
LARGE = 10 * 2**20
"""The smallest size that has a segment of its own."""
LARGE_STEP = 2 * 2**20

# A free block is one number, its size above its address: numbers compare faster than tuples.
_ADDRESS_BITS = 52
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class Peaks(NamedTuple):
    """The largest amounts of a replay, in bytes, as ``torch.cuda.memory_stats`` counts them."""

    allocated: int
    """Peak of the blocks in use: ``allocated_bytes.all.peak``."""
    reserved: int
    """Peak of what the device gave: ``reserved_bytes.all.peak``."""


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not less than ``size``."""
    return -(-size // multiple) * multiple


class _Pool:
    """The free blocks of one pool, and the bytes that it has from the device."""

    def __init__(self, small: bool, expandable: bool) -> None:
        self.reserved = 0
        self._expandable = expandable
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._smallest_rest = BLOCK if small or expandable else SMALL + 1
        self._end = 0  # The address after the last segment.
        self._free: list[int] = []  # Sorted by size, then by address.
        self._size_at: dict[int, int] = {}  # The size of each free block by its first address.
        self._start_of: dict[int, int] = {}  # The first address of each by the one after its last.

    def take(self, size: int) -> tuple[int, int]:
        """Return address and size of a block for a request of ``size`` bytes, a multiple of 512."""
        place = bisect_left(self._free, size << _ADDRESS_BITS)
        if self._expandable and place < len(self._free) - 1:
            key = self._free[place]
            place += (key & _ADDRESS) + (key >> _ADDRESS_BITS) == self._end  # not the last one
        if place < len(self._free):
            key = self._free.pop(place)
            address, result = key & _ADDRESS, key >> _ADDRESS_BITS
            self._forget(address, result)
        elif self._expandable:
            address, result = self._grow(size)
        else:
            address, result = self._new_segment(size)
        rest = result - size
        if rest >= self._smallest_rest:
            self._keep(address + size, rest)
            return address, size
        return address, result

    def give(self, address: int, size: int) -> None:
        """Take a block back, and join it with its free neighbours."""
        before = self._start_of.get(address)
        if before is not None:
            self._drop(before, address - before)
            size += address - before
            address = before
        after = self._size_at.get(address + size)
        if after is not None:
            self._drop(address + size, after)
            size += after
        self._keep(address, size)

    def _new_segment(self, size: int) -> tuple[int, int]:
        if size <= SMALL:
            result = SMALL_SEGMENT
        else:
            result = LARGE_SEGMENT if size < LARGE else round_up(size, LARGE_STEP)
        # Between two segments there is a gap, for blocks of different segments never join.
        address = self._end + BLOCK
        self._end = address + result
        self.reserved += result
        return address, result

    def _grow(self, size: int) -> tuple[int, int]:
        """Map pages after the free block at the end, which is a part of the new block."""
        address = self._start_of.get(self._end, self._end)
        if address < self._end:
            self._drop(address, self._end - address)
        mapped = round_up(size - (self._end - address), self._page)
        self._end += mapped
        self.reserved += mapped
        return address, self._end - address

    def _keep(self, address: int, size: int) -> None:
        insort(self._free, size << _ADDRESS_BITS | address)
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _drop(self, address: int, size: int) -> None:
        self._free.pop(bisect_left(self._free, size << _ADDRESS_BITS | address))
        self._forget(address, size)

    def _forget(self, address: int, size: int) -> None:
        del self._size_at[address], self._start_of[address + size]


def replay(events: Iterable[tuple[int, int]], expandable: bool = False) -> Peaks:
    """Replay allocations on one stream by CUDA's caching allocator, from an empty one on.

    The rules are those of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings. A
    request takes the smallest free block of its pool that is large enough, with the lowest address
    among equals. Else a new segment comes from the device. A rest that is large enough becomes a free
    block. A block that becomes free joins its free neighbours in the segment. No segment goes back.

    With ``expandable_segments:True`` each pool is one segment that grows at its end, by whole pages. A
    free block at the end, which can grow, is taken only if no other is large enough.

    The replay has no second stream, no private pools of CUDA graphs, and no retry without memory. A
    new segment has a higher address than those before it; a driver may do otherwise.

    ``events`` are pairs of a block's id and its bytes, in order: bytes > 0 allocates the block, bytes
    < 0 frees it, 0 does nothing. An id can be used again after its block is free.
    """
    small, large = _Pool(True, expandable), _Pool(False, expandable)
    used: dict[int, tuple[_Pool, int, int]] = {}
    allocated = peak = 0
    for name, amount in events:
        if amount > 0:
            if name in used:
                raise ValueError(f"block {name} is allocated a second time")
            size = round_up(amount, BLOCK)
            pool = small if size <= SMALL else large
            address, size = pool.take(size)
            used[name] = (pool, address, size)
            allocated += size
            peak = max(peak, allocated)
        elif amount < 0:
            if name not in used:
                raise ValueError(f"block {name} is freed, and is not in use")
            pool, address, size = used.pop(name)
            allocated -= size
            pool.give(address, size)
    # No segment goes back to the device, so that what is reserved at the end is the most.
    return Peaks(peak, small.reserved + large.reserved)
