"""The kernels of attention, each as the calls that together compute one.

A call yields the outputs of some queries over some keys. Where several calls have the same queries,
their outputs are merged by their log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867). A
backward kernel takes the merged output and log-sum-exp, and computes the gradients of each call alone
(Dao 2023, arXiv:2307.08691).

Shapes here have heads first: queries (B, H, L, K), keys (B, G, S, K), values (B, G, S, V), log-sum-exp
(B, H, L), natural and in float32 or wider. Query heads h H/G to (h + 1) H/G share key/value head h.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compose.ops.attention_layout import AttentionTask, Block, blocks, disjoint, row_starts

_ops = torch.ops.aten
_PLAIN_SCORES = 1 << 24  # scores that the plain kernel holds at a time, in elements

Index = tuple[slice, slice, slice]
"""Rows, heads and tokens of a tensor (B, H, L, K) or (B, H, L)."""
ALL = slice(None)
Three = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""
Result = tuple[Tensor, Tensor]
"""The output and the log-sum-exp."""


class Parts:
    """The calls of one kernel that together are an attention: each of some queries with some keys."""

    queries_once = keys_once = False
    """Whether each query, and each key, is in one call at most."""
    whole = False
    """Whether one call is all."""

    def _note_places(self, places: list[tuple[slice, slice]], q: Tensor, k: Tensor) -> None:
        """Note of which tokens (queries, keys) the calls are."""
        self.queries_once = disjoint([at_q for at_q, _ in places])
        self.keys_once = disjoint([at_k for _, at_k in places])
        self.whole = places == [(slice(0, q.shape[2]), slice(0, k.shape[2]))]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield the queries of each call, their output and their log-sum-exp."""
        width, (q, k, v) = v.shape[-1], self._fitted((q, k), (v,))
        for at_q, at_k, how in self._calls(q):
            out, lse = self._forward(how, q[at_q], k[at_k], v[at_k])
            del how  # or a mask would stay beside the next one
            yield at_q, out[..., :width], lse

    def backward(
        self, grad: Tensor, inputs: Three, result: Result
    ) -> Iterator[tuple[Index, Index, Three]]:
        """Yield the queries and the keys of each call, and the gradients of q, k and v there.

        ``result`` is that of all keys, of which a call may have a part.
        """
        lse = result[1]
        q, k, v, grad, out = self._fitted(inputs[:2], (inputs[2], grad, result[0]))
        for at_q, at_k, how in self._calls(q):
            here = (q[at_q], k[at_k], v[at_k])
            results = self._backward(how, grad[at_q], here, (out[at_q], lse[at_q]))
            del how
            dq, dk, dv = (d[..., : x.shape[-1]] for d, x in zip(results, inputs, strict=True))
            yield at_q, at_k, (dq, dk, dv)

    def _fitted(self, of_keys: Sequence[Tensor], of_values: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors as wide as keys, and tensors as wide as values, as the kernel takes them."""
        return [*of_keys, *of_values]

    def _calls(self, q: Tensor) -> Iterator[tuple[Index, Index, Any]]:
        """Yield the queries and the keys of each call, and how they attend."""
        raise NotImplementedError

    def _forward(self, how: Any, q: Tensor, k: Tensor, v: Tensor) -> Result:
        raise NotImplementedError

    def _backward(self, how: Any, grad: Tensor, inputs: Three, result: Result) -> Three:
        raise NotImplementedError


class FlashParts(Parts):
    """The blocks of a task, each run by the CPU's flash kernel."""

    def __init__(self, task: AttentionTask, q: Tensor, k: Tensor) -> None:
        self.task, rows = task, len(q)
        self.blocks = blocks(task.pieces, (q.shape[2], k.shape[2]), row_starts(task, rows, q.device))
        counts = [_counts(self.blocks, what, rows, x.shape[2]) for what, x in (("q", q), ("k", k))]
        self.queries_once, self.keys_once = (int(count.max()) <= 1 for count in counts)
        self.whole = len(self.blocks) == 1 and all(int(count.min()) == 1 for count in counts)

    def _fitted(self, of_keys: Sequence[Tensor], of_values: Sequence[Tensor]) -> list[Tensor]:
        tensors = (*of_keys, *of_values)
        width = max(x.shape[-1] for x in tensors)
        return [padded(x, width) for x in tensors]

    def _calls(self, q: Tensor) -> Iterator[tuple[Index, Index, Any]]:
        for b in self.blocks:
            how = {"is_causal": b.causal, "attn_mask": self._mask(b, q), "scale": self.task.scale}
            yield (b.rows, ALL, b.q), (b.rows, ALL, b.k), how

    def _mask(self, b: Block, q: Tensor) -> Tensor | None:
        if b.shift is None:
            return None
        lengths = (b.q.stop - b.q.start, b.k.stop - b.k.start)
        if q.is_meta:
            return q.new_empty(lengths)
        return band(lengths, b.shift, self.task.pieces.window, q.dtype)

    def _forward(self, how: Any, q: Tensor, k: Tensor, v: Tensor) -> Result:
        return _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, **how)

    def _backward(self, how: Any, grad: Tensor, inputs: Three, result: Result) -> Three:
        backward = _ops._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, *inputs, *result, 0.0, **how)


