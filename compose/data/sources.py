"""What ``data.path`` can name, each as a set of samples of ``train.seq_len`` tokens.

    text, the standard library    bytes, documents ended by 256        windows of one long row
    a .bin or .npy token file     ids, documents ended by a separator  windows of one long row
    a folder of `compose tokenize`  of text: windows; of chats: whole conversations, packed

A set numbers the samples of an epoch; in which order they are visited, batches.py says.
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

from compose.data.chats import Conversations
from compose.data.options import Data
from compose.data.packing import pack
from compose.data.rows import Row, Stored, check_ids
from compose.data.token_files import open_bin, open_npy
from compose.data.token_set import MANIFEST, TokenSet, open_token_set
from compose.data.tokenizer import SEPARATOR
from compose.errors import ConfigError

_CHECKED = 1 << 27  # tokens of a file whose ids are checked at the start; the rest, as they are read


class Samples(Protocol):
    """name: as the user gave it. token_set: that they are of, if they are of one. tokenizer: SHA-256 of
    its file, empty for bytes, None where nobody knows. content: what tells them from other tokens."""

    name: str
    token_set: TokenSet | None
    tokenizer: str | None

    @property
    def content(self) -> str: ...

    def __len__(self) -> int:
        """Samples of an epoch, at least 1."""
        ...

    def read(self, index: int) -> dict[str, Tensor]:
        """One sample: int64 tensors (L,) ``tokens``, ``targets`` (IGNORE where nothing is learnt),
        ``positions`` (from 0 in each document; -1 where there is none) and ``document_ids``.

        Raises ConfigError for a token id outside the vocabulary.
        """
        ...


class Windows:
    """Sample i is tokens i L to (i + 1) L of a row, and its targets are one further on.

    Raises ConfigError if there is no whole sample, or an id that the model has no row for.
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
        self.name, self.row, self.separator = name, row, separator
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.tokenizer, self.token_set = tokenizer, token_set
        if len(row) < seq_len + 1:
            raise ConfigError(
                f"{name} has {len(row)} tokens; one sample needs train.seq_len + 1 = {seq_len + 1}"
            )
        for block in row.blocks(_CHECKED) if token_set is None else ():  # else its tokenizer is known
            check_ids(block, name, vocab_size)

    @property
    def content(self) -> str:
        return self.row.digest

    def __len__(self) -> int:
        return (len(self.row) - 1) // self.seq_len

    def read(self, index: int) -> dict[str, Tensor]:
        window = self.row.read(index * self.seq_len, (index + 1) * self.seq_len + 1)
        check_ids(window, self.name, self.vocab_size)
        batch = pack(torch.from_numpy(window)[None], self.separator)
        return {name: value[0] for name, value in batch.items()}


def open_samples(path: str, data: Data, seq_len: int, vocab_size: int) -> Samples:
    """The samples at ``path``, read as ``data`` says. Raises ConfigError, without the key's name."""
    if path == "stdlib":
        return Windows(path, _stdlib(), SEPARATOR, seq_len, vocab_size, "")
    given = os.path.expanduser(path)
    if os.path.isdir(given):
        if not (Path(given) / MANIFEST).exists():
            raise ConfigError(f"{path} {_what_it_is(Path(given), path)}")
        return _of_token_set(path, open_token_set(Path(given)), seq_len, vocab_size)
    found = [given] if os.path.isfile(given) else glob.glob(given, recursive=True)
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
