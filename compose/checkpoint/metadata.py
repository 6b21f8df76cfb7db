"""The description of a checkpoint, ``metadata.json``: its tensors, and their places in its files.

torch.distributed.checkpoint (DCP) describes a checkpoint by a pickle, ``.metadata``. Whoever opens a
pickle runs the code that its writer put there, so our description is JSON.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from compose.checkpoint.safetensors_files import NAMES
from compose.config.json_files import Count, read_json
from compose.errors import ConfigError

METADATA = "metadata.json"
SUFFIX = ".safetensors"
_SHARD = re.compile(r"__\d+_\d+\.safetensors")
_TYPES = {name: dtype for dtype, name in NAMES.items()}

Size = Annotated[int, Field(ge=1, lt=2**63)]


class Chunk(NamedTuple):
    """A region of a tensor: its file, its bytes in the file, and its place in the whole tensor."""

    file: str
    begin: Count
    length: Count
    offsets: tuple[Count, ...]
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor of a checkpoint."""

    dtype: str
    """The dtype's name in safetensors, such as "F32"."""
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]
    """The regions of the tensor."""


@dataclass(frozen=True)
class _Described:
    tensors: dict[str, DescribedTensor]


def description(metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]) -> str:
    """Return the text of ``metadata.json`` for a checkpoint."""
    where = {(index.fqn, tuple(index.offset or ())): place for index, place in places.items()}
    tensors: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for region in stored.chunks:
            place = where[name, tuple(region.offsets)]
            offsets, sizes = tuple(region.offsets), tuple(region.sizes)
            chunks.append((place.relative_path, place.offset, place.length, offsets, sizes))
        dtype = NAMES[stored.properties.dtype]
        tensors[name] = {"dtype": dtype, "shape": tuple(stored.size), "chunks": chunks}
    return json.dumps({"tensors": tensors})


def read_metadata(folder: Path) -> Metadata:
    """Return DCP's description of the checkpoint in ``folder``."""
    path = folder / METADATA
    tensors = read_json(path, _Described, own=True).tensors
    for name, stored in tensors.items():
        if wrong := _flaw(stored):
            raise ConfigError(f"{path}: tensors.{name if name.isprintable() else ascii(name)}: {wrong}")
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=_TYPES[stored.dtype]),
                torch.Size(stored.shape),
                [
                    ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                    for c in stored.chunks
                ],
            )
            for name, stored in tensors.items()
        },
        storage_data={
            MetadataIndex(name, chunk.offsets): _StorageInfo(chunk.file, chunk.begin, chunk.length)
            for name, stored in tensors.items()
            for chunk in stored.chunks
        },
    )


def shards(metadata: Metadata) -> dict[str, int]:
    """Return the names of a checkpoint's tensor files, and the least number of bytes of each."""
    found: dict[str, int] = defaultdict(int)
    for place in metadata.storage_data.values():
        found[place.relative_path] = max(found[place.relative_path], place.offset + place.length)
    return found


def _flaw(stored: DescribedTensor) -> str:
    """Return why the regions of a tensor do not cover it exactly once; empty if they do."""
    if stored.dtype not in _TYPES:
        return f"dtype: {stored.dtype!r} is none of {', '.join(_TYPES)}"
    for file, begin, length, offsets, sizes in stored.chunks:
        if not _SHARD.fullmatch(file):
            return f"{file!r} is no name of a shard"
        if not len(offsets) == len(sizes) == len(stored.shape):
            return f"a region of {len(offsets)} and {len(sizes)} dims, of {len(stored.shape)}"
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, stored.shape, strict=True)):
            return f"a region of {list(sizes)} at {list(offsets)} is not in {list(stored.shape)}"
        if length != prod(sizes) * _TYPES[stored.dtype].itemsize:
            return f"{length:,} bytes at {begin:,} of {file} are not {list(sizes)} of {stored.dtype}"
    missing = prod(stored.shape) - sum(prod(chunk.sizes) for chunk in stored.chunks)
    if missing or _overlap(stored.chunks, len(stored.shape)):
        return f"its regions are not the whole of {list(stored.shape)}"
    return ""


def _overlap(chunks: Sequence[Chunk], dims: int) -> bool:
    """Return whether any two regions overlap."""
    if dims == 0:
        return len(chunks) > 1
    # Sort along the dim with the most distinct offsets, so that few pairs need to be compared.
    along = max(range(dims), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets[along])
    for place, one in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if other.offsets[along] >= one.offsets[along] + one.sizes[along]:
                break
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            ):
                return True
    return False
