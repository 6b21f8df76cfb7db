"""A quick estimate of a candidate, without a record: it tells which candidates are worth one.

What a unit of the model computes, sends and keeps comes from probes (layer_probe.py), which are traced
once for a model. Formulas put units together: data parallel, the pipeline, recomputation, and the
optimizer.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from compose.config.tables import Config
from compose.errors import ConfigError
from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import build_table, placement, stages_per_rank
from compose.pipeline.split import fewest_at_most
from compose.planner import costs
from compose.planner.cluster import Cluster
from compose.planner.costs import collective_seconds
from compose.planner.layer_probe import FIRST, LAST
from compose.planner.quick_units import ModelShape, Unit, stream_bytes, units_of_rank
from compose.planner.step_time import beside_messages

MEMORY_ERROR = 4 / 3
"""How often a recorded rank's reserved bytes may stand in the quick estimate, at most; assumed."""
_PINNED = 4 / 3  # of a pinned tensor's bytes, which are rounded up to a power of two, on average


@dataclass(frozen=True)
class QuickEstimate:
    """A rough estimate."""

    seconds: Mapping[str, float]
    """Seconds of a step by what takes them: compute, tp, cp, ep, dp, bubble, optimizer."""
    bytes: Mapping[str, float]
    """Bytes of the fullest rank: weights, optimizer, gradients, gathered, activations, logits."""
    host: float = 0.0
    """Bytes of its host memory."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def memory(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.bytes.values())


def quick(shape: ModelShape, config: Config, cluster: Cluster) -> QuickEstimate:
    """Return the rough estimate of a config whose degrees are known."""
    try:
        units = units_of_rank(shape, config, cluster)
    except ConfigError:  # the model cannot be cut so
        return QuickEstimate({"compute": math.inf}, {"weights": math.inf})
    ranks = _ranks(shape, config)
    seconds = _seconds(shape, config, cluster, units, ranks)
    return QuickEstimate(
        seconds, _bytes(shape, config, units, ranks), _host_bytes(config, units, ranks)
    )


def micro_batches(config: Config) -> int:
    """Return the micro-batches of a step, or 0 if the division has a remainder."""
    ranks = config.parallel.dp_replicate * config.parallel.dp_shard
    whole, rest = divmod(config.train.global_batch, ranks * config.train.micro_batch)
    return 0 if rest else whole


class _Rank(NamedTuple):
    """The units and stages of a rank of the pipeline."""

    held: Mapping[str, int]
    """Its units."""
    waiting: Mapping[str, int]
    """How often each of them waits for its backward, while most micro-batches are in flight."""
    flight: int
    """Micro-batches in flight in one of its stages then."""
    received: int
    """Tensors of the stream that it receives for a micro-batch."""


def _ranks(shape: ModelShape, config: Config) -> list[_Rank]:
    """Return the ranks of the pipeline that differ."""
    parallel, count = config.parallel, micro_batches(config)
    if parallel.pp == 1:
        held = {FIRST: 1, **shape.few.counts, LAST: 1}
        return [_Rank(held, held, 1, 0)]
    flight = min(count, 2 * parallel.pp)
    name, virtual = parallel.pp_schedule, parallel.pp_virtual_stages
    key = "ranks", name, parallel.pp, virtual, flight, tuple(parallel.pp_layers)
    if key not in shape.known:
        shape.known[key] = _ranks_of(shape, parallel, flight)
    return shape.known[key]


def _ranks_of(shape: ModelShape, parallel: Parallel, count: int) -> list[_Rank]:
    schedule, pp, virtual = parallel.pp_schedule, parallel.pp, parallel.pp_virtual_stages
    where = placement(schedule, pp, virtual)
    layers = parallel.pp_layers or _cut(shape, len(where))
    flight = _in_flight(schedule, pp, stages_per_rank(schedule, virtual), count)
    last, start = len(where) - 1, 0
    ranks = [(Counter[str](), Counter[str](), [0, 0]) for _ in range(pp)]
    for stage, number in enumerate(layers):
        units = Counter(shape.few.order[start : start + number])
        units.update([FIRST] * (stage == 0) + [LAST] * (stage == last))
        held, waiting, numbers = ranks[where[stage]]
        held.update(units)
        waiting.update({unit: n * flight[stage] for unit, n in units.items()})
        numbers[0] = max(numbers[0], flight[stage])
        numbers[1] += (stage > 0) + (stage < last)
        start += number
    different: dict[Any, _Rank] = {}
    for held, waiting, numbers in ranks:
        key = tuple(sorted(held.items()))
        if key not in different or sum(different[key].waiting.values()) < waiting.total():
            different[key] = _Rank(held, waiting, *numbers)
    return [*different.values()]


def _cut(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, balanced by FLOPs."""
    if ("cut", stages) not in shape.known:
        flops: dict[str, float] = defaultdict(float)
        probed = next(v for k, v in shape.known.items() if k[0] == "figures")
        for part, values in probed.items():
            if part.phase == "F" and part.what in ("op", "attention"):
                flops[part.unit] += values[part.what == "attention"]
        layers = [flops[unit] for unit in shape.few.order]
        shape.known["cut", stages] = fewest_at_most(flops[FIRST], layers, flops[LAST], stages)
    return shape.known["cut", stages]


