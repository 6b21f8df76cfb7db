"""Token files: one row of integers in a .bin file, or in a .npy file of numpy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from compose.data.rows import Stored
from compose.errors import ConfigError, state_of

# The codes of types in an .idx file (megatron/core/datasets/indexed_dataset.py, DType).
_MAGIC, _TYPES = b"MMIDIDX\x00\x00", {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_bin(path: Path, name: str, dtype: str) -> Stored:
    """Open a file that holds integers and nothing else.

    If the index of Megatron lies beside it, as NAME.idx, this says the type.
    """
    index, said = path.with_suffix(".idx"), "data.token_dtype"
    if index.is_file():
        with index.open("rb") as file:
            head = file.read(len(_MAGIC) + 9)
        if head.startswith(_MAGIC):
            dtype, said = np.dtype(_TYPES.get(head[-1], "f8")).name, index.name
    if dtype == "float64":
        raise ConfigError(f"cannot read {name}: {index.name} says that it holds no integers")
    kind, size = np.dtype(dtype), state_of(path).st_size
    if not size or size % kind.itemsize:
        raise ConfigError(f"cannot read {name}: {size:,} bytes are no row of {dtype} ({said})")
    return Stored(path, kind, size // kind.itemsize)


def open_npy(path: Path, name: str) -> Stored:
    """Open the array of a .npy file.

    Its format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
    """
    size = state_of(path).st_size
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":
            raise ConfigError(f"{name} is an archive of arrays; a token file is one array")
        file.seek(0)
        try:
            readers: dict[tuple[int, int], Callable[..., Any]] = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }
            shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
        except Exception as error:  # numpy parses it as Python, and lets most errors of that through
            words = next(iter(str(error).splitlines()), "")[:80] or type(error).__name__
            raise ConfigError(f"cannot read {name}: its header is not numpy's: {words}") from None
        offset = file.tell()
    if len(shape) != 1 or dtype.kind not in "iu":
        what = f"{dtype} of shape {shape}"
        raise ConfigError(f"{name} holds {what[:80]}; a token file is one row of integers")
    (count,) = shape
    wanted = offset + count * dtype.itemsize
    if count < 0 or size < wanted:
        raise ConfigError(
            f"cannot read {name}: it has {size:,} bytes, which are not {count} of {dtype}"
        )
    return Stored(path, dtype, count, offset)
