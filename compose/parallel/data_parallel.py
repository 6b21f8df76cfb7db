"""Data parallel: ZeRO stages 0 to 3 (Rajbhandari et al. 2020, arXiv:1910.02054) and HSDP, by FSDP2.

One mechanism serves all stages. What differs is when parameters are gathered and freed and when
gradients are reduced:

    zero  gradients reduced          parameters whole             sharded over dp_shard
    0     once a step (all-reduce)   always                       nothing
    1     once a step                from first forward to last   optimizer state
    2     every micro-batch          backward of the step         ... and gradients
    3     every micro-batch          one unit at a time           ... and parameters

Over dp_replicate the (sharded) gradients are all-reduced once a step in every stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from compose.base.local_tensor import local_tensor
from compose.base.torch_versions import finish_fsdp_backward
from compose.errors import ConfigError
from compose.parallel.mesh import axis_size
from compose.parallel.secondary_shards import NearGather, NearGroups


@dataclass(frozen=True)
class Sharding:
    """What data parallel shards, and how it moves it."""

    zero: int
    """The ZeRO stage. 0 asks for a mesh whose dp_shard is 1."""
    param_dtype: torch.dtype = torch.float32
    """Type in which parameters are gathered, and of forward and backward."""
    reduce_dtype: torch.dtype = torch.float32
    """Type in which gradients are reduced."""
    offload: bool = False
    """Parameters and gradients are in host memory, pinned where there is a GPU. A unit's shards are
    copied to the device when it is gathered. Their memory has to be made in host memory."""
    prefetch: int = 0
    """Units whose gather begins before the one ahead of them runs, in forward and in backward. 0: what
    FSDP does by itself, the next one in backward."""
    near: NearGroups | None = None
    """Neighbours to gather from again in stage 3, after a step's first gather."""
    expert_mesh: DeviceMesh | None = None
    """Of ``expert_mesh`` in expert_parallel.py: where experts are sharded."""


def check_offload(zero: int, offload: str) -> None:
    """Raise ConfigError unless ZeRO's stage ``zero`` leaves parameters free to be in host memory."""
    if offload != "none" and zero != 3:
        raise ConfigError(
            f"parallel.zero: {zero} keeps whole parameters on the device, and parallel.offload ="
            f' "{offload}" none; use parallel.zero = 3, or parallel.offload = "none"'
        )


