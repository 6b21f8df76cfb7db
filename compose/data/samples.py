"""The sets of samples of ``train.seq_len`` tokens that ``data.path`` can name.

    text, the standard library      bytes, documents ended by 256        windows of one long row
    a .bin or .npy token file       ids, documents ended by a separator  windows of one long row
    a folder of `compose tokenize`  of text: windows; of chats: whole conversations, packed

A set numbers the samples of an epoch, and batches.py decides their order.
"""

import bisect
import functools
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from compose.config.tables import Data
from compose.data.documents import ARROW, JSON_LINES, PACKED
from compose.data.token_files import (
    MANIFEST,
    READERS,
    ArrayFile,
    TokenRow,
    TokenSet,
    as_table,
    check_ids,
    open_bin,
    open_npy,
    open_token_set,
)
from compose.data.tokenizer import SEPARATOR
from compose.errors import ConfigError, or_say
from compose.object_storage import as_path, files_at
from compose.ops.batch import IGNORE

_CHECKED = 1 << 27  # tokens of a file checked at the start; the rest are checked when they are read


def pack(windows: Tensor, ends: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a model, each int64 (B, L), from windows of tokens, int64 (B, L + 1).

    ``ends``, bool (B, L), tells which tokens are the last of their documents.
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    document_ids = ends.cumsum(1) - ends.long()
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    starts = torch.where(ends, places + 1, 0).roll(1, 1)
    starts[:, 0] = 0
    return {
        "tokens": tokens.contiguous(),
        "targets": targets.masked_fill(ends, IGNORE),
        "positions": places - starts.cummax(1).values,
        "document_ids": document_ids,
    }


def random_batch(samples: int, seq_len: int, vocab_size: int, seed: int) -> dict[str, Tensor]:
    """Return a batch that makes a proof hard, with random tokens and documents of random lengths.

    The share of ignored targets grows from row to row, up to half. Every second row has documents with
    a mean of 8 tokens, so that many begin near any place. The others have one long document, so that
    with any cut of the sequence each part attends to each part before it.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, seq_len + 1)
    # The last token of the vocabulary ends a document, and is used only for that.
    windows = torch.randint(max(1, vocab_size - 1), shape, generator=generator)
    ends = torch.rand(shape, generator=generator) < 1 / 8
    edge = max(1, seq_len // 64)
    ends[::2, edge:-edge] = False
    ends[::2, edge - 1] = True
    batch = pack(windows.masked_fill(ends, vocab_size - 1), ends[:, :-1])
    ignored = torch.linspace(0, 0.5, samples)[:, None]
    drop = torch.rand(batch["targets"].shape, generator=generator) < ignored
    return {**batch, "targets": batch["targets"].masked_fill(drop, IGNORE)}


class Conversations:
    """The samples of a token set of chats, each with as many conversations as fit.

    In a conversation of n tokens, the first n - 1 are inputs of the model. A longer one is cut to
    ``seq_len`` inputs, and dropped if no target is left.
    """

    what = "conversation"

    def __init__(self, name: str, token_set: TokenSet, seq_len: int, vocab_size: int) -> None:
        assert token_set.trained is not None
        self.name, self.seq_len, self.vocab_size = name, seq_len, vocab_size
        self.token_set: TokenSet | None = token_set
        self.tokenizer: str | None = token_set.manifest.tokenizer.sha256
        self.tokens, self.trained = token_set.tokens, token_set.trained
        self.starts = np.concatenate([[0], token_set.ends[:-1]]).astype(np.int64)
        sizes = np.maximum(token_set.ends - self.starts - 1, 0)  # another program's may be empty
        limits = self.limits(sizes)
        self.lengths = np.minimum(sizes, limits)
        for number in np.flatnonzero(sizes > limits).tolist():
            if not self._learnt(number, int(limits[number])).any():
                self.lengths[number] = 0
        self.bins = self.binned()
        self.cut = np.flatnonzero(self.lengths < sizes)
        if not self.bins:
            raise ConfigError(
                f"{name} has no {self.what} with something to learn within train.seq_len {seq_len}"
            )

    def limits(self, sizes: np.ndarray) -> np.ndarray:
        """Return the most inputs of each conversation, of so many inputs each."""
        return np.full_like(sizes, self.seq_len)

    def binned(self) -> list[list[int]]:
        """Return the conversations of each sample."""
        return pack_into_bins(self.lengths, self.seq_len)

    @property
    def content(self) -> str:
        """A digest of the tokens and of the marks of what is learnt."""
        return f"{self.tokens.digest}/{self.trained.digest}"

    @property
    def packing(self) -> str:
        """How many conversations share a sample, and how full it is, on average."""
        many, full = np.count_nonzero(self.lengths), self.lengths.sum() / self.seq_len
        samples = len(self.bins)
        return f"{many / samples:.1f} conversations in a sample, {full / samples:.1%} full"

    def __len__(self) -> int:
        return len(self.bins)

    def table(self) -> str:
        """Return what a run learns of the set in an epoch, as a table."""
        assert self.token_set is not None
        ends, manifest, used = self.token_set.ends, self.token_set.manifest, int(self.lengths.sum())
        cut, learnt, many = 0, manifest.learnt, len(self.bins)
        for number in self.cut.tolist():
            size, kept = int(ends[number] - self.starts[number]) - 1, int(self.lengths[number])
            cut += size - kept
            learnt -= int(self._learnt(number, size)[kept:].sum())
        return as_table(
            [
                ("rows", manifest.rows, ""),
                ("replies", manifest.replies, ""),
                ("conversations", len(ends), ""),
                ("cut", len(self.cut), f"at train.seq_len {self.seq_len:,}: {cut:,} tokens are lost"),
                ("left out", int((self.lengths == 0).sum()), "of these: nothing to learn remains"),
                ("tokens learnt", learnt, f"in an epoch, of {used:,}"),
                ("samples", many, f"{100 * used / (many * self.seq_len):.1f} % full"),
            ]
        )

    def _learnt(self, number: int, length: int) -> np.ndarray:
        start = int(self.starts[number])
        return self.trained.read(start + 1, start + 1 + length) > 0

    def read(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        """Return one sample, as ``Samples.read``; unused places form a document at position -1."""
        length = self.seq_len
        tokens, targets = np.zeros(length, np.int64), np.full(length, IGNORE, np.int64)
        positions, documents = np.full(length, -1, np.int64), np.zeros(length, np.int64)
        at = 0
        for document, number in enumerate(self.bins[index]):
            size, start = int(self.lengths[number]), int(self.starts[number])
            here = slice(at, at + size)
            ids = self.tokens.read(start, start + size + 1)
            check_ids(ids, self.name, self.vocab_size)
            tokens[here] = ids[:-1]
            targets[here] = np.where(self._learnt(number, size), ids[1:], IGNORE)
            positions[here] = np.arange(size)
            documents[here] = document
            at += size
        documents[at:] = len(self.bins[index])
        names = ("tokens", "targets", "positions", "document_ids")
        values = map(torch.from_numpy, (tokens, targets, positions, documents))
        return dict(zip(names, values, strict=True))


def pack_into_bins(lengths: Sequence[int] | np.ndarray, size: int) -> list[list[int]]:
    """Put items into few bins of one size: best fit, longest first (Johnson 1974, 10.1137/0203025)."""
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # the open bins, by the space left in them
    spaces: list[int] = []  # the keys of open_bins, ascending
    lengths = np.asarray(lengths)
    for item in np.argsort(-lengths, kind="stable"):
        length = int(lengths[item])
        if length == 0:
            break
        place = bisect.bisect_left(spaces, length)
        if place == len(spaces):
            space, chosen = size, len(bins)
            bins.append([])
        else:
            space = spaces[place]
            chosen = open_bins[space].pop()
            if not open_bins[space]:
                del open_bins[space]
                spaces.pop(place)
        bins[chosen].append(int(item))
        left = space - length
        if left:
            if left not in open_bins:
                bisect.insort(spaces, left)
            open_bins.setdefault(left, []).append(chosen)
    return sorted(sorted(each) for each in bins)


class Samples(Protocol):
    """A numbered set of samples of one length, from ``open_samples`` or another ``Task.open``."""

    name: str  # the name that the user gave
    token_set: TokenSet | None
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
        learnt), ``positions`` (from 0 in each document; -1 outside of them) and ``document_ids``.
        """
        ...


@dataclass(eq=False)
class Windows:
    """Samples cut from one long row: sample i has tokens i L to (i + 1) L, and targets one later."""

    name: str
    row: TokenRow
    separator: int
    seq_len: int
    vocab_size: int
    tokenizer: str | None = None
    token_set: TokenSet | None = None

    def __post_init__(self) -> None:
        if len(self.row) < self.seq_len + 1:
            raise ConfigError(
                f"{self.name} has {len(self.row)} tokens; one sample needs train.seq_len + 1 ="
                f" {self.seq_len + 1}"
            )
        # A set's tokenizer is known.
        for block in self.row.blocks(_CHECKED) if self.token_set is None else ():
            check_ids(block, self.name, self.vocab_size)

    @property
    def content(self) -> str:
        """The digest of the row."""
        return self.row.digest

    @property
    def packing(self) -> str:
        """How many documents a sample cuts from the row on average, if that is known."""
        many = len(self.token_set.ends) / len(self) if self.token_set else 0
        return f"windows of one row of tokens{f', {many:.1f} documents in each' if many else ''}"

    def __len__(self) -> int:
        return (len(self.row) - 1) // self.seq_len

    def read(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        """Return one sample, as ``Samples.read``."""
        start = index * self.seq_len
        window = self.row.read(start, start + self.seq_len + 1)
        check_ids(window, self.name, self.vocab_size)
        if self.token_set is None:
            ends = window[:-1] == self.separator
        else:  # a document may begin with the token that ends one, as GPT-2's
            places = np.arange(start + 1, start + self.seq_len + 1)
            first, last = np.searchsorted(self.token_set.ends, [places[0], places[-1] + 1])
            ends = np.isin(places, self.token_set.ends[first:last])
        batch = pack(torch.from_numpy(window)[None], torch.from_numpy(ends)[None])
        return {name: value[0] for name, value in batch.items()}


def open_samples(
    path: str, data: Data, seq_len: int, vocab_size: int, pairs: type[Conversations] | None = None
) -> Samples:
    """Open the samples at ``path``; ``pairs`` is the class of those of a token set of pairs."""
    if path == "stdlib":
        return Windows(path, _stdlib(), SEPARATOR, seq_len, vocab_size, "")
    folder = as_path(path)
    if folder.is_dir():
        if not (folder / MANIFEST).exists():
            raise ConfigError(f"{path} {_what_it_is(folder, path)}")
        return _of_token_set(path, open_token_set(folder), seq_len, vocab_size, pairs)
    paths = files_at(path)
    if not paths:
        raise ConfigError(f"no file at {path}")
    openers: dict[str, Callable[[Path], ArrayFile]] = {
        ".bin": lambda file: open_bin(file, path, data.token_dtype),
        ".npy": lambda file: open_npy(file, path),
    }
    token_files = [each for each in paths if each.suffix.lower() in openers]
    if token_files and len(paths) > 1:
        raise ConfigError(
            f"{path} names {len(paths)} files, {token_files[0].name} among them;"
            " a token file stands alone"
        )
    _refuse_what_is_no_text(path, paths)
    with or_say(f"cannot read {path}"):
        if not token_files:
            return Windows(path, _bytes_of(paths), SEPARATOR, seq_len, vocab_size, "")
        tokens = openers[paths[0].suffix.lower()](paths[0])
    if data.separator >= vocab_size:
        raise ConfigError(
            f"data.separator {data.separator} is outside the vocabulary; model.vocab_size {vocab_size}"
            f" allows 0 to {vocab_size - 1}"
        )
    return Windows(path, TokenRow([tokens]), data.separator, seq_len, vocab_size)


def _refuse_what_is_no_text(name: str, paths: Sequence[Path]) -> None:
    """Raise ConfigError for files of documents; among other text a JSON file is text too."""
    packed = [each.name for each in paths if each.suffix.lower() in PACKED]
    if packed:
        raise ConfigError(f"{name}: {packed[0]} is compressed; unpack it first")
    tables = [each for each in paths if each.suffix.lower() in ARROW]
    if tables or all(each.suffix.lower() in JSON_LINES for each in paths):
        raise ConfigError(
            f"{name}: {(tables or paths)[0].name} would be read as bytes, not as the documents in it;"
            " make a folder of tokens first: python -m compose tokenize --tokenizer tokenizer.json"
            f" --out DIR {name}"
        )


def _what_it_is(folder: Path, path: str) -> str:
    if any(folder.glob("tokens-*.bin")) or (folder / ".job.json").exists():
        return "is not whole yet; run the same `python -m compose tokenize` again to finish it"
    if any(folder.glob("*.arrow")) or (folder / "dataset_dict.json").exists():
        command = f"python -m compose tokenize --tokenizer tokenizer.json --out DIR {path}"
        return f"is a folder of datasets.save_to_disk; make a folder of tokens first: {command}"
    return f"is a folder without {MANIFEST}; name its files, as {path}/*, or tokenize them first"


def _of_token_set(
    path: str, token_set: TokenSet, seq_len: int, vocab_size: int, pairs: type[Conversations] | None
) -> Samples:
    tokenizer = token_set.manifest.tokenizer
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{path} has ids up to {tokenizer.vocab_size - 1}; set model.vocab_size to at least"
            f" {tokenizer.vocab_size} (it is {vocab_size})"
        )
    if token_set.manifest.kind == "chat":
        return Conversations(path, token_set, seq_len, vocab_size)
    if token_set.manifest.kind == "pairs":
        if pairs is None:
            raise ConfigError(f"{path} holds pairs of replies; set dpo.beta = 0.1 to learn from them")
        return pairs(path, token_set, seq_len, vocab_size)
    row, end = token_set.tokens, tokenizer.end
    return Windows(path, row, end, seq_len, vocab_size, tokenizer.sha256, token_set)


@functools.cache
def _stdlib() -> TokenRow:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(root).parts)
    )
    return _bytes_of(sorted(files, key=lambda path: path.relative_to(root).parts))


def _bytes_of(paths: Iterable[Path]) -> TokenRow:
    end = np.array([SEPARATOR], dtype=np.uint16)
    with ThreadPoolExecutor(READERS) as readers:
        texts = readers.map(lambda path: path.read_bytes(), paths)
    parts = [part for text in texts for part in (np.frombuffer(text, dtype=np.uint8), end)]
    return TokenRow([np.concatenate([*parts, end[:0]]).astype(np.uint16)])
