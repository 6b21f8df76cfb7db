"""The table [data]."""

from dataclasses import dataclass
from typing import Literal

from compose.errors import LocalPath, LocalPaths, Weight


@dataclass(frozen=True)
class Data:
    """The table [data]: what is trained on."""

    path: LocalPaths = "stdlib"
    """stdlib (the source text of Python's standard library), a text file or glob (read as bytes), a
    folder of compose tokenize, or a token file: .bin or .npy; several in a list are mixed."""
    weights: tuple[Weight, ...] = ()
    """Share of each of a list in what is trained on, in any unit; empty: by their sizes."""
    validation: LocalPath = ""
    """What the validation loss is measured on, all of it; named as path is."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Integer type of a .bin token file."""
    separator: int = -1
    """Token id that ends a document in a token file; -1: the file is one document. Text needs none."""
    skip_unreadable: bool = False
    """Name and count an image that cannot be read, and take the next one; else the run stops."""
