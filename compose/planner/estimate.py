"""The estimate of one composition: memory of every pipeline rank, and the time of a step.

Pipeline ranks whose stages are equal have equal estimates, so one of them is recorded.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from compose.config.job import Job
from compose.errors import ConfigError
from compose.pipeline.schedules import Action, build_table
from compose.pipeline.timeline import Slot, simulate
from compose.planner import costs, node
from compose.planner.cluster import Cluster
from compose.planner.few_layers import (
    FEWEST,
    LayerRuns,
    few_micro_batches,
    linear,
    places,
    reduced,
    runs_of,
)
from compose.planner.memory import (
    STEP,
    ActionMemory,
    Key,
    RankMemory,
    categorize,
    peak,
    place_of,
    rank_memory,
    replay,
)
from compose.planner.record import Record
from compose.planner.record_cache import RecordFile
from compose.planner.record_pool import RecordPool
from compose.planner.step_time import (
    PART,
    PROCESSOR,
    Seconds,
    action_seconds,
    grown,
    in_pieces,
    no_wait,
    seconds_of,
)
from compose.planner.trace import RankStep, Traced, trace


@dataclass
class RankCosts:
    """The memory and the time of a pipeline rank, action by action."""

    memory: RankMemory
    surplus: int = 0
    """Bytes that the allocator has beyond the tensors, at the peaks of the record."""
    seconds: dict[Key, Seconds] = field(default_factory=dict)
    host: RankMemory = field(default_factory=RankMemory)
    """Its bytes in host memory, in place of a GPU's."""


def renamed(rank: RankCosts, stage: Mapping[int, int]) -> RankCosts:
    """Return the costs of a rank with other numbers of its stages."""

    def key(of: Key) -> Key:
        return stage.get(of[0], of[0]), of[1], of[2]

    memory, host = (
        replace(one, actions={key(k): of_one for k, of_one in one.actions.items()})
        for one in (rank.memory, rank.host)
    )
    seconds = {key(k): of_one for k, of_one in rank.seconds.items()}
    return replace(rank, memory=memory, seconds=seconds, host=host)


def with_all_layers(
    base: RankCosts, runs: LayerRuns, longer: Sequence[tuple[int, RankCosts]]
) -> RankCosts:
    """Return the costs with all layers of all runs."""
    stages = sorted({key[0] for key in base.seconds if key[0] >= 0})

    def more(place: int, stage: int) -> float:
        if stage >= 0:
            return runs.more(stage, place)
        # Work of no stage grows with all of the rank's. Each of them is one layer longer in the second
        # record.
        added = [runs.more(s, place) for s in stages]
        return sum(added) / max(1, sum(n > 0 for n in added))

    def whole(old: RankMemory, others: Sequence[tuple[int, RankMemory]]) -> RankMemory:
        memory = RankMemory(buffers=Counter(old.buffers))
        memory.start = _grow(old.start, [(more(p, -1), one.start) for p, one in others])
        for key, action in old.actions.items():
            steps = [(more(p, key[0]), one.actions[key]) for p, one in others]
            larger = ActionMemory(_grow(action.delta, [(n, m.delta) for n, m in steps]))
            for segment, above in action.peaks.items():
                if all(segment in m.peaks for _, m in steps):
                    larger.peaks[segment] = _grow(above, [(n, m.peaks[segment]) for n, m in steps])
            memory.actions[key] = larger
        return memory

    seconds = {
        key: grown(one, [(more(p, key[0]), rank.seconds[key]) for p, rank in longer])
        for key, one in base.seconds.items()
    }
    # The gaps between tensors serve the next layer too. What differs between two records is chance, the
    # sizes that fit into gaps, and no growth: the mean stands for all layers.
    surplus = (base.surplus + sum(rank.surplus for _, rank in longer)) // (1 + len(longer))
    memory = whole(base.memory, [(p, rank.memory) for p, rank in longer])
    host = whole(base.host, [(p, rank.host) for p, rank in longer])
    return RankCosts(memory, surplus, seconds, host)


