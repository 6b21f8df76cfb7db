"""The attention core: everything between the projections, on the heads that this rank holds.

Around it are the projections that most models share.

Shapes: B batch, L sequence length, D model width, H query heads, G key/value heads, K head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compose.ops.attention import AttentionOptions, attention
from compose.ops.attention_layout import attention_pairs as pairs_between
from compose.ops.batch import Documents

from .rope import rotate

__all__ = [
    "AttentionCore",
    "Documents",
    "GroupedAttention",
    "Sinks",
    "attention_pairs",
    "documents_of",
]


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


class GroupedAttention(nn.Module):
    """Grouped-query attention; it counts heads from its input, so a rank may hold a part of them.

    ``config`` has the widths, and ``options`` are those of the core. ``norm`` makes the norms of
    queries and keys: of each head before RoPE ("head") or after it ("head_after_rope"), or of the whole
    "width".
    """

    def __init__(
        self,
        config: Any,
        options: AttentionOptions,
        *,
        biases: tuple[bool, bool] = (False, False),
        qk_norm: str = "none",
        norm: Callable[[int], nn.Module] = nn.Identity,
        interleaved: bool = False,
        sinks: bool = False,
    ) -> None:
        """Make the layers; ``biases``: of queries, keys and values, and of the output."""
        super().__init__()
        c = config
        self.head_dim, self.norm_of, self.interleaved = c.head_dim, qk_norm, interleaved
        q_dim, kv_dim = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.wq = nn.Linear(c.dim, q_dim, bias=biases[0])
        self.wk = nn.Linear(c.dim, kv_dim, bias=biases[0])
        self.wv = nn.Linear(c.dim, kv_dim, bias=biases[0])
        self.wo = nn.Linear(q_dim, c.dim, bias=biases[1])
        if qk_norm != "none":
            whole = qk_norm == "width"
            self.q_norm = norm(q_dim if whole else c.head_dim)
            self.k_norm = norm(kv_dim if whole else c.head_dim)
        self.core = AttentionCore(options)
        self.sinks = Sinks(c.n_heads) if sinks else None

    def forward(
        self, x_BLD: Tensor, cosine: Tensor, sine: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return attention's output, (B, L, D).

        Cosine and sine of the positions' angles are (B, L, 1, K / 2), or of fewer pairs.
        """
        q, k = self.wq(x_BLD), self.wk(x_BLD)
        if self.norm_of == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BLHK, k_BLGK, v_BLGK = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, self.wv(x_BLD)))
        del q, k  # else they would outlive their rotation
        if self.norm_of == "head":
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        q_BLHK = rotate(q_BLHK, cosine, sine, self.interleaved)
        k_BLGK = rotate(k_BLGK, cosine, sine, self.interleaved)
        if self.norm_of == "head_after_rope":
            q_BLHK, k_BLGK = self.q_norm(q_BLHK), self.k_norm(k_BLGK)
        sinks_H = None if self.sinks is None else self.sinks()
        return self.wo(self.core(q_BLHK, k_BLGK, v_BLGK, documents, sinks_H).flatten(2))


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
