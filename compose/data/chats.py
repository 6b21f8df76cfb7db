"""Conversations packed into samples.

A sample holds several whole conversations. Documents and positions keep them apart.
"""

import bisect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compose.data.rows import check_ids
from compose.data.token_set import TokenSet, as_table
from compose.errors import ConfigError
from compose.ops.batch import IGNORE


class Conversations:
    """The samples of a token set of chats.

    In a conversation of n tokens, the first n - 1 are inputs of the model. At most ``seq_len`` inputs
    are kept, and a longer conversation is cut. A cut conversation with nothing left to learn is
    dropped. Each sample holds as many conversations as fit.
    """

    def __init__(self, name: str, token_set: TokenSet, seq_len: int, vocab_size: int) -> None:
        """Choose and pack the conversations."""
        assert token_set.trained is not None
        self.name, self.seq_len, self.vocab_size = name, seq_len, vocab_size
        self.token_set: TokenSet | None = token_set
        self.tokenizer: str | None = token_set.sha256
        self.tokens, self.trained = token_set.tokens, token_set.trained
        self.starts = np.concatenate([[0], token_set.ends[:-1]]).astype(np.int64)
        lengths = np.minimum(token_set.ends - self.starts - 1, seq_len)
        self.cut = np.flatnonzero(token_set.ends - self.starts - 1 > seq_len)
        for number in self.cut.tolist():
            if not self._learnt(number, seq_len).any():
                lengths[number] = 0
        self.lengths = lengths
        self.bins = pack_into_bins(lengths, seq_len)
        if not self.bins:
            raise ConfigError(
                f"{name} has no conversation with something to learn within train.seq_len {seq_len}"
            )

    @property
    def content(self) -> str:
        """A digest of the tokens and of the marks of what is learnt."""
        return f"{self.tokens.digest}/{self.trained.digest}"

    def __len__(self) -> int:
        return len(self.bins)

    def table(self) -> str:
        """Return what a run learns of the set in an epoch, as a table."""
        assert self.token_set is not None
        whole, used = self.token_set, int(self.lengths.sum())
        lost, learnt = 0, whole.learnt
        for number in self.cut.tolist():
            size, kept = int(whole.ends[number] - self.starts[number]) - 1, int(self.lengths[number])
            lost += size - kept
            if learnt is not None:
                learnt -= int(self._learnt(number, size)[kept:].sum())
        return as_table(
            [
                ("rows", whole.rows, ""),
                ("replies", whole.replies, ""),
                ("conversations", len(whole.ends), ""),
                ("cut", len(self.cut), f"at train.seq_len {self.seq_len:,}: {lost:,} tokens are lost"),
                ("left out", int((self.lengths == 0).sum()), "of these: nothing to learn remains"),
                ("tokens learnt", learnt, f"in an epoch, of {used:,}"),
                (
                    "samples",
                    len(self.bins),
                    f"{100 * used / (len(self.bins) * self.seq_len):.1f} % full",
                ),
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
        found = {
            "tokens": tokens,
            "targets": targets,
            "positions": positions,
            "document_ids": documents,
        }
        return {name: torch.from_numpy(value) for name, value in found.items()}


def pack_into_bins(lengths: Sequence[int] | np.ndarray, size: int) -> list[list[int]]:
    """Put items into bins of one size, and use few bins.

    The method is best fit, longest first (Johnson 1974, doi:10.1137/0203025). It needs at most 11/9 of
    the fewest bins, plus one.
    """
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
