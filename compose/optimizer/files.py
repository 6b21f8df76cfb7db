"""Tensors in files, read and written past the page cache, since memory is what they are to save."""

import contextlib
import ctypes
import os

import torch
from torch import Tensor

from compose.errors import ConfigError
from compose.optimizer.scratch import Scratch

PAGE = 4096  # bytes: what direct access asks places, sizes and addresses to be multiples of
_UNIT = PAGE // 4  # elements


def page_aligned(elements: int, pinned: bool) -> Tensor:
    """Host memory for ``elements`` float32, a multiple of 1024, that begins where a page does."""
    memory = torch.empty(elements + _UNIT, dtype=torch.float32, pin_memory=pinned)
    skip = -memory.data_ptr() % PAGE // 4
    return memory[skip : skip + elements]


class TensorFile:
    """A flat float32 tensor of ``elements`` zeros in a new file, whose room is taken at once.

    Raises ConfigError where there is no room.
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
        """The same contents as a tensor, which takes addresses but no memory until it is touched, and
        then pages that the system can take back."""
        return torch.from_file(
            str(self.folder.path / self.name), shared=True, size=self.elements, dtype=torch.float32
        )

    def read(self, start: int, into: Tensor) -> None:
        """The elements from ``start`` on, a multiple of 1024. ``into``: of :func:`page_aligned` memory,
        which is written to the end of its last page."""
        self._move(os.preadv, start, into)

    def write(self, start: int, values: Tensor) -> None:
        """As :meth:`read`."""
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
                os.fdatasync(fd)  # a page that is yet to be written cannot be let go
                os.posix_fadvise(fd, 4 * start, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _opened(self) -> tuple[int, bool]:
        """A descriptor, and whether it goes past the page cache; some file systems know no such way."""
        with contextlib.suppress(OSError, AttributeError):
            return self.folder.open(self.name, os.O_DIRECT), True
        return self.folder.open(self.name), False


def _whole_pages(elements: int) -> int:
    return -(-4 * elements // PAGE) * PAGE
