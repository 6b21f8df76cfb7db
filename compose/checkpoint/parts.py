"""A rank's part of a tensor, as torch.distributed.checkpoint (DCP) is told of it.

DCP would take DTensors themselves, but it places an uneven strided shard (257 rows over dp_shard 4 x
tp 2) elsewhere than FSDP does, and then finds that parts overlap. Here every part is a box of the whole
tensor whose place is read off the same cut that filled it (weights.py), and the planners below, which
DCP has for this purpose, tell it that box.
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

from compose.base.local_tensor import local_tensor
from compose.weights import local_box


@dataclass(frozen=True)
class Part:
    """The box of a tensor of ``shape`` that begins at ``offsets`` and holds ``local``."""

    shape: torch.Size
    offsets: torch.Size
    local: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offsets, self.local.shape)


def part_of(tensor: Tensor) -> Part:
    """What this rank holds of a DTensor, or all of a plain tensor; ``local`` is the tensor's memory."""
    if not isinstance(tensor, DTensor):
        return Part(tensor.shape, torch.Size([0] * tensor.ndim), local_tensor(tensor).detach())
    local = local_tensor(tensor).detach()
    if local.numel() == 0:
        return Part(tensor.shape, torch.Size([0] * tensor.ndim), local)
    return Part(tensor.shape, torch.Size(held.start for held in local_box(tensor)), local)


class SaveParts(DefaultSavePlanner):
    """Plans the writing of a dict of Parts; what several ranks hold alike is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        parts: Mapping[str, Part] = self.state_dict
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
        return self.state_dict[index.fqn].local


class LoadParts(DefaultLoadPlanner):
    """Plans the reading of this rank's Parts, whoever wrote them; names must be in the checkpoint."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Part],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            if part.local.numel() > 0:
                items += create_read_items_for_chunk_list(name, stored, [part.chunk])
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        """Never: there are tensors alone, and DCP's own would unpickle what is none."""
        raise TypeError(f"{read_item.dest_index.fqn} is no tensor")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


def mismatches(parts: Mapping[str, Part], metadata: Metadata) -> list[str]:
    """One line for each part that the checkpoint lacks or has in another shape."""
    problems = []
    for name, part in parts.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            problems.append(f"has no {name}")
        elif stored.size != part.shape:
            problems.append(f"{name} is {tuple(stored.size)}, the model's is {tuple(part.shape)}")
    return problems
