"""The attention core: everything between the projections, on the heads that this rank holds."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Documents:
    """The documents of a batch: made once in a forward pass, and handed to every layer's core.

    ``ids`` is (B, L), int64. Each run of equal ids is one document. A token attends to itself and to
    earlier tokens of its document.
    """

    def __init__(self, ids_BL: Tensor) -> None:
        self.ids = ids_BL
        self._mask: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """Return a mask (B, 1, L, L), bool, that is True where a query may attend."""
        # A compiled layer makes its own mask, since its graph may not write to its inputs.
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

    It is a module of its own, without parameters, so that a plan can name it.
    """

    def forward(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Compute attention within documents.

        Args:
            q_BLHK: Queries.
            k_BLGK: Keys.
            v_BLGK: Values; K may be another width than that of keys.
            documents: The documents; None makes each row one.

        Returns:
            (B, L, H, K), with K as in v.
        """
        shared = q_BLHK.shape[2] // k_BLGK.shape[2]
        if shared > 1 and q_BLHK.is_cuda and q_BLHK.dtype == torch.float32:
            # Here the only kernel that takes grouped heads would hold all scores, (L, L).
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
    """Return the number of keys that one query attends to, averaged over ``seq_len`` causal queries."""
    return (seq_len + 1) / 2
