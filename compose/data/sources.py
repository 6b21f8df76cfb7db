"""Everything that ``data.path`` can name, each as a set of samples of ``train.seq_len`` tokens.

    text, the standard library      bytes, documents ended by 256        windows of one long row
    a .bin or .npy token file       ids, documents ended by a separator  windows of one long row
    a folder of `compose tokenize`  of text: windows; of chats: whole conversations, packed

A set numbers the samples of an epoch. The module batches.py decides in which order they are visited.
"""

import functools
import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from compose.config.tables import Data
from compose.data.chats import Conversations
from compose.data.documents import JSON_LINES, PACKED
from compose.data.packing import pack
from compose.data.rows import Row, Stored, check_ids
from compose.data.token_files import open_bin, open_npy
from compose.data.token_set import MANIFEST, TokenSet, open_token_set
from compose.data.tokenizer import SEPARATOR
from compose.errors import ConfigError

_CHECKED = 1 << 27  # tokens of a file checked at the start; the rest are checked when they are read


class Samples(Protocol):
    """A numbered set of samples, each of the same length.

    ``open_samples`` opens those of language models; ``Task.open`` may open others.
    """

    name: str
    """The name that the user gave."""
    token_set: TokenSet | None
    """The token set of the samples, if they come from one."""
    tokenizer: str | None
    """SHA-256 of the tokenizer's file; empty for bytes, None if the tokenizer is unknown."""

    @property
    def content(self) -> str:
        """A digest that tells these tokens from other tokens."""
        ...

    def __len__(self) -> int:
        """Return the number of samples in an epoch, at least 1."""
        ...

    def read(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        """Return one sample: tensors by name, ``targets`` and the inputs of the model.

        Those of a language model are int64 (L,): ``tokens``, ``targets`` (IGNORE where nothing is
        learnt), ``positions`` (from 0 in each document; -1 outside of every document) and
        ``document_ids``.
        """
        ...


class Windows:
    """Samples cut from one long row of tokens.

    Sample i has the tokens i L to (i + 1) L of the row. Its targets are the same tokens, one place
    later.
    """

    def __init__(
        self,
        name: str,
        row: Row,
        separator: int,
        seq_len: int,
        vocab_size: int,
        tokenizer: str | None = None,
        token_set: TokenSet | None = None,
    ) -> None:
        """Check the row, and prepare to read it."""
        self.name, self.row, self.separator = name, row, separator
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.tokenizer, self.token_set = tokenizer, token_set
        if len(row) < seq_len + 1:
            raise ConfigError(
                f"{name} has {len(row)} tokens; one sample needs train.seq_len + 1 = {seq_len + 1}"
            )
        for block in row.blocks(_CHECKED) if token_set is None else ():  # a set's tokenizer is known
            check_ids(block, name, vocab_size)

    @property
    def content(self) -> str:
        """The digest of the row."""
        return self.row.digest

    def __len__(self) -> int:
        return (len(self.row) - 1) // self.seq_len

    def read(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        """Return one sample, as ``Samples.read``."""
        window = self.row.read(index * self.seq_len, (index + 1) * self.seq_len + 1)
        check_ids(window, self.name, self.vocab_size)
        batch = pack(torch.from_numpy(window)[None], self.separator)
        return {name: value[0] for name, value in batch.items()}


def open_samples(path: str, data: Data, seq_len: int, vocab_size: int) -> Samples:
    """Open the samples at ``path``."""
    if path == "stdlib":
        return Windows(path, _stdlib(), SEPARATOR, seq_len, vocab_size, "")
    if os.path.isdir(path):
        if not (Path(path) / MANIFEST).exists():
            raise ConfigError(f"{path} {_what_it_is(Path(path), path)}")
        return _of_token_set(path, open_token_set(Path(path)), seq_len, vocab_size)
    found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    paths = sorted(each for each in map(Path, found) if each.is_file())
    if not paths:
        raise ConfigError(f"no file at {path}")
    openers: dict[str, Callable[[Path], Stored]] = {
        ".bin": lambda file: open_bin(file, path, data.token_dtype),
        ".npy": lambda file: open_npy(file, path),
    }
    token_files = [each for each in paths if each.suffix in openers]
    if token_files and len(paths) > 1:
        raise ConfigError(
            f"{path} names {len(paths)} files, {token_files[0].name} among them;"
            " a token file stands alone"
        )
    _refuse_what_is_no_text(path, paths)
    try:
        if not token_files:
            return Windows(path, _text(tuple(paths)), SEPARATOR, seq_len, vocab_size, "")
        tokens = openers[paths[0].suffix](paths[0])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if data.separator >= vocab_size:
        raise ConfigError(
            f"data.separator {data.separator} is outside the vocabulary; model.vocab_size {vocab_size}"
            f" allows 0 to {vocab_size - 1}"
        )
    return Windows(path, Row([tokens]), data.separator, seq_len, vocab_size)


def _refuse_what_is_no_text(name: str, paths: Sequence[Path]) -> None:
    """Raise ConfigError for files of documents; among other text a JSON file is text too."""
    packed = [each.name for each in paths if each.suffix in PACKED]
    if packed:
        raise ConfigError(f"{name}: {packed[0]} is compressed; unpack it first")
    tables = [each for each in paths if each.suffix == ".parquet"]
    if tables or all(each.suffix in JSON_LINES for each in paths):
        raise ConfigError(
            f"{name}: {(tables or paths)[0].name} would be read as bytes, not as the documents in it;"
            " make a folder of tokens first: python -m compose tokenize --tokenizer tokenizer.json"
            f" --out DIR {name}"
        )


def _what_it_is(folder: Path, path: str) -> str:
    if any(folder.glob("tokens-*.bin")) or (folder / ".job.json").exists():
        return "is not whole yet; run the same `python -m compose tokenize` again to finish it"
    return f"is a folder without {MANIFEST}; name its files, as {path}/*, or tokenize them first"


def _of_token_set(path: str, token_set: TokenSet, seq_len: int, vocab_size: int) -> Samples:
    if token_set.vocab_size > vocab_size:
        raise ConfigError(
            f"{path} has ids up to {token_set.vocab_size - 1}; set model.vocab_size to at least"
            f" {token_set.vocab_size} (it is {vocab_size})"
        )
    if token_set.kind == "chat":
        return Conversations(path, token_set, seq_len, vocab_size)
    row, end, tokenizer = token_set.tokens, token_set.end, token_set.sha256
    return Windows(path, row, end, seq_len, vocab_size, tokenizer, token_set)


@functools.cache
def _stdlib() -> Row:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts)
    )
    return _bytes_of(sorted(files, key=lambda path: path.relative_to(root).parts))


@functools.cache
def _text(paths: Sequence[Path]) -> Row:
    return _bytes_of(paths)


def _bytes_of(paths: Iterable[Path]) -> Row:
    end = np.array([SEPARATOR], dtype=np.uint16)
    parts = [part for path in paths for part in (np.frombuffer(path.read_bytes(), dtype=np.uint8), end)]
    return Row([np.concatenate([*parts, end[:0]]).astype(np.uint16)])
