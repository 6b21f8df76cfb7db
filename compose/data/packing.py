"""From rows of tokens to what a model is given: targets, positions and documents."""

import torch
from torch import Tensor

from compose.base.batch import IGNORE


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
    """A batch (samples, seq_len) that is hard on a proof: random tokens, documents of random lengths,
    and the later a row, the more of its targets ignored, up to half.

    Every second row has documents of 8 tokens in the mean, so that many begin near any place. The
    others, the first among them, have such documents only at the two ends, and between these one that
    reaches from near the first token to near the last: with any cut of the sequence each part attends
    to each that is before it.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, seq_len + 1)
    # The last token of the vocabulary ends documents, and stands nowhere else.
    windows = torch.randint(max(1, vocab_size - 1), shape, generator=generator)
    ends = torch.rand(shape, generator=generator) < 1 / 8
    edge = max(1, seq_len // 64)
    ends[::2, edge:-edge] = False
    ends[::2, edge - 1] = True
    batch = pack(windows.masked_fill(ends, vocab_size - 1), separator=vocab_size - 1)
    ignored = torch.linspace(0, 0.5, samples)[:, None]
    drop = torch.rand(batch["targets"].shape, generator=generator) < ignored
    return {**batch, "targets": batch["targets"].masked_fill(drop, IGNORE)}
