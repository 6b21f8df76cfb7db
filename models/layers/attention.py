"""The attention core: everything between the projections, on the heads that this rank holds."""

import torch
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions, attention
from compose.ops.attention_layout import attention_pairs as pairs_between
from compose.ops.batch import Documents

__all__ = ["AttentionCore", "Documents", "Sinks", "attention_pairs", "documents_of"]


class AttentionCore(nn.Module):
    """Softmax attention with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245).

    It is a module of its own, without parameters, so that a plan can name it. Without ``options`` it
    is causal.
    """

    def __init__(self, options: AttentionOptions | None = None) -> None:
        super().__init__()
        self.options = options or AttentionOptions()

    def forward(
        self,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGV: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention within documents, (B, L, H, V); V may be another width than K.

        None for ``documents`` makes each row one. ``sinks`` (H,) are scores of the heads that have no
        value.
        """
        return attention(q_BLHK, k_BLGK, v_BLGV, documents, sinks, self.options)[0]


class Sinks(nn.Module):
    """A learnt score of each head, to which attention can give weight in place of a key."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self) -> Tensor:
        """Return the scores of the heads that this rank holds."""
        return self.weight


def documents_of(ids: Tensor | None, documents: Documents | None) -> Documents | None:
    """Return the documents of a batch from the two forms in which a model takes them.

    Each run of equal ``ids`` (B, L) is one document. On a GPU they are waited for.
    """
    return Documents(ids) if documents is None and ids is not None else documents


def attention_pairs(seq_len: int, window: int = 0) -> float:
    """Return the number of keys that one query attends to, averaged over ``seq_len`` causal queries.

    A query sees at most ``window`` keys; 0 is all.
    """
    return pairs_between(seq_len, seq_len, window=window) / seq_len
