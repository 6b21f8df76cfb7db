"""The memory of a rank by formulas: the pipeline's ranks, what they keep between steps, their peaks."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from compose.config.tables import Config
from compose.errors import ConfigError
from compose.optim.optimizers import OPTIMIZERS
from compose.optim.parameter_rules import parameter_rules
from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import build_table, placement, stages_per_rank
from compose.pipeline.split import fewest_at_most
from compose.planner.layer_probe import FIRST, LAST
from compose.planner.quick_units import ModelShape, UnitEstimate, shards, stream_bytes
from compose.planner.record_cache import remembered

_PINNED = 4 / 3  # of a pinned tensor's bytes, which are rounded up to a power of two, on average


def micro_batches(config: Config) -> int:
    """Return the micro-batches of a step, or 0 if the division has a remainder."""
    ranks = config.parallel.dp_replicate * config.parallel.dp_shard
    whole, rest = divmod(config.train.global_batch, ranks * config.train.micro_batch)
    return 0 if rest else whole


class Rank(NamedTuple):
    """The units and stages of a rank of the pipeline."""

    held: Mapping[str, int]
    """Its units."""
    waiting: Mapping[str, int]
    """How often each of them waits for its backward, while most micro-batches are in flight."""
    split: Mapping[str, int]
    """How often each of them waits for the gradients of its weights alone then."""
    flight: int
    """Micro-batches in flight in one of its stages then."""
    received: int
    """Tensors of the stream that it receives for a micro-batch."""


def ranks_of(shape: ModelShape, config: Config) -> list[Rank]:
    """Return the ranks of the pipeline that differ."""
    parallel, count = config.parallel, micro_batches(config)
    if parallel.pp == 1:
        held = {FIRST: 1, **shape.few.counts, LAST: 1}
        return [Rank(held, held, {}, 1, 0)]
    # A file's table holds for one number of micro-batches.
    flight = count if parallel.pp_schedule.endswith(".csv") else min(count, 2 * parallel.pp)
    name, virtual = parallel.pp_schedule, parallel.pp_virtual_stages
    key = "ranks", name, parallel.pp, virtual, flight, tuple(parallel.pp_layers)
    if key not in shape.known:
        shape.known[key] = _ranks_of(shape, parallel, flight)
    return shape.known[key]


def _ranks_of(shape: ModelShape, parallel: Parallel, count: int) -> list[Rank]:
    schedule, pp, virtual = parallel.pp_schedule, parallel.pp, parallel.pp_virtual_stages
    where = placement(schedule, pp, virtual)
    layers = parallel.pp_layers or _cut(shape, len(where))
    flight = _in_flight(shape, schedule, pp, stages_per_rank(schedule, virtual), count)
    last, start = len(where) - 1, 0
    ranks = [(Counter[str](), Counter[str](), Counter[str](), [0, 0]) for _ in range(pp)]
    for stage, number in enumerate(layers):
        units = Counter(shape.few.order[start : start + number])
        units.update([FIRST] * (stage == 0) + [LAST] * (stage == last))
        held, waiting, split, numbers = ranks[where[stage]]
        held.update(units)
        for counts, most in zip((waiting, split), flight[stage], strict=True):
            counts.update({unit: n * most for unit, n in units.items()})
        numbers[0] = max(numbers[0], flight[stage][0])
        numbers[1] += (stage > 0) + (stage < last)
        start += number
    different: dict[Any, Rank] = {}
    fullest: dict[Any, float] = {}
    for held, waiting, split, numbers in ranks:
        key, most = tuple(sorted(held.items())), waiting.total() + split.total() / 2
        if key not in fullest or fullest[key] < most:
            fullest[key], different[key] = most, Rank(held, waiting, split, *numbers)
    return [*different.values()]


def _cut(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, balanced by FLOPs.

    Raises ConfigError if there are fewer layers than stages between the ends.
    """
    if stages - 2 > shape.count:
        raise ConfigError(f"parallel.pp: {stages} stages have {shape.count} layers")
    if ("cut", stages) not in shape.known:
        flops: dict[str, float] = defaultdict(float)
        probed = next(v for k, v in shape.known.items() if k[0] == "figures")
        for part, values in probed.items():
            if part.phase in "FE" and part.what in ("op", "attention"):
                flops[part.unit] += values[part.what == "attention"]
        layers = [flops[unit] for unit in shape.few.order]
        shape.known["cut", stages] = fewest_at_most(flops[FIRST], layers, flops[LAST], stages)
    return shape.known["cut", stages]


