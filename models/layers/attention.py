"""The attention core: everything between the projections, on whatever heads this rank holds."""

import torch.nn.functional as F
from torch import Tensor, nn


def document_mask(document_ids_BL: Tensor) -> Tensor:
    """True where a query may look: not ahead, and not into another document. (B, 1, L, L), bool."""
    same_BLL = document_ids_BL[:, :, None] == document_ids_BL[:, None, :]
    return same_BLL.tril()[:, None]


class AttentionCore(nn.Module):
    """Causal softmax attention with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245).

    A module of its own, without parameters, so that a plan can name it.
    """

    def forward(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """``mask`` comes from :func:`document_mask`; None is plain causal. Returns (B, L, H, K)."""
        out_BHLK = F.scaled_dot_product_attention(
            q_BLHK.transpose(1, 2),
            k_BLGK.transpose(1, 2),
            v_BLGK.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q_BLHK.shape[2] != k_BLGK.shape[2],
        )
        return out_BHLK.transpose(1, 2)


def attention_pairs(seq_len: int) -> float:
    """Keys that one query attends to in causal attention, averaged over ``seq_len`` queries."""
    return (seq_len + 1) / 2


__all__ = ["AttentionCore", "attention_pairs", "document_mask"]