def _grow(base: Counter[str], steps: Sequence[tuple[float, Counter[str]]]) -> Counter[str]:
    return Counter({key: round(value) for key, value in linear(base, steps).items()})


@dataclass(frozen=True)
class OtherProgram:
    """The differences of another program, whose times are published, from the composition.

    The host issues its operators one by one, and attention goes over whole rows.
    """

    change: Callable[[Record, Job], None]
    """It changes the record before it is costed; a function of a module, since it goes to a process."""
    fused: bool = True
    """Whether operators that follow one another in a layer are one kernel."""
    flash2: bool = True
    """Whether FlashAttention-2 computes attention on every device, as in programs before 2025."""
    exchange: float = 0.0
    """Seconds of each action of a pipeline in which the host waits for its neighbours."""


@dataclass(frozen=True)
class RankPeak:
    """The peak of one pipeline rank."""

    allocated: int
    reserved: int
    """Bytes that the caching allocator has from the device."""
    by_category: Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """The estimate of a composition on a cluster."""

    peaks: list[RankPeak]
    step_seconds: float
    tokens_per_second_per_device: float
    mfu: float
    """Model FLOPs of a step over what all devices would do at the peak of the type of the products."""
    bubble: float
    """Share of the pipeline's time in which its ranks wait for one another by the schedule alone, on
    average. The time of messages between them is in ``exposed``, as "pp"."""
    work: Mapping[str, float]
    """Seconds that the slowest rank computes: product, attention, memory (all else), optimizer."""
    exposed: Mapping[str, float]
    """Seconds of a step that the slowest rank waits for messages, by axis, for copies ("copy") and sums
    ("host") in host memory, and "optimizer"."""
    slots: list[Slot]
    """The actions of all pipeline ranks on the clock."""
    host_bytes: int = 0
    """Bytes of host memory that offload takes of the fullest node."""
    kwh: float | None = None
    """Energy of a step of all devices and hosts (node.py); None: unknown."""


def schedule_rows(job: Job) -> list[list[Action]]:
    """Return the actions of each pipeline rank in order; without one, micro-batches in turn."""
    parallel, count = job.degrees, job.micro_batches
    if parallel.pp == 1:
        return [[Action(0, kind, i) for i in range(count) for kind in "FB"]]
    return build_table(parallel.pp_schedule, parallel.pp, parallel.pp_virtual_stages, count)


def estimate(
    job: Job,
    cluster: Cluster,
    workers: int = 0,
    other: OtherProgram | None = None,
    cache: Path | None = None,
) -> Estimate:
    """Return the memory and the time of a job's step on a cluster.

    ``cache`` is a folder for records (record_cache.py); None: all are made.
    """
    ranks = rank_costs(job, cluster, schedule_rows(job), workers, other, cache)
    return _estimate(job, cluster, ranks, other)


def estimates(
    jobs: Sequence[Job], cluster: Cluster, workers: int = 0, cache: Path | None = None
) -> Iterator[tuple[int, Estimate | ConfigError]]:
    """Yield the place of each job with its estimate, or with why it has none, as they end.

    The records of all jobs share the processes, of which there are ``workers``; 0: as many as cores.
    """
    plans = [_JobRecords(job, schedule_rows(job)) for job in jobs]
    for place, ranks in _costs(plans, cluster, workers, None, cache):
        if isinstance(ranks, ConfigError):
            yield place, ranks
        else:
            yield place, _estimate(jobs[place], cluster, ranks)


