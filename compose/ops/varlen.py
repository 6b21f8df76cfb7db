"""Attention by the kernels of GPUs that take rows; documents are cumulative lengths on the device.

A row can hold the end of a document and all of its earlier keys (gpu_kernels.flash_forward). Lengths
are computed on the device from the documents' boundaries, so nothing is waited for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.ops import gpu_kernels
from compose.ops.blocks import Layout
from compose.ops.gpu_kernels import Rows, aligned
from compose.ops.kernel_table import Kernel, Problem
from compose.ops.task import ALL, Gradients, Index, Task


@dataclass(frozen=True)
class Pair:
    """A piece of queries with a piece of keys: places in the sequence, and in the tensors."""

    q: tuple[int, int]
    k: tuple[int, int]
    at_q: slice
    at_k: slice
    inside: bool
    """Whether the queries' own keys are among these; else all keys are earlier."""
    left: int
    """Keys that a query sees before the one that is aligned with it; -1 is all."""


def pairs_of_pieces(layout: Layout, lengths: tuple[int, int]) -> Iterator[Pair]:
    """Yield the pairs of pieces that attend."""
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
            yield Pair((a, b), (c, d), at_q, at_k, inside, left)


def problem_of(task: Task, q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """Return a task as the table of kernels takes it; tensors are (B, heads, L, width)."""
    layout = task.layout
    parts = list(pairs_of_pieces(layout, (q.shape[2], k.shape[2])))
    sizes = [(pair.q[1] - pair.q[0], pair.k[1] - pair.k[0]) for pair in parts]
    return Problem(
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        task.bounds is not None,
        bool(layout.window),
        bool(task.scores.softcap),
        all(a == b for (a, b), pair in zip(sizes, parts, strict=True) if layout.causal and pair.inside),
        all(size % 128 == 0 for pair in sizes for size in pair),
        layout.causal or task.bounds is None or len(layout.q_starts) == 1,
    )


class VarlenParts:
    """The pairs of pieces of a task, each one call of a kernel of GPUs."""

    def __init__(
        self, task: Task, q: Tensor, k: Tensor, kernel: Kernel, widths: tuple[int, int]
    ) -> None:
        """Take the kernel, "cudnn" or "flash", and the widths that it is to get."""
        self.task, self.kernel, self.widths = task, kernel, widths
        self.rows = len(q)
        self.pairs = list(pairs_of_pieces(task.layout, (q.shape[2], k.shape[2])))
        self.whole = (
            len(self.pairs) == 1
            and self.pairs[0].at_q == slice(0, q.shape[2])
            and self.pairs[0].at_k == slice(0, k.shape[2])
        )
        """Whether one call is all."""
        self.queries_once = disjoint([pair.at_q for pair in self.pairs])
        self.keys_once = disjoint([pair.at_k for pair in self.pairs])
        """Whether each query, and each key, is in one call at most."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield the queries of each call, their output and their log-sum-exp."""
        run = gpu_kernels.cudnn_forward if self.kernel == "cudnn" else gpu_kernels.flash_forward
        width, (q, k, v) = v.shape[-1], self._padded((q, k), (v,))
        for pair in self.pairs:
            rows, seen = self._rows(pair)
            here = [_laid(x, at, rows) for x, at in ((q, pair.at_q), (k, pair.at_k), (v, pair.at_k))]
            out, lse = run(here[0], here[1], here[2], self.task.scores.scale, rows)
            out, lse = self._unlaid(out, rows), self._lse_of_rows(lse, rows)
            if seen is not None:
                out = out.masked_fill(~seen[..., None], 0.0)
                lse = lse.masked_fill(~seen, -torch.inf)
            yield (ALL, ALL, pair.at_q), out[..., :width], lse

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Index, Index, Gradients]]:
        """Yield the queries and the keys of each call, and the gradients of q, k and v there."""
        run = gpu_kernels.cudnn_backward if self.kernel == "cudnn" else gpu_kernels.flash_backward
        lse = result[1]
        q, k, v, grad, out = self._padded(inputs[:2], (inputs[2], grad, result[0]))
        for pair in self.pairs:
            rows, seen = self._rows(pair)
            places = (pair.at_q, pair.at_k, pair.at_k)
            here = [_laid(x, at, rows) for x, at in zip((q, k, v), places, strict=True)]
            lse_here = lse[:, :, pair.at_q]
            if seen is not None:
                lse_here = lse_here.masked_fill(~seen, torch.inf)
            if rows.q is not None:
                lse_here = lse_here.transpose(0, 1).flatten(1)
            found = run(
                _laid(grad, pair.at_q, rows),
                (here[0], here[1], here[2]),
                (_laid(out, pair.at_q, rows), lse_here),
                self.task.scores.scale,
                rows,
            )
            dq, dk, dv = (
                self._unlaid(d, rows)[..., : x.shape[-1]] for d, x in zip(found, inputs, strict=True)
            )
            yield (ALL, ALL, pair.at_q), (ALL, ALL, pair.at_k), (dq, dk, dv)

    def _padded(self, of_keys: Sequence[Tensor], of_values: Sequence[Tensor]) -> list[Tensor]:
        wide, narrow = self.widths
        return [aligned(x, wide) for x in of_keys] + [aligned(x, narrow) for x in of_values]

    def _rows(self, pair: Pair) -> tuple[Rows, Tensor | None]:
        """Return the rows of a call, and which queries (B, 1, Lq) see any key if not all do."""
        (a, b), (c, d) = pair.q, pair.k
        causal = self.task.layout.causal and pair.inside
        whole = self.task.bounds
        if whole is None:
            return Rows(None, None, (b - a, d - c), causal, pair.left), None
        assert self.task.extents is not None
        count, longest = map(int, self.task.extents.numpy())
        length = (whole.numel() - 1) // self.rows
        if pair.inside:
            bounds = whole[: count + 1]
            row = bounds // length
            place = bounds - row * length
            q, k = (
                (row * (end - first) + (place - first).clamp(0, end - first)).int()
                for first, end in (pair.q, pair.k)
            )
            return Rows(q, k, (min(longest, b - a), min(longest, d - c)), causal, pair.left), None
        # Of each row the document of its first query alone has keys here. Earlier keys go to a row of
        # their own, without queries.
        row = torch.arange(self.rows, device=whole.device)
        number = torch.searchsorted(whole, (row * length + a).int(), right=True)
        start, end = (whole[number + i] - row * length for i in (-1, 0))
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


def disjoint(places: list[slice]) -> bool:
    """Return whether no two of the places overlap."""
    ordered = sorted((place.start, place.stop) for place in places)
    return all(one[1] <= other[0] for one, other in pairwise(ordered))
