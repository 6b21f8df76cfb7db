"""A description of a run without running it: mesh, plan, placement of every parameter, bytes.

The plan is applied to the model on meta over a fake process group, whose collectives do nothing. So
one process shows what any number of ranks would hold.
"""

import copy
import math
import os
import re
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.apply import apply
from compose.config.addons import brought
from compose.config.job import Job
from compose.config.tables import Config
from compose.memory.float8 import select_layers
from compose.ops.tensors import local_tensor
from compose.optim.lr_schedule import short_of_warmup
from compose.optim.optimizers import OPTIMIZERS
from compose.optim.parameter_rules import parameter_rules
from compose.parallel.hpz import hpz_experts
from compose.parallel.mesh import AXES, init_mesh

_PURPOSES = ("weights", "gradients", "activations")


@dataclass(frozen=True)
class Placed:
    """One parameter as the first rank of its stage holds it; that rank has the largest shards."""

    name: str
    pp: int  # the stage's rank on the pp axis
    shape: tuple[int, ...]
    placements: dict[str, str]  # by axis; axes of size 1 are left out
    local_shape: tuple[int, ...]
    whole_bytes: int  # the part of this tp or ep rank, gathered over the data axes, in param_dtype
    local_bytes: int  # bytes of the master weight's shard, or of a frozen weight's
    trained: bool = True


