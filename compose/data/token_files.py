"""Tokens in files: rows of ids, token files, and the folders that ``python -m compose tokenize`` makes.

    manifest.json        what is in the folder; written last, so a folder that has it is whole
    tokens-00000.bin     ids, little-endian; the shards, one after another, are a single row
    ends-00000.bin       index: for each document of the shard the place after its last token, int64
    trained-00000.bin    only for chats: a byte for each token, 1 where it is learnt
    tokenizer.json ...   the tokenizer, and the files that belong to it

A document of text ends with the tokenizer's end token, and may span shards. A document of chats has no
end token, and lies in one shard.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from compose.config.json_files import Count, read_json
from compose.data.tokenizer import tokenizer_files
from compose.errors import LEADS_OUT, ConfigError, fill, leads_out, or_say, refuse_link_out, state_of
from compose.object_storage import Remote

_BLOCK = 1 << 22  # elements in memory at once while a row is checked
_WHOLE = 1 << 26  # a digest reads every element of files up to this count
_SPREAD = 1024  # blocks that a digest reads of a longer row
READERS = 16  # files or blocks read at once: object storage answers slowly, but many at a time
_SPREAD_BLOCK = 1 << 13  # elements in each of these blocks
# The codes of types in an .idx file (megatron/core/datasets/indexed_dataset.py, DType).
_MAGIC, _TYPES = b"MMIDIDX\x00\x00", {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# How the header of 1,024 bytes begins that llm.c puts before its tokens (dev/data/data_common.py).
_LLM_C = [np.array(head, "<i4").tobytes() for head in ((20240520, 1), (20240801, 7))]
MANIFEST = "manifest.json"
FORMAT = 1


class ArrayFile:
    """A one-dimensional array in a file; ``array[start:stop]`` reads a part of it.

    The file is not mapped: if it were cut short, a read would kill this process (SIGBUS). It is not
    kept open: a token set may have more files than a process may open.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> None:
        self.path, self.dtype, self.count, self.offset = path.absolute(), dtype, count, offset

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.count)
        result = np.empty(max(0, stop - start), self.dtype)
        if not len(result):
            return result
        with or_say(f"{self.path}: can no longer be read"):
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + start * self.dtype.itemsize)
                size = fill(file, result.view(np.uint8).data)
            if size < result.nbytes:
                wanted, there = self.offset + self.count * self.dtype.itemsize, self.path.stat().st_size
                raise ConfigError(
                    f"{self.path}: was cut short since it was opened: has {there:,} bytes of {wanted:,}"
                )
        return result


