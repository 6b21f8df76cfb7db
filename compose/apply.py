"""Where a Plan meets a model and a mesh: the one place, in one fixed order."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from compose.applied import Applied, remember
from compose.context_parallel import Balance, ContextParallel
from compose.data_parallel import apply_data_parallel
from compose.errors import ConfigError
from compose.plan import Plan, Resolved, resolve
from compose.tensor_parallel import Replicated, apply_tensor_parallel


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    zero: int = 3,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    activation_checkpoint: str = "none",
) -> nn.Module:
    """Cut ``model`` over ``mesh`` in place, as ``plan`` says, and return it.

    The model may be on meta (then ``compose.init_weights`` fills it afterwards) or hold weights,
    which are first made those of rank 0, as DistributedDataParallel does. ``mesh`` is that of
    ``compose.init_mesh``. Make the optimizer afterwards: the parameters are new objects.

    Raises ConfigError where the plan does not fit the model.
    """
    if zero not in (0, 1, 2, 3):
        raise ConfigError(f"zero: {zero} is not a ZeRO stage (0, 1, 2, 3)")
    if activation_checkpoint not in ("none", "full"):
        raise ConfigError(f"activation_checkpoint: {activation_checkpoint!r} is neither none nor full")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}: master weights are float32; call"
                " model.float(), and give param_dtype for forward and backward"
            )
    resolved = resolve(plan, model)
    _broadcast(model)
    if mesh["tp"].size() > 1:
        _tensor(model, resolved, mesh["tp"])
    if mesh["cp"].size() > 1:
        _context(model, resolved, mesh["cp"])
    if activation_checkpoint == "full":
        _checkpoint(model, resolved)
    # A lone process in full precision has nothing to shard, reduce or cast.
    if mesh.size() > 1 or param_dtype != torch.float32:
        apply_data_parallel(
            model,
            resolved.shard,
            mesh,
            zero=zero,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
        )
    balances: list[Balance] = [
        style.balance for _, style in resolved.context if isinstance(style, ContextParallel)
    ]
    remember(model, Applied(zero, *balances[:1]))
    return model


def _broadcast(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=0)


def _tensor(model: nn.Module, resolved: Resolved, mesh: DeviceMesh) -> None:
    replicated = [(name, Replicated()) for name in resolved.replicate]
    apply_tensor_parallel(model, resolved.tensor + replicated, mesh)
    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if whole:
        raise ConfigError(
            *(f"plan.tensor: no style placed the parameter {name} on the tp axis" for name in whole)
        )


def _context(model: nn.Module, resolved: Resolved, mesh: DeviceMesh) -> None:
    if not resolved.context:
        raise ConfigError("plan.context: names no attention core, which parallel.cp needs")
    for name, style in resolved.context:
        parallelize_module(model.get_submodule(name), mesh, style)


def _checkpoint(model: nn.Module, resolved: Resolved) -> None:
    if not resolved.checkpoint:
        raise ConfigError("plan.checkpoint: names no unit, which activation checkpointing needs")
    for name in resolved.checkpoint:
        module = model.get_submodule(name)
        # Around forward only, so that hooks and names stay where they are.
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