def describe(job: Job) -> None:
    """Print the dry run of a checked job; if there are several ranks, only rank 0 prints."""
    if os.environ.get("RANK", "0") != "0":
        return
    pp = job.degrees.pp
    placed = [_stage(job, rank * job.world_size // pp) for rank in range(pp)]
    print(_mesh_line(job), "", "plan", str(job.plan), sep="\n")
    print("", *_table([p for stage in placed for p in stage], pp), sep="\n")
    print("", *_summary(placed, job), sep="\n")
    for _, lines in brought("held"):
        print(*lines(job, placed), sep="\n")
    if short := short_of_warmup(job.config.train.steps, job.config.optimizer):
        print("", short, sep="\n")
    if job.config.comm.codes:
        print("", *_messages(job), sep="\n")
    if job.islands > 1:
        for _, lines in brought("between_workers"):
            print("", *lines(job, job.config.outer, job.islands), sep="\n")


def _stage(job: Job, rank: int) -> list[Placed]:
    """Return the parameters that ``rank`` holds."""
    from compose.planner.fake_world import fake_group

    with fake_group(rank, job.world_size):
        mesh = init_mesh(job.degrees)
        model = copy.deepcopy(job.model)
        apply(model, job.resolved, mesh, job.options)
        return placements(model, mesh, job.config)


def placements(model: nn.Module, mesh: DeviceMesh, config: Config) -> list[Placed]:
    """Return every parameter of a model that was cut."""
    width = getattr(torch, config.precision.param).itemsize
    stage = mesh["pp"].get_local_rank()
    result = []
    for name, parameter in model.named_parameters():
        local: torch.Tensor = parameter
        by_axis: dict[str, str] = {}
        parts = 1
        if isinstance(parameter, DTensor):
            local = local_tensor(parameter)
            names = parameter.device_mesh.mesh_dim_names or ()
            sizes = parameter.device_mesh.shape
            for axis, size, placement in zip(names, sizes, parameter.placements, strict=True):
                if size > 1:
                    by_axis[axis] = "R" if placement.is_replicate() else f"S({placement.dim})"  # type: ignore[attr-defined]
                    # FSDP does not gather over these axes.
                    if axis in ("tp", "ep") and not placement.is_replicate():
                        parts *= size
        whole = parameter.numel() // parts * width
        held = local.numel() * parameter.itemsize
        shapes = tuple(parameter.shape), by_axis, tuple(local.shape)
        result.append(Placed(name, stage, *shapes, whole, held, parameter.requires_grad))
    return result


def _messages(job: Job) -> list[str]:
    """Return the bytes that the rank sends which sends most, of the first ranks of stages."""
    from compose.planner.trace import sent_bytes

    pp = job.degrees.pp
    ranks = [sent_bytes(job, rank * job.world_size // pp) for rank in range(pp)]
    most = max(ranks, key=lambda sent: sum(sent.values()))
    comm = job.config.comm
    coded = [f"{name} {getattr(comm, name)}" for name in _PURPOSES if getattr(comm, name) != "off"]
    lines = [f"bytes that a rank sends in a step ({', '.join(coded)}):"]
    for purpose in _PURPOSES:
        levels = {level: size for (what, level), size in most.items() if what == purpose}
        if plain := levels.pop("plain", 0):
            shown = ", ".join(f"{size:,} to {level} ranks" for level, size in sorted(levels.items()))
            share = sum(levels.values()) / plain
            lines.append(f"  {purpose:<20}{shown}; plain {plain:,} ({share:.3f})")
    return lines


def _mesh_line(job: Job) -> str:
    parallel = job.degrees
    degrees = ", ".join(f"{axis} {getattr(parallel, axis)}" for axis in AXES)
    experts = f" (ep {parallel.ep} over them)" if parallel.ep > 1 else ""
    lines = [f"mesh: {job.world_size} ranks: {degrees}{experts}; zero {parallel.zero}"]
    if job.islands > 1:
        how = f"exchange weights every {job.config.outer.every} steps; all below is of one"
        lines.insert(0, f"islands: {job.islands}, which {how}")
    if parallel.pp > 1:
        lines.append(
            f"pipeline: {parallel.pp_schedule}, layers of its stages {list(parallel.pp_layers)}"
        )
    return "\n".join(lines)


def _table(placed: list[Placed], pp: int) -> list[str]:
    """Return a line for each parameter; equal layers share one line with their number."""
    known = [*AXES, "dp_shard_cp", "dp_replicate_cp", "expert_replicate", "expert_shard", "ep"]
    axes = [axis for axis in known if any(axis in p.placements for p in placed)]
    groups: dict[tuple[object, ...], list[Placed]] = {}
    for p in placed:
        pattern = re.sub(r"\.\d+\.", ".*.", p.name)
        alike = (p.pp, pattern, p.shape, tuple(p.placements.items()), p.local_shape)
        groups.setdefault(alike, []).append(p)
    rows = [("parameter", *(["pp"] if pp > 1 else []), "shape", *axes, "local shape", "bytes")]
    for group in groups.values():
        p, several = group[0], len(group) > 1
        name = f"{p.name} ... {group[-1].name} ({len(group)})" if several else p.name
        placed_on = [p.placements.get(axis, "R") for axis in axes]
        size = f"{p.local_bytes:,}" + (f" x {len(group)}" if several else "")
        stage = [str(p.pp)] if pp > 1 else []
        rows.append((name, *stage, _shape(p.shape), *placed_on, _shape(p.local_shape), size))
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows
    ]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _summary(placed: list[list[Placed]], job: Job) -> list[str]:
    """Return the parameter count, the FLOPs, and the bytes on the rank that holds most."""
    config = job.config
    parameters = sum(p.numel() for p in job.model.parameters())
    adapters = sum(p.numel() for p in job.model.parameters() if p.requires_grad)
    rules = parameter_rules(job.model, job.plan, config.optimizer)
    state = getattr(torch, config.precision.optimizer_state).itemsize
    zero, reduce_size = config.parallel.zero, getattr(torch, config.precision.reduce).itemsize
    param_size = getattr(torch, config.precision.param).itemsize
    train, lora = config.train, config.model.lora
    # Nearly all weights are frozen where there are adapters.
    kept = config.precision.param if lora.rank else config.precision.master

    def states(name: str) -> int:
        return len(OPTIMIZERS[rules[name].optimizer].state)

    def sizes(stage: list[Placed]) -> list[tuple[str, int]]:
        trained = [p for p in stage if p.trained]
        local, whole = sum(p.local_bytes for p in trained), sum(p.whole_bytes for p in trained)
        # Before the reduction, ZeRO-1 holds whole gradients. After it, and in ZeRO-2, they are sharded.
        gradients = local if zero >= 2 else max(local, whole // param_size * reduce_size)
        return [
            (f"weights ({kept})", sum(p.local_bytes for p in stage)),
            ("gradients", gradients),
            (
                f"optimizer ({config.optimizer.name})",
                sum(math.prod(p.local_shape) * state * states(p.name) for p in trained),
            ),
            ("gathered in a step", _gathered(stage, config)),
        ]

    fullest = max(placed, key=lambda stage: sum(size for _, size in sizes(stage)))
    *rows, (_, whole) = sizes(fullest)
    rank = f"first of pp rank {fullest[0].pp}" if len(placed) > 1 else "first"
    tokens = train.global_batch * train.seq_len
    lines = [
        f"parameters: {parameters:,}" + (f", of which {adapters:,} are trained" if lora.rank else ""),
        f"FLOPs per token: {config.model.config.flops_per_token(train.seq_len):,.0f}"
        f" (forward and backward, seq_len {train.seq_len})",
        f"steps: {train.last_step:,} of {train.global_batch:,} samples, {tokens:,} tokens",
        f"bytes per rank (the {rank}, which holds most):",
        *(f"  {name:<20}{_bytes(size)}" for name, size in rows),
        f"  {'state in all':<20}{_bytes(sum(size for _, size in rows))}",
    ]
    if config.precision.float8 != "off":
        recipe, tp = config.precision.float8, config.parallel.tp
        lines.insert(2, str(select_layers(job.model, job.resolved, tp, recipe, job.device_type)))
    if whole:
        lines.append(f"  {'gathered in a step':<20}{_bytes(whole)} ({config.precision.param})")
    return lines


def _gathered(stage: list[Placed], config: Config) -> int:
    """Return the bytes of gathered parameters kept for a step; zero 3 keeps those of neighbours."""
    parallel = config.parallel
    if parallel.zero < 3:
        return sum(p.whole_bytes for p in stage) if any(p.placements for p in stage) else 0
    if parallel.zero3_reshard in (0, parallel.dp_shard * parallel.cp):
        return 0
    experts = hpz_experts(parallel.zero3_reshard, parallel.tp, parallel.ep)
    result = 0
    for p in stage:
        near = experts if {"ep", "expert_shard"} & p.placements.keys() else parallel.zero3_reshard
        result += p.whole_bytes // near if near else 0
    return result


def _bytes(size: int) -> str:
    return f"{size:>18,}  {size / 2**30:9.3f} GiB"
