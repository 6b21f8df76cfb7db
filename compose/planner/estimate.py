"""The estimate of one composition: memory of every pipeline rank, and the time of a step.

Pipeline ranks whose stages are equal have equal estimates, so one of them is recorded.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from compose.config.job import Job
from compose.config.tables import TABLES, Config
from compose.errors import ConfigError
from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import ASYNCHRONOUS, Action, build_table
from compose.pipeline.timeline import TimedAction, simulate, versions
from compose.planner import costs
from compose.planner.cluster import Cluster
from compose.planner.memory import ACTIVATIONS, STATE, STEP, WEIGHTS, peak, place_of
from compose.planner.quick_memory import copies_kept
from compose.planner.quick_units import stream_bytes
from compose.planner.record_pool import JobRecords, OtherProgram, RankCosts, costs_of_ranks, rank_costs
from compose.planner.step_time import PART, PROCESSOR, Seconds, after_result, seconds_of

_JOULES = 3.6e6  # of a kWh
_OF_HOST = {PROCESSOR: "host", "host": "issue"}  # what a device waits for, by the names of step_time.py


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
    ("host") in host memory, for what the host issues ("issue"), and "optimizer"."""
    slots: list[TimedAction]
    """The actions of all pipeline ranks on the clock."""
    host_bytes: int = 0
    """Bytes of host memory that offload and checkpoint.memory take of the fullest node."""
    kwh: float | None = None
    """Energy of a step of all devices and hosts; None: unknown."""

    @property
    def fullest(self) -> RankPeak:
        """The peak of the rank that has most from its device."""
        return max(self.peaks, key=lambda peak: peak.reserved)


def check_counted(config: Config) -> None:
    """Raise ConfigError for what no record has."""
    if "dpo" in TABLES and config.dpo.beta:
        raise ConfigError(
            "dpo.beta: the second forward of DPO is not counted; plan with dpo.beta = 0, and add a"
            " third to the time, and without model.lora the frozen copy"
        )
    if (base := config.model.lora.base) != "full":
        raise ConfigError(
            f'model.lora.base: "{base}" is not counted by plan; use model.lora.base = "full", which'
            " takes more memory, or --dry-run for the bytes"
        )


def schedule_rows(job: Job) -> list[list[Action]]:
    """Return the actions of each pipeline rank in order; without one, micro-batches in turn."""
    parallel, count = job.degrees, job.micro_batches
    if parallel.pp == 1:
        return [[Action(0, kind, i) for i in range(count) for kind in "FB"]]
    return build_table(parallel.pp_schedule, parallel.pp, parallel.pp_virtual_stages, count)


def estimate(
    job: Job, cluster: Cluster, other: OtherProgram | None = None, cache: Path | None = None
) -> Estimate:
    """Return the memory and the time of a job's step on a cluster.

    ``cache`` is a folder for records (record_cache.py); None: all are made.
    """
    ranks = rank_costs(_recorded(job), cluster, schedule_rows(job), other, cache)
    return _estimate(job, cluster, ranks, other)


def estimates(
    jobs: Sequence[Job], cluster: Cluster, cache: Path | None = None
) -> Iterator[tuple[int, Estimate | ConfigError]]:
    """Yield the place of each job with its estimate, or with why it has none, as they end.

    The records of all jobs share the processes, of which there are as many as cores.
    """
    plans = [JobRecords(_recorded(job), schedule_rows(job)) for job in jobs]
    for place, ranks in costs_of_ranks(plans, cluster, None, cache):
        if isinstance(ranks, ConfigError):
            yield place, ranks
        else:
            yield place, _estimate(jobs[place], cluster, ranks)


Kinds = Sequence[tuple[Cluster, int]]
"""Clusters of several kinds of device with the ranks of each, in the order of the ranks."""