class TokenRow:
    """One-dimensional arrays, read as if they were joined."""

    def __init__(self, parts: Sequence[np.ndarray | ArrayFile]) -> None:
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
        """A hash of the length and the elements; for a long row in files, of blocks spread evenly."""
        result = hashlib.sha256(str(len(self)).encode())
        if len(self) <= _WHOLE or all(isinstance(part, np.ndarray) for part in self.parts):
            blocks = self.blocks(len(self))
        else:
            last = max(0, len(self) - _SPREAD_BLOCK)
            starts = (last * i // (_SPREAD - 1) for i in range(_SPREAD))
            with ThreadPoolExecutor(READERS) as readers:
                blocks = readers.map(lambda start: self.read(start, start + _SPREAD_BLOCK), starts)
        for block in blocks:
            result.update(block.astype("<u4").tobytes())
        return result.hexdigest()[:16]


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


def open_bin(path: Path, name: str, dtype: str) -> ArrayFile:
    """Open a file of integers alone; if Megatron's index lies beside it, NAME.idx, it has the type."""
    index, said = path.with_suffix(".idx"), "data.token_dtype"
    if index.is_file():
        with index.open("rb") as file:
            head = file.read(len(_MAGIC) + 9)
        if head.startswith(_MAGIC):
            dtype, said = np.dtype(_TYPES.get(head[-1], "f8")).name, index.name
    if dtype == "float64":
        raise ConfigError(f"cannot read {name}: {index.name} says that it holds no integers")
    kind, size = np.dtype(dtype), state_of(path).st_size
    with path.open("rb", buffering=0) as file:
        if file.read(8) in _LLM_C:
            raise ConfigError(
                f"cannot read {name}: it begins with llm.c's header, which is no tokens; cut it off:"
                f" tail -c +1025 {path.name} > NEW.bin"
            )
    if not size or size % kind.itemsize:
        raise ConfigError(f"cannot read {name}: {size:,} bytes are no row of {dtype} ({said})")
    return ArrayFile(path, kind, size // kind.itemsize)


def open_npy(path: Path, name: str) -> ArrayFile:
    """Open the array of a .npy file, whose format the documentation of numpy.lib.format describes."""
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
    return ArrayFile(path, dtype, count, offset)


class _Format(BaseModel):
    format: int


class _Tokenizer(BaseModel):
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    vocab_size: Annotated[int, Field(ge=1, le=1 << 32)]
    end: Annotated[int, Field(ge=-1, lt=1 << 32)]
    """The id that ends a document, -1 if there is none."""


class _Shard(BaseModel):
    name: Annotated[str, Field(pattern="^[0-9]{1,20}$")]
    tokens: Count
    documents: Count


class TokenSetManifest(BaseModel):
    """The used part of a manifest."""

    kind: Literal["text", "chat", "pairs"]
    dtype: Literal["<u2", "<u4"]  # no others: numpy's dtype "O" would follow pointers
    tokenizer: _Tokenizer
    shards: list[_Shard]
    added: bool | None
    rows: Count  # rows that the set was made from
    replies: Count = 0
    learnt: Count = 0  # for chats: the tokens to learn


@dataclass(frozen=True)
class TokenSet:
    """A token set, opened."""

    path: Path
    manifest: TokenSetManifest
    tokens: TokenRow
    ends: np.ndarray
    """The index over the whole row: for each document the place after its last token, int64."""
    trained: TokenRow | None
    """For chats: 1 for each token that is learnt, else 0. None for text."""


def open_token_set(folder: Path) -> TokenSet:
    """Open the token set in ``folder``."""
    path = folder / MANIFEST
    refuse_link_out(path, folder)
    version = read_json(path, _Format).format
    if version != FORMAT:
        raise ConfigError(f"{path}: is of format {version}, this reads {FORMAT}")
    manifest = read_json(path, TokenSetManifest)
    tokenizer, chat = manifest.tokenizer, manifest.kind != "text"
    if tokenizer.end >= tokenizer.vocab_size or (tokenizer.end < 0 and not chat):
        raise ConfigError(f"{path}: tokenizer.end: {tokenizer.end} is no id of its vocabulary")
    problems: list[str] = []
    # A question for each file would take minutes, so a store lists all at once.
    sizes = folder.sizes() if isinstance(folder, Remote) else None

    def files(name: str, dtype: str, what: Literal["tokens", "documents"]) -> list[ArrayFile]:
        results = []
        for shard in manifest.shards:
            file = folder / f"{name}-{shard.name}.bin"
            results.append(ArrayFile(file, np.dtype(dtype), getattr(shard, what)))
            wanted = len(results[-1]) * results[-1].dtype.itemsize
            problems.extend(_file_problems(file, folder, wanted, sizes))
        return results

    tokens = files("tokens", manifest.dtype, "tokens")
    ends = files("ends", "<i8", "documents")
    trained = files("trained", "u1", "tokens") if chat else []
    if problems:
        raise ConfigError(*problems)
    if manifest.kind == "pairs" and any(shard.documents % 2 for shard in manifest.shards):
        raise ConfigError(f"{path}: a shard of pairs has an odd number of documents")
    tokenizer_files(folder)  # a run copies these files
    joined = _joined_ends(folder, manifest.shards, ends)
    return TokenSet(folder, manifest, TokenRow(tokens), joined, TokenRow(trained) if chat else None)


def _file_problems(path: Path, folder: Path, wanted: int, sizes: Mapping[str, int] | None) -> list[str]:
    """Return what is wrong with a file of a token set that should have ``wanted`` bytes.

    ``sizes`` are those of the files of a folder in object storage.
    """
    if path.name not in sizes if sizes is not None else not path.exists():
        return [f"{path}: is missing"]
    if leads_out(path, folder):
        return [f"{path}: {LEADS_OUT}"]
    if sizes is None and not path.is_file():
        return [f"{path}: is no file"]
    size = path.stat().st_size if sizes is None else sizes[path.name]
    return [f"{path}: has {size:,} bytes, not the {wanted:,} of {MANIFEST}"] if size != wanted else []


def _joined_ends(folder: Path, shards: Sequence[_Shard], files: Sequence[ArrayFile]) -> np.ndarray:
    """Return the index of the whole row. Raises ConfigError for ends out of order or of a shard."""
    result, start = [np.zeros(0, np.int64)], 0
    with ThreadPoolExecutor(READERS) as readers:
        contents = readers.map(lambda file: file[:].astype(np.int64), files)
    for shard, file, ends in zip(shards, files, contents, strict=True):
        size = shard.tokens
        if len(ends) and (ends[0] < 0 or ends[-1] > size or (ends[1:] < ends[:-1]).any()):
            path = folder / file.path.name
            raise ConfigError(f"{path}: is no index of the {size:,} tokens of its shard")
        result.append(ends + start)
        start += size
    return np.concatenate(result)


def as_table(rows: Iterable[tuple[str, int | None, str]]) -> str:
    """Return a line for each (name, number, remark); those without a number are left out."""
    lines = [f"  {name:<14}{n:>14,}  {remark}".rstrip() for name, n, remark in rows if n is not None]
    return "\n".join(lines)
