"""A rank's part of a tensor, described for torch.distributed.checkpoint (DCP).

DCP accepts DTensors, but it places an uneven strided shard (257 rows over dp_shard 4 x tp 2) elsewhere
than FSDP does, and then reports overlapping parts. Here every part is a region of the whole tensor.
Its place comes from the same cut that filled the part (weights.py). The planners below tell DCP that
region.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor
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

from compose.ops.tensors import local_region, local_tensor


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor that one rank holds: a region."""

    shape: torch.Size
    """Shape of the whole tensor."""
    offsets: torch.Size
    """Where the region begins in the whole tensor."""
    local: Tensor
    """The values of the region."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The region as DCP describes it."""
        return ChunkStorageMetadata(self.offsets, self.local.shape)


def local_shard_of(tensor: Tensor) -> LocalShard:
    """Return this rank's part of a DTensor, or all of a plain tensor; ``local`` shares its memory."""
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.shape, torch.Size([0] * tensor.ndim), local_tensor(tensor).detach())
    local = local_tensor(tensor).detach()
    if local.numel() == 0:
        return LocalShard(tensor.shape, torch.Size([0] * tensor.ndim), local)
    return LocalShard(tensor.shape, torch.Size(held.start for held in local_region(tensor)), local)


class ShardSavePlanner(DefaultSavePlanner):
    """Plans the writing of a dict of Parts; one rank writes a part that several ranks hold."""

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
    """Plans the reading of this rank's Parts, whoever wrote them.

    The checkpoint must have all their names.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

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
        """Refuse to read, since a checkpoint holds tensors only.

        DCP's own method would unpickle anything else.
        """
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
