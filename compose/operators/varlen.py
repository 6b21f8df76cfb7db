"""Attention by the flash kernel of GPUs, whose documents are cumulative lengths on the device.

The kernel takes rows of several lengths, laid end to end. It aligns the last query of a row with the
last key: with ``causal`` that query sees all keys, the one before sees one key less. So a row can hold
the end of a document and all of its earlier keys.

Lengths are computed on the device from the documents' boundaries, so nothing is waited for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.operators.blocks import Layout
from compose.operators.task import ALL, Gradients, Index, Task

WIDEST = 256
"""Elements of a head that the kernel takes at most; it takes multiples of 8."""


@dataclass(frozen=True)
class Rows:
    """The rows of one call of the kernel. Without cumulative lengths they are those of the batch."""

    q: Tensor | None
    """(N + 1,), int32: where the queries of each row begin; the last entry is their number."""
    k: Tensor | None
    """The same for keys."""
    longest: tuple[int, int]
    """At least as many queries, and keys, as any row has."""
    causal: bool
    left: int
    """Keys that a query sees before the one that is aligned with it; -1 is all."""


def kernel_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: Rows) -> tuple[Tensor, Tensor]:
    """Run the kernel.

    Args:
        q: Queries, (B, L, H, K), or (T, H, K) with cumulative lengths.
        k: Keys, in the same way, with G heads.
        v: Values, as wide as the keys.
        scale: Of the scores.
        rows: The rows.

    Returns:
        The output in the shape of ``q``, and the log-sum-exp (B, H, L) or (H, T), float32.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        rows.q,
        rows.k,
        *rows.longest,
        0.0,
        rows.causal,
        False,
        scale=scale,
        window_size_left=rows.left,
        window_size_right=0 if rows.causal else -1,
    )
    return out, lse


def kernel_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    scale: float,
    rows: Rows,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`kernel_forward`.

    Args:
        grad: The gradient of the output.
        inputs: q, k and v.
        result: The output and the log-sum-exp, over all keys of which these may be a part. A query
            whose log-sum-exp is infinite sees none of these keys.
        scale: As in the forward.
        rows: As in the forward.

    Returns:
        The gradients of q, k and v.
    """
    # The kernel reads its random state only for dropout.
    unused = torch.empty(0, device=grad.device)
    state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad,
        *inputs,
        *result,
        rows.q,
        rows.k,
        *rows.longest,
        0.0,
        rows.causal,
        state,
        unused,
        scale=scale,
        window_size_left=rows.left,
        window_size_right=0 if rows.causal else -1,
    )


@dataclass(frozen=True)
class _Pair:
    """A piece of queries with a piece of keys: places in the sequence, and in the tensors."""

    q: tuple[int, int]
    k: tuple[int, int]
    at_q: slice
    at_k: slice
    inside: bool
    """Whether the queries' own keys are among these; else all keys are earlier."""
    left: int
    """Keys that a query sees before the one that is aligned with it; -1 is all."""


def _pairs(layout: Layout, lengths: tuple[int, int]) -> Iterator[_Pair]:
    q_size, k_size = lengths[0] // len(layout.q_starts), lengths[1] // len(layout.k_starts)
    window = layout.window
    for i, a in enumerate(layout.q_starts):
        for j, c in enumerate(layout.k_starts):
            b, d = a + q_size, c + k_size
            left = window - 1 if window else -1
            if not layout.causal:
                inside = True
            elif c >= b:
                continue
            elif inside := a < d:
                d = b  # later keys are not seen
                c = max(c, a - window + 1) if window else c
            elif window:
                b, c = min(b, d - 1 + window), max(c, a - window + 1)
                if b <= a:
                    continue
                left = d - b + window - 1
            q_shift, k_shift = i * q_size - layout.q_starts[i], j * k_size - layout.k_starts[j]
            at_q, at_k = slice(a + q_shift, b + q_shift), slice(c + k_shift, d + k_shift)
            yield _Pair((a, b), (c, d), at_q, at_k, inside, left)


