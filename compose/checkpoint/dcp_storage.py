"""The files in which torch.distributed.checkpoint (DCP) keeps each rank's parts of tensors.

The tensors of a rank are one safetensors file, ``__<rank>_0.safetensors``, as torch.save takes longer
than the writing itself. Its header says where in the whole tensor each part begins, so that DCP's
HuggingFaceStorageReader reads it too.
"""

import contextlib
import errno
import json
import os
import re
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from compose.checkpoint.local_shards import LocalShard, ShardLoadPlanner, ShardSavePlanner
from compose.checkpoint.safetensors_files import NAMES, PlannedTensor, bytes_of, header
from compose.config.json_files import Count, read_json
from compose.errors import ConfigError, fill, open_own, write_whole
from compose.ops.tensors import checksums

METADATA = "metadata.json"
_SHARD = re.compile(r"__\d+_\d+\.safetensors")
_TYPES = {name: dtype for dtype, name in NAMES.items()}
_BLOCK = 2**23  # bytes written at once; Linux takes three times as long for a gigabyte in one piece
_AT_ONCE = 2**26  # bytes to start writing to the device at once
_READERS = 4  # parts read at once
_ALIGNED = 64  # bytes, a multiple of which a part begins at


def save_parts(
    folder: Path,
    parts: Mapping[str, LocalShard],
    group: dist.ProcessGroup | None = None,
    planner: ShardSavePlanner | None = None,
) -> dict[str, dict[str, int]]:
    """Write the parts of every rank; return the size and the crc32 of this rank's file, by name.

    A collective of ``group``; without one, this process writes alone.
    """
    writer = PartsWriter(folder)
    with _over(group) as ranks:
        dcp.save(dict(parts), storage_writer=writer, planner=planner or ShardSavePlanner(), **ranks)
    return writer.entries


def load_parts(
    reader: "PartsReader", parts: Mapping[str, LocalShard], group: dist.ProcessGroup | None = None
) -> None:
    """Fill the parts of every rank; a collective of ``group``, or of this process alone."""
    with _over(group) as ranks:
        dcp.load(dict(parts), storage_reader=reader, planner=ShardLoadPlanner(), **ranks)


@contextlib.contextmanager
def _over(group: dist.ProcessGroup | None) -> Iterator[dict[str, Any]]:
    """Yield what tells DCP its ranks, without its warning that one process is alone, if it is."""
    ranks = {"process_group": group, "no_dist": group is None}
    if group is not None:  # the filters of warnings are the process's, and training has another thread
        yield ranks
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield ranks


SUMS = "checksums"
"""The checksums of a file's tensors in its header, which tell which of them is damaged."""


class PartsWriter(FileSystemWriter):
    """Writes the plan of ShardSavePlanner, one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entries: dict[str, dict[str, int]] = {}
        """The manifest's entry of the file that this rank has written, by name."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's parts, and flush them to the device."""
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the description of the whole checkpoint; only the first rank calls this, at the end."""
        places = {result.index: result.storage_data for each in results for result in each}
        write_whole(Path(self.path) / METADATA, description(metadata, places))

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = f"{plan.storage_data.prefix}0.safetensors"
        results, planned, begin, sums = [], [], {}, {}
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            key = item.index.fqn
            planned.append(PlannedTensor(key, tuple(data.chunk.sizes), data.properties.dtype))
            begin[key] = {"saved_offsets": list(data.chunk.offsets)}
            sums[key] = int(checksums([cast(Tensor, planner.resolve_data(item))]))
        with open_own(Path(self.path) / name, "wb") as file, ThreadPoolExecutor(1) as helper:
            summed = _ChecksummedFile(file, helper)
            words = {"DCP_SHARDING_INFO": json.dumps(begin), SUMS: json.dumps(sums)}
            head = header(planned, words)
            _reserve(file, len(head) + sum(one.nbytes for one in planned))
            summed.write(head)
            for item, one in zip(plan.items, planned, strict=True):
                place = _StorageInfo(name, summed.size, one.nbytes)
                summed.write(bytes_of(planner.resolve_data(item)))  # type: ignore[arg-type]
                results.append(WriteResult(item.index, one.nbytes, place))
            summed.flush()
        self.entries[name] = {"size": summed.size, "crc32": summed.crc32}
        return results


