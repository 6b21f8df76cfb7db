"""Folders of anyone's: what is read is theirs, and what is written stays where it was meant to be."""

import contextlib
import os
from pathlib import Path

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


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that a reader finds the old one or the new one, never a part.

    A link at ``path`` is replaced, and not followed. Raises OSError.
    """
    aside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    # "x" follows no link either.
    with aside.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