def _estimate(
    job: Job, cluster: Cluster, ranks: list[RankCosts], other: OtherProgram | None = None
) -> Estimate:
    rows, count, peaks = schedule_rows(job), job.micro_batches, []
    for costs_of, row in zip(ranks, rows, strict=True):
        size, shares = peak(costs_of.memory, row, count)
        peaks.append(RankPeak(size, size + costs_of.surplus, dict(shares)))
    of_stage = {a.stage: ranks[rank] for rank, row in enumerate(rows) for a in row}
    exchange = other.exchange if other and job.degrees.pp > 1 else 0.0

    def seconds(action: Action) -> float:
        return _of(of_stage[action.stage], action, count)["all"] + exchange

    def parts(action: Action) -> tuple[float, float]:
        return no_wait(_of(of_stage[action.stage], action, count), action.kind)

    message, sharing = _message(job, cluster), cluster.device.sharing
    slots = simulate(rows, seconds, message, parts, sharing)
    # A rank waits for other stages even if messages take no time. The rest is their time.
    at_once = simulate(rows, seconds, 0.0, parts, sharing) if message else slots
    shortest = max(slot.end for slot in at_once)
    return _summary(job, cluster, (rows, ranks, peaks), slots, shortest)


def _of(rank: RankCosts, action: Action, count: int) -> Seconds:
    return seconds_of(rank.seconds, (action.stage, action.kind, place_of(action.micro_batch, count)))


def _message(job: Job, cluster: Cluster) -> float:
    """Return the seconds of a message between two ranks of the pipeline."""
    if job.degrees.pp == 1:
        return 0.0
    train, parallel = job.config.train, job.degrees
    tokens = train.micro_batch * train.seq_len / parallel.cp
    # With sequence parallel each rank of tp sends its part of the stream.
    tokens /= parallel.tp if parallel.tp > 1 and parallel.sequence else 1
    width = getattr(job.config.model.config, "dim", 0)
    size = tokens * width * job.config.precision.param_dtype.itemsize
    stride = job.world_size // parallel.pp
    return costs.collective_seconds(cluster, "p2p", size, 2, stride)


def _summary(
    job: Job,
    cluster: Cluster,
    of_ranks: tuple[list[list[Action]], list[RankCosts], list[RankPeak]],
    slots: list[Slot],
    shortest: float,
) -> Estimate:
    """Return the estimate; ``shortest`` is the pipeline's time if its messages took none."""
    rows, ranks, peaks = of_ranks
    count, train = job.micro_batches, job.config.train
    length = max(slot.end for slot in slots)
    update = max(rank.seconds[STEP]["all"] for rank in ranks)
    busy = [sum(_of(rank, a, count)["all"] for a in row) for rank, row in zip(ranks, rows, strict=True)]
    slowest = max(range(len(rows)), key=lambda i: busy[i])
    exposed: dict[str, float] = defaultdict(float)
    work = dict.fromkeys(("product", "attention", "memory"), 0.0)
    actions = [_of(ranks[slowest], action, count) for action in rows[slowest]]
    last = ranks[slowest].seconds[STEP]
    for seconds in [*actions, last]:
        for name, value in seconds.items():
            if name.startswith("exposed "):
                exposed[name.removeprefix("exposed ")] += value
            elif name in work and seconds is not last:
                work[name] += value
            elif name == PROCESSOR and seconds is not last:
                exposed["host"] += value
    hosts, computed = [], []
    for rank, row, of_device in zip(ranks, rows, peaks, strict=True):
        hosts.append(_on_host(cluster, peak(rank.host, row, count)[0], of_device))
        parts = [*(_of(rank, a, count) for a in row), rank.seconds[STEP]]
        kinds = ("product", "attention", "memory", PART)
        computed.append(sum(part.get(kind, 0.0) for part in parts for kind in kinds))
    if length > shortest:
        exposed["pp"] += length - shortest
    exposed["optimizer"] = update - sum(v for k, v in last.items() if k.startswith("exposed "))
    step = length + update
    tokens = train.global_batch * train.seq_len
    flops = job.config.model.config.flops_per_token(train.seq_len) * tokens
    rate = cluster.device.peak[job.config.precision.param]
    return Estimate(
        peaks,
        step,
        tokens / step / job.world_size,
        flops / (step * job.world_size * rate),
        (shortest - sum(busy) / len(rows)) / length,
        work | {"optimizer": exposed["optimizer"]},
        dict(exposed),
        slots,
        node.host_bytes(cluster, job.world_size, hosts),
        node.step_kwh(cluster, job.world_size, step, computed),
    )


