"""Files in folders that anyone may have made: reads and writes stay inside the folder."""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any

LEADS_OUT = "is a link that leads out of its folder; put the file itself there"


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is a link to a place outside of ``folder``.

    Hugging Face's cache counts as one folder: its snapshots are links to the blobs beside them.

    Args:
        path: A path in ``folder``.
        folder: A folder that a person named.

    Returns:
        True for a link that leads out.
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
    """Open a regular file that is no link, as ``open`` does; text is UTF-8.

    Args:
        path: The file.
        mode: As in ``open``.
        buffering: As in ``open``.

    Returns:
        The open file, which the caller closes.

    Raises:
        OSError: The path is a symbolic link, which could lead anywhere, or no regular file. A pipe, for
            example, could block forever.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)

    try:
        encoding = None if "b" in mode else "utf-8"
        file = open(path, mode, buffering, encoding, opener=opener)  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no file", str(path))
    return file


def read_own(path: Path) -> bytes:
    """Return the content of a regular file that is no link.

    Raises:
        OSError: As :func:`open_own`, or the file cannot be read.
    """
    with open_own(path) as file:
        return file.read()


def state_of(path: Path) -> os.stat_result:
    """Return the system's data about a regular file; links are followed.

    Raises:
        OSError: It is no regular file. A pipe, for example, could block forever.
    """
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "is no file", str(path))
    return state


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; links are followed.

    Raises:
        OSError: It is no regular file, or cannot be read.
    """
    state_of(path)
    return path.read_bytes()


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a small file so that a reader finds the old file or the new one, never a part.

    A link at ``path`` is replaced, and not followed.

    Args:
        path: The file.
        content: Its content; text is written as UTF-8.

    Raises:
        OSError: The file cannot be written.
    """
    aside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    # The mode "x" does not follow links either.
    with aside.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