def _in_flight(
    shape: ModelShape, schedule: str, pp: int, virtual: int, count: int
) -> Sequence[tuple[int, int]]:
    """Return for each stage the micro-batches that wait when its rank is fullest.

    The first number is of those whose activations wait. The second is of those among them that wait for
    the gradients of weights alone.
    """
    if schedule == "PipeDream":  # of several steps
        return [(pp - rank, 0) for rank in range(pp)]
    if schedule == "1F1B":
        return [(min(count, pp - rank), 0) for rank in range(pp)]
    # A table of PyTorch's needs its compiler, which takes half a second to import.
    folder, asked = None if schedule.endswith(".csv") else shape.cache, (schedule, pp, virtual, count)
    model = shape.job.config.model.name
    return remembered(folder, "flight", model, repr(asked), lambda: _most_waiting(*asked))


def _most_waiting(schedule: str, pp: int, virtual: int, count: int) -> Sequence[tuple[int, int]]:
    most = [(0, 0)] * len(placement(schedule, pp, virtual))
    for row in build_table(schedule, pp, virtual, count):
        now: Counter[int] = Counter()
        split: Counter[int] = Counter()
        best = 0.0
        for action in row:
            now[action.stage] += (action.kind == "F") - (action.kind in "BW")
            split[action.stage] += (action.kind == "I") - (action.kind == "W")
            # The gradients that weights wait for take about half of what a layer keeps.
            size = now.total() + split.total() / 2
            if size > best:
                best = size
                for stage in now:
                    most[stage] = now[stage], split[stage]
    return most


def _cut_of_stacks(shape: ModelShape, config: Config) -> tuple[float, float]:
    """Return padded experts over their own numbers, and the part that later dims cut."""
    ranks, ep = shards(config)[1], config.parallel.ep
    whole = padded = moved = 0.0
    for (number, *dims), count in shape.stacks.items():
        here, size = number / ep, count * math.prod((number, *dims))
        other = here % ranks and any(dim % ranks == 0 for dim in dims)
        whole, moved = whole + size, moved + (size if other else 0)
        padded += size if other else size * math.ceil(here / ranks) * ranks / here
    return (padded / whole, moved / whole) if whole else (1.0, 0.0)


class Size(NamedTuple):
    """Elements of a unit's parameters."""

    whole: float
    """Elements that a rank would hold without data parallel."""
    own: float
    """Elements that one rank keeps between steps."""
    trained: float
    """Elements among ``own`` that are trained."""
    moved: float
    """Elements of experts that are cut along a later dim than the first: FSDP copies them once more."""


def sizes_of(shape: ModelShape, units: Mapping[str, UnitEstimate], config: Config) -> dict[str, Size]:
    """Return the sizes of each unit."""
    over, of_experts = shards(config)
    padded, moved = _cut_of_stacks(shape, config)
    result = {}
    for name, unit in units.items():
        experts = unit.experts * padded
        own = unit.dense / over + experts / of_experts
        result[name] = Size(unit.dense + experts, own, unit.trained * own, unit.experts * moved)
    return result


class _BytesInUse(NamedTuple):
    """Bytes of a rank at a moment, besides what it has between steps."""

    activations: float
    gradients: float
    gathered: float = 0.0
    communication: float = 0.0
    temporaries: float = 0.0
    logits: float = 0.0


def bytes_of_state(shape: ModelShape, config: Config) -> float:
    """Return the bytes of the optimizer's state for each number that is trained, on average."""
    key = "states", config.optimizer
    if key not in shape.known:
        model = shape.job.model
        rules = parameter_rules(model, shape.job.plan, config.optimizer)
        sizes = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
        states = sum(size * len(OPTIMIZERS[rules[n].optimizer].state) for n, size in sizes.items())
        shape.known[key] = states / max(1, sum(sizes.values()))
    return shape.known[key] * config.precision.state_dtype.itemsize


def host_bytes(config: Config, own: float, trained: float, state: float) -> float:
    """Return the bytes of host memory of a rank with so many numbers, and bytes of ``state``."""
    if config.parallel.offload == "cpu":
        gradients = trained * config.precision.master_dtype.itemsize
        return _PINNED * (bytes_of_weights(config, own, trained) + gradients) + state
    return _PINNED * state if config.optimizer.offload == "cpu" else 0.0


def bytes_of_weights(config: Config, own: float, trained: float) -> float:
    """Return the bytes of so many numbers between steps: frozen ones have no master (apply)."""
    precision = config.precision
    return trained * precision.master_dtype.itemsize + (own - trained) * precision.param_dtype.itemsize


def copies_kept(config: Config, several: bool) -> int:
    """Return how many copies of its state a rank keeps on hosts, its peer's on one of ``several``."""
    if not config.checkpoint.memory:
        return 0
    return 4 if several and config.parallel.dp_replicate == 1 else 2


