"""The time of each action: its operators and messages on the device's streams, in the order of issue.

A stream runs its work in order, and waits where the program waits. What a stream of messages does while
the computing one computes costs only the units that the message keeps. The rest is exposed, and belongs
to the axis of the message that is waited for. The host issues work in order too, and each piece takes
it a time. While the device is busy for longer, that costs nothing.
"""

import functools
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from compose.ops.kernel_table import kernel_that_runs
from compose.parallel.mesh import AXES, Parallel
from compose.planner import costs
from compose.planner.cluster import Cluster
from compose.planner.few_layers import linear
from compose.planner.memory import STEP, Key, action_key, stand_ins
from compose.planner.operator_figures import WEIGHTS
from compose.planner.record import BACKWARD, Operator, Record, RecordedMessage, Wait

Seconds = dict[str, float]
"""Seconds by what they are: "all" of the action, and of it "exposed AXIS" and each kind of operator."""
PART = "part"
"""The kind of an operator that is a part of a kernel for many tensors: no launch of its own."""
PROCESSOR = "processor"
"""The kind of an operator that the host computes, with tensors in its own memory."""
# Kernels with sums over rows, and fused ones, have the cluster's share of a copy's rate (``kernels``).
_WITH_SUMS = ("norm", "softmax", "logsumexp", "amax", "sum", "topk", "sort", "fused", "embedding")
_FULL = ("foreach", "fused_adam")
# Others have all of it, but for these (profiles of steps on two H200, 2026-11, torch 2.11). FSDP's
# copies of gradients with a cast have 1.9 of 4.2 TB/s, copies of narrow rows side by side, as those of
# rotary embeddings, 1.8, the backward of RMSNorm 1.75, and the compiled loss 1.6 to 3.4. Rows that are
# gathered by an index, as experts' are, have 0.6 to 3.1 in four models, and 1.0 on average.
_LOSS, _ROWS = "fused_loss", "index_select"
_SLOW = {"chunk_cat": 0.45, "cat": 0.42, "native_layer_norm_backward": 0.41, _LOSS: 0.53, _ROWS: 0.23}
_COMPILED = 10e-6
"""Seconds that the host takes at most to issue a kernel of compiled code; assumed: a launch alone takes
3 to 6 (ahrefs/ocannl #488)."""
# Python issues forward and recomputation, and the C++ engine of autograd the backward. Forwards
# alone take 38 and 45 us for a kernel (vllm-project/vllm-omni #6516, facebookresearch/sam2 #768),
# where a training step's mean is 24 (clusters/). With two thirds of its kernels in the backward, as
# assumed, these take 15.
_OF_PYTHON, _OF_ENGINE = 1.73, 0.63
_NEAR = 8  # pieces of work between a message and the product that it is split with
NO_KERNEL = ("aten.detach", "aten.empty", "aten.new_empty", "aten.empty_like", "aten.alias")


