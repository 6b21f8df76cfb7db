"""A quick estimate of a candidate, without a record: it tells which candidates are worth one.

What a unit of the model computes, sends and keeps comes from probes (layer_probe.py), which are traced
once for a model. Formulas put units together: data parallel, the pipeline, recomputation, and the
optimizer.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from compose.config.tables import Config
from compose.errors import ConfigError
from compose.pipeline.schedules import ASYNCHRONOUS, ZERO_BUBBLE, stages_per_rank
from compose.planner import costs, quick_memory
from compose.planner.cluster import Cluster
from compose.planner.costs import collective_seconds, stage_seconds
from compose.planner.layer_probe import FIRST, LAST
from compose.planner.quick_units import ModelShape, UnitEstimate, shards, stream_bytes, units_of_rank
from compose.planner.step_time import beside_messages, bytes_seconds, dispatch

MEMORY_ERROR = 4 / 3
"""How often a recorded rank's reserved bytes may stand in the quick estimate, at most; assumed."""


@dataclass(frozen=True)
class QuickEstimate:
    """A rough estimate."""

    seconds: Mapping[str, float]
    """Seconds of a step by what takes them: compute, tp, cp, ep, dp, bubble, optimizer."""
    bytes: Mapping[str, float]
    """Bytes of the fullest rank: weights, optimizer, gradients, gathered, activations, logits."""
    host: float = 0.0
    """Bytes of its host memory."""

    @cached_property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @cached_property
    def memory(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.bytes.values())


def quick(shape: ModelShape, config: Config, cluster: Cluster, room: float = math.inf) -> QuickEstimate:
    """Return the rough estimate of a config whose degrees are known.

    If it needs more bytes than ``room``, its seconds are not worked out.
    """
    cluster, whole = costs.for_ranks(cluster, config.parallel.ranks), cluster.node
    try:
        units = units_of_rank(shape, config, cluster)
        ranks, sizes = quick_memory.ranks_of(shape, config), quick_memory.sizes_of(shape, units, config)
    except ConfigError:  # the model cannot be cut so, or the schedule takes other micro-batches
        return QuickEstimate({"compute": math.inf}, {"weights": math.inf})
    kept = [
        (
            sum(n * sizes[u].own for u, n in rank.held.items()),
            sum(n * sizes[u].trained for u, n in rank.held.items()),
        )
        for rank in ranks
    ]
    own, trained = (max(column) for column in zip(*kept, strict=True))
    size = quick_memory.peak_bytes(shape, config, units, sizes, zip(ranks, kept, strict=True))
    state = trained * quick_memory.bytes_of_state(shape, config)
    host = quick_memory.host_bytes(config, own, trained, state)
    copies = quick_memory.copies_kept(config, config.parallel.ranks > whole)
    host += copies * (trained * config.precision.master_dtype.itemsize + state)
    if sum(size.values()) > room:
        return QuickEstimate({"compute": math.inf}, size, host)
    data = {unit: _data(one, sizes[unit], config, cluster) for unit, one in units.items()}
    seconds = _seconds(shape, config, cluster, (units, data), ranks, (own, trained))
    return QuickEstimate(seconds, size, host)