@cache
def _in_flight(schedule: str, pp: int, virtual: int, count: int) -> tuple[int, ...]:
    """Return for each stage the most micro-batches whose activations wait at a time."""
    where = placement(schedule, pp, virtual)
    if schedule == "1F1B":
        return tuple(min(count, pp - rank) for rank in range(pp))
    most = [0] * len(where)
    for row in build_table(schedule, pp, virtual, count):
        now: Counter[int] = Counter()
        best = 0
        for action in row:
            now[action.stage] += (action.kind == "F") - (action.kind in "BW")
            if now.total() > best:
                best = now.total()
                for stage in now:
                    most[stage] = now[stage]
    return tuple(most)


def _seconds(
    shape: ModelShape, config: Config, cluster: Cluster, units: Mapping[str, Unit], ranks: list[_Rank]
) -> dict[str, float]:
    """Return the seconds of a step by what takes them, on the busiest rank of the pipeline."""
    parallel, count = config.parallel, micro_batches(config)
    data = {unit: _data(one, config, cluster) for unit, one in units.items()}
    best: dict[str, float] = {}
    slowest = costs.slowest(cluster, _world(parallel))
    for rank in ranks:
        held = rank.held
        sent: dict[str, float] = defaultdict(float)
        compute = exposed = once = 0.0
        for unit, number in held.items():
            one = units[unit]
            for axis, took in one.sent.items():
                sent[axis] += number * took
            compute += number * (one.forward + one.backward - sum(one.sent.values()))
            each, step = data[unit]
            exposed += number * each
            once += number * step
        result = {"compute": compute * count * slowest, "dp": exposed * count + once}
        for axis in ("tp", "cp", "ep"):
            result[axis] = sent.get(axis, 0.0) * count
        if sum(result.values()) > sum(best.values()):
            best = result
    layers = [*shape.few.order, FIRST, LAST]
    mean = sum(units[u].forward + units[u].backward + data[u][0] for u in layers) / parallel.pp
    best["bubble"] = _bubble(shape, config, cluster, mean)
    own = max(sum(n * _local(units[u], config) for u, n in rank.held.items()) for rank in ranks)
    best["optimizer"] = costs.memory_seconds(cluster, 32 * own)
    if parallel.offload == "cpu":
        best |= _offload(config, cluster, own, count)
    return best


