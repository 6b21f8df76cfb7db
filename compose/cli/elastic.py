"""run.elastic: the mesh of a start is chosen for the ranks that are there.

The batch, the order of samples and the learning rates are functions of the step and the seed. So a run
goes on with any number of ranks from the checkpoint of any other number.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compose.config import rules
from compose.config.job import Job
from compose.config.models import find_model
from compose.config.tables import Config
from compose.errors import ConfigError
from compose.parallel.mesh import AXES, Parallel, divisors, meshes
from compose.pipeline.schedules import ASYNCHRONOUS

if TYPE_CHECKING:
    from compose.planner.cluster import Cluster

_CUTS = ("tp", "pp", "cp", "ep")  # axes that cut the model; the others are of data parallel
_TRIED = 500  # meshes that are tried at most before none counts as legal


def choose(config: Config, world_size: int) -> tuple[Job, str]:
    """Return the checked job for ``world_size`` ranks, and a line that says which mesh it has and why.

    The job may have fewer ranks. The last ranks of the launch then wait.
    Raises ConfigError if no mesh is legal, or if such a run could not go on with other ranks.
    """
    least = config.run.min_ranks
    problems = [*_cannot_go_on(config)]
    if world_size < least:
        cure = f"start {least}, or use run.min_ranks = {world_size}"
        problems.append(f"run.min_ranks: {least}, and there are {world_size} ranks; {cure}")
    if problems:
        raise ConfigError(*problems)
    result = _choose(config, world_size)
    if 0 < least < world_size:
        _check_least(config, world_size)
    return result


def _cannot_go_on(config: Config) -> Iterator[str]:
    keep = config.checkpoint
    lacks = {
        'run.dir = "runs/mine"': not config.run.dir,
        "checkpoint.interval = 100": not keep.interval,
        'checkpoint.resume = "auto"': keep.resume != "auto",
    }
    if cures := [cure for cure, lacking in lacks.items() if lacking]:
        yield (
            "run.elastic: true goes on from the newest checkpoint of its folder; set"
            f" {' and '.join(cures)}, or run.elastic = false"
        )
    schedule = config.parallel.pp_schedule
    if config.parallel.pp != 1 and schedule in ASYNCHRONOUS:
        yield (
            "run.elastic: true changes how old the weights of gradients are with parallel.pp_schedule ="
            f' "{schedule}", and so what is learned; use "1F1B", or run.elastic = false'
        )
    if config.parallel.speeds not in ((), "measure"):
        yield (
            "run.elastic: true may go on with other ranks than those of the list parallel.speeds; use"
            ' parallel.speeds = "measure", or run.elastic = false'
        )
    outer: Any = getattr(config, "outer", None)
    if outer and outer.every:
        yield (
            "run.elastic: true changes the number of islands, and so with outer.every ="
            f" {outer.every} what is learned; use run.elastic = false"
        )


def _check_least(config: Config, world_size: int) -> None:
    """Raise ConfigError if run.min_ranks ranks have no legal mesh."""
    least, why = config.run.min_ranks, ""
    for ranks in range(least, world_size):
        try:
            _choose(config, ranks)
            break
        except ConfigError as error:
            why = why or _reason(error.problems)
    else:
        ranks = world_size  # a mesh of these was chosen
    if why:
        raise ConfigError(f"run.min_ranks: {least} ranks have no legal mesh ({why}); nearest: {ranks}")


def _choose(config: Config, world_size: int) -> tuple[Job, str]:
    try:
        job = rules.check(config, world_size)
        return job, f"run.elastic: {_named(job)}, as the config says"
    except ConfigError as error:
        first = error
    model = find_model(config.model.name).on_meta(config.model.config)
    unused, tried = "", 0
    for ranks in range(world_size, max(config.run.min_ranks, 1) - 1, -1):
        for parallels in _by_distance(config.parallel, ranks):
            legal = list[Job]()
            for parallel in parallels:
                try:
                    legal.append(_check(config, parallel, ranks, model))
                except ConfigError as error:
                    unused, tried = unused or _reason(error.problems), tried + 1
            if legal and (job := _quickest(legal)):
                return job, _line(job, len(legal), world_size, _reason(first.problems), unused)
            if legal:
                unused = unused or f"{_named(legal[0])} would not fit into the memory of its GPUs"
            if tried > _TRIED:
                raise first
    raise first


def _by_distance(wanted: Parallel, ranks: int) -> Iterator[list[Parallel]]:
    """Yield the meshes of so many ranks, those as near to ``wanted`` as each other together."""
    every = [
        replace(
            wanted, **degrees, ep=ep, pp_layers=wanted.pp_layers if degrees["pp"] == wanted.pp else ()
        )
        for degrees in meshes(ranks)
        for ep in divisors(wanted.ep)
    ]

    def distance(parallel: Parallel) -> tuple[int, int, Fraction, bool]:
        pairs = [(getattr(wanted, axis), getattr(parallel, axis)) for axis in _CUTS]
        factors = [max(Fraction(a, b), Fraction(b, a)) for a, b in pairs if a not in (-1, b)]
        # More cuts are more messages.
        grown = sum(a < b for a, b in pairs if a != -1)
        # One axis of data parallel is kept, and the other takes what is left.
        kept = "dp_shard" if wanted.dp_replicate == -1 else "dp_replicate"
        moved = getattr(parallel, kept) != getattr(wanted, kept)
        return len(factors), grown, math.prod(factors, start=Fraction(1)), moved

    for _, equals in groupby(sorted(every, key=distance), distance):
        yield list(equals)


def _check(config: Config, parallel: Parallel, ranks: int, model: nn.Module) -> Job:
    """Return the job on a mesh, with the largest legal part of the config's micro_batch."""
    most, first = config.train.micro_batch, None
    for size in range(most, 0, -1):
        if most % size:
            continue
        train = replace(config.train, micro_batch=size)
        try:
            return rules.check(replace(config, parallel=parallel, train=train), ranks, model=model)
        except ConfigError as error:
            first = first or error
    assert first
    raise first


