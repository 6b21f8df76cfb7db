"""The estimate of one composition: memory of every pipeline rank, and the time of a step.

Pipeline ranks whose stages are equal have equal estimates, so one of them is recorded.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compose.config.job import Job
from compose.errors import ConfigError
from compose.pipeline.schedules import Action, build_table
from compose.pipeline.timeline import Slot, simulate
from compose.planner import costs, node
from compose.planner.cluster import Cluster
from compose.planner.memory import STEP, peak, place_of
from compose.planner.record_pool import JobRecords, OtherProgram, RankCosts, costs_of_ranks, rank_costs
from compose.planner.step_time import PART, PROCESSOR, Seconds, no_wait, seconds_of


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
    plans = [JobRecords(job, schedule_rows(job)) for job in jobs]
    for place, ranks in costs_of_ranks(plans, cluster, workers, None, cache):
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
