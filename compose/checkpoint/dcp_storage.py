"""How torch.distributed.checkpoint (DCP) writes and reads a rank's parts of tensors.

DCP accepts DTensors, but it places an uneven strided shard (257 rows over dp_shard 4 x tp 2) elsewhere
than FSDP does, and then reports overlapping parts. The planners here tell DCP each part's own region.

DCP's own writer sends each tensor through torch.save, which takes longer than the writing itself. Here
the tensors of a rank are one file of the safetensors format, ``__<rank>_0.safetensors``. Its header
says where in the whole tensor each part begins, in DCP's way: DCP's HuggingFaceStorageReader reads the
file too.
"""

import contextlib
import errno
import json
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from compose.checkpoint.metadata import METADATA, SUFFIX, description, read_metadata
from compose.checkpoint.safetensors_files import Planned, bytes_of, header
from compose.checkpoint.state import LocalShard
from compose.errors import open_own, write_whole

_BLOCK = 2**23  # bytes written at once; Linux takes three times as long for a gigabyte in one piece
_AT_ONCE = 2**26  # bytes to start writing to the device at once
_READERS = 4  # parts read at once


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
    """Plans the reading of this rank's parts, whoever wrote them.

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


class PartsWriter(FileSystemWriter):
    """Writes what ShardSavePlanner plans, one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        """Prepare to write into ``folder``.

        ``entries`` will hold ``size`` in bytes and ``crc32`` of the file that this rank writes, by
        name.
        """
        super().__init__(folder)
        self.entries: dict[str, dict[str, int]] = {}

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
        name = f"{plan.storage_data.prefix}0{SUFFIX}"
        results, planned, begin = [], [], {}
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            key = item.index.fqn
            planned.append(Planned(key, tuple(data.chunk.sizes), data.properties.dtype))
            begin[key] = {"saved_offsets": list(data.chunk.offsets)}
        with open_own(Path(self.path) / name, "wb") as file, ThreadPoolExecutor(1) as helper:
            summed = _Summed(file, helper)
            head = header(planned, {"DCP_SHARDING_INFO": json.dumps(begin)})
            _reserve(file, len(head) + sum(one.nbytes for one in planned))
            summed.write(head)
            for item, one in zip(plan.items, planned, strict=True):
                place = _StorageInfo(name, summed.size, one.nbytes)
                summed.write(bytes_of(planner.resolve_data(item)))  # type: ignore[arg-type]
                results.append(WriteResult(item.index, one.nbytes, place))
            summed.flush()
        self.entries[name] = {"size": summed.size, "crc32": summed.crc32}
        return results


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Suppress DCP's warning that one process saves or loads by itself, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reserve(file: IO[bytes], size: int) -> None:
    """Reserve the file's room at once where possible: this is faster, and finds a full disk early."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


class _Summed:
    """A file that is only appended to, with its checksum.

    ``helper``, a pool of one thread, computes the checksum during the writing, so the file need not be
    read again.
    """

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
    """Reads what ShardLoadPlanner plans, from files of PartsWriter."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the checkpoint, read once. DCP's own method would unpickle it."""
        self.known = self.known or read_metadata(Path(self.path))
        return self.known

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the description of the tensors."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.tensors = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill the planner's tensors, several at once."""
        with ThreadPoolExecutor(_READERS) as readers:
            for _ in readers.map(lambda item: self._read(item, planner), plan.items):
                pass  # errors are raised here
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        info, stored = self.storage_data[item.storage_index], self.tensors[item.storage_index.fqn]
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
        left = bytes_of(tensor)
        with open_own(Path(self.path) / name, buffering=0) as file:
            file.seek(begin)
            while left:
                count = file.readinto(left)
                if not count:
                    raise OSError(f"{name} ends too early")
                left = left[count:]
