"""Attention part by part, and how parts become one result.

A kernel yields the outputs of some queries over some keys. Where several parts have the same queries,
their outputs are merged by their log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867). A
backward kernel takes the merged output and log-sum-exp, and computes the gradients of each part alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from compose.base import devices
from compose.operators.blocks import Block, blocks
from compose.operators.kernels import (
    band,
    flash_backward,
    flash_forward,
    plain_backward,
    plain_forward,
)
from compose.operators.task import ALL, Gradients, Index, Task
from compose.operators.varlen import WIDEST, VarlenParts

_PLAIN_SCORES = 1 << 24  # scores that the plain kernel holds at a time, in elements


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
        for b in self.blocks:
            at_q, at_k = (b.rows, ALL, b.q), (b.rows, ALL, b.k)
            out, lse = flash_forward(
                q[at_q], k[at_k], v[at_k], self.task.scores, b.causal, self._mask(b, q)
            )
            yield at_q, out, lse

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Index, Index, Gradients]]:
        """Yield the queries and the keys of each block, and the gradients of q, k and v there."""
        q, k, v = inputs
        out, lse = result
        for b in self.blocks:
            at_q, at_k = (b.rows, ALL, b.q), (b.rows, ALL, b.k)
            yield (
                at_q,
                at_k,
                flash_backward(
                    grad[at_q],
                    (q[at_q], k[at_k], v[at_k]),
                    (out[at_q], lse[at_q]),
                    self.task.scores,
                    b.causal,
                    self._mask(b, q),
                ),
            )

    def _mask(self, b: Block, q: Tensor) -> Tensor | None:
        if b.shift is None:
            return None
        lengths = (b.q.stop - b.q.start, b.k.stop - b.k.start)
        if q.is_meta:
            return q.new_empty(lengths)
        return band(lengths, b.shift, self.task.layout.window, q.dtype)


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
        tile = max(1, _PLAIN_SCORES // max(1, q.shape[0] * q.shape[1] * self.k_size))
        self.tiles: list[tuple[int, int, int, int, int, int]] = []
        for i, a in enumerate(layout.q_starts):
            for j, c in enumerate(layout.k_starts):
                for q0 in range(a, a + self.q_size, tile):
                    q1 = min(q0 + tile, a + self.q_size)
                    k0 = max(c, q0 - layout.window + 1) if layout.window else c
                    k1 = min(c + self.k_size, q1) if layout.causal else c + self.k_size
                    if k0 < k1:
                        self.tiles.append((q0, q1, k0, k1, i * self.q_size - a, j * self.k_size - c))

    def _each(self, q: Tensor) -> Iterator[tuple[Index, Index, Tensor]]:
        for q0, q1, k0, k1, q_shift, k_shift in self.tiles:
            at_q = (ALL, ALL, slice(q0 + q_shift, q1 + q_shift))
            at_k = (ALL, ALL, slice(k0 + k_shift, k1 + k_shift))
            yield at_q, at_k, self._seen(q, (q0, q1), (k0, k1))

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
        for at_q, at_k, seen in self._each(q):
            yield at_q, *plain_forward(q[at_q], k[at_k], v[at_k], self.task.scores, seen)

    def backward(
        self, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Index, Index, Gradients]]:
        """Yield the queries and the keys of each tile, and the gradients of q, k and v there."""
        q, k, v = inputs
        out, lse = result
        for at_q, at_k, seen in self._each(q):
            here = (q[at_q], k[at_k], v[at_k])
            found = plain_backward(grad[at_q], here, (out[at_q], lse[at_q]), self.task.scores, seen)
            yield at_q, at_k, found


Parts = FlashParts | VarlenParts | PlainParts


def parts_of(task: Task, q: Tensor, k: Tensor) -> Parts:
    """Return the parts of a task by the kernel that the device has for it.

    Args:
        task: The task.
        q: Queries, (B, H, L, K).
        k: Keys, (B, G, S, K).

    Returns:
        The parts.
    """
    if task.scores.softcap:
        return PlainParts(task, q, k)
    if devices.device_of(q) == "cpu":
        return FlashParts(task, q, k)
    if devices.device_of(q) == "cuda" and gpu_takes(task, q):
        return VarlenParts(task, q, k)
    return PlainParts(task, q, k)


def gpu_takes(task: Task, q: Tensor) -> bool:
    """Return whether the flash kernel of GPUs computes a task.

    Args:
        task: The task, without a soft cap.
        q: Queries, (B, H, L, K).

    Returns:
        Whether it does.
    """
    half = q.dtype in (torch.bfloat16, torch.float16)
    in_order = task.layout.causal or task.bounds is None or len(task.layout.q_starts) == 1
    old = q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0)
    return half and in_order and q.shape[-1] <= WIDEST and not old


class Merged:
    """The output of some queries over parts of the keys, added one by one.

    Sums are in float32 or wider. If each query comes once, nothing is summed, and the output is in its
    own type.
    """

    def __init__(self, q: Tensor, width: int, once: bool = False) -> None:
        """Begin with no keys.

        Args:
            q: Queries, (B, H, L, K).
            width: Of the values.
            once: Whether each query is added once.
        """
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
        """Begin with zeros.

        Args:
            like: The tensors (B, heads, L, K) whose gradients these are.
            once: Whether each token is added once; then the sums have the tensors' own type.
        """
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
