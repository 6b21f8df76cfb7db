"""The kernels of GPUs: the memory-efficient one, and FlashAttention and cuDNN, which take rows.

Each returns its log-sum-exp in another layout and padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.ops.attention_kernels import ALL, Index, Parts, PlainParts, Result, Three, padded
from compose.ops.attention_layout import TILE, AttentionTask, PiecePair, pairs_of_pieces
from compose.ops.kernel_table import Kernel, Problem

_ops = torch.ops.aten
# Elements of a mask of the efficient kernel; whoever makes it holds some 16 bytes for each.
_MASK = 1 << 22
_LSE_UNIT = 32  # the efficient kernel's log-sum-exp is padded with infinity to a multiple of this


class EfficientParts(PlainParts):
    """Tiles of queries by the memory-efficient kernel of GPUs, which holds no scores but takes a mask.

    One mask serves all heads. Where queries see all keys, or as many as a square has, there is none,
    and a tile is a whole piece.
    """

    def __init__(self, task: AttentionTask, q: Tensor, k: Tensor, square: bool) -> None:
        """Take a task, and whether each causal part of it has as many queries as keys."""
        self.masked = bool(task.bounds is not None or task.pieces.window or not square)
        super().__init__(task, q, k)
        self._note_places([places for _, _, places in self.tiles], q, k)

    def _tile(self, q: Tensor) -> int:
        if not self.masked:
            return self.q_size
        window, rows = self.task.pieces.window, 1 if self.task.bounds is None else len(q)
        most = max(window, TILE[1]) if window else self.q_size
        reach = min(self.k_size, most + window) if window else self.k_size
        return min(most, max(TILE[0], _MASK // (rows * reach)))

    def _mask(self, q: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> Any:
        """Return whether a tile is causal, or who sees whom."""
        if self.masked:
            return False, super()._mask(q, queries, keys)
        return self.task.pieces.causal and queries == keys, None

    def _fitted(self, of_keys: Sequence[Tensor], of_values: Sequence[Tensor]) -> list[Tensor]:
        # Widths that 8 divides, as GPUs load them.
        return [_aligned(x, x.shape[-1] + -x.shape[-1] % 8) for x in (*of_keys, *of_values)]

    def _forward(self, how: Any, q: Tensor, k: Tensor, v: Tensor) -> Result:
        # If a query sees no key, its log-sum-exp is so low that its output has no weight beside that of
        # other keys.
        causal, seen = how
        bias = None if seen is None else _bias(q, seen)
        k, v = (_for_each_query_head(x, q) for x in (k, v))
        out, lse, *_ = _ops._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, causal, scale=self.task.scale
        )
        return out, lse[..., : q.shape[2]]

    def _backward(self, how: Any, grad: Tensor, inputs: Three, result: Result) -> Three:
        (causal, seen), (q, k, v), (out, lse) = how, inputs, result
        unused = torch.empty((), dtype=torch.int64, device=grad.device)  # the seed of dropout
        dq, dk, dv, _ = _ops._scaled_dot_product_efficient_attention_backward(
            grad,
            q,
            *(_for_each_query_head(x, q) for x in (k, v)),
            None if seen is None else _bias(q, seen),
            # The kernel knows no stride of the output's tokens.
            out.transpose(1, 2).contiguous().transpose(1, 2),
            F.pad(lse, (0, -lse.shape[-1] % _LSE_UNIT), value=torch.inf).contiguous(),
            unused,
            unused,
            0.0,
            [True, True, True, False],
            causal,
            scale=self.task.scale,
        )
        return dq, _of_groups(dk, k.shape[1]), _of_groups(dv, k.shape[1])


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with as many heads as queries have."""
    shared = q.shape[1] // x.shape[1]
    return x.repeat_interleave(shared, 1) if shared > 1 else x


def _of_groups(x: Tensor, groups: int) -> Tensor:
    """Return the sums over the query heads that share a head of keys."""
    if x.shape[1] == groups:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.unflatten(1, (groups, -1)).sum(2, dtype=wide)


def _bias(q: Tensor, seen: Tensor) -> Tensor:
    """Return what is added to the scores: 0 where a key is seen, else as good as minus infinity.

    It is finite, so no row becomes NaN. The kernel reads 16 elements at a time, so rows are padded.
    """
    keys = seen.shape[-1]
    held = q.new_zeros((*seen.shape[:-1], keys + -keys % 16))
    held[..., :keys].masked_fill_(~seen, torch.finfo(q.dtype).min / 2)
    return held[..., :keys].expand(len(q), q.shape[1], -1, -1)


