"""The estimate of one composition: the memory of every pipeline rank, from records of few layers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

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


@dataclass(frozen=True)
class Task:
    """One record to make: a rank, with some of the layers."""

    job: Job
    pp_rank: int
    runs: Runs | None
    kept: Runs | None
    """The layers to keep; None keeps all."""
    device_type: str
    stream: Any
    """What the first rank of the pipeline broadcast: shape and dtype of what stages send."""


def memory_of(
    job: Job, pp_ranks: Sequence[int] = (), device_type: str = "cuda", workers: int = 2
) -> list[RankPeak]:
    """Return the peak of memory of pipeline ranks.

    Args:
        job: The checked job.
        pp_ranks: The ranks on the pp axis; empty: all.
        device_type: The device whose kernels are chosen.
        workers: How many processes make records side by side.

    Returns:
        The peak of each rank.
    """
    runs = runs_of(job)
    if runs is not None and not runs.places():
        runs = None
    kept = [None] if runs is None else [runs.fewest(), *map(runs.longer, runs.places())]
    ranks = list(pp_ranks or range(job.degrees.pp))
    stream = stream_of(job) if job.degrees.pp > 1 else None
    tasks = [Task(job, rank, runs, k, device_type, stream) for rank in ranks for k in kept]
    # A process for each: PyTorch keeps what it knows of a world's groups for the next one.
    with get_context("fork").Pool(min(workers, len(tasks)), maxtasksperchild=1) as pool:
        made = pool.map(traced, tasks, chunksize=1)
    rows, found = schedule_rows(job), []
    for i, rank in enumerate(ranks):
        base, *longer = made[i * len(kept) : (i + 1) * len(kept)]
        if runs is not None:
            base = _grown(base, runs, list(zip(runs.places(), longer, strict=True)))
        size, shares = peak(base, rows[rank], job.micro_batches)
        found.append(RankPeak(size, dict(shares)))
    return found


def stream_of(job: Job) -> tuple[torch.Size, torch.dtype]:
    """Return shape and dtype of what a pipeline's stages send: the stream of one micro-batch.

    Args:
        job: The checked job, of a pipeline.
    """
    with get_context("fork").Pool(1) as pool:
        return pool.apply(_stream, (job,))


def _stream(job: Job) -> tuple[torch.Size, torch.dtype]:
    runs = runs_of(job)
    kept = runs and runs.fewest()
    task = Task(job, 0, runs, kept, "cuda", None)
    return _record(task).broadcast[0]


def traced(task: Task) -> RankMemory:
    """Make a record, and return its memory."""
    one = _record(task)
    categorize(one.record, task.job.resolved.output)
    where = places(task.job, task.runs, task.kept) if task.runs and task.kept else {}
    return rank_memory(one.record, min(_MICRO_BATCHES, task.job.micro_batches), where)


def _record(task: Task) -> Traced:
    job, kept = task.job, task.kept
    model, layers = None, ()
    if task.runs is not None and kept is not None:
        model = reduced(job, task.runs, kept)
        layers = kept.layers() if job.degrees.pp > 1 else ()
    return trace(
        job,
        task.pp_rank * job.world_size // job.degrees.pp,
        model=model,
        pp_layers=layers,
        micro_batches=min(_MICRO_BATCHES, job.micro_batches),
        device_type=task.device_type,
        objects=None if task.pp_rank == 0 else [task.stream],
    )


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