def _quickest(jobs: Sequence[Job]) -> Job | None:
    """Return the job with the shortest step by the planner's quick estimate.

    On GPUs it must fit into their memory by that estimate; None if no job does.
    """
    on_cuda, world_size = jobs[0].on_cuda, jobs[0].world_size
    if len(jobs) == 1 and not on_cuda:
        return jobs[0]
    # The planner takes long to import, and a run whose degrees fit needs nothing of it.
    from compose.planner.candidates import Space, candidate_of, fits, order, shape_for

    space = Space(jobs[0].config, _cluster(on_cuda), world_size)
    shape = shape_for(space)
    ranked = [(candidate_of(space, shape, job.config), job) for job in jobs]
    best, job = min(ranked, key=lambda pair: order(space, pair[0]))
    return job if not on_cuda or fits(space, best) else None


def _cluster(on_cuda: bool) -> "Cluster":
    """Return the cluster of this machine's devices, as far as one is known."""
    from compose.planner.cluster import cluster_names, load_cluster

    result = load_cluster("h100_sxm" if on_cuda else "cpu")
    if on_cuda:
        mine = torch.cuda.get_device_properties(0)
        named = [c for c in map(load_cluster, cluster_names()) if c.device.name == mine.name]
        result = named[0] if named else result
        result = replace(result, device=replace(result.device, memory=mine.total_memory))
    return replace(result, node=int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or result.node)


def _line(job: Job, equals: int, world_size: int, why: str, unused: str) -> str:
    chosen = f"the quickest of {equals} meshes as near, by the planner" if equals > 1 else "the nearest"
    line = f"run.elastic: {_named(job)}, {chosen} ({why})"
    if job.world_size == world_size:
        return line
    waiting = [str(rank) for rank in range(job.world_size, world_size)]
    ranks = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {', '.join(waiting)} wait"
    return f"{line}; {ranks}, since no mesh of {world_size} ranks is legal ({unused})"


def _named(job: Job) -> str:
    degrees = [(axis, getattr(job.degrees, axis)) for axis in (*AXES, "ep")]
    shown = ", ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "no axis"
    return f"{job.world_size} ranks: {shown}, micro_batch {job.config.train.micro_batch}"


def _reason(problems: Sequence[str]) -> str:
    return problems[0].split("; nearest:")[0].split("; use ")[0]