def apply_data_parallel(
    model: nn.Module,
    units: Sequence[Sequence[str]],
    mesh: DeviceMesh,
    how: Sharding,
    experts: Sequence[str] = (),
    ends: bool = True,
) -> list[NearGather]:
    """``fully_shard`` each unit, then the model, over the data axes of ``mesh``.

    What dp_shard and cp hold between them is sharded over both, and replicated over dp_replicate.
    Gradients are summed over ranks and not averaged: the loss is already divided by the number of
    target tokens in the global batch.

    Args:
        model: A stage, or the whole model.
        units: Names of the modules of each unit, in order of use.
        mesh: Of ``compose.init_mesh``.
        how: What is sharded, and in which types.
        experts: Modules that are sharded over ``how.expert_mesh``, each a unit within another.
        ends: Whether the loss follows the last unit, as it does not in a pipeline's other stages.

    Returns:
        The gathers that ``how.near`` asks for.
    """
    zero, near = how.zero, how.near
    data_mesh = _data_mesh(mesh)
    where = OffloadPolicy()
    if how.offload:
        where = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")

    def shard(
        modules: nn.Module | list[nn.Module], reshard: bool, mesh: DeviceMesh = data_mesh, **more: Any
    ) -> None:
        # The model's own inputs are cast; between its parts, what is float32 is so on purpose.
        cast_inputs = modules is model
        policy = MixedPrecisionPolicy(
            how.param_dtype, how.reduce_dtype, cast_forward_inputs=cast_inputs
        )
        more |= {"mp_policy": policy, "offload_policy": where}
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, **more)  # type: ignore[arg-type]

    gathers: list[NearGather] = []

    def gather_near(module: nn.Module, group: dist.ProcessGroup | None) -> None:
        if group is not None and isinstance(module, FSDPModule):
            gathers.append(NearGather(group))
            module.set_custom_all_gather(cast(Any, gathers[-1]))

    expert_mesh = how.expert_mesh
    if expert_mesh is not None:
        over = expert_mesh["expert_shard"]
        if axis_size(expert_mesh, "expert_replicate") > 1:
            over = expert_mesh["expert_replicate", "expert_shard"]
        place = partial(_even_dim, axis_size(expert_mesh, "expert_shard"))
        free = zero == 3 and not (near and near.experts_stay)
        for name in experts:
            module = model.get_submodule(name)
            shard(module, free, over, shard_placement_fn=place)
            gather_near(module, near and near.experts)

    for i, unit in enumerate(units):
        modules = [model.get_submodule(name) for name in unit]
        # The last unit's backward follows its forward at once.
        keep = ends and i == len(units) - 1
        shard(modules if len(modules) > 1 else modules[0], zero == 3 and not keep)
        if not keep:
            gather_near(modules[0], near and near.shards)
    shard(model, False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum.
            module.set_force_sum_reduction_for_comms(True)
    if how.prefetch:
        _prefetch([model.get_submodule(unit[0]) for unit in units], how.prefetch)
    return gathers


def _prefetch(units: Sequence[nn.Module], ahead: int) -> None:
    """Have each of ``units``, in order of use, begin the gathers of the next ``ahead`` before it runs.

    A unit within another, as experts, is gathered with it.
    """
    inner: list[list[FSDPModule]] = [
        [m for m in unit.modules() if isinstance(m, FSDPModule)] for unit in units
    ]
    for i, (own, *within) in enumerate(inner):
        before, after = inner[max(0, i - ahead) : i], inner[i + 1 : i + 1 + ahead]
        own.set_modules_to_forward_prefetch([*within, *(m for unit in after for m in unit)])
        # Itself, as an empty list would mean FSDP's choice: in a pipeline now and then the wrong unit.
        back = [*within, *(m for unit in reversed(before) for m in unit)]
        own.set_modules_to_backward_prefetch(back if back else [own])
        for module in within:
            module.set_modules_to_backward_prefetch([module])


def _even_dim(ranks: int, parameter: nn.Parameter) -> Shard:
    """The first dim that ``ranks`` share evenly, as few experts may be left; FSDP pads only dim 0."""
    return Shard(
        next((dim for dim, size in enumerate(local_tensor(parameter).shape) if size % ranks == 0), 0)
    )


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh for ``fully_shard``: (dp_shard x cp), or (dp_replicate, dp_shard x cp) for HSDP."""
    if axis_size(mesh, "cp") == 1:
        shard = mesh["dp_shard"]
    elif axis_size(mesh, "dp_shard") == 1:
        shard = mesh["cp"]
    else:
        shard = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    if axis_size(mesh, "dp_replicate") == 1:
        return shard
    # No public call joins a flattened axis to another; this one is in torch 2.11 to 2.15.
    return DeviceMesh._concatenate([mesh["dp_replicate"], shard])


def gather(model: nn.Module) -> None:
    """Have all of the model's parameters whole, and gradients stay where they are, for what runs
    outside of forward and ``backward()``; :func:`finish_backward` ends this."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def finish_backward(model: nn.Module, zero: int, last: bool) -> None:
    """After gradients were found without ``backward()``: do what would have followed from it.

    After a forward that no backward follows too: what it gathered is freed, and its order, by which
    the next backward would prefetch, is forgotten.
    """
    if isinstance(model, FSDPModule):
        prepare_micro_batch(model, zero, last)
        finish_fsdp_backward(model)


def prepare_micro_batch(model: nn.Module, zero: int, last: bool) -> None:
    """Before the forward of one micro-batch: communicate in its backward what the stage needs.

    ``last``: it is the last micro-batch of the optimizer step. Does nothing without data parallel.
    """
    if not isinstance(model, FSDPModule):
        return
    # set_is_last_backward(last), which is for pipelines, would keep the order of prefetching over
    # micro-batches, and the last one would gather a unit again that it has just freed.
    model.set_requires_gradient_sync(last or zero >= 2)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or zero == 3)
