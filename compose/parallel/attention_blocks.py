"""Attention in blocks: rectangles of (queries, keys) that need no mask, run by the flash kernels.

A long sequence is cut into chunks. A document is a run of tokens, so at most one document reaches from
an earlier chunk into a later one. The pairs that attend between two chunks are therefore one full
rectangle: the first queries of the later chunk by the last keys of the earlier one. Within a chunk each
document is a causal square. So no mask is built, blocks without a pair are not computed, and memory
stays linear in the length.

The kernels return each query's output and the log-sum-exp of its scores. The outputs of blocks are
merged by their log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867). The backward kernel takes
the merged output and log-sum-exp, and computes each block's gradients alone (Dao 2023,
arXiv:2307.08691).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ops = torch.ops.aten


@dataclass(frozen=True)
class Block:
    """A rectangle of queries and keys that attend to each other."""

    rows: slice
    """The rows of the batch."""
    q: slice
    """The queries, as places in the query tensor."""
    k: slice
    """The keys, as places in the key tensor."""
    causal: bool
    """Whether a query sees only the keys up to its own; such a block is square."""


def document_starts(ids: Tensor) -> list[list[int]]:
    """Return, for each row of ``ids`` (B, S), where its documents (runs of equal ids) begin.

    On meta there are no ids, and each row counts as one document.
    """
    if ids.is_meta:
        return [[0]] * len(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return [row.nonzero().flatten().tolist() for row in begins.cpu()]


def blocks(
    q_chunks: Sequence[int], k_chunks: Sequence[int], size: int, starts: Sequence[Sequence[int]]
) -> list[Block]:
    """Return the blocks of attention between two lists of chunks.

    Args:
        q_chunks: The chunks in the query tensor, in order, as indices into the sequence.
        k_chunks: The chunks in the key tensor, in the same way.
        size: Tokens of one chunk.
        starts: Where the documents of each row begin, as :func:`document_starts` returns it.

    Returns:
        The blocks; their slices are places in the query and the key tensor.
    """
    rows_of: dict[tuple[int, int, int, int, bool], list[int]] = {}
    for row, begins in enumerate(starts):
        for q_place, q_chunk in enumerate(q_chunks):
            for k_place, k_chunk in enumerate(k_chunks):
                for q0, q1, k0, k1, causal in _pairs(q_chunk, k_chunk, size, begins):
                    q_shift = (q_place - q_chunk) * size
                    k_shift = (k_place - k_chunk) * size
                    key = (q0 + q_shift, q1 + q_shift, k0 + k_shift, k1 + k_shift, causal)
                    rows_of.setdefault(key, []).append(row)
    return [
        Block(rows, slice(q0, q1), slice(k0, k1), causal)
        for (q0, q1, k0, k1, causal), found in rows_of.items()
        for rows in _runs(found)
    ]


def _pairs(
    q_chunk: int, k_chunk: int, size: int, begins: Sequence[int]
) -> Iterable[tuple[int, int, int, int, bool]]:
    """Yield (first query, end, first key, end, causal) of one row, as places in the whole sequence."""
    if k_chunk > q_chunk:
        return
    start, end = q_chunk * size, (q_chunk + 1) * size
    inside = [begin for begin in begins if start < begin < end]
    if k_chunk == q_chunk:
        for first, last in zip([start, *inside], [*inside, end], strict=True):
            yield first, last, first, last, True
        return
    document = max(begin for begin in begins if begin <= start)
    k_first, k_end = max(document, k_chunk * size), (k_chunk + 1) * size
    if k_first < k_end:
        yield start, inside[0] if inside else end, k_first, k_end, False


def _runs(rows: Sequence[int]) -> Iterable[slice]:
    """Yield slices that cover the ascending ``rows``."""
    first = rows[0]
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        if after != row + 1:
            yield slice(first, row + 1)
            first = after if after is not None else first


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return a block's output (B, H, Lq, K) and log-sum-exp (B, H, Lq); inputs are (B, heads, L, K)."""
    if q.device.type == "cpu":
        return _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if q.dtype == torch.float64:
        return plain_forward(q, k, v, causal)
    k, v = _expand(k, q.shape[1]), _expand(v, q.shape[1])
    return _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a block's q, k, v; ``out`` and ``lse`` are those of all blocks merged."""
    if q.device.type == "cpu":
        return _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
    if q.dtype == torch.float64:
        return plain_backward(grad, (q, k, v), out, lse, causal)
    heads, groups = q.shape[1], k.shape[1]
    k, v = _expand(k, heads), _expand(v, heads)
    # The kernel reads seed and offset only for dropout.
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    lengths = (q.shape[2], k.shape[2])
    dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, none, none
    )
    dk, dv = (d.unflatten(1, (groups, heads // groups)).sum(2) for d in (dk, dv))
    return dq, dk, dv


def plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute what the flash kernels do, with all scores (B, H, Lq, Lk) in memory.

    The proof runs a composition's logic in float64 on short sequences, and CUDA's kernels take no
    float64.

    Args:
        q: Queries, (B, H, Lq, K).
        k: Keys, (B, G, Lk, K).
        v: Values, (B, G, Lk, K).
        causal: Whether a query sees only the keys up to its own.

    Returns:
        The output (B, H, Lq, K) and the log-sum-exp (B, H, Lq).
    """
    scores = _scores(q, _expand(k, q.shape[1]), causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ _expand(v, q.shape[1]), lse


def plain_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`plain_forward` (Dao 2023, arXiv:2307.08691, section 2.3).

    Args:
        grad: The gradient of ``out``, (B, H, Lq, K).
        inputs: q (B, H, Lq, K), k and v (B, G, Lk, K).
        out: The forward's output; it may be the merged output of all blocks.
        lse: The log-sum-exp (B, H, Lq) that belongs to ``out``.
        causal: As in the forward.

    Returns:
        The gradients of q, k and v.
    """
    q, k, v = inputs
    heads, groups = q.shape[1], k.shape[1]
    k, v = _expand(k, heads), _expand(v, heads)
    weights = (_scores(q, k, causal) - lse[..., None]).exp()
    d_weights = grad @ v.mT - (grad * out).sum(-1, keepdim=True)
    d_scores = weights * d_weights * q.shape[-1] ** -0.5
    dk, dv = d_scores.mT @ q, weights.mT @ grad
    dk, dv = (d.unflatten(1, (groups, heads // groups)).sum(2) for d in (dk, dv))
    return d_scores @ k, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if not causal:
        return scores
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


def _expand(x: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads for the query heads that share them; the kernel needs this temporary."""
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x


class Merged:
    """The attention output over several blocks of keys, added one by one, in float32 or wider."""

    def __init__(self, q_BHLK: Tensor) -> None:
        dtype = torch.promote_types(q_BHLK.dtype, torch.float32)
        self.q = q_BHLK
        self.out = torch.zeros_like(q_BHLK, dtype=dtype)
        self.lse = torch.full(q_BHLK.shape[:3], -torch.inf, dtype=dtype, device=q_BHLK.device)

    def add(self, k_BGSK: Tensor, v_BGSK: Tensor, parts: Iterable[Block]) -> None:
        """Attend to more keys.

        Args:
            k_BGSK: Keys, (B, G, S, K).
            v_BGSK: Values, (B, G, S, K).
            parts: The blocks between the queries and these keys.
        """
        for b in parts:
            out, lse = _forward(
                self.q[b.rows, :, b.q], k_BGSK[b.rows, :, b.k], v_BGSK[b.rows, :, b.k], b.causal
            )
            before, total = self.lse[b.rows, :, b.q], self.out[b.rows, :, b.q]
            after = torch.logaddexp(before, lse)
            total.mul_((before - after).exp()[..., None])
            total.add_(out * (lse - after).exp()[..., None])
            before.copy_(after)


class Gradients:
    """The gradients of the queries, and of blocks of keys and values that are added one by one."""

    def __init__(self, grad: Tensor, q_BHLK: Tensor, out: Tensor, lse: Tensor) -> None:
        self.grad, self.q, self.out, self.lse = grad, q_BHLK, out, lse
        self.dq = torch.zeros_like(q_BHLK, dtype=lse.dtype)

    def add(self, k_BGSK: Tensor, v_BGSK: Tensor, parts: Iterable[Block]) -> Tensor:
        """Add the queries' share to ``dq``, and return the gradients of these keys and values.

        Args:
            k_BGSK: Keys, (B, G, S, K).
            v_BGSK: Values, (B, G, S, K).
            parts: The blocks between the queries and these keys.

        Returns:
            The gradients of keys and values, stacked: (2, B, G, S, K).
        """
        kv = torch.zeros((2, *k_BGSK.shape), dtype=self.dq.dtype, device=k_BGSK.device)
        for b in parts:
            q = (b.rows, slice(None), b.q)
            k = (b.rows, slice(None), b.k)
            dq, dk, dv = _backward(
                self.grad[q], self.q[q], k_BGSK[k], v_BGSK[k], self.out[q], self.lse[q], b.causal
            )
            self.dq[q] += dq
            kv[0][k] += dk
            kv[1][k] += dv
        return kv
