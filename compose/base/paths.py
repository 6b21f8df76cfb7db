"""Paths that a person gives, as a key of a file or as a word of a command line."""

import os
import re
from typing import Annotated

from pydantic import AfterValidator

_STORE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?")


def local_path(text: str) -> str:
    """Return ``text`` with a home folder in place of ``~``.

    Variables are not expanded: they differ between nodes, and where one is unset the path is another.

    Raises:
        ValueError: It would become a folder of that very name, which nobody means.
    """
    if _STORE.match(text):
        raise ValueError("is in a remote store, which cannot be used; give a folder of this machine")
    if found := _VARIABLE.search(text):
        raise ValueError(f"has {found[0]}, and variables are not expanded here; write its value, or ~")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"names no known home folder; a folder of that name is ./{text}")
    return path


def _each(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return local_path(value) if isinstance(value, str) else tuple(map(local_path, value))


# Types of keys that name a file or a folder, and may have other values too, as "stdlib".
LocalPath = Annotated[str, AfterValidator(local_path)]
LocalPaths = Annotated[str | tuple[str, ...], AfterValidator(_each)]
