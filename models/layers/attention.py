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
        """Compute attention within documents.

        Args:
            q_BLHK: Queries.
            k_BLGK: Keys.
            v_BLGV: Values; V may be another width than K.
            documents: The documents; None makes each row one.
            sinks: A score of each head that has no value, (H,), or None.

        Returns:
            (B, L, H, V).
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

    Args:
        ids: (B, L); each run of equal ids is one document. On a GPU they are waited for.
        documents: The documents, if they are known already.

    Returns:
        The documents; None if both are.
    """
    return Documents(ids) if documents is None and ids is not None else documents


def attention_pairs(seq_len: int, window: int = 0) -> float:
    """Return the number of keys that one query attends to, averaged over ``seq_len`` causal queries.

    Args:
        seq_len: Tokens of a sample.
        window: Keys that a query sees at most; 0 is all.

    Returns:
        The average.
    """
    return pairs_between(seq_len, seq_len, window=window) / seq_len
