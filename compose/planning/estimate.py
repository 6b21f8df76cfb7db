"""The estimate of one composition: the memory of every pipeline rank, from records of few layers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compose.legality.job import Job
from compose.pipeline.schedules import Action, build_table
from compose.planning.memory import ActionMemory, RankMemory, categorize, peak, rank_memory
from compose.planning.reduction import Runs, linear, places, reduced, runs_of
from compose.planning.trace import Traced, trace

_MICRO_BATCHES = 3  # a first one, a last one, and one between


@dataclass(frozen=True)
class RankPeak:
    """The peak of one pipeline rank."""

    allocated: int
    """Bytes."""
    by_category: dict[str, int]
    """Bytes of each category at the peak."""


def schedule_rows(job: Job) -> list[list[Action]]:
    """Return the actions of each pipeline rank in order; without a pipeline one micro-batch at a time.

    Args:
        job: The checked job.
    """
    parallel, count = job.degrees, job.micro_batches
    if parallel.pp == 1:
        return [[Action(0, kind, i) for i in range(count) for kind in "FB"]]
    return build_table(parallel.pp_schedule, parallel.pp, parallel.pp_virtual_stages, count)


def memory_of(job: Job, ranks: Sequence[int] = (), device_type: str = "cuda") -> list[RankPeak]:
    """Return the peak of memory of pipeline ranks.

    Args:
        job: The checked job.
        ranks: The ranks on the pp axis; empty: all.
        device_type: The device whose kernels are chosen.

    Returns:
        The peak of each rank.
    """
    rows, runs, found = schedule_rows(job), runs_of(job), []
    objects: list[Any] | None = None
    for pp_rank in ranks or range(job.degrees.pp):
        rank = pp_rank * job.world_size // job.degrees.pp
        if pp_rank and objects is None:
            objects = traced(job, 0, None, None, device_type, None)[0].broadcast
        memory, first = _rank(job, rank, runs, device_type, objects if pp_rank else None)
        objects = objects or first
        size, shares = peak(memory, rows[pp_rank], job.micro_batches)
        found.append(RankPeak(size, dict(shares)))
    return found


def traced(
    job: Job, rank: int, runs: Runs | None, kept: Runs | None, device_type: str, objects: list[Any] | None
) -> tuple[Traced, RankMemory]:
    """Record a rank with some of the layers.

    Args:
        job: The checked job.
        rank: The rank to play.
        runs: The runs of the job's stages.
        kept: The layers to keep; None keeps all.
        device_type: The device whose kernels are chosen.
        objects: What the first rank of the pipeline broadcast.

    Returns:
        The record, and its memory.
    """
    count = min(_MICRO_BATCHES, job.micro_batches)
    if runs is None or kept is None:
        one = trace(job, rank, micro_batches=count, device_type=device_type, objects=objects)
        where: dict[str, list[str]] = {}
    else:
        one = trace(
            job,
            rank,
            model=reduced(job, runs, kept),
            pp_layers=kept.layers() if job.degrees.pp > 1 else (),
            micro_batches=count,
            device_type=device_type,
            objects=objects,
        )
        where = places(job, runs, kept)
    categorize(one.record, job.resolved.output)
    return one, rank_memory(one.record, count, where)


def _rank(
    job: Job, rank: int, runs: Runs | None, device_type: str, objects: list[Any] | None
) -> tuple[RankMemory, list[Any]]:
    if runs is None or not runs.places():
        one, memory = traced(job, rank, None, None, device_type, objects)
        return memory, one.broadcast
    one, base = traced(job, rank, runs, runs.fewest(), device_type, objects)
    longer = [
        (place, traced(job, rank, runs, runs.longer(place), device_type, objects)[1])
        for place in runs.places()
    ]
    return _grown(base, runs, longer), one.broadcast


def _grown(base: RankMemory, runs: Runs, longer: Sequence[tuple[int, RankMemory]]) -> RankMemory:
    """Return the memory with all layers of all runs."""
    stages = sorted({key[0] for key in base.actions if key[0] >= 0})
    found = RankMemory(buffers=Counter(base.buffers))

    def more(place: int, stage: int) -> int:
        # What belongs to no stage grows with the layers of all stages of the rank.
        return runs.more(stage, place)

    # Of a rank with several stages each is one layer longer in the second record.
    def whole(place: int) -> float:
        added = [more(place, stage) for stage in stages]
        return sum(added) / max(1, sum(1 for n in added if n))

    found.start = _grow(base.start, [(whole(p), m.start) for p, m in longer])
    for key, action in base.actions.items():
        steps = [
            (whole(p) if key[0] < 0 else more(p, key[0]), m.actions[key]) for p, m in longer
        ]
        grown = ActionMemory(_grow(action.delta, [(n, m.delta) for n, m in steps]))
        for segment, above in action.peaks.items():
            if all(segment in m.peaks for _, m in steps):
                grown.peaks[segment] = _grow(above, [(n, m.peaks[segment]) for n, m in steps])
        found.actions[key] = grown
    return found


def _grow(base: Counter[str], steps: Sequence[tuple[float, Counter[str]]]) -> Counter[str]:
    return Counter({key: round(value) for key, value in linear(base, steps).items()})
