"""PyTorch's attention operators of CUDA on a CPU, by plain products: with their layouts and demands.

They stand in for the kernels, so that what calls them can be compared with the definition in float64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compose.ops import attention, kernel_table, operators
from compose.ops.attention_layout import AttentionTask
from compose.ops.kernel_table import Gpu, Problem

HOPPER = Gpu((9, 0), cudnn=91900)
AMPERE = Gpu((8, 0))

Seen = Tensor  # (B, 1 or H, L, S), bool


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """The output (B, L, H, V) and the log-sum-exp (B, H, L) of (B, L, H, K)."""
    kind, (q, k, v) = q.dtype, (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("blhk,bshk->bhls", q, k) * scale + bias.double()
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("bhls,bshv->blhv", weights, v)
    return out.to(kind), lse.to(torch.promote_types(kind, torch.float32))


def _plain_backward(
    grad: Tensor, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, scale: float, bias: Tensor
) -> tuple[Tensor, ...]:
    """The gradients; ``lse`` is (B, H, L)."""
    kind = grad.dtype
    grad, q, k, v, out, lse = (x.double() for x in (grad, *inputs, out, lse))
    shared = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(shared, 2) for x in (k, v))
    scores = torch.einsum("blhk,bshk->bhls", q, keys) * scale + bias.double()
    weights = (scores - lse[..., None]).exp()
    change = torch.einsum("blhv,bshv->bhls", grad, values)
    of_scores = weights * (change - (grad * out).sum(-1).transpose(1, 2)[..., None]) * scale
    dq = torch.einsum("bhls,bshk->blhk", of_scores, keys)
    dk = torch.einsum("bhls,blhk->bshk", of_scores, q).unflatten(2, (-1, shared)).sum(3)
    dv = torch.einsum("bhls,blhv->bshv", weights, grad).unflatten(2, (-1, shared)).sum(3)
    return dq.to(kind), dk.to(kind), dv.to(kind)


def _hidden(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)


# FlashAttention-2: rows of several lengths, windows, the last query aligned with the last key.


def _flash_bias(
    q: Tensor, k: Tensor, ends: tuple[Any, Any], longest: tuple[int, int], causal: bool, left: int
) -> Tensor:
    length, keys = q.shape[1], k.shape[1]
    ends_q = [0, length] if ends[0] is None else ends[0].tolist()
    ends_k = [0, keys] if ends[1] is None else ends[1].tolist()
    assert (ends_q[-1], ends_k[-1]) == (length, keys)
    seen = torch.zeros(length, keys, dtype=torch.bool)
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        assert 0 <= b - a <= longest[0]
        assert d - c >= 0
        assert d - c <= longest[1] or a == b
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        here = torch.ones(b - a, d - c, dtype=torch.bool)
        here = here & (distance >= 0) if causal else here
        seen[a:b, c:d] = here & (distance <= left) if left >= 0 else here
    return _hidden(seen)


def _in_rows(x: Tensor, ends: Tensor | None) -> Tensor:
    return x if ends is None else x[None]


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Any,
    ends_k: Any,
    most_q: int,
    most_k: int,
    *others: Any,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    **rest: Any,
) -> tuple[Tensor, ...]:
    _check_widths(q, k, v)
    assert q.shape[-1] == v.shape[-1]
    dropout, causal, debug = others
    assert (dropout, debug, window_size_right) == (0, False, 0 if causal else -1)
    rows = [_in_rows(x, ends_q) for x in (q, k, v)]
    bias = _flash_bias(rows[0], rows[1], (ends_q, ends_k), (most_q, most_k), causal, window_size_left)
    out, lse = _plain_forward(rows[0], rows[1], rows[2], scale, bias)
    # As the kernel says "no key".
    out, lse = out.nan_to_num(0.0), lse.masked_fill(lse == -torch.inf, torch.inf)
    out, lse = (out, lse) if ends_q is None else (out[0], lse[0])
    return out, lse, q.new_empty(2), q.new_empty(()), q.new_empty(0)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends_q: Any,
    ends_k: Any,
    most_q: int,
    most_k: int,
    dropout: float,
    causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    _check_widths(q, k, v)
    assert lse.is_contiguous()
    assert window_size_right == (0 if causal else -1)
    rows = [_in_rows(x, ends_q) for x in (q, k, v, grad, out)]
    bias = _flash_bias(rows[0], rows[1], (ends_q, ends_k), (most_q, most_k), causal, window_size_left)
    lse = lse if ends_q is None else lse[None]
    found = _plain_backward(rows[3], (rows[0], rows[1], rows[2]), rows[4], lse, scale, bias)
    return tuple(x.reshape(y.shape) for x, y in zip(found, (q, k, v), strict=True))


# cuDNN: heads first, the first query aligned with the first key, a log-sum-exp of four dims.


def _top_left(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return _hidden(seen.tril() if causal else seen)


def cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    with_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float,
) -> tuple[Any, ...]:
    _check_widths(q, k, v)
    _check_dense(q)
    assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = _plain_forward(rows[0], rows[1], rows[2], scale, _top_left(q, k, causal))
    empty = q.new_empty(0)
    sizes = (q.shape[2], k.shape[2])
    return out.transpose(1, 2), lse[..., None], empty, empty, *sizes, empty, empty, empty


def cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Any,
    ends_q: Any,
    ends_k: Any,
    most_q: int,
    most_k: int,
    dropout: float,
    causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    _check_widths(q, k, v)
    _check_dense(q, k, v, grad, out)
    assert (most_q, most_k, dropout) == (q.shape[2], k.shape[2], 0.0)
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.stride() == torch.empty(lse.shape).stride()
    rows = [x.transpose(1, 2) for x in (q, k, v, grad, out)]
    bias = _top_left(q, k, causal)
    found = _plain_backward(rows[3], (rows[0], rows[1], rows[2]), rows[4], lse[..., 0], scale, bias)
    return tuple(x.transpose(1, 2) for x in found)


# The efficient kernel: heads first, as many of keys as of queries, a mask, a padded log-sum-exp.


def _efficient_bias(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    if bias is None:
        return _top_left(q, k, causal)
    assert not causal
    assert bias.shape == (*q.shape[:3], k.shape[2])
    assert bias.dtype == q.dtype
    assert bias.stride(-1) == 1
    assert not any(stride % 8 for stride in bias.stride()[:-1])
    assert bias.stride(2) >= k.shape[2] + -k.shape[2] % 16
    return bias


def efficient_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    with_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float,
) -> tuple[Any, ...]:
    _check_widths(q, k, v)
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert (dropout, with_lse) == (0.0, True)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    added = _efficient_bias(q, k, bias, causal)
    out, lse = _plain_forward(rows[0], rows[1], rows[2], scale, added)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return out.contiguous().transpose(1, 2), lse, q.new_empty(0), q.new_empty(0)


def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: list[bool],
    causal: bool = False,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    _check_widths(q, k, v)
    length = q.shape[2]
    assert out.transpose(1, 2).is_contiguous()
    assert (dropout, wanted) == (0.0, [True, True, True, False])
    assert not any(stride % 8 for n, stride in zip(lse.shape[:-1], lse.stride(), strict=False) if n > 1)
    assert lse.shape[-1] >= length
    assert lse.stride(-1) == 1
    assert (lse[..., length:] == torch.inf).all()
    q_rows, k_rows, v_rows, g_rows, o_rows = (x.transpose(1, 2) for x in (q, k, v, grad, out))
    found = _plain_backward(
        g_rows,
        (q_rows, k_rows, v_rows),
        o_rows,
        lse[..., :length],
        scale,
        _efficient_bias(q, k, bias, causal),
    )
    return *(x.transpose(1, 2) for x in found), q.new_empty(0)


def _check_widths(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1
        assert not any(at % 8 for at in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


def _check_dense(*tensors: Tensor) -> None:
    """cuDNN's graph has the strides of an output as dense as it can be, also where a size is 1."""
    for x in tensors:
        rows = x.transpose(1, 2)
        assert rows.stride() == torch.empty(rows.shape).stride()


OPERATORS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}


@contextmanager
def on_cpu(calls: list[str] | None = None) -> Iterator[None]:
    """The operators run on a CPU. Their names are added to ``calls``."""
    library = torch.library.Library("aten", "IMPL", "CPU")

    def noted(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if calls is not None:
                calls.append(name)
            return OPERATORS[name](*args, **kwargs)

        return run

    try:
        for name in OPERATORS:
            library.impl(name, noted(name), "CPU")
        yield
    finally:
        library._destroy()


def play(monkeypatch: pytest.MonkeyPatch, device: Gpu, kind: torch.dtype) -> None:
    """Attention chooses kernels as for tensors on ``device``, of type ``kind`` and of even length."""
    found = attention.problem_of

    def problem_of(task: AttentionTask, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        return replace(found(task, q, k, v), dtype=kind, even=True)

    monkeypatch.setattr(operators, "device_of", lambda q: "cuda")
    monkeypatch.setattr(kernel_table, "device_of", lambda q: device)
    monkeypatch.setattr(attention, "problem_of", problem_of)
