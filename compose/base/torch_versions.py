"""What differs between the versions of PyTorch that pyproject.toml allows, 2.11 to 2.15.

Each name says which versions it serves. It goes when the oldest of these is no longer allowed. The
private names of PyTorch that all of them have are listed in tests/test_torch_versions.py.
"""

import warnings
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.torch_version import TorchVersion

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The all-gather of torch.distributed, FSDP's too. 2.13 renamed it and deprecates the old name."""

REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""The same of the reduce-scatter."""

functional_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
"""The all-gather that returns its result; renamed by 2.13 too."""

functional_reduce_scatter = (
    getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
)
"""The same of the reduce-scatter."""


def splits_functions() -> bool:
    """Tell whether a pipeline can run the backward of a ``torch.autograd.Function`` in two parts.

    Before 2.13 the part that finds the gradients of weights fails there
    (torch/distributed/pipelining/_backward.py, ``stage_backward_input``).
    """
    return TorchVersion(torch.__version__) >= "2.13"


def finish_fsdp_backward(module: FSDPModule) -> None:
    """Do for the root ``module`` what FSDP does behind a ``backward()``, where none was called.

    No version has a public call that does this for each micro-batch. (2.15 has ``finalize_backward``;
    it refuses gradients that are reduced over a part of the ranks.) Since 2.15 FSDP asks how the
    backward began, and a backward that was never called has not said so.
    """
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


class StageOverrides:
    """What a stage of a pipeline has instead of PyTorch's own; a base ahead of PipelineStage.

    No version has all of these methods, and none calls one that it does not have.
    """

    group_rank: int

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leave out the rank itself, which gloo cannot greet. 2.11 to 2.14; 2.11 alone calls it."""
        greetings = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [op for op in greetings if op.group_peer != self.group_rank]

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Compare nothing. 2.11: it compares the last stage's output, whose shape nobody told it."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep gradients, which are sums over steps. Since 2.12: it drops them, as if it had run."""


def bypass_saved_tensors_hooks(mode: Any) -> None:
    """Have ``mode`` of selective checkpointing keep tensors where they are, whatever hooks do.

    So it was before 2.14. 2.14 and 2.15 warn unless they are told, and a later version will hand the
    tensors to the hooks. ``checkpoint``'s argument of this name reaches the modes of PyTorch alone.
    """
    mode.respect_saved_tensors_hooks = False


def enable_async_tp(group: str) -> None:
    """Have Inductor run products in pieces while their messages travel in the group of this name.

    The setting is private in 2.11 to 2.15. The messages take symmetric memory. Before 2.15 Inductor
    uses it only after a call that is deprecated.
    """
    from torch._inductor import config

    config._micro_pipeline_tp = True
    if TorchVersion(torch.__version__) < "2.15":
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(cast(Any, group))
