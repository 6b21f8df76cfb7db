"""Rows of token ids: arrays in memory and in files, read as if they were joined."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compose.errors import ConfigError

_BLOCK = 1 << 22  # elements in memory at once while a row is checked
_WHOLE = 1 << 26  # a digest reads every element of files up to this count
_SPREAD = 1024  # blocks that a digest reads of a longer row
_SPREAD_BLOCK = 1 << 13  # elements in each of these blocks


class Stored:
    """A one-dimensional array in a file; ``stored[start:stop]`` reads a part of it.

    The file is not mapped. If another process cut a mapped file short, a read beyond the new end would
    kill this process (SIGBUS). The file is not kept open either: a token set may have more files than a
    process may open. A read raises ConfigError if the file no longer has the wanted elements.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> None:
        """Remember where the array lies; nothing is read."""
        self.path, self.dtype, self.count, self.offset = path.absolute(), dtype, count, offset

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.count)
        found = np.empty(max(0, stop - start), self.dtype)
        if not len(found):
            return found
        room = found.view(np.uint8).data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + start * self.dtype.itemsize)
                while room:
                    size = file.readinto(room)
                    if not size:
                        wanted = self.offset + self.count * self.dtype.itemsize
                        raise ConfigError(
                            f"{self.path}: was cut short since it was opened: has"
                            f" {self.path.stat().st_size:,} bytes of {wanted:,}"
                        )
                    room = room[size:]
        except OSError as error:
            raise ConfigError(f"{self.path}: can no longer be read: {error.strerror}") from None
        return found


class Row:
    """One-dimensional arrays, read as if they were joined."""

    def __init__(self, parts: Sequence[np.ndarray | Stored]) -> None:
        self.parts = list(parts)
        self.starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the elements from ``start`` to ``stop``, int64; fewer if the row ends."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < stop and first < len(self.parts):
            begin = int(self.starts[first])
            piece = self.parts[first][start - begin : stop - begin]
            pieces.append(piece.astype(np.int64))
            start += len(piece)
            first += 1
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def blocks(self, count: int) -> Iterator[np.ndarray]:
        """Yield the first ``count`` elements in blocks, in the dtype in which they are stored."""
        for part in self.parts:
            stop = min(count, len(part))
            for start in range(0, stop, _BLOCK):
                yield part[start : min(start + _BLOCK, stop)]
            count -= stop

    @functools.cached_property
    def digest(self) -> str:
        """A hash that tells one row from another: of the length and of the elements.

        For a long row in files, only blocks are read, spread evenly from first to last.
        """
        found = hashlib.sha256(str(len(self)).encode())
        if len(self) <= _WHOLE or all(isinstance(part, np.ndarray) for part in self.parts):
            blocks = self.blocks(len(self))
        else:
            last = max(0, len(self) - _SPREAD_BLOCK)
            starts = (last * i // (_SPREAD - 1) for i in range(_SPREAD))
            blocks = (self.read(start, start + _SPREAD_BLOCK) for start in starts)
        for block in blocks:
            found.update(block.astype("<u4").tobytes())
        return found.hexdigest()[:16]


def check_ids(tokens: np.ndarray, name: str, vocab_size: int) -> None:
    """Raise ConfigError if an id in ``tokens`` is outside the vocabulary."""
    if not len(tokens):
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"{name} holds token id {low if low < 0 else high}; model.vocab_size {vocab_size} allows 0"
            f" to {vocab_size - 1}"
        )
