"""Attention part by part, and how parts become one result.

A kernel yields the outputs of some queries over some keys. Where several parts have the same queries,
their outputs are merged by their log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867). A
backward kernel takes the merged output and log-sum-exp, and computes the gradients of each part alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from compose.ops import devices, kernel_table
from compose.ops.blocks import TILE, Block, blocks
from compose.ops.gpu_kernels import aligned, efficient_backward, efficient_forward, padded
from compose.ops.kernel_table import kernel_of, widths_of
from compose.ops.kernels import band, flash_backward, flash_forward, plain_backward, plain_forward
from compose.ops.task import ALL, Gradients, Index, Task
from compose.ops.varlen import VarlenParts, disjoint, problem_of

_PLAIN_SCORES = 1 << 24  # scores that the plain kernel holds at a time, in elements
_MASK = (
    1 << 22
)  # elements of a mask of the efficient kernel; whoever makes it holds some 16 bytes for each


class FlashParts:
    """The blocks of a task, each run by the CPU's flash kernel."""

    def __init__(self, task: Task, q: Tensor, k: Tensor) -> None:
        self.task, rows = task, len(q)
        self.blocks = blocks(task.layout, (q.shape[2], k.shape[2]), row_starts(task, rows, q.device))
        counts = [_counts(self.blocks, what, rows, x.shape[2]) for what, x in (("q", q), ("k", k))]
        self.queries_once, self.keys_once = (int(count.max()) <= 1 for count in counts)
        """Whether each query, and each key, is in one block at most."""
        self.whole = len(self.blocks) == 1 and all(int(count.min()) == 1 for count in counts)
        """Whether one block is all."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield the queries of each block, their output and their log-sum-exp."""
        width, (q, k, v) = v.shape[-1], _of_one_width(q, k, v)
        for b in self.blocks:
            at_q, at_k = (b.rows, ALL, b.q), (b.rows, ALL, b.k)
            out, lse = flash_forward(
                q[at_q], k[at_k], v[at_k], self.task.scores, b.causal, self._mask(b, q)
            )
            yield at_q, out[..., :width], lse

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Index, Index, Gradients]]:
        """Yield the queries and the keys of each block, and the gradients of q, k and v there."""
        lse = result[1]
        q, k, v, grad, out = _of_one_width(*inputs, grad, result[0])
        for b in self.blocks:
            at_q, at_k = (b.rows, ALL, b.q), (b.rows, ALL, b.k)
            found = flash_backward(
                grad[at_q],
                (q[at_q], k[at_k], v[at_k]),
                (out[at_q], lse[at_q]),
                self.task.scores,
                b.causal,
                self._mask(b, q),
            )
            dq, dk, dv = (d[..., : x.shape[-1]] for d, x in zip(found, inputs, strict=True))
            yield at_q, at_k, (dq, dk, dv)

    def _mask(self, b: Block, q: Tensor) -> Tensor | None:
        if b.shift is None:
            return None
        lengths = (b.q.stop - b.q.start, b.k.stop - b.k.start)
        if q.is_meta:
            return q.new_empty(lengths)
        return band(lengths, b.shift, self.task.layout.window, q.dtype)


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors as the CPU's flash kernel takes them. Zeros change no result."""
    width = max(x.shape[-1] for x in tensors)
    return [padded(x, width) for x in tensors]