def weakest(kinds: Kinds) -> Cluster:
    """Return the cluster of the slowest device, with the least memory and slowest network of all."""
    clusters = [cluster for cluster, _ in kinds]
    peaks = [cluster.device.peak for cluster in clusters]
    common = [dtype for dtype in peaks[0] if all(dtype in peak for peak in peaks)]
    first = common[0]
    slowest = min(clusters, key=lambda c: c.device.peak[first] * c.efficiencies.products[first])
    between = min((c.between for c in clusters), key=lambda link: link.usable)
    return replace(
        slowest,
        name="+".join(f"{ranks}x{cluster.name}" for cluster, ranks in kinds),
        device=replace(
            slowest.device,
            memory=min(c.device.memory - c.device.context - c.nccl_bytes for c in clusters)
            + slowest.device.context
            + slowest.nccl_bytes,
            peak={dtype: min(peak[dtype] for peak in peaks) for dtype in common},
        ),
        between=replace(between, latency=max(c.between.latency for c in clusters)),
        host_memory=min(c.host_memory for c in clusters),
    )


def _of_parts(parallel: Parallel, kinds: Kinds, dtype: str) -> tuple[list[Cluster], list[float]]:
    """Return the slowest cluster of each data rank of each pipeline rank, and its speed, 1 the least.

    The speed is the rate of large products.
    """
    rates = {c: costs.peak_rate(c, dtype) * c.efficiencies.products[dtype] for c, _ in kinds}
    of_ranks = [cluster for cluster, ranks in kinds for _ in range(ranks)]
    size, least = parallel.cp * parallel.tp, min(rates.values())
    parts = [of_ranks[i : i + size] for i in range(0, len(of_ranks), size)]
    slowest = [min(part, key=rates.__getitem__) for part in parts]
    return slowest, [round(rates[cluster] / least, 2) for cluster in slowest]


def speeds_of(parallel: Parallel, kinds: Kinds, dtype: str) -> tuple[float, ...]:
    """Return ``parallel.speeds`` for devices of several kinds; empty if each part has a slowest one."""
    _, speeds = _of_parts(parallel, kinds, dtype)
    return tuple(speeds) if len({*speeds}) > 1 else ()


def estimate_of_kinds(job: Job, kinds: Kinds, cache: Path | None = None) -> Estimate:
    """Return the estimate of a job on devices of several kinds, whose ``parallel.speeds`` are set.

    Without a pipeline it is that of the kind which takes longest for its shares of the samples. Stages
    have the times of the slowest device of each. The energy is left out.
    """
    degrees, dtype, whole = job.degrees, job.config.precision.param, weakest(kinds)
    clusters, speeds = _of_parts(degrees, kinds, dtype)
    own = {each: replace(each, between=whole.between) for each in dict.fromkeys(clusters)}
    if degrees.pp == 1:
        shares, rows = job.shares or job.dealt([1.0] * degrees.data_ranks), {}
        for cluster, share in zip(clusters, shares, strict=True):
            of_step = (share.micro_batches * share.micro_batch, share.micro_batch)
            rows[cluster] = max(rows.get(cluster, (0, 0)), of_step)
        each = [
            estimate(_of_equal_shares(job, *of_step), own[cluster], cache=cache)
            for cluster, of_step in rows.items()
        ]
        result = max(each, key=lambda one: one.step_seconds)
        peaks = max(each, key=lambda one: one.fullest.reserved).peaks
        result = replace(result, peaks=peaks, host_bytes=max(one.host_bytes for one in each))
    else:
        count = degrees.data_ranks
        costs_of = {
            cluster: rank_costs(_recorded(job), own[cluster], schedule_rows(job), None, cache)
            for cluster in own
        }
        mixed = []
        for stage in range(degrees.pp):
            row = range(stage * count, (stage + 1) * count)
            mixed.append(costs_of[clusters[min(row, key=speeds.__getitem__)]][stage])
        result = _estimate(job, whole, mixed)
    train, world_size = job.config.train, job.world_size
    tokens = train.global_batch * train.seq_len
    flops = job.config.model.config.flops_per_token(train.seq_len) * tokens
    peak_rate = sum(cluster.device.peak[dtype] * ranks for cluster, ranks in kinds)
    return replace(
        result,
        tokens_per_second_per_device=tokens / result.step_seconds / world_size,
        mfu=flops / (result.step_seconds * peak_rate),
        kwh=None,
    )


