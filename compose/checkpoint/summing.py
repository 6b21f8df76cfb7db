"""Files that are summed as they are written, so that nobody has to read them again for it."""

import io
import os
import zlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

_ASIDE = 2**20  # bytes from which on a second thread pays


class SummingFiles(FileSystem):
    """For ``FileSystemWriter.fs``.

    entries: of every file that was written to its end, by name, ``size`` in bytes and ``crc32``.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, int]] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """A file opened in ``mode``; one that is written is entered when it is closed."""
        with super().create_stream(path, mode) as stream, ThreadPoolExecutor(1) as helper:
            if "w" not in mode:
                yield stream
                return
            summed = _Summed(stream, helper)
            yield cast(io.IOBase, summed)
            self.entries[Path(path).name] = {"size": summed.size, "crc32": summed.value}


class _Summed:
    """A file to which is only appended; it is written and summed at once, by two threads."""

    def __init__(self, file: Any, helper: ThreadPoolExecutor) -> None:
        self.file, self.helper, self.size, self.value = file, helper, 0, 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < _ASIDE:
            self.value = zlib.crc32(data, self.value)
            written = self.file.write(data)
        else:
            found = self.helper.submit(zlib.crc32, data, self.value)
            try:
                written = self.file.write(data)
            finally:
                self.value = found.result()  # in any case: the memory is the caller's
        self.size += size
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