def _bubble(shape: ModelShape, config: Config, cluster: Cluster, mean: float) -> float:
    """Return the seconds that the busiest rank of a pipeline waits for others.

    ``mean`` is a rank's mean time for a micro-batch. The terms of it and of a message are those of the
    pipeline's simulator (timeline.py) for equal stages and messages shorter than an action.
    """
    parallel, schedule = config.parallel, config.parallel.pp_schedule
    pp, count = parallel.pp, micro_batches(config)
    if pp == 1:
        return 0.0
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
    took = collective_seconds(cluster, "p2p", stream_bytes(shape, config), 2, _world(parallel) // pp)
    return waits * mean + took * messages


def _world(parallel: Parallel) -> int:
    return math.prod((parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp))


def _local(unit: Unit, config: Config, trained: bool = True) -> float:
    """Return the numbers of a unit that one rank keeps between steps: the trained ones, or all."""
    over, of_experts = _shards(config)
    experts = unit.experts * _padded(unit, config) / of_experts
    return (unit.trained if trained else 1) * (unit.dense / over + experts)


def _padded(unit: Unit, config: Config) -> float:
    """Return what padding adds: without a mesh of their own, experts are cut along their first dim."""
    parallel = config.parallel
    if not unit.number or parallel.ep * parallel.tp > 1 or not parallel.zero:
        return 1.0
    over = parallel.dp_shard * parallel.cp
    return -(-unit.number // over) * over / unit.number


def _shards(config: Config) -> tuple[int, int]:
    """Return the ranks that share weights, and those that share experts."""
    parallel = config.parallel
    if parallel.zero == 0:
        return 1, 1
    over = parallel.dp_shard * parallel.cp
    return over, max(1, over * parallel.tp // parallel.ep)


def _data(unit: Unit, config: Config, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of data parallel that a unit shows in each micro-batch, and once in a step."""
    parallel, precision = config.parallel, config.precision
    width, wide = precision.param_dtype.itemsize, precision.reduce_dtype.itemsize
    over, of_experts = _shards(config)
    held = unit.dense + unit.experts * _padded(unit, config)
    gather = reduce = replicas = 0.0
    inner = parallel.dp_shard * parallel.cp * parallel.tp
    weights = (unit.dense, over, parallel.tp)
    for size, ranks, stride in (weights, (held - unit.dense, of_experts, parallel.ep)):
        if size:
            part = unit.trained * size * wide
            gather += collective_seconds(cluster, "all_gather", size * width, ranks, stride)
            reduce += collective_seconds(cluster, "reduce_scatter", part, ranks, stride)
            replicas += collective_seconds(
                cluster, "all_reduce", part / ranks, parallel.dp_replicate, inner
            )
    copies = sums = 0.0
    if gather or width < precision.master_dtype.itemsize:
        copies = costs.memory_seconds(cluster, 2 * width * held)
        sums = costs.memory_seconds(cluster, (width + 2 * wide) * unit.trained * held)

    def shown(alone: float, messages: float) -> float:
        return max(messages, beside_messages(cluster, alone, messages)) - alone

    forward, backward = unit.forward, unit.backward
    if parallel.zero == 3:
        both = max(gather, reduce)
        each = shown(forward, gather) + shown(backward, both) + 2 * copies + sums
        return each, max(0.0, max(reduce + replicas, gather) - max(backward, both))
    once, backwards = shown(forward, gather) + copies, shown(backward, reduce) + sums
    return (backwards, once) if parallel.zero == 2 else (0.0, once + backwards)


def _offload(config: Config, cluster: Cluster, own: float, count: int) -> dict[str, float]:
    """Return the seconds of shards that are copied to the device and back, and of the host's optimizer.

    Each micro-batch copies its shards for forward and for backward, and its gradients back.
    """
    copied = 3 * count * costs.host_seconds(cluster, own * config.precision.master_dtype.itemsize)
    return {"offload": copied, "optimizer": costs.processor_seconds(cluster, 28 * own)}


class _Moment(NamedTuple):
    """Bytes of a rank at a moment, besides what it has between steps."""

    activations: float
    gradients: float
    gathered: float = 0.0
    communication: float = 0.0
    temporaries: float = 0.0
    logits: float = 0.0


def _host_bytes(config: Config, units: Mapping[str, Unit], ranks: list[_Rank]) -> float:
    """Return the bytes of host memory of a rank."""
    precision = config.precision
    own = max(sum(n * _local(units[u], config, False) for u, n in rank.held.items()) for rank in ranks)
    trained = max(sum(n * _local(units[u], config) for u, n in rank.held.items()) for rank in ranks)
    state = 2 * trained * precision.state_dtype.itemsize
    if config.parallel.offload == "cpu":
        return _PINNED * (own + trained) * precision.master_dtype.itemsize + state
    return _PINNED * state if config.optimizer.offload == "cpu" else 0.0


def _bytes(
    shape: ModelShape, config: Config, units: Mapping[str, Unit], ranks: list[_Rank]
) -> dict[str, float]:
    """Return the bytes of the fullest rank at the moment of its peak."""
    precision, here = config.precision, config.parallel.offload != "cpu"
    most, best = -1.0, {}
    for rank in ranks:
        own = sum(n * _local(units[u], config, False) for u, n in rank.held.items())
        trained = sum(n * _local(units[u], config) for u, n in rank.held.items())
        weights = own * precision.master_dtype.itemsize * here
        state = trained * 2 * precision.state_dtype.itemsize * here
        gradients = trained * precision.master_dtype.itemsize * here
        moment = max(_moments(shape, config, units, rank, gradients), key=sum)
        if sum(moment) + weights + state > most:
            most = sum(moment) + weights + state
            best = {"weights": weights, "optimizer": state, **moment._asdict()}
    return best


def _moments(
    shape: ModelShape, config: Config, units: Mapping[str, Unit], rank: _Rank, sharded: float
) -> Iterator[_Moment]:
    """Yield the bytes of a rank at each moment that may be its peak; ``sharded`` are all gradients'."""
    parallel, precision, count = config.parallel, config.precision, micro_batches(config)
    param, reduce = precision.param_dtype.itemsize, precision.reduce_dtype.itemsize
    held, flight, master = rank.held, rank.flight, precision.master_dtype.itemsize
    # Else weights are used as they are kept, and gradients stay where backward makes them.
    cast = _shards(config)[0] > 1 or param < master
    size = {u: units[u].dense + units[u].experts * _padded(units[u], config) for u in held}
    sent = {u: size[u] * units[u].trained * reduce * cast for u in held}
    # With zero 3 each unit is gathered for its use; before that, all stay. Without zero 2 sums over
    # micro-batches stay whole too.
    each = param if parallel.zero == 3 and cast else 0
    gathered = 0.0 if parallel.zero == 3 else sum(n * size[u] for u, n in held.items()) * param * cast
    summed = sum(n * sent[u] for u, n in held.items()) if parallel.zero < 2 and count > 1 else 0.0
    # A stage has a buffer for what each micro-batch receives, and keeps what it has sent until the end.
    buffers = rank.received * stream_bytes(shape, config) * (count + max(0, count - flight))
    waiting = sum(n * units[u].kept for u, n in rank.waiting.items()) + buffers
    layers = [u for u in shape.few.counts if u in held]
    ends_kept = units[LAST].kept if LAST in held else 0.0

    def backward(waiting: float, done: float, grows: bool) -> Iterator[_Moment]:
        if LAST in held:
            one = units[LAST]
            whole = gathered + each * size[LAST]
            yield _Moment(waiting - ends_kept, summed + done, whole, 0, 0, one.working)
            done += _local(one, config) * master * grows
        after = sent.get(LAST, 0.0)
        for unit in reversed(layers):
            one = units[unit]
            kept = waiting - ends_kept - one.kept
            if parallel.pp == 1:
                before = _before(shape, unit)
                kept -= sum((held[u] - before[u]) * units[u].kept for u in layers)
            message, whole = max(after, sent[unit]), gathered + each * 2 * size[unit]
            yield _Moment(kept, summed + done + one.own, whole, message, one.working)
            after = 0.0

    yield from backward(waiting, sharded * (count > flight), count <= flight)
    if count == flight > 1:
        yield from backward(buffers + (waiting - buffers) * (flight - 1) / flight, sharded, False)
    if layers:  # the end of the last backward
        unit, one = layers[0], units[layers[0]]
        kept = buffers + (units[FIRST].kept if FIRST in held else 0.0)
        whole = gathered + each * 2 * size[unit]
        yield _Moment(kept, summed + sharded + one.own, whole, sent[unit], one.working)
    for unit in (FIRST, LAST):
        if unit in held:
            own = size[unit] * units[unit].trained * param * cast
            yield _Moment(buffers, summed + sharded + own, gathered + each * size[unit], sent[unit])


def _before(shape: ModelShape, unit: str) -> Counter[str]:
    """Return the layers up to the last one of a kind."""
    key = "before", unit
    if key not in shape.known:
        order = shape.few.order
        last = len(order) - order[::-1].index(unit)
        shape.known[key] = Counter(order[:last])
    return shape.known[key]
