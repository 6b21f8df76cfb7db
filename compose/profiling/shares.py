"""The shares of a run's time."""

from collections.abc import Iterator

from compose.profiling.trace import ATTENTION, COMMUNICATION, DATA, MATMUL, OPTIMIZER, Trace

OTHER, IDLE = "other", "idle"
KINDS = (MATMUL, ATTENTION, COMMUNICATION, OPTIMIZER, DATA, OTHER, IDLE)
# If a GPU does several things at once, the first of these counts. So communication counts only where
# nothing is computed.
_FIRST = (MATMUL, ATTENTION, OPTIMIZER, DATA, OTHER, COMMUNICATION)

_MAKING = "making data"


def time_shares(trace: Trace) -> dict[str, float]:
    """Return the share of each of KINDS in the time of all steps; the shares sum to 1.

    The time is that from the first step's start to the last one's end. On a CPU it is the training
    thread's time, and each moment belongs to the innermost operator. On a GPU it is the device's time,
    by kernels. ``communication`` is the part that computation does not hide. On a CPU it is the
    thread's waits, with the copies into and out of buffers; on a GPU it is the time without another
    kernel. ``idle`` is Python between operators; on a GPU it is the time without a kernel, unless data
    is being made.
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
