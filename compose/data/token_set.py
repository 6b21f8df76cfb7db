"""Token sets: the folders that ``python -m compose tokenize`` makes, memory-mapped.

    manifest.json        what is in it: written last, so a folder with one is whole
    tokens-00000.bin     ids, little-endian, one shard after another a single row
    ends-00000.bin       index: for each document of the shard the place after its last token, int64
    trained-00000.bin    of chats: a byte for each token, 1 where it is learnt
    tokenizer.json ...   the tokenizer, and what belongs to it

A document of text ends with the tokenizer's end token, and may span shards; one of chats does neither.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from compose.errors import ConfigError

MANIFEST = "manifest.json"
FORMAT = 1


class Row:
    """Arrays of one dim, read as if they were joined."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = list(parts)
        self.starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Elements ``start`` to ``stop``, int64."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < stop and first < len(self.parts):
            begin = int(self.starts[first])
            piece = self.parts[first][start - begin : stop - begin]
            pieces.append(piece.astype(np.int64))
            start += len(piece)
            first += 1
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def head(self, count: int) -> np.ndarray:
        """Some of the first elements, no more than ``count``, without a copy."""
        return self.parts[0][:count]


@dataclass(frozen=True)
class TokenSet:
    """kind: of what it was made. vocab_size: of its tokenizer. end: id that ends a document. ends: the
    index, over the whole row. trained: of chats, what is learnt."""

    path: Path
    kind: Literal["text", "chat"]
    sha256: str
    vocab_size: int
    end: int
    tokens: Row
    ends: np.ndarray
    trained: Row | None


def open_token_set(folder: Path) -> TokenSet:
    """Map the token set in ``folder``. Raises ConfigError with a line for each file that is missing or
    not of the size that the manifest says."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ConfigError(f"{path}: is of format {manifest['format']}, this reads {FORMAT}")
        tokenizer, shards = manifest["tokenizer"], manifest["shards"]
        dtype, kind = np.dtype(manifest["dtype"]), manifest["kind"]
        tokens = [(f"tokens-{s['name']}.bin", dtype, s["tokens"]) for s in shards]
        ends = [(f"ends-{s['name']}.bin", np.dtype("<i8"), s["documents"]) for s in shards]
        trained = [(f"trained-{s['name']}.bin", np.dtype("u1"), s["tokens"]) for s in shards]
        wanted = [*tokens, *ends, *(trained if kind == "chat" else [])]
        problems = [words for each in wanted if (words := _problem(folder, *each))]
        if problems:
            raise ConfigError(*problems)
        row = Row([_map(folder, *each) for each in tokens])
        return TokenSet(
            folder,
            kind,
            tokenizer["sha256"],
            tokenizer["vocab_size"],
            tokenizer["end"],
            row,
            np.concatenate([_map(folder, *e) + row.starts[i] for i, e in enumerate(ends)]),
            Row([_map(folder, *each) for each in trained]) if kind == "chat" else None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error!r}") from None


def _problem(folder: Path, name: str, dtype: np.dtype[Any], count: int) -> str:
    path = folder / name
    if not path.exists():
        return f"{path}: is missing"
    size, wanted = path.stat().st_size, count * dtype.itemsize
    return "" if size == wanted else f"{path}: has {size:,} bytes, not the {wanted:,} of {MANIFEST}"


def _map(folder: Path, name: str, dtype: np.dtype[Any], count: int) -> np.ndarray:
    if not count:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(folder / name, dtype=dtype, mode="r")
