"""Attention of one rectangle of queries and keys, by the kernel that the device has for it.

Shapes here have heads first, as the kernels take them: queries (B, H, Lq, K), keys and values
(B, G, Lk, K), log-sum-exp (B, H, Lq). Query heads h H/G to (h + 1) H/G share key/value head h.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_ops = torch.ops.aten


@dataclass(frozen=True)
class Scores:
    """How the product of a query and a key becomes a score."""

    scale: float
    """It is multiplied by this,"""
    softcap: float = 0.0
    """and, unless this is 0, becomes softcap tanh(score / softcap)."""


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the CPU's flash kernel; ``mask`` (Lq, Lk) is added to the scores."""
    return _ops._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scores.scale
    )


def flash_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    scores: Scores,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`flash_forward` (Dao 2023, arXiv:2307.08691).

    ``result`` is the output and the log-sum-exp over all keys, of which these may be a part.
    """
    return _ops._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *inputs, *result, 0.0, causal, attn_mask=mask, scale=scores.scale
    )


@lru_cache(maxsize=8)
def band(lengths: tuple[int, int], shift: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return the mask (Lq, Lk) of a band, on the CPU: 0 where a query sees a key, else minus infinity.

    ``shift`` is how far the first query lies behind the first key.
    """
    distance = torch.arange(lengths[0])[:, None] + shift - torch.arange(lengths[1])
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(lengths, dtype=dtype).masked_fill_(~seen, -torch.inf)


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute attention by plain products, with all scores (B, H, Lq, Lk) in memory.

    ``seen`` tells whether a query sees a key, (B, 1, Lq, Lk) or less; a query may see none. Results are
    in float32 or wider.
    """
    made, _ = _scores(q, k, scores, seen)
    lse = made.logsumexp(-1)
    weights = (made - lse[..., None]).exp().masked_fill(~seen, 0.0)
    return _by_group(weights, k.shape[1]).matmul(v[:, :, None].to(made.dtype)).flatten(1, 2), lse


def plain_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    scores: Scores,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`plain_forward` (Dao 2023, arXiv:2307.08691, section 2.3)."""
    q, k, v = inputs
    out, lse = result
    made, slope = _scores(q, k, scores, seen)
    grad, out = grad.to(made.dtype), out.to(made.dtype)
    groups = k.shape[1]
    weights = (made - lse[..., None]).exp().masked_fill(~seen, 0.0)
    of_weights = _by_group(grad, groups).matmul(v[:, :, None].to(made.dtype).mT).flatten(1, 2)
    of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * slope * scores.scale
    by_group = _by_group(of_scores, groups)
    dq = by_group.matmul(k[:, :, None].to(made.dtype)).flatten(1, 2)
    dk = by_group.mT.matmul(_by_group(q.to(made.dtype), groups)).sum(2)
    dv = _by_group(weights, groups).mT.matmul(_by_group(grad, groups)).sum(2)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, scores: Scores, seen: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return the scores, minus infinity where a key is not seen, and the slope of the soft cap."""
    wide = torch.promote_types(q.dtype, torch.float32)
    products = _by_group(q.to(wide), k.shape[1]).matmul(k[:, :, None].to(wide).mT).flatten(1, 2)
    made, slope = products * scores.scale, 1.0
    if scores.softcap:
        capped = (made / scores.softcap).tanh()
        made, slope = capped * scores.softcap, 1 - capped.square()
    return made.masked_fill(~seen, -torch.inf), slope


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Return (B, G, H / G, ...) of (B, H, ...)."""
    return x.unflatten(1, (groups, -1))