def _of_equal_shares(job: Job, rows: int, micro_batch: int) -> Job:
    """Return the job in which each data rank has so many rows."""
    config, ranks = job.config, job.degrees.data_ranks
    train = replace(config.train, global_batch=rows * ranks, micro_batch=micro_batch)
    parallel = replace(config.parallel, speeds=())
    return replace(job, config=replace(config, train=train, parallel=parallel))


def _recorded(job: Job) -> Job:
    """Return the job whose step is recorded: without a flush, that of 1F1B, whose actions are equal."""
    if job.degrees.pp_schedule not in ASYNCHRONOUS:
        return job
    parallel = replace(job.config.parallel, pp_schedule="1F1B")
    return replace(job, config=replace(job.config, parallel=parallel))


def _held_without_flush(schedule: str, costs: Sequence[RankCosts]) -> list[RankCosts]:
    """Return the costs of ranks with what they hold besides between steps: versions of the weights.

    Micro-batches of PipeDream wait in other steps than their own, those of 2BW in the table of a step.
    """
    results = []
    for rank, (of_rank, held) in enumerate(zip(costs, versions(schedule, len(costs)), strict=True)):
        start = Counter(of_rank.memory.start)
        start[WEIGHTS] *= held
        if schedule == "PipeDream":
            forward = of_rank.memory.actions[rank, "F", "last"].delta
            start[ACTIVATIONS] += (held - 1) * forward[ACTIVATIONS]
        results.append(replace(of_rank, memory=replace(of_rank.memory, start=start)))
    return results


def _estimate(
    job: Job, cluster: Cluster, ranks: list[RankCosts], other: OtherProgram | None = None
) -> Estimate:
    rows, count, peaks = schedule_rows(job), job.micro_batches, []
    waits = job.degrees.pp == 1 or job.degrees.pp_schedule not in ASYNCHRONOUS
    ranks = ranks if waits else _held_without_flush(job.degrees.pp_schedule, ranks)
    for costs_of, row in zip(ranks, rows, strict=True):
        size, shares = peak(costs_of.memory, row, count)
        peaks.append(RankPeak(size, size + costs_of.surplus, dict(shares)))
    of_stage = {a.stage: ranks[rank] for rank, row in enumerate(rows) for a in row}
    exchange = other.exchange if other and job.degrees.pp > 1 else 0.0

    @cache
    def known(stage: int, kind: str, place: str) -> Seconds:
        return seconds_of(of_stage[stage].seconds, (stage, kind, place))

    def parts(action: Action) -> Seconds:
        return known(action.stage, action.kind, place_of(action.micro_batch, count))

    def took(action: Action) -> float:
        return parts(action)["all"] + exchange

    def after(action: Action) -> float:
        return after_result(parts(action), action.kind)

    each = job.world_size // job.degrees.pp
    here, sharing = costs.for_ranks(cluster, job.world_size), cluster.device.sharing
    message = partial(costs.stage_seconds, here, stream_bytes(job.config), each)
    slots = simulate(rows, took, message, after, sharing)
    # A rank waits for other stages even if messages take no time. The rest is their time.
    free = simulate(rows, took, after_result=after, sharing=sharing) if job.degrees.pp > 1 else slots
    shortest = max(slot.end for slot in free)
    length = max(slot.end for slot in slots)
    if not waits:  # the step before fills the gaps of the table, and messages travel meanwhile
        length = shortest = max(sum(map(took, row)) for row in rows)
    of_rows = [[parts(action) for action in row] for row in rows]
    return _summary(job, cluster, (rows, of_rows, ranks, peaks), slots, (length, shortest))


