"""Folders of anyone's: what is read is theirs, and what is written stays where it was meant to be."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any

LEADS_OUT = "is a link that leads out of its folder; put the file itself there"


def leads_out(path: Path, folder: Path) -> bool:
    """Whether ``path`` in ``folder``, which a person named, is a link to what lies outside of it.

    Hugging Face's cache is one folder in this sense: its snapshots are links to the blobs beside them.
    """
    if not path.is_symlink():
        return False
    root, found = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    roots = [
        root,
        *(each.parent / "blobs" for each in (root, *root.parents) if each.name == "snapshots"),
    ]
    return not any(found.is_relative_to(each) for each in roots)


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


def state_of(path: Path) -> os.stat_result:
    """What the system knows of a regular file, be it by way of a link. Raises OSError where it is none:
    a pipe, say, for which one would wait."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "is no file", str(path))
    return state


def read_file(path: Path) -> bytes:
    """The content of a regular file, be it by way of a link. Raises OSError where it is none."""
    state_of(path)
    return path.read_bytes()


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a small file so that a reader finds the old one or the new one, never a part.

    A link at ``path`` is replaced, and not followed. Raises OSError.
    """
    aside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    # "x" follows no link either.
    with aside.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
