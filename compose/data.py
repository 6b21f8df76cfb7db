"""Token sources, and batches whose samples are a function of (seed, step) alone.

A source is one long row of tokens. Sample i of an epoch is a window of ``seq_len`` tokens and the
targets one further on; the epoch's windows are visited in an order drawn from the seed. What a rank
reads is its slice of the global batch, so the mesh cannot change what is trained on, and the whole
state is a count of samples.
"""

import functools
import glob
import os
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compose.config import Data
from compose.errors import ConfigError
from compose.loss import IGNORE
from compose.tokenizer import SEPARATOR

_CHECKED = 1 << 27  # tokens of a file whose ids are checked at the start; the rest, as they are read


@dataclass(frozen=True)
class Source:
    """One row of token ids (int array of any width) in which ``separator`` ends a document."""

    name: str
    tokens: np.ndarray
    separator: int

    def window(self, start: int, length: int) -> np.ndarray:
        """``length`` tokens from ``start`` on, int64."""
        return self.tokens[start : start + length].astype(np.int64)


@functools.cache
def open_source(data: Data) -> Source:
    """The tokens that ``[data]`` names. Raises ConfigError for a missing or unreadable file."""
    if data.path == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = (
            path
            for path in root.rglob("*.py")
            if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts)
        )
        return Source("stdlib", *_read_bytes(sorted(files, key=lambda p: p.relative_to(root).parts)))
    given = os.path.expanduser(data.path)
    if os.path.isdir(given):
        raise ConfigError(f"data.path: {data.path} is a folder; name its files, as {data.path}/*")
    found = [given] if os.path.isfile(given) else glob.glob(given, recursive=True)
    paths = sorted(path for path in map(Path, found) if path.is_file())
    if not paths:
        raise ConfigError(f"data.path: no file at {data.path}")
    openers: dict[str, Callable[[Path], np.ndarray]] = {
        ".bin": lambda path: np.memmap(path, dtype=data.token_dtype, mode="r"),
        ".npy": lambda path: np.load(path, mmap_mode="r"),
    }
    token_files = [path for path in paths if path.suffix in openers]
    if token_files and len(paths) > 1:
        raise ConfigError(
            f"data.path: {data.path} names {len(paths)} files, {token_files[0].name} among them;"
            " a token file stands alone"
        )
    try:
        if not token_files:
            return Source(data.path, *_read_bytes(paths))
        tokens = openers[paths[0].suffix](paths[0])
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"data.path: cannot read {data.path}: {error}") from None
    if not isinstance(tokens, np.ndarray):
        raise ConfigError(f"data.path: {data.path} is an archive of arrays; a token file is one array")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"data.path: {data.path} holds {tokens.dtype} of shape {tokens.shape};"
            " a token file is one row of integers"
        )
    return Source(data.path, tokens, data.separator)


def _read_bytes(paths: Iterable[Path]) -> tuple[np.ndarray, int]:
    end = np.array([SEPARATOR], dtype=np.uint16)
    parts = [part for path in paths for part in (np.frombuffer(path.read_bytes(), dtype=np.uint8), end)]
    return np.concatenate([*parts, end[:0]]).astype(np.uint16), SEPARATOR


def check_source(source: Source, seq_len: int, vocab_size: int) -> None:
    """Raise ConfigError if the source has no whole sample, or an id outside the vocabulary."""
    if source.separator >= vocab_size:
        raise ConfigError(
            f"data.separator: {source.separator} is outside the vocabulary; model.vocab_size"
            f" {vocab_size} allows 0 to {vocab_size - 1}"
        )
    if len(source.tokens) < seq_len + 1:
        raise ConfigError(
            f"data.path: {source.name} has {len(source.tokens)} tokens; one sample needs"
            f" train.seq_len + 1 = {seq_len + 1}"
        )
    check_ids(source.tokens[:_CHECKED], source.name, vocab_size)


def check_ids(tokens: np.ndarray, name: str, vocab_size: int) -> None:
    """Raise ConfigError if an id of ``tokens`` is outside the vocabulary."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"data.path: {name} holds token id {low if low < 0 else high}; model.vocab_size"
            f" {vocab_size} allows 0 to {vocab_size - 1}"
        )


class Batches:
    """The global batch of any step, cut for one rank.

    ``share`` is (index, count), as ``compose.mesh.batch_share`` gives it: of ``count`` equal slices
    of the global batch this reads the ``index``-th.
    """

    def __init__(
        self,
        source: Source,
        *,
        seq_len: int,
        global_batch: int,
        vocab_size: int,
        seed: int,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.source, self.seq_len, self.vocab_size = source, seq_len, vocab_size
        self.global_batch, self.seed = global_batch, seed
        index, count = share
        self.rows = range(index * global_batch // count, (index + 1) * global_batch // count)
        self.windows = (len(source.tokens) - 1) // seq_len

    def batch(self, first: int) -> dict[str, Tensor]:
        """This rank's part of the global batch that begins at sample ``first`` of the run: int64
        tensors (samples, L).

        ``tokens``, ``targets`` (IGNORE where the next token belongs to another document),
        ``positions`` (from 0 in each document) and ``document_ids``.
        """
        windows = np.stack([self._sample(first + row) for row in self.rows])
        check_ids(windows, self.source.name, self.vocab_size)
        return pack(torch.from_numpy(windows), self.source.separator)

    def _sample(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.windows)
        start = shuffled(place, self.windows, self.seed * 1_000_003 + epoch) * self.seq_len
        return self.source.window(start, self.seq_len + 1)


def pack(windows: Tensor, separator: int) -> dict[str, Tensor]:
    """Batch tensors (B, L) from windows (B, L + 1) in which ``separator`` ends a document."""
    tokens, targets = windows[:, :-1], windows[:, 1:]
    ends = tokens == separator
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
    """A batch (samples, seq_len) that is hard on a proof: random tokens, documents of random lengths
    (8 tokens in the mean), and the later a row, the more of its targets ignored, up to half.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, seq_len + 1)
    windows = torch.randint(vocab_size, shape, generator=generator)
    ends = torch.rand(shape, generator=generator) < 1 / 8
    batch = pack(windows.masked_fill(ends, vocab_size - 1), separator=vocab_size - 1)
    ignored = torch.linspace(0, 0.5, samples)[:, None]
    drop = torch.rand(batch["targets"].shape, generator=generator) < ignored
    return {**batch, "targets": batch["targets"].masked_fill(drop, IGNORE)}


def shuffled(place: int, size: int, key: int) -> int:
    """Where ``place`` goes in a permutation of range(size) drawn by ``key``, without a table.

    Four Feistel rounds over the smallest even number of bits that holds ``size``, repeated until the
    value is in range ("cycle walking", Black and Rogaway 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for step in range(4):
            left, right = right, left ^ (_mix(right, key + step * 0x9E3779B97F4A7C15) & mask)
        place = left << half | right
        if place < size:
            return place


def _mix(value: int, key: int) -> int:
    """A 64-bit hash of (value, key): the finalizer of SplitMix64 (Steele et al. 2014), twice."""
    for word in (key, value):
        value = (value ^ word) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value
