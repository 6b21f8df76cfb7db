"""Token sets: the folders that ``python -m compose tokenize`` makes.

    manifest.json        what is in the folder; written last, so a folder that has it is whole
    tokens-00000.bin     ids, little-endian; the shards, one after another, are a single row
    ends-00000.bin       index: for each document of the shard the place after its last token, int64
    trained-00000.bin    only for chats: a byte for each token, 1 where it is learnt
    tokenizer.json ...   the tokenizer, and the files that belong to it

A document of text ends with the tokenizer's end token, and may span shards. A document of chats has no
end token, and lies in one shard.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from compose.config.json_files import Count, read_json
from compose.data.rows import Row, Stored
from compose.data.tokenizer import carried
from compose.errors import LEADS_OUT, ConfigError, leads_out

MANIFEST = "manifest.json"
FORMAT = 1


class _Format(BaseModel):
    format: int


class _Tokenizer(BaseModel):
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    vocab_size: Annotated[int, Field(ge=1, le=1 << 32)]
    end: Annotated[int, Field(ge=-1, lt=1 << 32)]


class _Shard(BaseModel):
    name: Annotated[str, Field(pattern="^[0-9]{1,20}$")]
    tokens: Count
    documents: Count


class _Manifest(BaseModel):
    """The used part of a manifest.

    The dtypes are listed: numpy's dtype "O" would follow pointers.
    """

    kind: Literal["text", "chat"]
    dtype: Literal["<u2", "<u4"]
    tokenizer: _Tokenizer
    shards: list[_Shard]
    added: bool | None = None
    rows: Count | None = None
    replies: Count | None = None
    learnt: Count | None = None


@dataclass(frozen=True)
class TokenSet:
    """A token set, opened."""

    path: Path
    kind: Literal["text", "chat"]
    """The kind of documents that it was made from."""
    sha256: str
    """SHA-256 of the tokenizer's file."""
    vocab_size: int
    """Size of the tokenizer's vocabulary."""
    end: int
    """The id that ends a document, -1 if there is none."""
    tokens: Row
    ends: np.ndarray
    """The index over the whole row: for each document the place after its last token, int64."""
    trained: Row | None
    """For chats: 1 for each token that is learnt, else 0. None for text."""
    added: bool | None = None
    """Whether documents of text have the tokens that their tokenizer adds to a text. None for chats,
    and for sets of an earlier version, which added none."""
    rows: int | None = None
    """Rows that it was made from; None if an older version made it."""
    replies: int | None = None
    """For chats: the replies to learn, as ``rows``."""
    learnt: int | None = None
    """For chats: the tokens to learn, as ``rows``."""


def open_token_set(folder: Path) -> TokenSet:
    """Open the token set in ``folder``."""
    path = folder / MANIFEST
    if leads_out(path, folder):
        raise ConfigError(f"{path}: {LEADS_OUT}")
    version = read_json(path, _Format).format
    if version != FORMAT:
        raise ConfigError(f"{path}: is of format {version}, this reads {FORMAT}")
    manifest = read_json(path, _Manifest)
    tokenizer, shards, chat = manifest.tokenizer, manifest.shards, manifest.kind == "chat"
    if tokenizer.end >= tokenizer.vocab_size or (tokenizer.end < 0 and not chat):
        raise ConfigError(f"{path}: tokenizer.end: {tokenizer.end} is no id of its vocabulary")
    kind = np.dtype(manifest.dtype)
    tokens = [_File(folder, f"tokens-{s.name}.bin", kind, s.tokens) for s in shards]
    ends = [_File(folder, f"ends-{s.name}.bin", np.dtype("<i8"), s.documents) for s in shards]
    trained = [_File(folder, f"trained-{s.name}.bin", np.dtype("u1"), s.tokens) for s in shards if chat]
    problems = [words for each in (*tokens, *ends, *trained) if (words := each.problem())]
    if problems:
        raise ConfigError(*problems)
    carried(folder)  # a run copies these files
    row = Row([each.stored() for each in tokens])
    return TokenSet(
        folder,
        manifest.kind,
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.end,
        row,
        _joined(row, ends),
        Row([each.stored() for each in trained]) if chat else None,
        manifest.added,
        manifest.rows,
        manifest.replies,
        manifest.learnt,
    )


@dataclass(frozen=True)
class _File:
    folder: Path
    name: str
    dtype: np.dtype[Any]
    count: int

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.folder / self.name

    def problem(self) -> str:
        """Return what is wrong with the file, or an empty string."""
        if not self.path.exists():
            return f"{self.path}: is missing"
        if leads_out(self.path, self.folder):
            return f"{self.path}: {LEADS_OUT}"
        if not self.path.is_file():
            return f"{self.path}: is no file"
        size, wanted = self.path.stat().st_size, self.count * self.dtype.itemsize
        if size == wanted:
            return ""
        return f"{self.path}: has {size:,} bytes, not the {wanted:,} of {MANIFEST}"

    def stored(self) -> Stored:
        """Return the array in the file, not read yet."""
        return Stored(self.path, self.dtype, self.count)


def _joined(row: Row, files: Sequence[_File]) -> np.ndarray:
    """Return the index of the whole row. Raises ConfigError for ends out of order or of a shard."""
    found = [np.zeros(0, np.int64)]
    for number, file in enumerate(files):
        ends, size = file.stored()[:].astype(np.int64), len(row.parts[number])
        if len(ends) and (ends[0] < 0 or ends[-1] > size or (ends[1:] < ends[:-1]).any()):
            raise ConfigError(f"{file.path}: is no index of the {size:,} tokens of its shard")
        found.append(ends + row.starts[number])
    return np.concatenate(found)


def as_table(rows: Iterable[tuple[str, int | None, str]]) -> str:
    """Return a line for each (name, number, remark); those without a number are left out."""
    lines = [f"  {name:<14}{n:>14,}  {remark}".rstrip() for name, n, remark in rows if n is not None]
    return "\n".join(lines)
