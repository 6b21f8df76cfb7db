"""The part of each tensor that this rank has, by names that do not depend on the mesh.

The part is a region of the whole tensor, which its placements decide (ops/tensors.py). The planners of
torch.distributed.checkpoint (DCP) place an uneven strided shard (257 rows over dp_shard 4 x tp 2)
elsewhere than FSDP does. So the planners here tell DCP each part's own region.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from compose.composition import Composition, module_of
from compose.ops.tensors import local_region, local_tensor, persistent_buffers


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
    whole: nn.Module | Composition, optimizer: torch.optim.Optimizer | None, adapters: bool = False
) -> dict[str, list[Tensor]]:
    """Return every tensor of a checkpoint, with all copies that stages share on this rank.

    ``model.<name>`` are parameters and persistent buffers. With ``adapters`` frozen parameters are left
    out: these are the weights below the adapters, and come from elsewhere.
    ``optimizer.<name>.<key>`` is the optimizer's state of a parameter.
    """
    model = module_of(whole)
    results: dict[str, list[Tensor]] = {}
    buffers = persistent_buffers(model)  # first: state_dict makes FSDP put its shards back
    for name, parameter in whole.named_parameters():
        if adapters and not parameter.requires_grad:
            continue
        results.setdefault(f"model.{name}", []).append(parameter)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                results.setdefault(f"optimizer.{name}.{key}", []).append(value)
    for name, buffer in buffers.items():
        results.setdefault(f"model.{name}", []).append(buffer)
    return results


@torch.no_grad()  # or each DTensor.to_local would be an autograd function
def parts(tensors: dict[str, list[Tensor]]) -> dict[str, LocalShard]:
    """Return this rank's part of each tensor, taken from the first copy."""
    return {name: local_shard_of(copies[0]) for name, copies in tensors.items()}


def staged(
    state: dict[str, LocalShard], into: dict[str, LocalShard] | None = None
) -> dict[str, LocalShard]:
    """Return a copy in host memory, that of an earlier copy ``into``: new pages cost more than copying.

    Parts on a GPU are copied to pinned memory, all at once, at the bus's rate.
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
    """Return host memory for a copy of a tensor, pinned if the tensor is on a GPU."""
    memory = torch.empty_like(like, device="cpu")
    return pinned(memory) if like.is_cuda and memory.numel() else memory


def pinned(memory: Tensor) -> Tensor:
    """Return host memory, pinned in its place, so that a GPU copies to it at the bus's rate."""
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


class ShardSavePlanner(DefaultSavePlanner):
    """Plans the writing of this rank's parts; one rank writes a part that several ranks hold."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Return the plan that writes each part of this rank that is not empty."""
        parts: Mapping[str, LocalShard] = self.state_dict
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, part.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=part.chunk,
                        properties=TensorProperties.create_from_tensor(part.local),
                        size=part.shape,
                    ),
                )
                for name, part in parts.items()
                if part.local.numel() > 0
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to write for ``index``."""
        return self.state_dict[index.fqn].local


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of this rank's parts; the checkpoint must have all their names."""

    def set_up_planner(
        self,
        state_dict: dict[str, LocalShard],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep what DCP gives each planner."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return the plan that reads each part of this rank that is not empty."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            if part.local.numel() > 0:
                items += create_read_items_for_chunk_list(name, stored, [part.chunk])
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        """Refuse anything but tensors, which DCP's own method would unpickle."""
        raise TypeError(f"{read_item.dest_index.fqn} is no tensor")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to fill for ``index``."""
        return self.state_dict[index.fqn].local


def mismatches(parts: Mapping[str, LocalShard], metadata: Metadata) -> list[str]:
    """Return one line for each part that the checkpoint lacks or has in another shape."""
    problems = []
    for name, part in parts.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            problems.append(f"has no {name}")
        elif stored.size != part.shape:
            problems.append(f"{name} is {tuple(stored.size)}, the model's is {tuple(part.shape)}")
    return problems
