"""The bytes of weights, gradients and optimizer that a rank holds, by how parameters are placed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.config.job import Job
from compose.config.tables import Config
from compose.ops.tensors import local_tensor
from compose.optim.optimizers import OPTIMIZERS
from compose.optim.parameter_rules import parameter_rules
from compose.parallel.hpz import hpz_experts
from compose.pipeline.schedules import ASYNCHRONOUS
from compose.pipeline.timeline import versions


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
        whole = parameter.numel() // parts * (width if parameter.is_floating_point() else 1)
        held = local.numel() * parameter.itemsize
        shapes = tuple(parameter.shape), by_axis, tuple(local.shape)
        result.append(Placed(name, stage, *shapes, whole, held, parameter.requires_grad))
    return result


def state_bytes(placed: Sequence[Placed], job: Job) -> dict[str, int]:
    """Return the bytes that the rank with these parameters holds, by what they are.

    The last are of weights that stay gathered during a step.
    """
    config = job.config
    rules = parameter_rules(job.model, job.plan, config.optimizer)
    state = getattr(torch, config.precision.optimizer_state).itemsize
    zero, reduce_size = config.parallel.zero, getattr(torch, config.precision.reduce).itemsize
    param_size = getattr(torch, config.precision.param).itemsize
    # Nearly all weights are frozen where there are adapters.
    lora = config.model.lora
    kept = config.precision.param if lora.rank else config.precision.master
    kept = kept if lora.base == "full" else lora.base
    trained = [p for p in placed if p.trained]
    local, whole = sum(p.local_bytes for p in trained), sum(p.whole_bytes for p in trained)

    def states(name: str) -> int:
        return len(OPTIMIZERS[rules[name].optimizer].state)

    held, schedule = {}, config.parallel.pp_schedule
    if config.parallel.pp > 1 and schedule in ASYNCHRONOUS and placed:
        more = versions(schedule, config.parallel.pp)[placed[0].pp] - 1
        held = {"older versions": more * local}
    return {
        f"weights ({kept})": sum(p.local_bytes for p in placed),
        # Before the reduction, ZeRO-1 holds whole gradients. After it, and in ZeRO-2, they are sharded.
        "gradients": local if zero >= 2 else max(local, whole // param_size * reduce_size),
        f"optimizer ({config.optimizer.name})": sum(
            math.prod(p.local_shape) * state * states(p.name) for p in trained
        ),
        **held,
        "gathered in a step": _gathered(placed, config),
    }


def copied_bytes(placed: Sequence[Placed], job: Job) -> int:
    """Return the bytes of what a checkpoint has of the rank with these parameters."""
    optimizer = state_bytes(placed, job)[f"optimizer ({job.config.optimizer.name})"]
    adapters = job.config.model.lora.rank > 0
    return sum(p.local_bytes for p in placed if p.trained or not adapters) + optimizer


def _gathered(stage: Sequence[Placed], config: Config) -> int:
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
