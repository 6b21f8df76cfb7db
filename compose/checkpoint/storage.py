"""Where torch.distributed.checkpoint (DCP) puts tensors, and gets them from: files of plain bytes.

DCP's own writer sends each tensor through torch.save, which takes longer than the writing itself. Here
a rank's tensors are one file of the safetensors format, ``__<rank>_0.safetensors``, whose header says
as DCP's does where in the whole each part begins: DCP's HuggingFaceStorageReader reads it too.
"""

import errno
import json
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from compose.base.own_files import open_own, write_whole
from compose.base.safetensors_files import Planned, bytes_of, header
from compose.checkpoint.metadata import METADATA, SUFFIX, description, read_metadata

_BLOCK = 2**23  # bytes written at once; Linux takes three times as long for a gigabyte in one piece
_AT_ONCE = 2**26  # bytes that the device is given together
_READERS = 4  # parts read at once


class PartsWriter(FileSystemWriter):
    """Writes what SaveParts plans; one tensor at a time is asked for.

    entries: of the file that this rank has written, by name, ``size`` in bytes and ``crc32``.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entries: dict[str, dict[str, int]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's parts, and flush them to the device."""
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written: describe the whole."""
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


def _reserve(file: IO[bytes], size: int) -> None:
    """Have the file system find all the room at once, where it can: what is written then comes faster,
    and a disk that is too full is known before."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


class _Summed:
    """A file to which is only appended; ``helper``, of one thread, sums it meanwhile, so that nobody
    has to read it again for that."""

    def __init__(self, file: IO[bytes], helper: ThreadPoolExecutor) -> None:
        self.file, self.helper, self.size, self.crc32 = file, helper, 0, 0
        self.behind: Sequence[Future[None]] = ()
        self.given = 0  # bytes that the device has been told of

    def write(self, data: bytes | memoryview) -> None:
        whole = memoryview(data)
        for start in range(0, whole.nbytes, _BLOCK):
            block = whole[start : start + _BLOCK]
            now = self.helper.submit(self._sum, block)
            self.file.write(block)
            for before in self.behind:  # one block, while the next is written
                before.result()
            self.behind = [now]
        self.size += whole.nbytes
        if self.size - self.given >= _AT_ONCE and hasattr(os, "posix_fadvise"):
            # It begins with what need not stay in memory, rather than when all is there.
            start, self.given = self.given, self.size
            os.posix_fadvise(self.file.fileno(), start, self.size - start, os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        """Until all is summed, and on the device."""
        for last in self.behind:
            last.result()
        self.file.flush()
        os.fsync(self.file.fileno())

    def _sum(self, block: memoryview) -> None:
        self.crc32 = zlib.crc32(block, self.crc32)


class PartsReader(FileSystemReader):
    """Reads what LoadParts plans, of a checkpoint by PartsWriter or by DCP's own FileSystemWriter."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What lies where. DCP's own would unpickle it."""
        return read_metadata(Path(self.path))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.tensors = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill the planner's tensors, several at once."""
        if any(not info.relative_path.endswith(SUFFIX) for info in self.storage_data.values()):
            return super().read_data(plan, planner)
        with ThreadPoolExecutor(_READERS) as readers:
            for _ in readers.map(lambda item: self._read(item, planner), plan.items):
                pass  # an error is raised here
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        info, stored = self.storage_data[item.storage_index], self.tensors[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        assert item.storage_index.index is not None
        dtype, sizes = stored.properties.dtype, stored.chunks[item.storage_index.index].sizes
        target = planner.resolve_tensor(item).detach()
        # The rows that hold what is wanted, of which other dims are cut once they are in memory.
        box = [slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
        rows, *cut = box or [slice(0, 1)]
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