@dataclass(frozen=True)
class CallRows:
    """The rows of one call of a kernel. Without cumulative lengths they are those of the batch."""

    q: Tensor | None
    """(N + 1,), int32: where the queries of each row begin; the last entry is their number."""
    k: Tensor | None
    longest: tuple[int, int]
    """At least as many queries, and keys, as any row has."""
    causal: bool
    left: int
    """Keys that a query sees before the one that is aligned with it; -1 is all."""

    @property
    def window(self) -> dict[str, int]:
        """The keys that a query sees before and after its own, as the flash kernel takes them."""
        return {"window_size_left": self.left, "window_size_right": 0 if self.causal else -1}


class VarlenParts(Parts):
    """The pairs of pieces of a task, each one call of a kernel of GPUs that takes rows.

    A row can hold the end of a document and all of its earlier keys. Cumulative lengths of documents
    are computed on the device from the documents' boundaries, so nothing is waited for.
    """

    def __init__(
        self, task: AttentionTask, q: Tensor, k: Tensor, kernel: Kernel, widths: tuple[int, int]
    ) -> None:
        """Take the kernel, "cudnn" or "flash", and the widths that it is to get."""
        self.task, self.widths = task, widths
        self.run, self.run_backward = _flash_forward, _flash_backward
        if kernel == "cudnn":
            self.run, self.run_backward = _cudnn_forward, _cudnn_backward
        self.rows = len(q)
        self.pairs = list(pairs_of_pieces(task.pieces, (q.shape[2], k.shape[2])))
        self._note_places([(pair.at_q, pair.at_k) for pair in self.pairs], q, k)

    def _fitted(self, of_keys: Sequence[Tensor], of_values: Sequence[Tensor]) -> list[Tensor]:
        wide, narrow = self.widths
        return [_aligned(x, wide) for x in of_keys] + [_aligned(x, narrow) for x in of_values]

    def _calls(self, q: Tensor) -> Iterator[tuple[Index, Index, Any]]:
        for pair in self.pairs:
            yield (ALL, ALL, pair.at_q), (ALL, ALL, pair.at_k), self._rows(pair)

    def _forward(self, how: Any, q: Tensor, k: Tensor, v: Tensor) -> Result:
        rows, seen = how
        q, k, v = (_laid(x, rows) for x in (q, k, v))
        out, lse = self.run(q, k, v, self.task.scale, rows)
        out = self._unlaid(out, rows)
        lse = lse if rows.q is None else lse.unflatten(1, (self.rows, -1)).transpose(0, 1)
        if seen is not None:
            out = out.masked_fill(~seen[..., None], 0.0)
            lse = lse.masked_fill(~seen, -torch.inf)
        return out, lse

    def _backward(self, how: Any, grad: Tensor, inputs: Three, result: Result) -> Three:
        (rows, seen), (out, lse) = how, result
        if seen is not None:  # a query whose log-sum-exp is infinite sees none of these keys
            lse = lse.masked_fill(~seen, torch.inf)
        if rows.q is not None:
            lse = lse.transpose(0, 1).flatten(1)
        grad, out, *here = (_laid(x, rows) for x in (grad, out, *inputs))
        results = self.run_backward(grad, here, (out, lse), self.task.scale, rows)
        dq, dk, dv = (self._unlaid(d, rows) for d in results)
        return dq, dk, dv

    def _rows(self, pair: PiecePair) -> tuple[CallRows, Tensor | None]:
        """Return the rows of a call, and which queries (B, 1, Lq) see any key if not all do."""
        (a, b), (c, d) = pair.q, pair.k
        causal = self.task.pieces.causal and pair.inside
        whole = self.task.bounds
        if whole is None:
            return CallRows(None, None, (b - a, d - c), causal, pair.left), None
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
            return CallRows(q, k, (min(longest, b - a), min(longest, d - c)), causal, pair.left), None
        # In a row, the document of its first query alone has keys here. Earlier keys go to a row of
        # their own, without queries.
        row = torch.arange(self.rows, device=whole.device)
        number = torch.searchsorted(whole, (row * length + a).int(), right=True)
        start, end = (whole[number + i] - row * length for i in (-1, 0))
        skipped = row * (d - c) + (start - c).clamp(0, d - c)
        q = torch.stack([row, row], 1).flatten() * (b - a)
        k = torch.stack([row * (d - c), skipped], 1).flatten()
        q, k = (F.pad(x, (0, 1), value=self.rows * n) for x, n in ((q, b - a), (k, d - c)))
        seen = (torch.arange(a, b, device=row.device) < end[:, None]) & (start < d)[:, None]
        return CallRows(q.int(), k.int(), (b - a, d - c), causal, pair.left), seen[:, None]

    def _unlaid(self, x: Tensor, rows: CallRows) -> Tensor:
        """Return (B, heads, L, K) of what the kernel returned."""
        return (x if rows.q is None else x.unflatten(0, (self.rows, -1))).transpose(1, 2)


