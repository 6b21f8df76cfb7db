"""The summary of a profile: the shares of time, the tensors that fill memory at its peak, as text."""

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compose.errors import in_columns
from compose.profiling.trace import (
    ATTENTION,
    COMMUNICATION,
    DATA,
    MATMUL,
    NOTED,
    OPTIMIZER,
    Range,
    Trace,
)

WEIGHTS, GRADIENTS, ACTIVATIONS, OTHER = "weights", "gradients", "activations", "other"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, OTHER)


@dataclass(slots=True, eq=False)
class MemoryLifetime:
    """Memory between two times, in microseconds."""

    start: float
    end: float
    address: int
    bytes: int
    within: Range | None  # the range in which it was allocated
    freed_within: Range | None
    category: str  # one of CATEGORIES; empty while it is not known


def allocations(trace: Trace, noted: Sequence[Mapping[int, str]]) -> list[MemoryLifetime]:
    """Return the allocations during a trace, and those that were freed meanwhile.

    ``noted`` has for each range NOTED of the trace the categories of addresses at that time.
    """
    result: list[MemoryLifetime] = []
    live: dict[int, MemoryLifetime] = {}
    marks = sorted(r.start for r in trace.ranges if r.name == NOTED)
    events: list[tuple[float, Any]] = [(change.time, change) for change in trace.changes]
    events += zip(marks, noted, strict=True)
    for time, event in sorted(events, key=lambda pair: pair[0]):
        if isinstance(event, Mapping):
            for address, category in event.items():
                if address in live:
                    live[address].category = category
        elif event.bytes > 0:
            new = MemoryLifetime(time, math.inf, event.address, event.bytes, event.within, None, "")
            live[event.address] = new
            result.append(new)
        elif event.address in live:
            freed = live.pop(event.address)
            freed.end, freed.freed_within = time, event.within
        else:
            freed_bytes = -event.bytes
            result.append(
                MemoryLifetime(-math.inf, time, event.address, freed_bytes, None, event.within, OTHER)
            )
    _categorize(result, trace)
    return result


def _categorize(allocations: Sequence[MemoryLifetime], trace: Trace) -> None:
    """Give each allocation its category, by the ranges in which it was allocated and freed."""
    backwards = sorted(r.start for r in trace.ranges if r.backward)
    for each in allocations:
        within = each.within
        if each.category or within is None:
            each.category = each.category or ACTIVATIONS
            continue
        place = bisect(backwards, each.start)
        # It was made in a forward, and lives when the next backward begins: it is kept for it.
        kept = not within.backward and place < len(backwards) and backwards[place] < each.end
        if within.buffers:
            each.category = COMMUNICATION
        elif each.freed_within and each.freed_within.reduces:
            each.category = GRADIENTS  # FSDP frees a whole gradient once it has a copy to send
        elif within.label == COMMUNICATION and not kept:
            each.category = COMMUNICATION
        else:
            each.category = OTHER if within.label in (OPTIMIZER, DATA) else ACTIVATIONS


def peak(allocated: Sequence[MemoryLifetime], before: Mapping[str, int]) -> dict[str, Any]:
    """Return the greatest use of memory; ``before`` are bytes of each category at the start.

    ``peak`` are the most bytes at one time, ``at_peak`` those of each of CATEGORIES then, and ``most``
    the most bytes of each category at any time.
    """
    now = {category: before.get(category, 0) for category in CATEGORIES}
    most, at_peak, whole = dict(now), dict(now), sum(now.values())
    highest = whole
    edges = [(a.start, a.bytes, a.category) for a in allocated if a.start > -math.inf]
    edges += [(a.end, -a.bytes, a.category) for a in allocated if a.end < math.inf]
    for _, change, category in sorted(edges, key=lambda edge: edge[0]):
        now[category] += change
        whole += change
        most[category] = max(most[category], now[category])
        if whole > highest:
            highest, at_peak = whole, dict(now)
    return {"peak": highest, "at_peak": at_peak, "most": most}


