"""Files in a folder that anyone may have written to before: no link there leads out of it."""

import errno
import os
import stat
from pathlib import Path
from typing import Any


def open_own(path: Path, mode: str = "rb", buffering: int = -1) -> Any:
    """``open``, of a regular file that lies in its folder itself; text is UTF-8.

    Raises OSError where it is a symbolic link, which could lead anywhere, or no file: a pipe, say, for
    which one would wait.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)

    try:
        encoding = None if "b" in mode else "utf-8"
        file = open(path, mode, buffering, encoding, opener=opener)  # noqa: SIM115 (the caller's)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no file", str(path))
    return file


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader finds the old one or the new one, never a part."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)  # what a broken attempt has left
    with open_own(aside, "x") as file:  # made here: nobody's link
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