def _on_host(cluster: Cluster, moved: int, of_device: RankPeak) -> int:
    """Return the bytes of host memory of a rank that has ``moved`` so many there."""
    # A CPU's ranks have all in one memory.
    return moved + of_device.reserved if moved and cluster.backend == "gloo" else moved


class _JobRecords:
    """The records that a job needs: of one rank of each kind, each with few layers and one more."""

    def __init__(self, job: Job, rows: Sequence[Sequence[Action]]) -> None:
        self.job, self.runs = job, runs_of(job)
        runs, last = self.runs, max(action.stage for row in rows for action in row)
        self._stages = [sorted({action.stage for action in row}) for row in rows]
        self._equal: dict[Any, list[int]] = {}
        for rank, mine in enumerate(self._stages):
            self._equal.setdefault(_kind(runs, mine, last), []).append(rank)
        # The longest of those that are equal is recorded, so that fewer layers may stand for all.
        self._chosen = {
            kind: max(
                ranks, key=lambda r: sum(runs.layers()[s] for s in self._stages[r]) if runs else 0
            )
            for kind, ranks in self._equal.items()
        }
        self.kept = {
            rank: _kept(runs, self._stages[rank], len(self._equal[kind]))
            for kind, rank in self._chosen.items()
        }
        """The layers of each record, by the rank that is recorded."""
        self.made: dict[tuple[int, int], RankCosts] = {}
        """The records by rank and place in ``kept``."""

    @property
    def whole(self) -> bool:
        """Whether all records are there."""
        return len(self.made) == sum(map(len, self.kept.values()))

    def costs(self) -> list[RankCosts]:
        """Return the costs of each pipeline rank."""
        results: dict[int, RankCosts] = {}
        for kind, source in self._chosen.items():
            records = [self.made[source, i] for i in range(len(self.kept[source]))]
            for rank in self._equal[kind]:
                numbers = dict(zip(self._stages[source], self._stages[rank], strict=True))
                base, *longer = [renamed(one, numbers) for one in records]
                if self.runs is not None and longer:
                    more = list(zip(self.runs.places(), longer, strict=True))
                    base = with_all_layers(base, self.runs, more)
                results[rank] = base
        return [results[rank] for rank in sorted(results)]


def rank_costs(
    job: Job,
    cluster: Cluster,
    rows: Sequence[Sequence[Action]],
    workers: int = 0,
    other: OtherProgram | None = None,
    cache: Path | None = None,
) -> list[RankCosts]:
    """Return the costs of each pipeline rank."""
    [(_, result)] = _costs([_JobRecords(job, rows)], cluster, workers, other, cache)
    if isinstance(result, ConfigError):
        raise result
    return result


def _costs(
    plans: Sequence[_JobRecords],
    cluster: Cluster,
    workers: int,
    other: OtherProgram | None,
    cache: Path | None,
) -> Iterator[tuple[int, list[RankCosts] | ConfigError]]:
    """Yield the place of each job with the costs of its pipeline ranks, as they end."""
    left = set(range(len(plans)))
    with RecordPool(workers) as pool:

        def submit(place: int, rank: int, number: int, stream: Any = None) -> None:
            plan, name = plans[place], (place, rank, number)
            asked = _Asked(plan.job, cluster, other, rank, plan.kept[rank][number], stream)
            of = rank, stream, other is None, *_played(cluster, other).items()
            file = RecordFile(cache, asked.job, asked.kept, *of) if cache else None
            if traced := file and file.read():
                pool.known(name, _priced(traced, asked))
            else:
                pool.submit(name, _recorded, asked, file)

        for place in left:
            for number in range(len(plans[place].kept[0])):
                submit(place, 0, number)
        for name, result in pool.results():
            place, rank, number = name
            if place not in left:
                continue  # another of its records has failed
            plan = plans[place]
            if isinstance(result, ConfigError):
                left.discard(place)
                yield place, result
                continue
            plan.made[rank, number], stream = result
            if (rank, number) == (0, 0):  # it tells the other ranks what stages send
                for other_rank in [r for r in plan.kept if r]:
                    for i in range(len(plan.kept[other_rank])):
                        submit(place, other_rank, i, stream)
            if plan.whole:
                left.discard(place)
                yield place, plan.costs()