def _seconds(
    shape: ModelShape,
    config: Config,
    cluster: Cluster,
    of_units: tuple[Mapping[str, UnitEstimate], Mapping[str, tuple[float, float]]],
    ranks: list[quick_memory.Rank],
    numbers: tuple[float, float],
) -> dict[str, float]:
    """Return the seconds of a step by what takes them, on the busiest rank of the pipeline.

    ``of_units`` are the units and what :func:`_data` says of each. ``numbers`` are those of the fullest
    rank, and those of them that it trains.
    """
    parallel, count = config.parallel, quick_memory.micro_batches(config)
    (units, data), (own, trained) = of_units, numbers
    best: dict[str, float] = {}
    slowest = costs.slowest(cluster, parallel.ranks)
    issued = {unit: _issued(one, config, cluster) for unit, one in units.items()}
    for rank in ranks:
        held = rank.held
        sent: dict[str, float] = defaultdict(float)
        compute = exposed = once = forward = 0.0
        issue = [0.0, 0.0]
        for unit, number in held.items():
            one = units[unit]
            forward += number * one.forward
            issue = [all + number * took for all, took in zip(issue, issued[unit], strict=True)]
            for axis, took in one.sent.items():
                sent[axis] += number * took
            compute += number * (one.forward + one.backward - sum(one.sent.values()))
            each, step = data[unit]
            exposed += number * each
            once += number * step
        result = {"compute": compute * count * slowest, "dp": exposed * count + once}
        for axis in ("tp", "cp", "ep"):
            result[axis] = sent.get(axis, 0.0) * count
        # The host is ahead of the device, but for the first forward of a step.
        behind = max(issue[0] - forward, sum(issue) * count - sum(result.values()))
        result["compute"] += max(0.0, behind)
        if sum(result.values()) > sum(best.values()):
            best = result
    if parallel.pp > 1:
        alone = {
            u: max(one.forward + one.backward + data[u][0], sum(issued[u])) for u, one in units.items()
        }
        layers = [*shape.few.order, FIRST, LAST]
        best["bubble"] = _bubble(config, cluster, sum(map(alone.__getitem__, layers)) / parallel.pp)
    else:
        best["bubble"] = 0.0
    best["optimizer"] = costs.memory_seconds(cluster, 32 * trained)
    if config.optimizer.offload != "none":  # its two means come over the link, and go back meanwhile
        best["optimizer"] = max(best["optimizer"], costs.host_seconds(cluster, 8 * trained))
    if parallel.offload == "cpu":
        # Shards are copied for the forward and for the backward of a micro-batch, and gradients back.
        there = costs.host_seconds(cluster, quick_memory.bytes_of_weights(config, own, trained))
        back = costs.host_seconds(cluster, trained * config.precision.master_dtype.itemsize)
        best |= {
            "offload": count * (2 * there + back),
            "optimizer": costs.processor_seconds(cluster, 28 * trained),
        }
    return best


_PIECES = 5
"""The host issues so many copies and messages for a gather of FSDP, and for a sum of gradients."""


