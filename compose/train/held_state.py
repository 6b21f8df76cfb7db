"""The state that a rank holds: its bytes, by how parameters are placed, and whether its copies agree.

Memory and links flip bits without a sign, so copies are compared. Weights, gradients and optimizer
state have copies on the ranks of every axis over which they are not sharded, and a weight that several
stages of a pipeline share has one on each.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.composition import Composition
from compose.config.job import Job
from compose.config.tables import Config
from compose.ops.tensors import checksums, gathered_objects, local_tensor, persistent_buffers
from compose.optim.optimizers import OPTIMIZERS
from compose.optim.parameter_rules import parameter_rules
from compose.parallel.hpz import hpz_experts
from compose.parallel.mesh import AXES
from compose.pipeline.schedules import ASYNCHRONOUS
from compose.pipeline.timeline import versions


@dataclass(frozen=True)
class PlacedParameter:
    """One parameter as the first rank of its stage holds it; that rank has the largest shards."""

    name: str
    pp: int  # the stage's rank on the pp axis
    shape: tuple[int, ...]
    placements: dict[str, str]  # by axis; axes of size 1 are left out
    local_shape: tuple[int, ...]
    whole_bytes: int  # the part of this tp or ep rank, gathered over the data axes, in param_dtype
    local_bytes: int  # bytes of the master weight's shard, or of a frozen weight's
    trained: bool = True


def placements(model: nn.Module, mesh: DeviceMesh, config: Config) -> list[PlacedParameter]:
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
        result.append(PlacedParameter(name, stage, *shapes, whole, held, parameter.requires_grad))
    return result


def state_bytes(placed: Sequence[PlacedParameter], job: Job) -> dict[str, int]:
    """Return the bytes that the rank with these parameters holds, by what they are.

    The last entry is of weights that stay gathered during a step.
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
    trained, once = [p for p in placed if p.trained], zero >= 2 or job.micro_batches == 1
    local, whole = sum(p.local_bytes for p in trained), sum(p.whole_bytes for p in trained)

    def states(name: str) -> int:
        return len(OPTIMIZERS[rules[name].optimizer].state)

    held, schedule = {}, config.parallel.pp_schedule
    if config.parallel.pp > 1 and schedule in ASYNCHRONOUS and placed:
        more = versions(schedule, config.parallel.pp)[placed[0].pp] - 1
        held = {"older versions": more * local}
    return {
        f"weights ({kept})": sum(p.local_bytes for p in placed),
        # ZeRO-1 holds whole gradients until the last micro-batch, whose backward reduces them unit by
        # unit. In ZeRO-2 each does.
        "gradients": local if once else max(local, whole // param_size * reduce_size),
        f"optimizer ({config.optimizer.name})": sum(
            math.prod(p.local_shape) * state * states(p.name) for p in trained
        ),
        **held,
        "gathered in a step": _gathered(placed, config),
    }


def copied_bytes(placed: Sequence[PlacedParameter], job: Job) -> int:
    """Return the bytes of what a checkpoint has of the rank with these parameters."""
    optimizer = state_bytes(placed, job)[f"optimizer ({job.config.optimizer.name})"]
    adapters = job.config.model.lora.rank > 0
    return sum(p.local_bytes for p in placed if p.trained or not adapters) + optimizer


def _gathered(stage: Sequence[PlacedParameter], config: Config) -> int:
    """Return the bytes of gathered parameters kept for a step; zero 3 keeps those of neighbours."""
    parallel, precision = config.parallel, config.precision
    if parallel.zero < 3:
        # Where nothing is sharded, copies in another type than the master weights stay all the same.
        cast = not precision.param == precision.reduce == precision.master
        sharded = any(p.placements.keys() - {"tp", "ep"} for p in stage)
        return sum(p.whole_bytes for p in stage) if sharded or cast else 0
    if parallel.zero3_reshard in (0, parallel.dp_shard * parallel.cp):
        return 0
    experts = hpz_experts(parallel.zero3_reshard, parallel.tp, parallel.ep)
    result = 0
    for p in stage:
        near = experts if {"ep", "expert_shard"} & p.placements.keys() else parallel.zero3_reshard
        result += p.whole_bytes // near if near else 0
    return result


def replica_mismatches(composition: Composition, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return a line for each set of ranks whose copies differ from those of most ranks; a collective.

    Call it after gradients are complete and before the optimizer's step.
    """
    copies: dict[tuple[DeviceMesh, int], list[tuple[str, Tensor]]] = {}
    mesh, pipeline = composition.mesh, composition.pipeline
    ties = {tied.name for tied in pipeline.ties} if pipeline else set()
    of_stages: list[tuple[str, Tensor]] = []
    named = list(composition.named_parameters())
    state = weights_and_state(named, optimizer)
    for name, whole, tensor in [*gradients_of(named), *state, *buffers_of(composition.model)]:
        local = (name, local_tensor(tensor))
        if whole in ties:
            of_stages.append(local)
        names: tuple[str, ...] = ()
        # It has a copy along each axis of a stage that its own mesh does not have, by itself or joined.
        where, axes = mesh, [axis for axis in AXES if axis != "pp"]
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names or ()
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate():
                    copies.setdefault((tensor.device_mesh, axis), []).append(local)
            if {"expert_shard", "ep"} & set(names):
                where, axes = tensor.device_mesh._get_root_mesh(), ["expert_replicate"]
        for axis in axes:
            if not any(axis in name for name in names):
                dim = (where.mesh_dim_names or ()).index(axis)
                copies.setdefault((where, dim), []).append(local)
    if ties:
        copies[mesh, AXES.index("pp")] = of_stages
    results: list[str] = []
    for (where, axis), tensors in copies.items():
        if where.size(axis) > 1:
            results += _unlike(tensors, where.get_group(axis))
    return list(dict.fromkeys(line for lines in gathered_objects(results) for line in lines))


Named = tuple[str, str, Tensor]  # a name in a message, that in the whole model, the tensor


def gradients_of(named: Iterable[tuple[str, Tensor]]) -> Iterator[Named]:
    """Yield the gradients of parameters by name."""
    for name, parameter in named:
        if parameter.grad is not None:
            yield f"gradient of {name}", name, parameter.grad


def weights_and_state(
    named: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None, steps: bool = False
) -> Iterator[Named]:
    """Yield parameters by name and what an optimizer keeps of each; its ``steps`` too, if wanted."""
    for name, parameter in named:
        yield f"weight {name}", name, parameter
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            if isinstance(value, Tensor) and (steps or key != "step"):  # that may be on the host
                yield f"{key} of {name}", name, value


def buffers_of(model: nn.Module) -> Iterator[Named]:
    """Yield the buffers that a checkpoint has."""
    for name, buffer in persistent_buffers(model).items():
        yield f"buffer {name}", name, buffer


def _unlike(tensors: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> list[str]:
    """Return the lines of one group, whose ranks each hold copies of the tensors, or none."""
    values = checksums([tensor for _, tensor in tensors]).tolist() if tensors else []
    mine = [(name, value) for (name, _), value in zip(tensors, values, strict=True)]
    everyone = gathered_objects(mine, group)
    copies: dict[str, list[tuple[int, int]]] = {}
    for rank, held in zip(dist.get_process_group_ranks(group), everyone, strict=True):
        for name, value in held:
            copies.setdefault(name, []).append((rank, value))
    guilty: dict[tuple[int, ...], list[str]] = {}
    for name, held in copies.items():
        counts = Counter(value for _, value in held)
        if len(counts) > 1:
            (most, times), (_, second) = counts.most_common(2)
            usual = most if times > second else None
            ranks = tuple(dict.fromkeys(rank for rank, value in held if value != usual))
            guilty.setdefault(ranks, []).append(name)
    lines = []
    for ranks, names in guilty.items():
        several = f"ranks {', '.join(map(str, ranks))} differ"
        who = f"rank {ranks[0]} differs" if len(ranks) == 1 else several
        lines.append(f"{who} in {first_of(names)}")
    return lines


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and how many others there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