class PlainParts:
    """Tiles of queries with all keys that they may reach, by plain products.

    Documents are told apart by a mask that is made for each tile on the device, so nothing is waited
    for. A tile has so few queries that its scores take at most ``_PLAIN_SCORES`` elements.
    """

    whole = queries_once = keys_once = False

    def __init__(self, task: Task, q: Tensor, k: Tensor) -> None:
        self.task, layout = task, task.layout
        self.q_size = q.shape[2] // len(layout.q_starts)
        self.k_size = k.shape[2] // len(layout.k_starts)
        tile = self._tile(q)
        self.tiles: list[tuple[int, int, int, int, int, int]] = []
        for i, a in enumerate(layout.q_starts):
            for j, c in enumerate(layout.k_starts):
                for q0 in range(a, a + self.q_size, tile):
                    q1 = min(q0 + tile, a + self.q_size)
                    k0 = max(c, q0 - layout.window + 1) if layout.window else c
                    k1 = min(c + self.k_size, q1) if layout.causal else c + self.k_size
                    if k0 < k1:
                        self.tiles.append((q0, q1, k0, k1, i * self.q_size - a, j * self.k_size - c))

    def _tile(self, q: Tensor) -> int:
        """Return how many queries a tile has at most."""
        return max(1, _PLAIN_SCORES // max(1, q.shape[0] * q.shape[1] * self.k_size))

    def _places(self) -> Iterator[tuple[Index, Index, tuple[int, int], tuple[int, int]]]:
        """Yield the queries and the keys of each tile: where they are in the tensors, and in a row."""
        for q0, q1, k0, k1, q_shift, k_shift in self.tiles:
            at_q = (ALL, ALL, slice(q0 + q_shift, q1 + q_shift))
            at_k = (ALL, ALL, slice(k0 + k_shift, k1 + k_shift))
            yield at_q, at_k, (q0, q1), (k0, k1)

    def _seen(self, q: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Return whether a query sees a key, (B or 1, 1, Lq, Lk)."""
        layout, bounds = self.task.layout, self.task.bounds
        at_q, at_k = (torch.arange(*ends, device=q.device) for ends in (queries, keys))
        distance = at_q[:, None] - at_k
        seen = torch.ones_like(distance, dtype=torch.bool)
        if layout.causal:
            seen &= distance >= 0
        if layout.window:
            seen &= distance < layout.window
        if bounds is None:
            return seen[None, None]
        rows = len(q)
        first = torch.arange(rows, device=q.device)[:, None] * ((bounds.numel() - 1) // rows)
        of_q, of_k = (torch.searchsorted(bounds, first + at, right=True) for at in (at_q, at_k))
        return (seen & (of_q[:, :, None] == of_k[:, None, :]))[:, None]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield the queries of each tile, their output and their log-sum-exp."""
        for at_q, at_k, *ends in self._places():
            seen = self._seen(q, *ends)
            yield at_q, *plain_forward(q[at_q], k[at_k], v[at_k], self.task.scores, seen)

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Index, Index, Gradients]]:
        """Yield the queries and the keys of each tile, and the gradients of q, k and v there."""
        q, k, v = inputs
        out, lse = result
        for at_q, at_k, *ends in self._places():
            seen = self._seen(q, *ends)
            here = (q[at_q], k[at_k], v[at_k])
            found = plain_backward(grad[at_q], here, (out[at_q], lse[at_q]), self.task.scores, seen)
            yield at_q, at_k, found


class EfficientParts(PlainParts):
    """The same by the memory-efficient kernel of GPUs, which holds no scores but takes a mask.

    One mask serves all heads. Where queries see all keys, or as many as a square has, there is none,
    and a tile is a whole piece.
    """

    def __init__(self, task: Task, q: Tensor, k: Tensor, square: bool) -> None:
        """Take a task, and whether each causal part of it has as many queries as keys."""
        self.masked = bool(task.bounds is not None or task.layout.window or not square)
        super().__init__(task, q, k)
        places = [(at_q[2], at_k[2]) for at_q, at_k, *_ in self._places()]
        self.queries_once = disjoint([at_q for at_q, _ in places])
        self.keys_once = disjoint([at_k for _, at_k in places])
        self.whole = places == [(slice(0, q.shape[2]), slice(0, k.shape[2]))]

    def _tile(self, q: Tensor) -> int:
        if not self.masked:
            return self.q_size
        window, rows = self.task.layout.window, 1 if self.task.bounds is None else len(q)
        most = max(window, TILE[1]) if window else self.q_size
        reach = min(self.k_size, most + window) if window else self.k_size
        return min(most, max(TILE[0], _MASK // (rows * reach)))

    def _mask(
        self, q: Tensor, queries: tuple[int, int], keys: tuple[int, int]
    ) -> tuple[bool, Tensor | None]:
        """Return whether a tile is causal, or who sees whom."""
        if self.masked:
            return False, self._seen(q, queries, keys)
        return self.task.layout.causal and queries == keys, None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """Yield the queries of each tile, their output and their log-sum-exp."""
        width, (q, k, v) = v.shape[-1], _in_eights(q, k, v)
        for at_q, at_k, *ends in self._places():
            out, lse = efficient_forward(
                q[at_q], k[at_k], v[at_k], self.task.scores.scale, *self._mask(q, *ends)
            )
            yield at_q, out[..., :width], lse

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Index, Index, Gradients]]:
        """Yield the queries and the keys of each tile, and the gradients of q, k and v there."""
        lse = result[1]
        q, k, v, grad, out = _in_eights(*inputs, grad, result[0])
        for at_q, at_k, *ends in self._places():
            found = efficient_backward(
                grad[at_q],
                (q[at_q], k[at_k], v[at_k]),
                (out[at_q], lse[at_q]),
                self.task.scores.scale,
                *self._mask(q, *ends),
            )
            dq, dk, dv = (d[..., : x.shape[-1]] for d, x in zip(found, inputs, strict=True))
            yield at_q, at_k, (dq, dk, dv)