class VarlenParts:
    """The pairs of pieces of a task, each one call of the flash kernel of GPUs."""

    def __init__(self, task: Task, q: Tensor, k: Tensor) -> None:
        self.task, layout = task, task.layout
        self.rows = len(q)
        self.pairs = list(_pairs(layout, (q.shape[2], k.shape[2])))
        self.whole = (
            len(self.pairs) == 1
            and self.pairs[0].at_q == slice(0, q.shape[2])
            and self.pairs[0].at_k == slice(0, k.shape[2])
        )
        """Whether one call is all."""
        self.queries_once = _disjoint([pair.at_q for pair in self.pairs])
        self.keys_once = _disjoint([pair.at_k for pair in self.pairs])
        """Whether each query, and each key, is in one call at most."""
        self.bounds = None if task.bounds is None or task.bounds.is_meta else task.bounds

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield the queries of each call, their output and their log-sum-exp."""
        for pair in self.pairs:
            rows, seen = self._rows(pair)
            here = [_laid(x, at, rows) for x, at in ((q, pair.at_q), (k, pair.at_k), (v, pair.at_k))]
            out, lse = kernel_forward(here[0], here[1], here[2], self.task.scores.scale, rows)
            out, lse = self._unlaid(out, rows), self._lse_of_rows(lse, rows)
            if seen is not None:
                out = out.masked_fill(~seen[..., None], 0.0)
                lse = lse.masked_fill(~seen, -torch.inf)
            yield (ALL, ALL, pair.at_q), out, lse

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Index, Index, Gradients]]:
        """Yield the queries and the keys of each call, and the gradients of q, k and v there."""
        out, lse = result
        for pair in self.pairs:
            rows, seen = self._rows(pair)
            places = (pair.at_q, pair.at_k, pair.at_k)
            here = [_laid(x, at, rows) for x, at in zip(inputs, places, strict=True)]
            lse_here = lse[:, :, pair.at_q]
            if seen is not None:
                lse_here = lse_here.masked_fill(~seen, torch.inf)
            if rows.q is not None:
                lse_here = lse_here.transpose(0, 1).flatten(1)
            found = kernel_backward(
                _laid(grad, pair.at_q, rows),
                (here[0], here[1], here[2]),
                (_laid(out, pair.at_q, rows), lse_here.contiguous()),
                self.task.scores.scale,
                rows,
            )
            dq, dk, dv = (self._unlaid(x, rows) for x in found)
            yield (ALL, ALL, pair.at_q), (ALL, ALL, pair.at_k), (dq, dk, dv)

    def _rows(self, pair: _Pair) -> tuple[Rows, Tensor | None]:
        """Return the rows of a call, and which queries (B, 1, Lq) see any key if not all do."""
        (a, b), (c, d) = pair.q, pair.k
        causal = self.task.layout.causal and pair.inside
        if self.bounds is None:
            return Rows(None, None, (b - a, d - c), causal, pair.left), None
        assert self.task.extents is not None
        count, longest = map(int, self.task.extents.numpy())
        length = (self.bounds.numel() - 1) // self.rows
        if pair.inside:
            bounds = self.bounds[: count + 1]
            row = bounds // length
            place = bounds - row * length
            q, k = (
                (row * (end - first) + (place - first).clamp(0, end - first)).int()
                for first, end in (pair.q, pair.k)
            )
            return Rows(q, k, (min(longest, b - a), min(longest, d - c)), causal, pair.left), None
        # Of each row the document of its first query alone has keys here. Earlier keys go to a row of
        # their own, without queries.
        row = torch.arange(self.rows, device=self.bounds.device)
        number = torch.searchsorted(self.bounds, (row * length + a).int(), right=True)
        start, end = (self.bounds[number + i] - row * length for i in (-1, 0))
        skipped = row * (d - c) + (start - c).clamp(0, d - c)
        q = torch.stack([row, row], 1).flatten() * (b - a)
        k = torch.stack([row * (d - c), skipped], 1).flatten()
        q, k = (F.pad(x, (0, 1), value=self.rows * n) for x, n in ((q, b - a), (k, d - c)))
        seen = (torch.arange(a, b, device=row.device) < end[:, None]) & (start < d)[:, None]
        return Rows(q.int(), k.int(), (b - a, d - c), causal, pair.left), seen[:, None]

    def _unlaid(self, x: Tensor, rows: Rows) -> Tensor:
        """Return (B, heads, L, K) of what the kernel returned."""
        return (x if rows.q is None else x.unflatten(0, (self.rows, -1))).transpose(1, 2)

    def _lse_of_rows(self, lse: Tensor, rows: Rows) -> Tensor:
        return lse if rows.q is None else lse.unflatten(1, (self.rows, -1)).transpose(0, 1)


def _laid(x: Tensor, at: slice, rows: Rows) -> Tensor:
    """Return tokens of (B, heads, S, K) as the kernel takes them."""
    here = x[:, :, at].transpose(1, 2)
    return here if rows.q is None else here.flatten(0, 1)


def _disjoint(places: list[slice]) -> bool:
    ordered = sorted((place.start, place.stop) for place in places)
    return all(one[1] <= other[0] for one, other in pairwise(ordered))