def action_seconds(
    record: Record,
    cluster: Cluster,
    degrees: Parallel,
    micro_batches: int,
    fused: bool,
    compiled: bool = True,
) -> dict[Key, Seconds]:
    """Return the time of each kind of action of a record.

    "host" is the time in which the device waits for what the host issues, and "processor" that in which
    it waits for what the host computes.
    """
    # The first stage has no input whose gradient it could compute: its I does nothing.
    results: dict[Key, Seconds] = {
        action_key(segment.action, micro_batches): defaultdict(float)
        for segment in record.segments
        if segment.action[1] != "setup"
    }
    clock: dict[int, float] = defaultdict(float)
    host, waiting = 0.0, 0
    beside: list[tuple[float, float]] = []  # kernels of other streams: when they may start, seconds
    reached: dict[int, float] = {}
    sent: dict[int, str] = {}
    free: dict[str, float] = defaultdict(float)  # when a communicator's last message has ended
    events = sorted((place, number) for number, place in record.events.items())
    taken = 0
    slowest = costs.slowest(cluster, degrees.ranks)
    issue = dispatch(cluster, fused and compiled)
    hooks = _hooks(record, cluster, fused and compiled)
    unit = ""
    on_gpu = cluster.backend == "nccl"
    for place, work in enumerate(joined(record, fused, on_gpu)):
        while taken < len(events) and events[taken][0] <= place:
            number = events[taken][1]
            reached[number] = clock[record.event_streams[number]]
            taken += 1
        if work is None:
            waiting += not compiled
            continue
        segment = record.segments[work.segment]
        if segment.action[1] == "setup":
            continue
        seconds, before = results[action_key(segment.action, micro_batches)], clock[0]
        if segment.unit != unit:
            unit = segment.unit
            if unit:
                host += hooks[segment.phase == BACKWARD]
        if isinstance(work, Wait):
            until = reached.get(work.event, 0.0)
            if work.stream == 0 and until > clock[0]:
                axis = sent.get(record.event_streams[work.event], "copy")
                seconds[f"exposed {axis}"] += until - clock[0]
            clock[work.stream] = max(clock[work.stream], until)
        elif isinstance(work, RecordedMessage):
            axis = axis_of(work, degrees)
            if axis == "pp" or work.received:
                continue
            took = _message(cluster, work, degrees.ranks)
            host += issue[0]
            late = max(0.0, host - clock[work.stream])
            # NCCL runs what one communicator sends in the order of issue, whatever the streams.
            waited = max(0.0, free[work.group] - clock[work.stream] - late) if on_gpu else 0.0
            clock[work.stream] += late + waited + took
            free[work.group] = clock[work.stream]
            sent[work.stream] = axis
            if work.stream == 0:
                seconds[f"exposed {axis}"] += waited + took
                seconds["host"] += late
            seconds[f"sent {axis}"] += took
        else:
            took = operator_seconds(cluster, work)
            if work.kind == PROCESSOR:
                # It waits for what it computes with, and what follows on the device waits for it.
                host = max([host, *clock.values()]) + took
                seconds[PROCESSOR] += host - clock[0]
                clock[0] = host
                seconds["all"] += clock[0] - before
                continue
            took *= slowest
            host += (work.kind != PART) * (1 + waiting) * issue[segment.phase == BACKWARD]
            late = max(0.0, host - clock[work.stream])
            running = max((clock[stream] for stream in sent if stream), default=0.0)
            took = beside_messages(cluster, took, running - clock[work.stream] - late)
            waiting = 0
            if work.stream == 0:
                seconds[work.kind] += took
                seconds["host"] += late
                others = _in_between(beside, clock[0] + late, took)
                seconds["memory"] += others
                took += others
            elif on_gpu and not work.linked:
                heapq.heappush(beside, (max(clock[work.stream] + late, clock[0]), took))
            clock[work.stream] += late + took
        seconds["all"] += clock[0] - before
    # A record may have several micro-batches between the first and the last. A step is in two parts.
    actions = {segment.action for segment in record.segments}
    numbers = Counter(action_key(action, micro_batches) for action in actions)
    numbers[STEP] = 1
    return {
        key: defaultdict(float, {name: value / numbers[key] for name, value in seconds.items()})
        for key, seconds in results.items()
    }


def _in_between(beside: list[tuple[float, float]], begin: float, took: float) -> float:
    """Return the seconds of other streams' kernels that run between computation's, and forget them.

    Each kernel fills the device, so that two of them take as long as one after the other: in profiles
    of five models the sum of all kernels is 0.98 to 1.05 of a step. What runs while computation waits
    costs nothing.
    """
    others = 0.0
    while beside and beside[0][0] < begin + took + others:
        start, seconds = heapq.heappop(beside)
        others += max(0.0, seconds - max(0.0, begin - start))
    return others


def dispatch(cluster: Cluster, compiled: bool) -> tuple[float, float]:
    """Return the seconds that the host takes to issue a kernel, and one of a backward."""
    mean = cluster.device.dispatch
    if compiled:
        return min(mean, _COMPILED), min(mean, _COMPILED)
    return mean * _OF_PYTHON, mean * _OF_ENGINE


def _hooks(record: Record, cluster: Cluster, compiled: bool) -> tuple[float, ...]:
    """Return the seconds of FSDP's hooks on the host for a unit's forward and backward."""
    if not any(isinstance(work, Operator) and work.name.startswith("fsdp.") for work in record.work):
        return 0.0, 0.0
    return cluster.device.hooks_compiled if compiled else cluster.device.hooks


