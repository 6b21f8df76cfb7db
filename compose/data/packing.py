"""Turns rows of tokens into the model's inputs: tokens, targets, positions and documents."""

import torch
from torch import Tensor

from compose.ops.batch import IGNORE


def pack(windows: Tensor, separator: int) -> dict[str, Tensor]:
    """Return the inputs of a model, each int64 (B, L), from windows of tokens, int64 (B, L + 1)."""
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
    """Return a batch that makes a proof hard, with random tokens and documents of random lengths.

    The share of ignored targets grows from row to row, up to half.

    Every second row has documents with a mean of 8 tokens, so that many documents begin near any place.
    The other rows (the first row is one of them) have such documents only at the two ends. Between the
    ends lies one document from near the first token to near the last one. So with any cut of the
    sequence each part attends to each part before it.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, seq_len + 1)
    # The last token of the vocabulary ends a document, and is used only for that.
    windows = torch.randint(max(1, vocab_size - 1), shape, generator=generator)
    ends = torch.rand(shape, generator=generator) < 1 / 8
    edge = max(1, seq_len // 64)
    ends[::2, edge:-edge] = False
    ends[::2, edge - 1] = True
    batch = pack(windows.masked_fill(ends, vocab_size - 1), separator=vocab_size - 1)
    ignored = torch.linspace(0, 0.5, samples)[:, None]
    drop = torch.rand(batch["targets"].shape, generator=generator) < ignored
    return {**batch, "targets": batch["targets"].masked_fill(drop, IGNORE)}
