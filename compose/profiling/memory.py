"""The tensors that fill a rank's memory at its peak, and a snapshot of it for PyTorch's viewer."""

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compose.profiling.trace import COMMUNICATION, DATA, NOTED, OPTIMIZER, Range, Trace

WEIGHTS, GRADIENTS, ACTIVATIONS, OTHER = "weights", "gradients", "activations", "other"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, OTHER)


@dataclass(slots=True, eq=False)
class Allocation:
    """Memory between two times."""

    start: float
    """Time of the allocation, in microseconds."""
    end: float
    """Time at which it was freed, in microseconds."""
    address: int
    bytes: int
    within: Range | None
    """The range in which it was allocated."""
    freed_within: Range | None
    """The range in which it was freed."""
    category: str
    """One of CATEGORIES; empty while it is not known."""


def allocations(trace: Trace, noted: Sequence[Mapping[int, str]]) -> list[Allocation]:
    """Return what was allocated while the trace was made.

    On a GPU there are also earlier allocations that were freed meanwhile, since only there they are
    known.

    Args:
        trace: The trace.
        noted: For each range NOTED of the trace, the categories of addresses at that time.

    Returns:
        The allocations.
    """
    found: list[Allocation] = []
    held: dict[int, Allocation] = {}
    marks = sorted(r.start for r in trace.ranges if r.name == NOTED)
    events: list[tuple[float, Any]] = [(change.time, change) for change in trace.changes]
    events += zip(marks, noted, strict=True)
    for time, event in sorted(events, key=lambda pair: pair[0]):
        if isinstance(event, Mapping):
            for address, category in event.items():
                if address in held:
                    held[address].category = category
        elif event.bytes > 0:
            held[event.address] = Allocation(
                time, math.inf, event.address, event.bytes, event.within, None, ""
            )
            found.append(held[event.address])
        elif event.address in held:
            freed = held.pop(event.address)
            freed.end, freed.freed_within = time, event.within
        else:
            found.append(
                Allocation(-math.inf, time, event.address, -event.bytes, None, event.within, OTHER)
            )
    _categorize(found, trace)
    return found


def _categorize(found: Sequence[Allocation], trace: Trace) -> None:
    """Give each allocation its category, by the ranges in which it was allocated and freed."""
    backwards = sorted(r.start for r in trace.ranges if r.backward)
    for each in found:
        within = each.within
        if each.category or within is None:
            each.category = each.category or ACTIVATIONS
            continue
        place = bisect(backwards, each.start)
        # It was made in a forward and is there when the next backward begins, so it is kept for it.
        kept = not within.backward and place < len(backwards) and backwards[place] < each.end
        if within.buffers:
            each.category = COMMUNICATION
        elif each.freed_within and each.freed_within.reduces:
            each.category = GRADIENTS  # FSDP frees a whole gradient once it has a copy to send
        elif within.label == COMMUNICATION and not kept:
            each.category = COMMUNICATION
        else:
            each.category = OTHER if within.label in (OPTIMIZER, DATA) else ACTIVATIONS


def peak(found: Sequence[Allocation], before: Mapping[str, int]) -> dict[str, Any]:
    """Return the greatest use of memory, and how categories shared it.

    Args:
        found: The allocations.
        before: Bytes of each category at the start.

    Returns:
        ``peak``, the most bytes at one time; ``at_peak``, how CATEGORIES shared them, which sums to it;
            and
        ``most``, the most bytes of each category at any time.
    """
    now = {category: before.get(category, 0) for category in CATEGORIES}
    most, at_peak, whole = dict(now), dict(now), sum(now.values())
    highest = whole
    edges = [(a.start, a.bytes, a.category) for a in found if a.start > -math.inf]
    edges += [(a.end, -a.bytes, a.category) for a in found if a.end < math.inf]
    for _, change, category in sorted(edges, key=lambda edge: edge[0]):
        now[category] += change
        whole += change
        most[category] = max(most[category], now[category])
        if whole > highest:
            highest, at_peak = whole, dict(now)
    return {"peak": highest, "at_peak": at_peak, "most": most}


def snapshot(found: Sequence[Allocation], before: Mapping[str, int]) -> dict[str, Any]:
    """Return for a CPU what ``torch.cuda.memory._snapshot`` returns on a GPU, as far as it is known.

    The viewer colours by category. The ranges of the trace are in the place of Python's stack.
    """
    events: list[tuple[float, dict[str, Any]]] = []
    # The viewer fails on categories without "unknown".
    for address, category in enumerate(CATEGORIES, 1):
        made = _entry("alloc", address, before.get(category, 0), ["before the first step"], category)
        events.append((-math.inf, made))
    for each in found:
        frames, within = [], each.within
        while within:
            frames.append(within.name)
            within = within.parent
        common = (each.address, each.bytes, frames, each.category)
        events.append((each.start, _entry("alloc", *common)))
        if each.end < math.inf:
            events += [(each.end, _entry(f"free_{how}", *common)) for how in ("requested", "completed")]
    return {
        "segments": [],
        "device_traces": [[entry for _, entry in sorted(events, key=lambda event: event[0])]],
    }


def _entry(
    action: str, address: int, size: int, frames: Sequence[str], category: str
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "frames": [{"name": name, "filename": "", "line": 0} for name in frames],
        "category": "unknown" if category == OTHER else category,
    }
