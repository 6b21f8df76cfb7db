"""Tensors in files. Reads and writes avoid the page cache, since the files are there to save memory."""

import contextlib
import ctypes
import os

import torch
from torch import Tensor

from compose.errors import ConfigError
from compose.optim.scratch import Scratch

PAGE = 4096  # bytes; with direct access places, sizes and addresses must be multiples of it
UNIT = PAGE // 4  # elements


def page_aligned(elements: int, pinned: bool) -> Tensor:
    """Return host memory for float32 elements that begins at the start of a page.

    Args:
        elements: The number of elements, a multiple of 1024.
        pinned: Whether the memory is pinned.

    Returns:
        A flat float32 tensor.
    """
    memory = torch.empty(elements + UNIT, dtype=torch.float32, pin_memory=pinned)
    skip = -memory.data_ptr() % PAGE // 4
    return memory[skip : skip + elements]


class TensorFile:
    """A flat float32 tensor of zeros in a new file, whose space is reserved at once.

    Args:
        folder: The folder of the file.
        name: The file's name.
        elements: The number of elements.

    Raises:
        ConfigError: The file system has no room.
    """

    def __init__(self, folder: Scratch, name: str, elements: int) -> None:
        self.folder, self.name, self.elements = folder, name, elements
        fd = folder.open(name, os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, _whole_pages(max(1, elements)))
        except OSError as error:
            raise ConfigError(
                f"optimizer.offload_dir: {folder.path} has no room for the optimizer's state"
                f" ({error.strerror})"
            ) from None
        finally:
            os.close(fd)

    def mapped(self) -> Tensor:
        """Return the same contents as a tensor that is mapped to the file.

        The tensor takes addresses but no memory until it is touched. Then the system can take its pages
        back.
        """
        return torch.from_file(
            str(self.folder.path / self.name), shared=True, size=self.elements, dtype=torch.float32
        )

    def read(self, start: int, into: Tensor) -> None:
        """Read elements from the file.

        Args:
            start: The first element, a multiple of 1024.
            into: A part of :func:`page_aligned` memory; it is written to the end of its last page.
        """
        self._move(os.preadv, start, into)

    def write(self, start: int, values: Tensor) -> None:
        """Write elements to the file.

        Args:
            start: The first element, a multiple of 1024.
            values: A part of :func:`page_aligned` memory; it is read to the end of its last page.
        """
        self._move(os.pwritev, start, values)

    def _move(self, call, start: int, memory: Tensor) -> None:  # type: ignore[no-untyped-def]
        size = _whole_pages(memory.numel())
        view = memoryview((ctypes.c_char * size).from_address(memory.data_ptr()))
        fd, direct = self._opened()
        try:
            done = 0
            while done < size:
                moved = call(fd, [view[done:]], 4 * start + done)
                if not moved:
                    raise OSError(f"{self.folder.path / self.name} ends at {4 * start + done} bytes")
                done += moved
            if not direct:
                os.fdatasync(fd)  # a page that is not written yet cannot be dropped
                os.posix_fadvise(fd, 4 * start, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _opened(self) -> tuple[int, bool]:
        """Return a descriptor, and whether it bypasses the page cache, as some file systems can."""
        with contextlib.suppress(OSError, AttributeError):
            return self.folder.open(self.name, os.O_DIRECT), True
        return self.folder.open(self.name), False


def _whole_pages(elements: int) -> int:
    return -(-4 * elements // PAGE) * PAGE
