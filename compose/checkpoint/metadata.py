"""The description of a checkpoint, ``metadata.json``: its tensors, and their places in its files.

torch.distributed.checkpoint (DCP) describes a checkpoint by a pickle, ``.metadata``. Whoever opens a
pickle runs the code that its writer put there. Our description is JSON. The pickle of an older
checkpoint is still read, but no class or function that it names is called: it yields plain values,
which are checked as those of JSON are.
"""

import json
import pickle
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
from compose.config.json_files import Count, parse_json, read_json
from compose.errors import ConfigError, open_own

METADATA = "metadata.json"
PICKLED = ".metadata"  # the description of older checkpoints
SUFFIX = ".safetensors"
_SHARD = re.compile(r"__\d+_\d+(\.safetensors|\.distcp)")
_TYPES = {name: dtype for dtype, name in NAMES.items()}
# The names of classes that DCP's own descriptions hold.
_KNOWN = {
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "PosixPath",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
    "_get_layout",
    "getattr",  # of an enum's class and a name: so Python 3.11.0 to 3.11.3 pickles a member
}

Size = Annotated[int, Field(ge=1, lt=2**63)]


class Chunk(NamedTuple):
    """A region of a tensor: its file, its bytes in the file, and its place in the whole tensor."""

    file: str
    begin: Count
    length: Count
    offsets: tuple[Count, ...]
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    dtype: str
    """The dtype's name in safetensors, such as "F32"."""
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]
    """The regions of the tensor."""


@dataclass(frozen=True)
class _Described:
    tensors: dict[str, Stored]


def description(metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]) -> str:
    """Return the text of ``metadata.json`` for a checkpoint."""
    return json.dumps({"tensors": _plain(metadata.state_dict_metadata, places)})


def read_metadata(folder: Path) -> Metadata:
    """Return DCP's description of the checkpoint in ``folder``."""
    path = folder / METADATA
    if path.exists() or not (folder / PICKLED).exists():
        tensors = read_json(path, _Described, own=True).tensors
    else:
        path = folder / PICKLED
        try:
            tensors = _unpickled(path)
        except Exception as error:  # any error: the file may come from anyone
            words = str(error) or type(error).__name__
            raise ConfigError(f"{path}: is no description of tensors: {words}") from None
    for name, stored in tensors.items():
        if wrong := _flaw(stored):
            raise ConfigError(f"{path}: tensors.{name if name.isprintable() else ascii(name)}: {wrong}")
    return Metadata(
        {name: _for_dcp(stored) for name, stored in tensors.items()},
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


def _for_dcp(stored: Stored) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=_TYPES[stored.dtype]),
        torch.Size(stored.shape),
        [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in stored.chunks],
    )


def _plain(tensors: Mapping[str, Any], places: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the description as JSON has it, from DCP's objects or those of :func:`_unpickled`."""
    where = {(index.fqn, tuple(index.offset)): place for index, place in places.items()}
    found: dict[str, Any] = {}
    for name, stored in tensors.items():
        chunks = []
        for region in stored.chunks:
            place = where[name, tuple(region.offsets)]
            length, offsets, sizes = place.length, tuple(region.offsets), tuple(region.sizes)
            chunks.append((place.relative_path, place.offset, length, offsets, sizes))
        found[name] = {
            "dtype": NAMES[stored.properties.dtype],
            "shape": tuple(stored.size),
            "chunks": tuple(chunks),
        }
    return found


def _flaw(stored: Stored) -> str:
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
        if file.endswith(SUFFIX) and length != prod(sizes) * _TYPES[stored.dtype].itemsize:
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


class _Inert:
    """Stands for an object of any class in a pickle: it holds the arguments and runs no code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # A tensor's properties are a tuple that begins with the dtype.
        self.__dict__.update(state if isinstance(state, dict) else {"dtype": state[0]})


class _Opened(pickle.Unpickler):
    """Opens DCP's description without calling a class or function that it names.

    Sizes become tuples, dtypes stay dtypes, and everything else becomes inert.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for the object ``module.name``."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _Inert


def _unpickled(path: Path) -> dict[str, Stored]:
    """Return the tensors that an older checkpoint's pickle describes."""
    with open_own(path) as file:
        found = _Opened(file).load()
    if any(getattr(place, "transform_descriptors", None) for place in found.storage_data.values()):
        raise ValueError("its tensors are compressed")
    tensors = _plain(found.state_dict_metadata, found.storage_data)
    return parse_json(json.dumps({"tensors": tensors}).encode(), _Described).tensors