def _in_eights(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with widths that 8 divides, as GPUs load them."""
    return [aligned(x, x.shape[-1] + -x.shape[-1] % 8) for x in tensors]


Parts = FlashParts | VarlenParts | PlainParts


def parts_of(task: Task, q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Return the parts of a task by the kernel that the device has for it."""
    kind = devices.device_of(q)
    if kind == "cuda":
        task = _with_documents_that_matter(task, len(q))
        device, problem = kernel_table.device_of(q), problem_of(task, q, k, v)
        kernel = kernel_of(device, problem)
        if kernel in ("flash", "cudnn"):
            return VarlenParts(task, q, k, kernel, widths_of(kernel, device, problem))
        if kernel == "efficient":
            return EfficientParts(task, q, k, problem.square)
    if kind == "cpu" and not task.scores.softcap:
        return FlashParts(task, q, k)
    return PlainParts(task, q, k)


def _with_documents_that_matter(task: Task, rows: int) -> Task:
    """Return the task without documents if each row is one; on meta none can be read."""
    extents = task.extents
    if extents is None or not (extents.is_meta or int(extents.numpy()[0]) == rows):
        return task
    return replace(task, bounds=None, extents=None)


class Merged:
    """The output of some queries over parts of the keys, added one by one.

    Sums are in float32 or wider. If each query comes once, nothing is summed, and the output is in its
    own type.
    """

    def __init__(self, q: Tensor, width: int, once: bool = False) -> None:
        """Begin with no keys."""
        rows, heads, length, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        self.once = once
        # The layout that the flash kernels have, so that a change of axes copies nothing.
        out = q.new_zeros((rows, length, heads, width), dtype=q.dtype if once else wide)
        self.out = out.transpose(1, 2)
        """(B, H, L, V)"""
        self.lse = q.new_full((rows, length, heads), -torch.inf, dtype=wide).transpose(1, 2)
        """(B, H, L)"""

    def add(self, at: Index, out: Tensor, lse: Tensor) -> None:
        """Add the output and the log-sum-exp of the queries at ``at`` over more keys."""
        if self.once:
            self.out[at], self.lse[at] = out, lse
            return
        before, total = self.lse[at], self.out[at]
        after = torch.logaddexp(before, lse)
        # Queries that have seen no key yet have no weights: minus infinity twice has no difference.
        none = after == -torch.inf
        total.mul_((before - after).masked_fill_(none, 0.0).exp_()[..., None])
        total.add_(out * (lse - after).masked_fill_(none, 0.0).exp_()[..., None])
        before.copy_(after)


class Sums:
    """The gradients of queries, or of keys and values, added part by part, in float32 or wider."""

    def __init__(self, like: Sequence[Tensor], once: bool) -> None:
        """Begin with zeros."""
        self.once = once
        self.of = [
            torch.zeros_like(x, dtype=x.dtype if once else torch.promote_types(x.dtype, torch.float32))
            for x in like
        ]

    def add(self, at: Index, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the tokens at ``at``."""
        for total, gradient in zip(self.of, gradients, strict=True):
            if self.once:
                total[at] = gradient
            else:
                total[at] += gradient


def _counts(parts: Sequence[Block], what: str, rows: int, length: int) -> np.ndarray:
    """Return in how many blocks each query, or each key, is: (B, L)."""
    counts = np.zeros((rows, length), np.int32)
    for block in parts:
        counts[block.rows, getattr(block, what)] += 1
    return counts


def row_starts(task: Task, rows: int, device: torch.device) -> tuple[tuple[int, ...], ...]:
    """Return for each row where its documents begin, read from host memory.

    On meta there are none to read, and each row counts as one document.
    """
    if task.bounds is None or device.type == "meta" or task.bounds.is_meta:
        return ((0,),) * rows
    return _row_starts(task.bounds.numpy().tobytes(), rows)


def _row_starts(bounds: bytes, rows: int) -> tuple[tuple[int, ...], ...]:
    places = memoryview(bounds).cast("i")
    length = (len(places) - 1) // rows
    found: list[list[int]] = [[] for _ in range(rows)]
    for place in places:
        if place == rows * length:
            break
        found[place // length].append(place % length)
    return tuple(map(tuple, found))