def snapshot(allocated: Sequence[MemoryLifetime], before: Mapping[str, int]) -> dict[str, Any]:
    """Return the form of ``torch.cuda.memory._snapshot`` for a CPU, with ranges as Python's stack."""
    events: list[tuple[float, dict[str, Any]]] = []
    # The viewer fails on categories without "unknown".
    for address, category in enumerate(CATEGORIES, 1):
        made = _entry("alloc", address, before.get(category, 0), ["before the first step"], category)
        events.append((-math.inf, made))
    for each in allocated:
        frames, within = [], each.within
        while within:
            frames.append(within.name)
            within = within.parent
        common = (each.address, each.bytes, frames, each.category)
        events.append((each.start, _entry("alloc", *common)))
        if each.end < math.inf:
            events += [(each.end, _entry(f"free_{how}", *common)) for how in ("requested", "completed")]
    in_order = [entry for _, entry in sorted(events, key=lambda event: event[0])]
    return {"segments": [], "device_traces": [in_order]}


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


IDLE = "idle"
KINDS = (MATMUL, ATTENTION, COMMUNICATION, OPTIMIZER, DATA, OTHER, IDLE)
# If a GPU does several things at once, the first of these counts. So communication counts only where
# nothing is computed.
_FIRST = (MATMUL, ATTENTION, OPTIMIZER, DATA, OTHER, COMMUNICATION)

_MAKING = "making data"


def time_shares(trace: Trace) -> dict[str, float]:
    """Return the share of each of KINDS in the time of all steps; the shares sum to 1.

    On a CPU it is the training thread's time, and each moment belongs to the innermost operator. On a
    GPU it is the device's time, by kernels. ``communication`` is the part that computation does not
    hide: on a CPU the thread's waits and copies of buffers, on a GPU the time without another kernel.
    ``idle`` is Python between operators; on a GPU it is the time without a kernel or making data.
    """
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for kind, time in _of_device(trace) if trace.gpu else _of_thread(trace):
        spent[kind] += time
    whole = sum(spent.values())
    return {kind: time / whole for kind, time in spent.items()}


def _of_thread(trace: Trace) -> Iterator[tuple[str, float]]:
    between = trace.end - trace.start
    for one in trace.ranges:
        if one.thread != trace.thread or not trace.start <= one.start < trace.end:
            continue
        if one.parent is None:
            between -= one.end - one.start
        yield one.label or (OTHER if one.operator else IDLE), max(0.0, one.own)
    yield IDLE, max(0.0, between)


def _of_device(trace: Trace) -> Iterator[tuple[str, float]]:
    # The host is ahead of the device, so the last step's kernels end after the step.
    end = max([trace.end, *(kernel.end for kernel in trace.kernels)])
    edges: list[tuple[float, int, str]] = []
    for kernel in trace.kernels:
        edges += [(kernel.start, 1, kernel.label or OTHER), (kernel.end, -1, kernel.label or OTHER)]
    for one in trace.ranges:
        if one.label == DATA and one.thread == trace.thread:
            edges += [(one.start, 1, _MAKING), (one.end, -1, _MAKING)]
    going: dict[str, int] = {}
    now = trace.start
    for time, change, kind in sorted([*edges, (end, 0, OTHER)]):
        until = min(max(time, now), end)
        current = next((known for known in _FIRST if going.get(known)), None)
        yield current or (DATA if going.get(_MAKING) else IDLE), until - now
        now = until
        going[kind] = going.get(kind, 0) + change


def as_text(summary: Mapping[str, Any], folder: Path) -> str:
    """Return the lines that ``Profiler`` prints."""
    first, last = summary["steps"]
    lines = [f"profile of steps {first} to {last}, in {folder}"]
    times, memories = [["time, %", "s/step", *KINDS]], [["memory, MiB", "all", *CATEGORIES]]
    for result in summary["ranks"]:
        rank = f"rank {result['rank']}"
        if "problem" in result:
            lines.append(f"  {rank}: not written: {result['problem']}")
            continue
        shares, memory = result["time"], result["memory"]
        per_step = f"{result['seconds_per_step']:.3f}"
        times.append([rank, per_step, *(f"{100 * shares[kind]:.1f}" for kind in KINDS)])
        at_peak, most = ([_mib(memory[key][c]) for c in CATEGORIES] for key in ("at_peak", "most"))
        memories += [
            [f"{rank}, at peak", _mib(memory["peak"]), *at_peak],
            ["  most of each", "", *most],
        ]
    for table in (times, memories):
        lines += [f"  {line}" for line in in_columns(table, left=1)] if len(table) > 1 else []
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"