def _reserve(file: IO[bytes], size: int) -> None:
    """Reserve the file's room at once where possible: this is faster, and finds a full disk early."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


class _ChecksummedFile:
    """A file that is only appended to, and its checksum, which the thread of ``helper`` computes."""

    def __init__(self, file: IO[bytes], helper: ThreadPoolExecutor) -> None:
        self.file, self.helper, self.size, self.crc32 = file, helper, 0, 0
        self.behind: Sequence[Future[None]] = ()
        self.given = 0  # bytes whose writing to the device has been started

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        whole = memoryview(data)
        for start in range(0, whole.nbytes, _BLOCK):
            block = whole[start : start + _BLOCK]
            now = self.helper.submit(self._sum, block)
            self.file.write(block)
            for before in self.behind:  # sum at most one block while the next one is written
                before.result()
            self.behind = [now]
        self.size += whole.nbytes
        if self.size - self.given >= _AT_ONCE and hasattr(os, "posix_fadvise"):
            # The kernel then starts to write these bytes now, not only at the end.
            start, self.given = self.given, self.size
            os.posix_fadvise(self.file.fileno(), start, self.size - start, os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        """Wait until all bytes are summed, and are on the device."""
        for last in self.behind:
            last.result()
        self.file.flush()
        os.fsync(self.file.fileno())

    def _sum(self, block: memoryview) -> None:
        self.crc32 = zlib.crc32(block, self.crc32)


class PartsReader(FileSystemReader):
    """Reads the plan of ShardLoadPlanner from files of PartsWriter."""

    known: Metadata | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the checkpoint, read once. DCP's own method would unpickle it."""
        self.known = self.known or read_metadata(self.folder)
        return self.known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill the planner's tensors, several at once."""
        with ThreadPoolExecutor(_READERS) as readers:
            for _ in readers.map(lambda item: self._read(item, planner), plan.items):
                pass  # errors are raised here
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        stored = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        assert item.storage_index.index is not None
        dtype, sizes = stored.properties.dtype, stored.chunks[item.storage_index.index].sizes
        target = planner.resolve_tensor(item).detach()
        # Read whole rows. The other dims are cut in memory.
        region = [slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
        rows, *cut = region or [slice(0, 1)]
        begin = info.offset + rows.start * prod(sizes[1:]) * dtype.itemsize
        straight = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
        if straight and item.lengths[1:] == sizes[1:]:
            self._fill(target, info.relative_path, begin)
        else:
            whole = torch.empty((rows.stop - rows.start, *sizes[1:]), dtype=dtype)
            self._fill(whole, info.relative_path, begin)
            target.copy_(whole[(slice(None), *cut)].view(target.shape))
        planner.commit_tensor(item, target)

    def _fill(self, tensor: Tensor, name: str, begin: int) -> None:
        memory = bytes_of(tensor)
        with open_own(self.folder / name, buffering=0) as file:
            file.seek(begin)
            if fill(file, memory) < len(memory):
                raise OSError(f"{name} ends too early")


# metadata.json describes a checkpoint: its tensors, and their places in its files. DCP's own is a
# pickle, and whoever opens a pickle runs the code of its writer.

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
    """A tensor of a checkpoint, and its regions."""

    dtype: str  # its name in safetensors, such as "F32"
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class _DescribedTensors:
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
            own = place.relative_path, place.offset, place.length, region.offsets, region.sizes
            chunks.append(own)
        dtype = NAMES[stored.properties.dtype]
        tensors[name] = {"dtype": dtype, "shape": stored.size, "chunks": chunks}
    return json.dumps({"tensors": tensors})


def read_metadata(folder: Path) -> Metadata:
    """Return DCP's description of the checkpoint in ``folder``."""
    path = folder / METADATA
    tensors = read_json(path, _DescribedTensors, own=True).tensors
    for name, stored in tensors.items():
        if wrong := flaw(stored):
            raise ConfigError(f"{path}: tensors.{name if name.isprintable() else ascii(name)}: {wrong}")
    return metadata_of(tensors)


def metadata_of(tensors: Mapping[str, DescribedTensor]) -> Metadata:
    """Return DCP's description of tensors that have no flaw."""
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


def placed(state: Mapping[str, LocalShard]) -> tuple[dict[str, DescribedTensor], int]:
    """Return where each part is in a file of all parts, one after another, and the file's size."""
    tensors, size = {}, 0
    for name, part in state.items():
        chunks, local = (), part.local
        if local.numel():
            chunks = (Chunk("", size, local.nbytes, tuple(part.offsets), tuple(local.shape)),)
            size += -(-local.nbytes // _ALIGNED) * _ALIGNED
        tensors[name] = DescribedTensor(NAMES[local.dtype], tuple(part.shape), chunks)
    return tensors, size


def shards(metadata: Metadata) -> dict[str, int]:
    """Return the names of a checkpoint's tensor files, and the least number of bytes of each."""
    results: dict[str, int] = defaultdict(int)
    for place in metadata.storage_data.values():
        results[place.relative_path] = max(results[place.relative_path], place.offset + place.length)
    return results


def flaw(stored: DescribedTensor) -> str:
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
    if dims == 0:
        return len(chunks) > 1
    # Along the dim with the most distinct offsets few pairs need to be compared.
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
