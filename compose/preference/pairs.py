"""Pairs of replies: a row of a batch holds the chosen and the rejected one, each with its prompt."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compose.config.tables import Config
from compose.data.batches import stacked
from compose.data.datasets import LanguageModelling
from compose.data.samples import Conversations, Samples, open_samples
from compose.errors import ConfigError
from compose.preference.loss import PairLoss


class Preference(LanguageModelling):
    """To prefer the chosen of two replies.

    A pair is two documents of one row. So no rank and no micro-batch has a half of it, but those of cp,
    which have a part of each sequence. ``targets`` are float32 (B, L, 3): a token, its side (1 in the
    chosen reply, -1 in the rejected one), and its log-probability by the reference, 0 in the data. All
    three are NaN where nothing is learnt.
    """

    def open(self, path: str, config: Config) -> Samples:
        """Open pairs; see ``compose.config.models.Task.open``."""
        seq_len, vocab_size = config.train.seq_len, config.model.config.vocab_size
        samples = open_samples(path, config.data, seq_len, vocab_size, Pairs)
        if not isinstance(samples, Pairs):
            raise ConfigError(
                f"{path} holds no pairs, which dpo.beta = {config.dpo.beta:g} learns from; make some by"
                " python -m compose tokenize --pairs, or use dpo.beta = 0"
            )
        return samples

    def random_batch(self, config: Config, samples: int, seed: int) -> dict[str, Tensor]:
        """Return random pairs of any lengths, with random log-probabilities of a reference."""
        length, vocab_size = config.train.seq_len, config.model.config.vocab_size
        draw = torch.Generator().manual_seed(seed)
        return stacked([_random_pair(length, vocab_size, draw) for _ in range(samples)])

    def loss(self, config: Config) -> Any:
        """Return the loss of pairs."""
        return PairLoss(config.dpo.beta)


def pair_targets(ids: Tensor, documents: Tensor, learnt: Tensor, reference: Tensor) -> Tensor:
    """Return the targets (L, 3) of tokens; document 0 is the chosen one, and 1 the rejected one."""
    values = torch.stack([ids, 1 - 2 * documents, reference], -1)
    return values.float().where(learnt[:, None], torch.nan)


def _random_pair(length: int, vocab_size: int, draw: torch.Generator) -> dict[str, Tensor]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, max(low, high) + 1, (), generator=draw))

    chosen = number(1, length - 1)
    rejected = number(1, length - chosen)
    positions, documents = torch.full((length,), -1), torch.full((length,), 2)
    learnt = torch.zeros(length, dtype=torch.bool)
    for document, (start, size) in enumerate([(0, chosen), (chosen, rejected)]):
        stop = min(start + size, length)
        positions[start:stop], documents[start:stop] = torch.arange(stop - start), document
        learnt[start + number(0, size - 1) : stop] = True
    # About what a model of random weights finds.
    reference = torch.randn(length, generator=draw) - math.log(vocab_size)
    tokens = torch.randint(vocab_size, (length,), generator=draw)
    targets = pair_targets(tokens.roll(-1), documents, learnt, reference)
    return {"tokens": tokens, "targets": targets, "positions": positions, "document_ids": documents}


class Pairs(Conversations):
    """The samples of a token set of pairs: its documents 2 i and 2 i + 1 are chosen and rejected.

    Of a pair that is longer than ``seq_len``, each is cut to a half of it, or to what the other leaves.
    A pair is dropped if one of the two has no target left.
    """

    what = "pair"

    def limits(self, sizes: np.ndarray) -> np.ndarray:
        """Return the most inputs of each document."""
        other = sizes.reshape(-1, 2)[:, ::-1].reshape(-1)
        return np.maximum(self.seq_len // 2, self.seq_len - other)

    def binned(self) -> list[list[int]]:
        """Return the documents of each sample."""
        pairs = self.lengths.reshape(-1, 2)
        whole = (pairs > 0).all(1)
        pairs[~whole] = 0
        return [[2 * int(i), 2 * int(i) + 1] for i in np.flatnonzero(whole)]

    def read(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        """Return one sample, as ``Samples.read``."""
        sample = super().read(index, epoch)
        targets = sample["targets"]
        made = pair_targets(targets, sample["document_ids"], targets >= 0, torch.zeros(len(targets)))
        return {**sample, "targets": made}