def grown(base: Seconds, longer: Sequence[tuple[float, Seconds]]) -> Seconds:
    """Return the seconds of an action with more layers.

    What is exposed may shrink with a layer. It does not fall below 0.
    """
    results = {name: max(0.0, value) for name, value in linear(base, longer).items()}
    results["all"] = sum(v for n, v in results.items() if n != "all" and not n.startswith("sent "))
    return results


def after_result(seconds: Seconds, kind: str) -> float:
    """Return the part of an action that comes after its result: sums of gradients behind a backward.

    A forward's gathers are no such part before its input: FSDP's streams wait for computation's, and
    this one for the input (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _root_pre_forward).
    """
    exposed = sum(v for name, v in seconds.items() if name.startswith("exposed dp_"))
    return 0.0 if kind == "F" else exposed


def seconds_of(known: Mapping[Key, Seconds], key: Key) -> Seconds:
    """Return the time of an action, by the actions that stand for it."""
    if key in known:
        return known[key]
    whole: Seconds = defaultdict(float)
    for each in stand_ins(key, known):
        for name, value in known[each].items():
            whole[name] += value
    return whole


def in_pieces(record: Record, cluster: Cluster, degrees: Parallel) -> None:
    """Leave of tp's gathers and sums what products do not hide, if both go in as many pieces as ranks.

    A gather's piece travels while the product of the one before runs, and a sum's after its own
    (``compile.async_tp``; Wang et al. 2023, doi:10.1145/3567955.3567959). One piece has no other to
    hide it.
    """
    work, tp = record.work, degrees.tp
    for place, message in enumerate(work):
        if not isinstance(message, RecordedMessage) or axis_of(message, degrees) != "tp":
            continue
        if message.kind == "all_gather":
            near = range(place + 1, min(place + _NEAR, len(work)))
        elif message.kind == "reduce_scatter":
            near = range(place - 1, max(place - _NEAR, -1), -1)
        else:
            continue
        beside = (work[i] for i in near)
        product = next((w for w in beside if isinstance(w, Operator) and w.kind == "product"), None)
        if product:
            took, hides = _message(cluster, message, degrees.ranks), operator_seconds(cluster, product)
            message.bytes = round(message.bytes * max(1 / tp, 1 - (1 - 1 / tp) * hides / took))


def operator_seconds(cluster: Cluster, work: Operator) -> float:
    """Return the time of one operator."""
    if work.kind == "product" and len(work.shape) == 4:
        batch, m, n, k = work.shape
        if "grouped_mm" in work.name:
            rows_of = "k" if work.name.endswith(WEIGHTS) else "m"
            return costs.grouped_seconds(cluster, (batch, m, n, k), work.dtype, rows_of)
        return costs.product_seconds(cluster, m, n, k, batch, work.dtype)
    if work.kind == "attention":
        sizes = work.flops, work.bytes, work.dtype, work.shape[-1]
        known = by_kernel(cluster, kernel_that_runs(work.name))
        return costs.attention_seconds(known, *sizes, "backward" in work.name)
    if work.name in NO_KERNEL or not work.bytes:
        return 0.0
    if work.kind == PROCESSOR:
        return costs.processor_seconds(cluster, work.bytes)
    kernel, share = equal_kernel(work.name), 1.0
    if cluster.backend == "nccl" and kernel in _SLOW:
        share = _SLOW[kernel]
    elif any(word in kernel for word in _WITH_SUMS):
        share = cluster.efficiencies.kernels
    took = costs.memory_seconds(cluster, work.bytes / share)
    if work.linked:
        return max(took, costs.host_seconds(cluster, work.linked))
    return max(0.0, took - cluster.device.launch) if work.kind == PART else took


@functools.lru_cache(maxsize=1024)
def by_kernel(cluster: Cluster, kernel: str) -> Cluster:
    """Return the cluster whose ``attention_forward`` and ``attention_backward`` are a kernel's."""
    known = cluster.efficiencies
    if kernel not in known.attention:
        return cluster
    forward, backward = known.attention[kernel]
    others = replace(known, attention_forward=forward, attention_backward=backward)
    return replace(cluster, efficiencies=others)