def _kind(runs: LayerRuns | None, stages: Sequence[int], last: int) -> Any:
    """Return what ranks have in common of which one record serves all."""
    if runs is None:
        return tuple(stages)
    # A run that is too short to leave layers out is another kind of stage.
    shapes = [tuple(n if n < FEWEST else FEWEST for n in runs.lengths[s]) for s in stages]
    # Stages that follow one another on a rank pass tensors without a message and its buffer.
    follow = tuple(s + 1 in stages for s in stages)
    return follow, *((shape, s == 0, s == last) for shape, s in zip(shapes, stages, strict=True))


def _kept(runs: LayerRuns | None, stages: Sequence[int], ranks: int) -> list[LayerRuns | None]:
    """Return the layers of each record; all layers in one record, if that is less work."""
    if runs is None or not runs.places():
        return [None]
    all_layers = sum(runs.layers()[s] for s in stages)
    several = [runs.fewest(), *map(runs.fewest, runs.places())]
    if ranks == 1 and all_layers <= sum(kept.layers()[s] for kept in several for s in stages):
        return [None]
    return [*several]


class _Asked(NamedTuple):
    """A record that is wanted: of a rank of the pipeline, with the layers that are kept, or all."""

    job: Job
    cluster: Cluster
    other: OtherProgram | None
    pp_rank: int
    kept: LayerRuns | None
    stream: Any
    """What stages send, as the first rank of the pipeline broadcast it."""


def _recorded(asked: _Asked, file: RecordFile | None) -> tuple[RankCosts, Any]:
    """Make the record of a rank, put it into ``file``, and return what it costs, and the stream."""
    job, runs, kept, options = asked.job, runs_of(asked.job), asked.kept, dict[str, Any]()
    if runs and kept:
        options["model"] = reduced(job, runs, kept)
        options["pp_layers"] = kept.layers() if job.degrees.pp > 1 else ()
    step = RankStep(
        job,
        rank=asked.pp_rank * job.world_size // job.degrees.pp,
        micro_batches=len(few_micro_batches(job)),
        documents=asked.other is None,
        objects=None if asked.pp_rank == 0 else [asked.stream],
        **options,
        **_played(asked.cluster, asked.other),
    )
    traced = trace(step)
    if file:
        file.write(traced)
    return _priced(traced, asked)


def _priced(traced: Traced, asked: _Asked) -> tuple[RankCosts, Any]:
    job, cluster, other, _, kept, stream = asked
    record, sent, count = traced.record, traced.broadcast, len(few_micro_batches(job))
    if other:
        other.change(record, job)
    categorize(record, job.resolved.output)
    runs = runs_of(job)
    where = places(job, runs, kept) if runs and kept else {}
    if job.config.compile.async_tp:
        in_pieces(record, cluster, job.degrees)
    fused = other.fused if other else job.config.compile.mode != "off"
    seconds = action_seconds(record, cluster, job.degrees, count, fused, compiled=other is None)
    grows = cluster.backend == "nccl"  # as train/processes.py sets the allocator
    peaks = replay(((place, change) for _, place, change in record.changes), grows)
    surplus = peaks.reserved - peaks.allocated
    memory, host = (rank_memory(one, count, where) for one in (record, record.of_host))
    costs_of = RankCosts(memory, surplus, seconds, host)
    return costs_of, sent[0] if stream is None and sent else stream


def _played(cluster: Cluster, other: OtherProgram | None) -> dict[str, Any]:
    """Return what a record takes of its devices."""
    target, capability = cluster.target, cluster.device.capability
    return {
        "device_type": target.device_type,
        "float8": target.float8,
        "capability": (8, 0) if other and other.flash2 else tuple(capability),
    }