@lru_cache(maxsize=8)
def band(lengths: tuple[int, int], shift: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return the mask (Lq, Lk) of a band, on the CPU: 0 where a query sees a key, else minus infinity.

    ``shift`` is how far the first query lies behind the first key.
    """
    distance = torch.arange(lengths[0])[:, None] + shift - torch.arange(lengths[1])
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(lengths, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _counts(parts: Sequence[Block], what: str, rows: int, length: int) -> np.ndarray:
    """Return in how many blocks each query, or each key, is: (B, L)."""
    counts = np.zeros((rows, length), np.int32)
    for block in parts:
        counts[block.rows, getattr(block, what)] += 1
    return counts


class PlainParts(Parts):
    """Tiles of queries with all keys that they may reach, by plain products.

    A mask separates documents. It is made for each tile on the device, so nothing is waited for. A tile
    has so few queries that its scores take at most ``_PLAIN_SCORES`` elements.
    """

    def __init__(self, task: AttentionTask, q: Tensor, k: Tensor) -> None:
        self.task, pieces = task, task.pieces
        self.q_size = q.shape[2] // len(pieces.q_starts)
        self.k_size = k.shape[2] // len(pieces.k_starts)
        tile = self._tile(q)
        self.tiles: list[tuple[tuple[int, int], tuple[int, int], tuple[slice, slice]]] = []
        """The queries and the keys of each, and their places in q and k."""
        for i, a in enumerate(pieces.q_starts):
            for j, c in enumerate(pieces.k_starts):
                for q0 in range(a, a + self.q_size, tile):
                    q1 = min(q0 + tile, a + self.q_size)
                    k0 = max(c, q0 - pieces.window + 1) if pieces.window else c
                    k1 = min(c + self.k_size, q1) if pieces.causal else c + self.k_size
                    if k0 < k1:
                        q_shift, k_shift = i * self.q_size - a, j * self.k_size - c
                        places = slice(q0 + q_shift, q1 + q_shift), slice(k0 + k_shift, k1 + k_shift)
                        self.tiles.append(((q0, q1), (k0, k1), places))

    def _tile(self, q: Tensor) -> int:
        """Return how many queries a tile has at most."""
        return max(1, _PLAIN_SCORES // max(1, q.shape[0] * q.shape[1] * self.k_size))

    def _calls(self, q: Tensor) -> Iterator[tuple[Index, Index, Any]]:
        for queries, keys, (at_q, at_k) in self.tiles:
            yield (ALL, ALL, at_q), (ALL, ALL, at_k), self._mask(q, queries, keys)

    def _mask(self, q: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> Any:
        """Return whether a query sees a key, (B or 1, 1, Lq, Lk)."""
        pieces, bounds = self.task.pieces, self.task.bounds
        at_q, at_k = (torch.arange(*ends, device=q.device) for ends in (queries, keys))
        distance = at_q[:, None] - at_k
        seen = torch.ones_like(distance, dtype=torch.bool)
        if pieces.causal:
            seen &= distance >= 0
        if pieces.window:
            seen &= distance < pieces.window
        if bounds is None:
            return seen[None, None]
        rows = len(q)
        first = torch.arange(rows, device=q.device)[:, None] * ((bounds.numel() - 1) // rows)
        of_q, of_k = (torch.searchsorted(bounds, first + at, right=True) for at in (at_q, at_k))
        return (seen & (of_q[:, :, None] == of_k[:, None, :]))[:, None]

    def _forward(self, how: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Result:
        scores, _ = self._scores(q, k, how)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().masked_fill(~how, 0.0)
        values = v[:, :, None].to(scores.dtype)
        return _by_group(weights, k.shape[1]).matmul(values).flatten(1, 2), lse

    def _backward(self, how: Tensor, grad: Tensor, inputs: Three, result: Result) -> Three:
        """Compute the gradients as section 2.3 of Dao 2023 (arXiv:2307.08691) does."""
        q, k, v = inputs
        out, lse = result
        scores, slope = self._scores(q, k, how)
        grad, out = grad.to(scores.dtype), out.to(scores.dtype)
        groups = k.shape[1]
        weights = (scores - lse[..., None]).exp().masked_fill(~how, 0.0)
        of_weights = _by_group(grad, groups).matmul(v[:, :, None].to(scores.dtype).mT).flatten(1, 2)
        of_scores = (
            weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * slope * self.task.scale
        )
        by_group = _by_group(of_scores, groups)
        dq = by_group.matmul(k[:, :, None].to(scores.dtype)).flatten(1, 2)
        dk = by_group.mT.matmul(_by_group(q.to(scores.dtype), groups)).sum(2)
        dv = _by_group(weights, groups).mT.matmul(_by_group(grad, groups)).sum(2)
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor, seen: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the scores, minus infinity where a key is not seen, and the slope of the soft cap."""
        wide = torch.promote_types(q.dtype, torch.float32)
        products = _by_group(q.to(wide), k.shape[1]).matmul(k[:, :, None].to(wide).mT).flatten(1, 2)
        scores, slope, softcap = products * self.task.scale, 1.0, self.task.softcap
        if softcap:
            capped = (scores / softcap).tanh()
            scores, slope = capped * softcap, 1 - capped.square()
        return scores.masked_fill(~seen, -torch.inf), slope


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Return (B, G, H / G, ...) of (B, H, ...)."""
    return x.unflatten(1, (groups, -1))


def padded(x: Tensor, width: int) -> Tensor:
    """Return a tensor (..., width), with zeros at the end. They change no result of attention."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