def peak_bytes(
    shape: ModelShape,
    config: Config,
    units: Mapping[str, UnitEstimate],
    sizes: Mapping[str, Size],
    ranks: Iterable[tuple[Rank, Sequence[float]]],
) -> dict[str, float]:
    """Return the bytes of the fullest rank at the moment of its peak.

    With each rank are its own numbers, and those of them that are trained.
    """
    precision, here = config.precision, config.parallel.offload != "cpu"
    with_state = here and config.optimizer.offload == "none"
    schedule = config.parallel.pp_schedule if config.parallel.pp > 1 else ""
    most, best = -1.0, {}
    for rank, (own, trained) in ranks:
        held = {"PipeDream": rank.flight, "PipeDream2BW": 2}.get(schedule, 1)  # versions
        weights = bytes_of_weights(config, own, trained) * here * held
        state = trained * bytes_of_state(shape, config) * with_state
        gradients = trained * precision.master_dtype.itemsize * here
        moment = max(_moments(shape, config, (units, sizes), rank, gradients), key=sum)
        if sum(moment) + weights + state > most:
            most = sum(moment) + weights + state
            best = {"weights": weights, "optimizer": state, **moment._asdict()}
    return best


def _moments(
    shape: ModelShape,
    config: Config,
    of_units: tuple[Mapping[str, UnitEstimate], Mapping[str, Size]],
    rank: Rank,
    sharded: float,
) -> Iterator[_BytesInUse]:
    """Yield the bytes of a rank at each moment that may be its peak; ``sharded`` are all gradients'."""
    units, sizes = of_units
    parallel, precision, count = config.parallel, config.precision, micro_batches(config)
    param, reduce = precision.param_dtype.itemsize, precision.reduce_dtype.itemsize
    held, flight, master = rank.held, rank.flight, precision.master_dtype.itemsize
    # Else weights are used as they are kept, and gradients stay where backward makes them.
    cast = shards(config)[0] > 1 or param < master
    size = {u: sizes[u].whole for u in held}
    sent = {u: size[u] * units[u].trained * reduce * cast for u in held}
    # With zero 3 each unit is gathered for its use; before that, all stay. Without zero 2 sums over
    # micro-batches stay whole too.
    each = param if parallel.zero == 3 and cast else 0
    gathered = 0.0 if parallel.zero == 3 else sum(n * size[u] for u, n in held.items()) * param * cast
    summed = sum(n * sent[u] for u, n in held.items()) if parallel.zero < 2 and count > 1 else 0.0
    # A stage has a buffer for what each micro-batch receives, and keeps what it has sent until the end.
    buffers = rank.received * stream_bytes(config) * (count + max(0, count - flight))
    waiting = sum(n * units[u].kept for u, n in rank.waiting.items()) + buffers
    of_weights = sum(n * units[u].results for u, n in rank.split.items())
    layers = [u for u in shape.few.counts if u in held]
    ends_kept = units[LAST].kept if LAST in held else 0.0

    def backward(waiting: float, done: float, grows: bool) -> Iterator[_BytesInUse]:
        if LAST in held:
            one = units[LAST]
            whole = gathered + each * size[LAST]
            kept = waiting - ends_kept
            yield _BytesInUse(kept, summed + done, whole, 0, of_weights, one.working)
            done += sizes[LAST].trained * master * grows
        after = sent.get(LAST, 0.0)
        for unit in reversed(layers):
            one = units[unit]
            kept = waiting - ends_kept - one.kept
            if parallel.pp == 1:
                before = _before(shape, unit)
                kept -= sum((held[u] - before[u]) * units[u].kept for u in layers)
            message, whole = max(after, sent[unit]), gathered + each * 2 * size[unit]
            working = one.working + of_weights
            yield _BytesInUse(kept, summed + done + one.own, whole, message, working)
            after = 0.0

    yield from backward(waiting, sharded * (count > flight), count <= flight)
    if count == flight > 1:
        yield from backward(buffers + (waiting - buffers) * (flight - 1) / flight, sharded, False)
    if layers:  # the end of the last backward
        unit, one = layers[0], units[layers[0]]
        kept = buffers + (units[FIRST].kept if FIRST in held else 0.0)
        whole = gathered + each * 2 * size[unit]
        yield _BytesInUse(kept, summed + sharded + one.own, whole, sent[unit], one.working)
    for unit in (FIRST, LAST):
        if unit in held:
            own = size[unit] * units[unit].trained * param * cast
            yield _BytesInUse(buffers, summed + sharded + own, gathered + each * size[unit], sent[unit])


def _before(shape: ModelShape, unit: str) -> Counter[str]:
    """Return the layers up to the last one of a kind."""
    key, order = ("before", unit), shape.few.order
    if key not in shape.known:
        shape.known[key] = Counter(order[: len(order) - order[::-1].index(unit)])
    return shape.known[key]