def equal_kernel(name: str) -> str:
    """Return the name of a kernel that is as fast as an operator's for each byte: one of few."""
    short = name.rpartition(".")[2].strip("_")
    if short in _SLOW:
        return short
    sums = any(word in short for word in _WITH_SUMS) and not short.startswith(_FULL)
    return _WITH_SUMS[0] if sums else "copy"


def bytes_seconds(cluster: Cluster, name: str, size: float) -> float:
    """Return the time of an operator that reads and writes ``size`` bytes."""
    return operator_seconds(cluster, Operator(0, 0, name, "memory", 0.0, round(size), "", ()))


def beside_messages(cluster: Cluster, alone: float, messages: float) -> float:
    """Return the time of an operator beside messages, which keep units of the device."""
    left = 1 - cluster.device.message_units / cluster.device.units
    return min(alone / left, alone + max(0.0, messages) * (1 - left))


def axis_of(message: RecordedMessage, degrees: Parallel) -> str:
    """Return the axes over which a message goes, joined by "+"; "ep" for what goes to experts."""
    # Gradients in few bytes go to all too, on a stream of their own.
    to_all = message.kind == "all_to_all" and not message.stream
    if to_all and degrees.ep > 1 and degrees.cp_method != "ulysses":
        return "ep"
    result, size = [], 1
    for axis in reversed(AXES):
        degree = getattr(degrees, axis)
        if len({rank // size % degree for rank in message.ranks}) > 1:
            result.append(axis)
        size *= degree
    return "+".join(reversed(result)) or "other"


def _message(cluster: Cluster, work: RecordedMessage, world_size: int) -> float:
    ranks = len(work.ranks)
    stride = work.ranks[1] - work.ranks[0] if ranks > 1 else 1
    return costs.collective_seconds(cluster, work.kind, work.bytes, ranks, stride, world_size)


def joined(
    record: Record, layers: bool = True, loss: bool = False
) -> Iterator[Operator | RecordedMessage | Wait | None]:
    """Yield the work with neighbours of one layer fused: one kernel reads and writes what is needed.

    With ``loss`` that of the loss is fused too, which is in no unit: on a GPU it is compiled whatever
    ``compile.mode`` is (compose/ops/operators.py). The places stay: None is where an operator became a
    part of the next one.
    """
    last_read: dict[int, int] = {}
    for place, work in enumerate(record.work):
        if isinstance(work, Operator):
            for read in work.reads:
                last_read[read] = place
    group: list[Operator] = []
    for place, work in enumerate(record.work):
        segment = record.segments[work.segment]
        joins = (
            _compiles(work)
            and (layers if segment.unit else loss and segment.action[1] != "step")
            and (not group or group[-1].segment == work.segment)
        )
        if joins:
            assert isinstance(work, Operator)
            group.append(work)
        follows = record.work[place + 1] if place + 1 < len(record.work) else None
        if not joins:
            yield work
        elif follows and _compiles(follows) and follows.segment == group[-1].segment:
            yield None
        else:
            yield _fused(record, group, last_read, place)
            group = []


def _compiles(work: Operator | RecordedMessage | Wait) -> bool:
    """Tell whether torch.compile makes code of its own for an operator."""
    return (
        isinstance(work, Operator)
        and work.kind == "memory"
        and work.stream == 0
        # PyTorch's own kernels compute with complex numbers (pytorch/torchtitan #15). FSDP's copies
        # are in hooks, and rows are gathered for experts outside of graphs. (The bias of gpt-oss'
        # experts is gathered inside one, and is priced too high.)
        and not work.dtype.startswith("complex")
        and not work.name.startswith("fsdp.")
        and not work.name.endswith(_ROWS)
    )


def _fused(
    record: Record, group: Sequence[Operator], last_read: Mapping[int, int], end: int
) -> Operator:
    """Return one kernel for several: it reads what came from outside, and writes what is used."""
    written = {w for one in group for w in one.writes}
    read = {r for one in group for r in one.reads} - written
    kept = {w for w in written if last_read.get(w, -1) > end or record.allocations[w].end is None}
    size = sum(record.allocations[i].bytes for i in read | kept)
    most = sum(one.bytes for one in group)
    first = group[0]
    name = "fused" if record.segments[first.segment].unit else _LOSS
    return Operator(first.segment, 0, name, "memory", 0.0, min(size, most), first.dtype, first.shape)
