"""The files of an offloaded optimizer: a folder that does not outlive a run, and tensors in it.

The folder has a mark, and only marked folders are emptied. Reads and writes avoid the page cache, since
the files are there to save memory.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from compose.errors import ConfigError, or_say

PAGE = 4096  # bytes; with direct access places, sizes and addresses must be multiples of it
UNIT = PAGE // 4  # elements
MARK = ".compose-scratch"
_WORDS = "Files of a run of dtensor-compose: removed when it ends, or else when the next one begins.\n"
_KEY = "optimizer.offload_dir"
_OWN = re.compile(r"\d+\.exp_avg(_sq)?")  # names of the files that are made here


class ScratchFolder:
    """A folder that belongs to this process alone until :meth:`remove` or the end of the process.

    Files that a killed run left are removed: regular files of this module's names, in a folder with its
    mark. Links are never followed. With ``must_lock`` a file system without locks is refused, where
    nobody can know if the folder is in use.
    """

    def __init__(self, path: Path, must_lock: bool = False) -> None:
        self.path = path
        with or_say(f"{_KEY}: cannot write to {self.path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            if path.is_symlink():
                raise _refused(f"{path} is a link; remove it, or choose another folder")
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self._take(must_lock)
        except BaseException:
            os.close(self.fd)
            raise

    def _take(self, must_lock: bool) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refused(f"{self.path} is in use by another run") from None
        except OSError:
            if must_lock:
                raise
        held = sorted(os.listdir(self.fd))
        marked = MARK in held and self._regular(MARK)
        for name in held:
            if not marked or (_OWN.fullmatch(name) and not self._regular(name)):
                raise _refused(
                    f"{self.path} holds {name!r}, which no run made there; choose another folder, or"
                    " take it away"
                )
        with or_say(f"{_KEY}: cannot write to {self.path}"):
            self._empty()
            if not held:
                with os.fdopen(self.open(MARK, os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
                    file.write(_WORDS)

    def open(self, name: str, flags: int = 0) -> int:
        """Open a file of the folder to read and to write."""
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600, dir_fd=self.fd)

    def remove(self) -> None:
        """Remove the files that were made here, and the folder if it holds no others."""
        with contextlib.suppress(OSError):
            self._empty()
            if os.listdir(self.fd) == [MARK]:
                os.unlink(MARK, dir_fd=self.fd)
                self.path.rmdir()
        os.close(self.fd)

    def _empty(self) -> None:
        for name in os.listdir(self.fd):
            if _OWN.fullmatch(name) and self._regular(name):
                os.unlink(name, dir_fd=self.fd)

    def _regular(self, name: str) -> bool:
        return stat.S_ISREG(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode)


def remove_left(folders: Iterable[Path]) -> None:
    """Remove what killed runs left in those ``folders`` that have the mark and are not in use."""
    for folder in folders:
        if not folder.is_symlink() and (folder / MARK).exists():
            with contextlib.suppress(ConfigError, OSError):
                ScratchFolder(folder, must_lock=True).remove()


def _refused(words: str) -> ConfigError:
    return ConfigError(f"{_KEY}: {words}")


class TensorFile:
    """A flat float32 tensor of zeros in a new file, whose space is reserved at once.

    Reads and writes begin at a multiple of 1024 elements, move parts of :func:`page_aligned` memory,
    and go on to the end of its last page.
    """

    def __init__(self, folder: ScratchFolder, name: str, elements: int) -> None:
        self.folder, self.name, self.elements = folder, name, elements
        try:
            fd = folder.open(name, os.O_CREAT | os.O_EXCL)
            try:
                os.posix_fallocate(fd, 0, _whole_pages(max(1, elements)))
            finally:
                os.close(fd)
        except OSError as error:
            raise _refused(
                f"{folder.path} has no room for the optimizer's state ({error.strerror})"
            ) from None

    def mapped(self) -> Tensor:
        """Return the same contents as a tensor that is mapped to the file.

        The tensor takes addresses but no memory until it is touched. Then the system can take its pages
        back.
        """
        return torch.from_file(
            str(self.folder.path / self.name), shared=True, size=self.elements, dtype=torch.float32
        )

    def read(self, start: int, into: Tensor) -> None:
        """Read elements from the file."""
        self._move(os.preadv, start, into)

    def write(self, start: int, values: Tensor) -> None:
        """Write elements to the file."""
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
                    raise OSError(errno.EIO, f"ends at {4 * start + done} bytes")
                done += moved
            if not direct:
                os.fdatasync(fd)  # a page that is not written yet cannot be dropped
                os.posix_fadvise(fd, 4 * start, size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _refused(f"{self.folder.path / self.name}: {error.strerror}") from None
        finally:
            os.close(fd)

    def _opened(self) -> tuple[int, bool]:
        """Return a descriptor, and whether it bypasses the page cache, as some file systems can."""
        with contextlib.suppress(OSError, AttributeError):
            return self.folder.open(self.name, os.O_DIRECT), True
        return self.folder.open(self.name), False


def page_aligned(elements: int, pinned: bool) -> Tensor:
    """Return host memory for a multiple of 1024 float32 elements, from the start of a page on."""
    memory = torch.empty(elements + UNIT, dtype=torch.float32, pin_memory=pinned)
    skip = -memory.data_ptr() % PAGE // 4
    return memory[skip : skip + elements]


def _whole_pages(elements: int) -> int:
    return -(-4 * elements // PAGE) * PAGE
