"""The part of each tensor that this rank has, by names that do not depend on the mesh.

The part is a region of the whole tensor, which its placements decide (ops/tensors.py).
"""

import weakref
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from compose.composition import Composition, module_of
from compose.ops.tensors import local_region, local_tensor


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that one rank holds: a region."""

    shape: torch.Size  # of the whole tensor
    offsets: torch.Size  # where the region begins in the whole tensor
    local: Tensor  # the values of the region

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The region as DCP describes it."""
        return ChunkStorageMetadata(self.offsets, self.local.shape)


def local_shard_of(tensor: Tensor) -> LocalShard:
    """Return this rank's part of a DTensor, or all of a plain tensor; ``local`` shares its memory."""
    local = local_tensor(tensor).detach()
    if not isinstance(tensor, DTensor) or local.numel() == 0:
        return LocalShard(tensor.shape, torch.Size([0] * tensor.ndim), local)
    return LocalShard(tensor.shape, torch.Size(cut.start for cut in local_region(tensor)), local)


def named_tensors(
    whole: nn.Module | Composition, optimizer: torch.optim.Optimizer | None
) -> dict[str, list[Tensor]]:
    """Return every tensor that training changes, with all copies that stages share on this rank.

    ``model.<name>`` are parameters that are not frozen, and persistent buffers.
    ``optimizer.<name>.<key>`` is the optimizer's state of a parameter.
    """
    model = module_of(whole)
    results: dict[str, list[Tensor]] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, parameter in whole.named_parameters():
        if not parameter.requires_grad:
            continue
        results.setdefault(f"model.{name}", []).append(parameter)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                results.setdefault(f"optimizer.{name}.{key}", []).append(value)
    for name, buffer in model.named_buffers():
        if name in persistent:
            results.setdefault(f"model.{name}", []).append(buffer)
    return results


def parts(tensors: dict[str, list[Tensor]]) -> dict[str, LocalShard]:
    """Return this rank's part of each tensor, taken from the first copy."""
    return {name: local_shard_of(copies[0]) for name, copies in tensors.items()}


def staged(
    state: dict[str, LocalShard], into: dict[str, LocalShard] | None = None
) -> dict[str, LocalShard]:
    """Return a copy in host memory, which is that of an earlier copy: new pages cost more than copying.

    Parts of a GPU are copied to pinned memory, all at once, at the bus's rate.
    """
    copies = {}
    for name, part in state.items():
        # An optimizer has no state before its first step.
        kept = into[name].local if into and name in into else _host_memory(part.local)
        copies[name] = replace(part, local=kept.copy_(part.local, non_blocking=True))
    if any(part.local.is_cuda for part in state.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def _host_memory(like: Tensor) -> Tensor:
    """Return memory of the host for a copy; pinned if it is for a copy of a GPU's."""
    memory = torch.empty_like(like, device="cpu")
    if like.is_cuda and memory.numel():
        # The pinned memory of PyTorch's allocator may be nearly twice as large, a power of two.
        address, cuda = memory.data_ptr(), cast(Any, torch.cuda.cudart())
        torch.cuda.check_error(cuda.cudaHostRegister(address, memory.nbytes, 0))
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return memory


@torch.no_grad()
def spread(tensors: dict[str, list[Tensor]]) -> None:
    """Copy the value of each first copy to the other copies."""
    for first, *others in tensors.values():
        for other in others:
            local_tensor(other).copy_(local_tensor(first))
