"""What fills a rank's memory at its peak, and a snapshot of it for PyTorch's viewer."""

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
    """Memory between two times, in microseconds; ``category`` one of CATEGORIES, empty before known."""

    start: float
    end: float
    address: int
    bytes: int
    within: Range | None
    freed_within: Range | None
    category: str


def allocations(trace: Trace, noted: Sequence[Mapping[int, str]]) -> list[Allocation]:
    """What was allocated while the trace was made; and before (on a GPU, where that is known), if it
    was freed meanwhile.

    noted: at each range NOTED of the trace, the category of what then was at an address.
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
    """By the ranges in which they were allocated and freed."""
    backwards = sorted(r.start for r in trace.ranges if r.backward)
    for each in found:
        within = each.within
        if each.category or within is None:
            each.category = each.category or ACTIVATIONS
            continue
        place = bisect(backwards, each.start)
        # A forward's, and there when the next backward begins: it was made to be kept.
        kept = not within.backward and place < len(backwards) and backwards[place] < each.end
        if within.buffers:
            each.category = COMMUNICATION
        elif each.freed_within and each.freed_within.reduces:
            each.category = GRADIENTS  # FSDP lets go of a whole gradient once it has a copy to send
        elif within.label == COMMUNICATION and not kept:
            each.category = COMMUNICATION
        else:
            each.category = OTHER if within.label in (OPTIMIZER, DATA) else ACTIVATIONS


def peak(found: Sequence[Allocation], before: Mapping[str, int]) -> dict[str, Any]:
    """Most bytes at once, ``peak``; how CATEGORIES shared them, ``at_peak``, which sum to it; and the
    most that each had at any time, ``most``. ``before``: what there was of them at the start."""
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
    """What ``torch.cuda.memory._snapshot`` returns on a GPU, for a CPU, as far as a profiler knows it;
    the viewer colours by category. In place of Python's stack there are the ranges of the trace."""
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
