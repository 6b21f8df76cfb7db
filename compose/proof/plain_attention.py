"""Attention by plain PyTorch, with all scores at once; the proof's one process computes it so.

The operator that models call (compose/ops) finds documents and windows by its own rules, and so
does context parallel. A fault of those rules would be the same in both runs of a proof, and would not
be seen. So the one process uses a mask (L, L).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PlainAttention(TorchFunctionMode):
    """Within this mode the operator of compose.attention is computed by plain PyTorch."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function, or plain attention in its place."""
        if func is torch.ops.compose.attention_forward.default:
            return plain_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    extents: Tensor | None,
    sinks: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor]:
    """Compute what the operator computes, for whole sequences.

    Args:
        q: Queries, (B, L, H, K).
        k: Keys, (B, S, G, K).
        v: Values, (B, S, G, V).
        bounds: The first places of documents, (B S + 1,), or None.
        extents: Not read.
        sinks: (H,), or None.
        *others: The operator's other arguments, in their order.

    Returns:
        The output (B, L, H, V), and the log-sum-exp (B, L, H).
    """
    _, _, causal, window, scale, softcap = others
    shared = q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = _seen(q, k, bounds, causal, window)
    heads = [
        q.transpose(1, 2),
        *(x.transpose(1, 2).repeat_interleave(shared, 1) for x in (k, v)),
    ]
    scores = heads[0].to(wide) @ heads[1].to(wide).mT * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores)[:, None, None].expand(len(q), -1, q.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]].to(q.dtype)
    return (weights @ heads[2]).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


def _seen(q: Tensor, k: Tensor, bounds: Tensor | None, causal: bool, window: int) -> Tensor:
    """Return whether a query sees a key, (B or 1, 1, L, S)."""
    rows, length, keys = len(q), q.shape[1], k.shape[1]
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        seen = seen & (distance < window)
    if bounds is None:
        return seen[None, None]
    places = torch.arange(rows * keys, device=q.device, dtype=bounds.dtype)
    ids = torch.searchsorted(bounds, places, right=True).view(rows, keys)
    return (seen & (ids[:, :, None] == ids[:, None, :]))[:, None]
