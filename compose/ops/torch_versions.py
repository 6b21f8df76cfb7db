"""The differences between the versions of PyTorch that pyproject.toml allows, 2.11 to 2.15.

Each name says which versions it serves. It is removed when the oldest of these is no longer allowed.
The private names of PyTorch that all versions have are listed in tests/ops/test_torch_versions.py.
"""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import flop_registry, register_flop_formula

from compose.errors import ConfigError

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The all-gather of torch.distributed, used by FSDP too. 2.13 renamed and deprecated the old name."""

REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""The reduce-scatter of torch.distributed. 2.13 renamed it and deprecates the old name."""

functional_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
"""The all-gather that returns its result. 2.13 renamed it too."""

functional_reduce_scatter = (
    getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
)
"""The reduce-scatter that returns its result. 2.13 renamed it too."""


def _grouped_flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    """Return the FLOPs of a grouped product: a row (a column if ``b`` is 2-D) meets one matrix."""
    return 2 * (a[-2:] if len(b) < len(a) else a).numel() * b[-1]


# Up to 2.13 torch.utils.flop_counter does not know the operator.
if torch.ops.aten._grouped_mm not in flop_registry:
    register_flop_formula(torch.ops.aten._grouped_mm)(_grouped_flops)


def splits_functions() -> bool:
    """Return whether a pipeline can run the backward of a ``torch.autograd.Function`` in two parts.

    Before 2.13 the part that computes the gradients of weights fails for such a function
    (torch/distributed/pipelining/_backward.py, ``stage_backward_input``).
    """
    return TorchVersion(torch.__version__) >= "2.13"


def begin_fsdp_backward_at(tensor: Tensor, module: nn.Module, output: Any) -> None:
    """Let FSDP see where a backward of the root ``module`` begins: at ``tensor``, made of ``output``.

    It sees it by tensors of the output, and finds none in objects of which PyTorch is told nothing.
    """
    if isinstance(module, FSDPModule) and tensor.requires_grad and not isinstance(output, Tensor):
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        tensor.register_hook(state._pre_backward)


def finish_fsdp_backward(module: FSDPModule) -> None:
    """Do for the root ``module`` what FSDP does after a ``backward()``, if none was called.

    No version has a public call that does this for each micro-batch. (2.15 has ``finalize_backward``,
    but it refuses gradients that are reduced over a part of the ranks.) Since 2.15 FSDP reads a flag
    that is set when backward begins. Without a backward the flag is missing, so it is set here.
    """
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False
    # In a backward in two parts a hook may put some of a unit's gradients aside, in the type of sums.
    # FSDP sums gradients of one type alone.
    for group in _fsdp_groups(cast(nn.Module, module)):
        if any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
    state._root_post_backward_final_callback()


def _fsdp_groups(model: nn.Module) -> list[Any]:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states: list[Any] = [fully_shard.state(unit) for unit in units]  # type: ignore[attr-defined]
    return [group for state in states if (group := state._fsdp_param_group)]


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return FSDP's records of the parameters that it cuts, which no version shows."""
    return [p for group in _fsdp_groups(model) for p in group.fsdp_params]


def before_fsdp_sends(model: nn.Module, call: Callable[[dict[str, bool]], None]) -> None:
    """Call ``call`` before a unit sends gradients, with whether each of its parameters has one.

    Before a unit gathers, refuse tensors in place of its parameters, which FSDP would put aside.
    """
    names = {p: name for name, p in model.named_parameters()}
    for group in _fsdp_groups(model):
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        named = {names[p.sharded_param]: p for p in trained}

        def post_backward(*unused: Any, group: Any = group, named: dict[str, Any] = named) -> None:
            if group.reduce_grads:
                gradients = {
                    name: p.unsharded_accumulated_grad is not None
                    or getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None
                    for name, p in named.items()
                }
                call(gradients)
            type(group).post_backward(group, *unused)

        def pre_forward(*given: Any, group: Any = group) -> Any:
            for p in group.fsdp_params if not group.is_unsharded else ():
                held = p._module_info.module._parameters.get(p._module_info.param_name)
                if held is not p.sharded_param:
                    raise ConfigError(
                        "model: forward runs with another tensor in place of"
                        f" {names.get(p.sharded_param)}, as torch.func.functional_call puts it there,"
                        " and FSDP would take its own; do so inside of a unit of plan.shard, or use"
                        " parallel.zero = 0"
                    )
            enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            # Weights gathered under torch.inference_mode could not be used in training afterwards.
            with torch.inference_mode(False), torch.set_grad_enabled(enabled):
                return type(group).pre_forward(group, *given)

        group.post_backward, group.pre_forward = post_backward, pre_forward


class StageOverrides:
    """Methods that replace those of PyTorch's PipelineStage; a base class ahead of it.

    No version has all of these methods, and no version calls one that it does not have.
    """

    group_rank: int

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leave out the rank itself, to which gloo cannot connect.

        2.11 to 2.14 have this method; only 2.11 calls it.
        """
        greetings = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [op for op in greetings if op.group_peer != self.group_rank]

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Do nothing.

        2.11 would compare the last stage's output with a shape that it was never told.
        """

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep gradients, which are sums over steps. Since 2.12 PyTorch would drop them here."""


def bypass_saved_tensors_hooks(mode: Any) -> None:
    """Let ``mode`` of selective checkpointing keep tensors where they are, whatever hooks do.

    This was the behaviour before 2.14. 2.14 and 2.15 warn unless they are told. A later version will
    give the tensors to the hooks. The argument of ``checkpoint`` with this name reaches only PyTorch's
    modes.
    """
    mode.respect_saved_tensors_hooks = False


async_tp_groups: set[str] = set()
"""The groups of :func:`enable_async_tp`, by name."""


def enable_async_tp(group: str) -> None:
    """Have Inductor run products in pieces while their messages travel in the group of this name.

    The setting is private in 2.11 to 2.15. The messages take symmetric memory. Before 2.15 Inductor
    uses it only after a call that is deprecated.
    """
    from torch._inductor import config

    config._micro_pipeline_tp = True
    async_tp_groups.add(group)
    if TorchVersion(torch.__version__) < "2.15":
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(cast(Any, group))


def default_store() -> dist.Store:
    """Return the store that the default process group was made with, which no public call returns."""
    return dist.distributed_c10d._get_default_store()