def _issued(unit: UnitEstimate, config: Config, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds in which the host issues a unit's forward and backward, with FSDP's work."""
    parallel, precision = config.parallel, config.precision
    types = {precision.master_dtype, precision.param_dtype, precision.reduce_dtype}
    # FSDP has the weights of a unit (apply_data_parallel).
    mesh_of_experts = bool(unit.number) and parallel.ep * parallel.tp > 1
    sharded = shards(config)[0] > 1 or len(types) > 1 or parallel.offload != "none" or mesh_of_experts
    if not sharded:
        return unit.issue
    compiled = config.compile.mode != "off"
    hooks = cluster.device.hooks_compiled if compiled else cluster.device.hooks
    issue, issue_back = dispatch(cluster, compiled)
    gathers = _PIECES * (parallel.zero == 3)
    sums = _PIECES * (parallel.zero > 1)
    if parallel.zero > 1 or quick_memory.micro_batches(config) > 1:
        sums += unit.tensors  # each is added to its sum
    forward, backward = unit.issue
    return forward + hooks[0] + gathers * issue, backward + hooks[1] + (gathers + sums) * issue_back


def _bubble(config: Config, cluster: Cluster, mean: float) -> float:
    """Return the seconds that the busiest rank of a pipeline waits for others.

    ``mean`` is a rank's mean time for a micro-batch. The terms of it and of a message are those of the
    pipeline's simulator (timeline.py) for equal stages and messages shorter than an action.
    """
    parallel, schedule = config.parallel, config.parallel.pp_schedule
    if schedule in ASYNCHRONOUS:  # the step before fills its gaps, and messages travel meanwhile
        return 0.0
    pp, count = parallel.pp, quick_memory.micro_batches(config)
    virtual = stages_per_rank(schedule, parallel.pp_virtual_stages)
    waits, messages = (pp - 1) / virtual, 2.0 * (virtual * pp - 1)
    if schedule == "1F1B":
        messages = 2 * (pp - 2) + 2 * count * (pp - 1) / pp
    elif schedule in ("ZBVZeroBubble", "DualPipeV"):
        waits, messages = (pp - 1) / (6 if count >= 2 * pp - 1 else 3), 5.0 * pp - 7
    elif schedule == "InterleavedZeroBubble":
        waits /= 3
    if cluster.device.sharing > 1:  # ranks that wait leave their processors to the others
        waits *= max(0.0, 1 - cluster.device.sharing / pp)
    each, size = parallel.ranks // pp, stream_bytes(config)
    took = sum(stage_seconds(cluster, size, each, rank, rank + 1) for rank in range(pp - 1)) / (pp - 1)
    return waits * mean + took * messages


def _data(
    unit: UnitEstimate, size: quick_memory.Size, config: Config, cluster: Cluster
) -> tuple[float, float]:
    """Return the seconds of data parallel that a unit shows in each micro-batch, and once in a step."""
    parallel, precision = config.parallel, config.precision
    width, wide = precision.param_dtype.itemsize, precision.reduce_dtype.itemsize
    over, of_experts = shards(config)
    held = size.whole
    gather = reduce = replicas = 0.0
    ranks_of_stage = parallel.ranks // parallel.pp
    weights = (unit.dense, over, parallel.tp)
    for numbers, ranks, stride in (weights, (held - unit.dense, of_experts, parallel.ep)):
        if numbers:
            part = unit.trained * numbers * wide
            message = partial(collective_seconds, cluster, world_size=parallel.ranks)
            gather += message("all_gather", numbers * width, ranks, stride)
            reduce += message("reduce_scatter", part, ranks, stride)
            own, others = part / ranks, ranks_of_stage // (ranks * stride)
            replicas += message("all_reduce", own, others, ranks * stride)
    copies = sums = added = 0.0
    master = precision.master_dtype.itemsize
    if gather or width < master:
        trained, own = unit.trained * held, unit.trained * size.own
        copies = bytes_seconds(cluster, "fsdp.split_with_sizes_copy", 2 * width * held)
        copies += bytes_seconds(cluster, "aten._foreach_copy_", (master + width) * size.own)
        copies += bytes_seconds(cluster, "aten.cat", 2 * width * size.moved)
        sums = bytes_seconds(cluster, "fsdp.chunk_cat", (width + wide) * trained)
        sums += bytes_seconds(cluster, "aten.add_", 3 * wide * own)
        sums += bytes_seconds(cluster, "aten.cat", 2 * width * unit.trained * size.moved)
        if quick_memory.micro_batches(config) > 1:
            added = bytes_seconds(cluster, "aten.add_", (width + 2 * wide) * trained)

    def shown(alone: float, more: float, messages: float) -> float:
        """Return how much longer a unit takes with ``more`` work, both beside messages."""
        return max(messages, beside_messages(cluster, alone + more, messages)) - alone

    forward, backward = unit.forward, unit.backward
    if parallel.zero < 3:
        once, last = shown(forward, copies, gather), shown(backward, sums, reduce + replicas)
        each = shown(backward, sums, reduce) if parallel.zero == 2 else 0.0
        return each + (parallel.zero < 2) * added, once + last - each
    # NCCL sends both by one communicator, one after the other.
    both = gather + reduce if cluster.backend == "nccl" else max(gather, reduce)
    each = shown(forward, copies, gather)
    if parallel.pp > 1 and parallel.pp_schedule in ZERO_BUBBLE:  # both halves of a backward gather
        each += shown(backward / 2, copies, gather) + shown(backward / 2, copies + sums, both)
    else:
        each += shown(backward, copies + sums, both)
    return each, max(0.0, max(reduce + replicas, gather) - max(backward, both))
