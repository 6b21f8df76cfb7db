"""Fewer layers in place of many: equal layers in a row cost equally much, so few of them are traced.

A run is a row of equal layers in one stage. What a stage costs is linear in the length of each run:
bytes and seconds grow by the same amount with every layer that is added. So a run is traced with three
layers, and once more with four. Three are needed since the first and the last layer of a run may do
something else: the next unit's gather begins in the one before it.
"""

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from torch import nn

from compose.config.job import Job
from compose.pipeline.schedules import Action, build_table
from compose.pipeline.split import kind_of, layer_names
from compose.plan import Pipeline

FEWEST = 3


def busiest_rank(job: Job, pp_rank: int = 0) -> int:
    """Return the rank of the job, at a place of the pipeline, that computes most.

    Without balance the last rank of cp attends to the whole sequence, and the others wait for it.
    """
    degrees = job.degrees
    last = (degrees.cp - 1) * degrees.tp if degrees.cp_balance == "none" else 0
    return pp_rank * job.world_size // degrees.pp + last


@dataclass(frozen=True)
class LayerRuns:
    """The lengths of the runs of every stage."""

    lengths: tuple[tuple[int, ...], ...]
    """The length of each run, by stage."""

    def fewest(self, place: int = -1) -> "LayerRuns":
        """Return the runs cut to FEWEST layers, and to one more in the run ``place`` of each stage."""
        return LayerRuns(
            tuple(
                tuple(min(n, FEWEST + (i == place)) for i, n in enumerate(stage))
                for stage in self.lengths
            )
        )

    def places(self) -> list[int]:
        """Return the places of runs that are longer than FEWEST in some stage."""
        return sorted({i for stage in self.lengths for i, n in enumerate(stage) if n > FEWEST})

    def more(self, stage: int, place: int) -> int:
        """Return how many layers a run has beyond FEWEST."""
        lengths = self.lengths[stage]
        return max(0, lengths[place] - FEWEST) if place < len(lengths) else 0

    def layers(self) -> tuple[int, ...]:
        """Return the number of layers of each stage."""
        return tuple(map(sum, self.lengths))


def runs_of(job: Job) -> LayerRuns | None:
    """Return the runs of a job's stages; None if its layers are not known or may not be left out.

    Which layers are recomputed is chosen from the whole model, so it must be the same for all of them.
    Layers of a segment that is recomputed together cost differently, by their place in it.
    """
    pipeline, recompute = job.resolved.pipeline, job.config.activation_checkpoint
    if pipeline is None or recompute.mode in ("every_k", "budget") or recompute.segment > 1:
        return None
    without_float8 = set(job.resolved.float8_except)
    kinds = [
        (kind_of(layer), any(f"{pipeline.layers}.{name}" == other for other in without_float8))
        for name, layer in job.model.get_submodule(pipeline.layers).named_children()
    ]
    stages = job.degrees.pp_layers if job.degrees.pp > 1 else (len(kinds),)
    result, start = [], 0
    for count in stages:
        within = kinds[start : start + count]
        result.append(tuple(len(list(run)) for _, run in groupby(within)))
        start += count
    return LayerRuns(tuple(result))


def few_micro_batches(job: Job) -> list[int]:
    """Return which micro-batches of a step are enough to know what all of them cost.

    They are the first, the last, and one between. With a pipeline there is one between for each kind of
    action that a stage runs between: a table may split the backward of some micro-batches only.
    """
    count, parallel = job.micro_batches, job.degrees
    if count <= 3:
        return list(range(count))
    if parallel.pp == 1:
        return [0, 1, count - 1]
    return list(_of_table(parallel.pp_schedule, parallel.pp, parallel.pp_virtual_stages, count))


@cache
def _of_table(schedule: str, pp: int, virtual_stages: int, count: int) -> tuple[int, ...]:
    chosen: dict[tuple[int, str], int] = {}
    for row in build_table(schedule, pp, virtual_stages, count):
        for action in row:
            if 0 < action.micro_batch < count - 1:
                chosen.setdefault((action.stage, action.kind), action.micro_batch)
    return tuple(sorted({0, *chosen.values(), count - 1}))


def few_rows(job: Job) -> list[list[Action]]:
    """Return a pipeline's table with those micro-batches alone, which have new numbers."""
    parallel, number = job.degrees, {which: i for i, which in enumerate(few_micro_batches(job))}
    table = build_table(
        parallel.pp_schedule, parallel.pp, parallel.pp_virtual_stages, job.micro_batches
    )
    return [
        [Action(a.stage, a.kind, number[a.micro_batch]) for a in row if a.micro_batch in number]
        for row in table
    ]


def reduced(job: Job, runs: LayerRuns, kept: LayerRuns) -> nn.Module:
    """Return a copy of the job's model on meta, with fewer layers."""
    pipeline: Pipeline | None = job.resolved.pipeline
    assert pipeline is not None
    names, gone, start = layer_names(job.model, pipeline), list[str](), 0
    for lengths, counts in zip(runs.lengths, kept.lengths, strict=True):
        for length, count in zip(lengths, counts, strict=True):
            gone += names[start + count : start + length]
            start += length
    return without_layers(job.model, pipeline.layers, gone)


def without_layers(model: nn.Module, layers: str, names: Container[str]) -> nn.Module:
    """Return a copy of a model without some of the modules in ``layers``, which are not copied."""
    container = model.get_submodule(layers)
    every = container._modules
    container._modules = {name: layer for name, layer in every.items() if name not in names}
    try:
        return copy.deepcopy(model)
    finally:
        container._modules = every


def places(job: Job, runs: LayerRuns, kept: LayerRuns) -> dict[str, list[str]]:
    """Return the places of each layer of a reduced model, from the start and the end of its run.

    The two layers at each end of a run have a place; one may have two.
    """
    pipeline = job.resolved.pipeline
    assert pipeline is not None
    names, result, start = layer_names(job.model, pipeline), {}, 0
    for stage, (lengths, counts) in enumerate(zip(runs.lengths, kept.lengths, strict=True)):
        for run, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            for i, name in enumerate(names[start : start + count]):
                ends = [f"start {i}"] * (i < 2) + [f"end {count - 1 - i}"] * (count - i <= 2)
                result[f"{pipeline.layers}.{name}"] = [f"{stage}.{run} {end}" for end in ends]
            start += length
    return result


def linear(
    base: Mapping[str, float], longer: Sequence[tuple[float, Mapping[str, float]]]
) -> dict[str, float]:
    """Return the figures of the whole runs."""
    result = dict(base)
    for more, figures in longer:
        for key in {**base, **figures}:
            step = figures.get(key, 0.0) - base.get(key, 0.0)
            result[key] = result.get(key, 0.0) + more * step
    return result