def _summary(
    job: Job,
    cluster: Cluster,
    of_ranks: tuple[list[list[Action]], list[list[Seconds]], list[RankCosts], list[RankPeak]],
    slots: list[TimedAction],
    lengths: tuple[float, float],
) -> Estimate:
    """Return the estimate; ``lengths`` are the pipeline's time, and that if its messages took none.

    ``of_ranks`` has for each rank its actions, their times, its costs and its peak.
    """
    rows, timed, ranks, peaks = of_ranks
    count, train = job.micro_batches, job.config.train
    length, shortest = lengths
    update = max(rank.seconds[STEP]["all"] for rank in ranks)
    busy = [sum(parts["all"] for parts in row) for row in timed]
    slowest = max(range(len(rows)), key=lambda i: busy[i])
    exposed: dict[str, float] = defaultdict(float)
    work = dict.fromkeys(("product", "attention", "memory"), 0.0)
    last = ranks[slowest].seconds[STEP]
    for seconds in [*timed[slowest], last]:
        for name, value in seconds.items():
            if name.startswith("exposed "):
                exposed[name.removeprefix("exposed ")] += value
            elif name in work and seconds is not last:
                work[name] += value
            elif name in _OF_HOST and seconds is not last:
                exposed[_OF_HOST[name]] += value
    hosts, computed = [], []
    copies = copies_kept(job.config, job.world_size > cluster.node)
    for rank, row, times, of_device in zip(ranks, rows, timed, peaks, strict=True):
        moved = peak(rank.host, row, count)[0]
        held = moved + sum(of_device.by_category.get(what, 0) for what in (WEIGHTS, STATE))
        # A CPU's ranks have all in one memory.
        beside = of_device.reserved if moved and cluster.backend == "gloo" else 0
        hosts.append(moved + beside + copies * held)
        kinds = ("product", "attention", "memory", PART)
        parts = [*times, rank.seconds[STEP]]
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
        host_bytes(cluster, job.world_size, hosts),
        step_kwh(cluster, job.world_size, step, computed),
    )


def host_bytes(cluster: Cluster, world_size: int, by_rank: Sequence[int]) -> int:
    """Return the bytes of host memory that the fullest node's ranks take.

    ``by_rank`` are those of a rank of each pipeline rank. The ranks of one follow one another.
    """
    each = world_size // len(by_rank)
    of_ranks = [by_rank[rank // each] for rank in range(world_size)]
    nodes = range(0, world_size, cluster.node)
    return max(sum(of_ranks[first : first + cluster.node]) for first in nodes)


def lack_of_host(cluster: Cluster, needed: float) -> str:
    """Return that a node lacks host memory, in words; empty if it does not, or if it is not known."""
    has = cluster.host_memory
    if not has or needed <= has:
        return ""
    return f"needs {needed / 2**30:,.0f} GiB of host memory, a node has {has / 2**30:,.0f}"


def step_kwh(cluster: Cluster, world_size: int, step: float, busy: Sequence[float]) -> float | None:
    """Return the kWh of a step of ``step`` seconds; None if the power of a device is not known.

    ``busy`` are the seconds in which a device of each pipeline rank computes. It then takes the power
    that the efficiencies were measured at, or the limit below it. While it waits, it takes that of an
    idle device, which is too little where it waits for messages. Each machine takes its part of
    ``host_power`` besides, and 0 if that is unknown. Cooling of the building is not counted.
    """
    device = cluster.device
    if device.power == 1.0:  # Device's default
        return None
    load = min(device.power, device.power_limit) - device.power_idle
    joules = world_size * (device.power_idle * step + load * sum(busy) / len(busy))
    machines = math.ceil(world_size * cluster.machines / cluster.node)
    joules += machines * cluster.host_power / cluster.machines * step
    return joules / _JOULES