def _laid(x: Tensor, rows: CallRows) -> Tensor:
    """Return (B, heads, S, K) as the kernel takes it: (B, S, heads, K), or end to end."""
    x = x.transpose(1, 2)
    return x if rows.q is None else x.flatten(0, 1)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: CallRows) -> Result:
    """Run the flash kernel: FlashAttention-2, or the implementation that is activated in its place.

    It takes rows of several lengths, laid end to end. It aligns the last query of a row with the last
    key: with ``causal`` that query sees all keys, the one before sees one key less.

    Tensors are (B, L, heads, K), or (T, heads, K) with cumulative lengths. The results are the output
    in the shape of ``q``, and the log-sum-exp (B, H, L) or (H, T).
    """
    given = (q, k, v, rows.q, rows.k, *rows.longest, 0.0, rows.causal, False)
    out, lse, *_ = _ops._flash_attention_forward(*given, scale=scale, **rows.window)
    return out, lse


def _flash_backward(
    grad: Tensor, inputs: Sequence[Tensor], result: Result, scale: float, rows: CallRows
) -> Sequence[Tensor]:
    # The kernel reads its random state only for dropout.
    unused = torch.empty(0, device=grad.device)
    state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    out, lse = result
    given = (grad, *inputs, out, lse.contiguous(), rows.q, rows.k, *rows.longest, 0.0, rows.causal)
    return _ops._flash_attention_backward(*given, state, unused, scale=scale, **rows.window)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: CallRows) -> Result:
    """Run cuDNN's kernel: arguments and result as for :func:`_flash_forward`.

    It aligns the first query with the first key. So a causal call has as many queries as keys, and then
    the two ways are one. It has neither windows nor rows of several lengths here.
    """
    assert rows.q is None
    assert rows.left < 0
    assert not rows.causal or q.shape[1] == k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (_dense(q), k, v))
    out, lse, *_ = _ops._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, rows.causal, False, scale=scale
    )
    return out.transpose(1, 2), lse.flatten(2)  # of (B, H, L, 1)


def _cudnn_backward(
    grad: Tensor, inputs: Sequence[Tensor], result: Result, scale: float, rows: CallRows
) -> Sequence[Tensor]:
    grad, q, k, v, out = (_dense(x).transpose(1, 2) for x in (grad, *inputs, result[0]))
    unused = torch.empty((), dtype=torch.int64, device=grad.device)  # the seed of dropout
    random_and_bias = (unused, unused, None)
    lengths = (None, None, q.shape[2], k.shape[2])
    lse = result[1].contiguous()[..., None]
    results = _ops._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, *random_and_bias, *lengths, 0.0, rows.causal, scale=scale
    )
    return [x.transpose(1, 2) for x in results]


def _dense(x: Tensor) -> Tensor:
    """Return a tensor whose strides are those of its shape, also where a size is 1.

    PyTorch gives cuDNN the strides that an output and gradients have if queries are dense, and newer
    versions refuse others.
    """
    return x.contiguous().flatten().view(x.shape)


def _aligned(x: Tensor, width: int) -> Tensor:
    """Return a tensor (..., width) whose rows begin where GPUs load 8 elements at a time."""
    x = padded(x, width)
    places = (x.storage_offset(), *x.stride()[:-1])
    return x if x.stride(-1) == 1 and not any(at % 8 for at in places) else x.contiguous()


def _has_all_keys(task: AttentionTask, rows: int, k: Tensor) -> bool:
    """Tell whether all keys are here: a document that has none gives its queries infinities."""
    assert task.bounds is not None
    return len(task.pieces.q_starts) == 1 and k.shape[2] * rows == task.bounds.numel() - 1


def problem_of(task: AttentionTask, q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """Return a task as the table of kernels takes it; tensors are (B, heads, L, width)."""
    pieces = task.pieces
    pairs = list(pairs_of_pieces(pieces, (q.shape[2], k.shape[2])))
    sizes = [(pair.q[1] - pair.q[0], pair.k[1] - pair.k[0]) for pair in pairs]
    return Problem(
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        task.bounds is not None,
        bool(pieces.window),
        bool(task.softcap),
        all(a == b for (a, b), pair in zip(sizes, pairs, strict=True) if pieces.causal and pair.inside),
        all(size % 128 == 0 for pair in sizes for size in pair),
        pieces.causal or task.bounds is None or _has_all_keys(task, len(q), k),
    )
