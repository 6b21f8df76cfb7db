"""A folder of files that do not outlive a run. It has a mark; only marked folders are emptied."""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from compose.errors import ConfigError

MARK = ".compose-scratch"
_WORDS = "Files of a run of dtensor-compose: removed when it ends, or else when the next one begins.\n"
_OWN = re.compile(r"\d+\.exp_avg(_sq)?")  # names of the files that are made here


class Scratch:
    """A folder that belongs to this process alone until :meth:`remove` or the end of the process.

    Files that a killed run left are removed: regular files of this module's names, in a folder with its
    mark. Links are never followed.

    Args:
        path: The folder.
        must_lock: Whether to refuse a file system without locks, where nobody can know if it is in use.

    Raises:
        ConfigError: The folder is in use, or was not made here.
    """

    def __init__(self, path: Path, must_lock: bool = False) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            if path.is_symlink():
                raise _refused(path, "is a link", "remove it, or choose another folder")
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError(
                f"optimizer.offload_dir: cannot write to {path}: {error.strerror}"
            ) from None
        try:
            self._take(must_lock)
        except BaseException:
            os.close(self.fd)
            raise

    def _take(self, must_lock: bool) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"optimizer.offload_dir: {self.path} is in use by another run") from None
        except OSError:
            if must_lock:
                raise
        held = sorted(os.listdir(self.fd))
        marked = MARK in held and self._regular(MARK)
        foreign = [name for name in held if not marked or (_named(name) and not self._regular(name))]
        if foreign:
            raise _refused(
                self.path,
                f"holds {foreign[0]!r}, which no run made there",
                "choose another folder, or take it away",
            )
        try:
            self._empty()
            if not held:
                self.create(MARK, _WORDS)
        except OSError as error:
            raise ConfigError(
                f"optimizer.offload_dir: cannot write to {self.path}: {error.strerror}"
            ) from None

    def create(self, name: str, text: str = "") -> None:
        """Create a file."""
        fd = self.open(name, os.O_CREAT | os.O_EXCL)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)

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
            if _named(name) and self._regular(name):
                os.unlink(name, dir_fd=self.fd)

    def _regular(self, name: str) -> bool:
        return stat.S_ISREG(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode)


def remove_left(folders: Iterable[Path]) -> None:
    """Remove what killed runs left in those ``folders`` that have the mark and are not in use."""
    for folder in folders:
        if not folder.is_symlink() and (folder / MARK).exists():
            with contextlib.suppress(ConfigError, OSError):
                Scratch(folder, must_lock=True).remove()


def _named(name: str) -> bool:
    return bool(_OWN.fullmatch(name))


def _refused(path: Path, why: str, cure: str) -> ConfigError:
    return ConfigError(f"optimizer.offload_dir: {path} {why}; {cure}")
