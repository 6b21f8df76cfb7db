"""The attention core: everything between the projections, on whatever heads this rank holds."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Documents:
    """Which tokens belong together: made once in a forward pass, and handed to every layer's core.

    ids: (B, L), int64. Each run of equal ids is one document; a token attends to itself and to what
    is before it in its document.
    """

    def __init__(self, ids_BL: Tensor) -> None:
        self.ids = ids_BL
        self._mask: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """True where a query may look. (B, 1, L, L), bool."""
        # A compiled layer makes its own: its graph may not write to what it is given.
        if self._mask is not None and not torch.compiler.is_compiling():
            return self._mask
        mask = self._made()
        if not torch.compiler.is_compiling():
            self._mask = mask
        return mask

    def _made(self) -> Tensor:
        same_BLL = self.ids[:, :, None] == self.ids[:, None, :]
        return same_BLL.tril()[:, None]


class AttentionCore(nn.Module):
    """Causal softmax attention with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245).

    A module of its own, without parameters, so that a plan can name it.
    """

    def forward(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Attention within ``documents``; None makes each row one. Returns (B, L, H, K), K as in v."""
        shared = q_BLHK.shape[2] // k_BLGK.shape[2]
        if shared > 1 and q_BLHK.is_cuda and q_BLHK.dtype == torch.float32:
            # There the one kernel that takes grouped heads holds all scores, (L, L).
            k_BLGK, v_BLGK = (x.repeat_interleave(shared, 2) for x in (k_BLGK, v_BLGK))
        out_BHLK = F.scaled_dot_product_attention(
            q_BLHK.transpose(1, 2),
            k_BLGK.transpose(1, 2),
            v_BLGK.transpose(1, 2),
            attn_mask=None if documents is None else documents.mask,
            is_causal=documents is None,
            enable_gqa=q_BLHK.shape[2] != k_BLGK.shape[2],
        )
        return out_BHLK.transpose(1, 2)


def attention_pairs(seq_len: int) -> float:
    """Keys that one query attends to in causal attention, averaged over ``seq_len`` queries."""
    return (seq_len + 1) / 2
