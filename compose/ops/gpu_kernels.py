"""PyTorch's kernels of attention for CUDA, each with its log-sum-exp in the one form that parts merge.

The log-sum-exp is natural and float32 in all of them. Its layout and padding differ.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ops = torch.ops.aten
_LSE_UNIT = 32  # the efficient kernel's log-sum-exp is padded with infinity to a multiple of this


@dataclass(frozen=True)
class Rows:
    """The rows of one call of a kernel. Without cumulative lengths they are those of the batch."""

    q: Tensor | None
    """(N + 1,), int32: where the queries of each row begin; the last entry is their number."""
    k: Tensor | None
    """The same for keys."""
    longest: tuple[int, int]
    """At least as many queries, and keys, as any row has."""
    causal: bool
    left: int
    """Keys that a query sees before the one that is aligned with it; -1 is all."""


def padded(x: Tensor, width: int) -> Tensor:
    """Return a tensor (..., width), with zeros at the end. They change no result of attention."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def aligned(x: Tensor, width: int) -> Tensor:
    """Return a tensor (..., width) whose rows begin where GPUs load 8 elements at a time."""
    x = padded(x, width)
    places = (x.storage_offset(), *x.stride()[:-1])
    return x if x.stride(-1) == 1 and not any(at % 8 for at in places) else x.contiguous()


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: Rows) -> tuple[Tensor, Tensor]:
    """Run the flash kernel: FlashAttention-2, or the implementation that is activated in its place.

    It takes rows of several lengths, laid end to end. It aligns the last query of a row with the last
    key: with ``causal`` that query sees all keys, the one before sees one key less.

    Tensors are (B, L, heads, K), or (T, heads, K) with cumulative lengths. The results are the output
    in the shape of ``q``, and the log-sum-exp (B, H, L) or (H, T).
    """
    out, lse, *_ = _ops._flash_attention_forward(
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


def flash_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    scale: float,
    rows: Rows,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`flash_forward`, whose other arguments these are.

    ``result`` is the output and the log-sum-exp over all keys, of which these may be a part. A query
    whose log-sum-exp is infinite sees none of these keys.
    """
    # The kernel reads its random state only for dropout.
    unused = torch.empty(0, device=grad.device)
    state = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    out, lse = result
    return _ops._flash_attention_backward(
        grad,
        *inputs,
        out,
        lse.contiguous(),
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


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: Rows) -> tuple[Tensor, Tensor]:
    """Run cuDNN's kernel: arguments and result as for :func:`flash_forward`.

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


def cudnn_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    scale: float,
    rows: Rows,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`cudnn_forward`, as :func:`flash_backward` does."""
    grad, q, k, v, out = (_dense(x).transpose(1, 2) for x in (grad, *inputs, result[0]))
    unused = torch.empty((), dtype=torch.int64, device=grad.device)  # the seed of dropout
    found = _ops._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        result[1].contiguous()[..., None],
        unused,
        unused,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        rows.causal,
        scale=scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in found)
    return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    """Return a tensor whose strides are those of its shape, also where a size is 1.

    PyTorch gives cuDNN the strides that an output and gradients have if queries are dense, and newer
    versions refuse others.
    """
    return x.contiguous().flatten().view(x.shape)


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the memory-efficient kernel, which takes float32, any width, and a mask.

    Tensors are (B, heads, L, K). ``seen`` tells whether a query sees a key, (B or 1, 1, L, S); None:
    all, or what ``causal`` leaves of as many keys as queries. If a query sees no key, its log-sum-exp
    is so low that its output has no weight beside that of other keys.
    """
    bias = None if seen is None else _bias(q, seen)
    k, v = (_for_each_query_head(x, q) for x in (k, v))
    out, lse, *_ = _ops._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def efficient_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    scale: float,
    causal: bool,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`efficient_forward`, whose other arguments these are.

    ``result`` is the output and the log-sum-exp over all keys, of which these may be a part.
    """
    q, k, v = inputs
    out, lse = result
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
        scale=scale,
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
