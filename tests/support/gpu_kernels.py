"""PyTorch's attention operators of CUDA on a CPU, by plain products: with their layouts and demands.

They stand in for the kernels, so that what calls them can be compared with the definition in float64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compose.ops import attention, kernel_table, operators
from compose.ops.attention_layout import AttentionTask
from compose.ops.kernel_table import Gpu, Problem

HOPPER = Gpu((9, 0), cudnn=91900)
AMPERE = Gpu((8, 0))


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor) -> Tensor:
    """(B, H, L, S) in float64, of (B, L, H, K) and (B, S, G, K)."""
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("blhk,bshk->bhls", q.double(), keys) * scale + bias.double()


def _plain_forward(
    scale: float, bias: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The output (B, L, H, V) and the log-sum-exp (B, H, L) of (B, L, H, K)."""
    scores = _scores(q, k, scale, bias)
    lse = scores.logsumexp(-1)
    values = v.double().repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhls,bshv->blhv", (scores - lse[..., None]).exp(), values)
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


def _plain_backward(
    scale: float, bias: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of (B, L, H, K); ``lse`` is (B, H, L)."""
    weights = (_scores(q, k, scale, bias) - lse.double()[..., None]).exp()
    kind, (q, k, v, grad, out) = grad.dtype, (x.double() for x in (q, k, v, grad, out))
    shared = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(shared, 2) for x in (k, v))
    change = torch.einsum("blhv,bshv->bhls", grad, values)
    of_scores = weights * (change - (grad * out).sum(-1).transpose(1, 2)[..., None]) * scale
    dq = torch.einsum("bhls,bshk->blhk", of_scores, keys)
    dk = torch.einsum("bhls,blhk->bshk", of_scores, q).unflatten(2, (-1, shared)).sum(3)
    dv = torch.einsum("bhls,blhv->bshv", weights, grad).unflatten(2, (-1, shared)).sum(3)
    return dq.to(kind), dk.to(kind), dv.to(kind)


def _hidden(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def _check_widths(a: Any) -> None:
    for x in (a.query, a.key, a.value):
        assert x.stride(-1) == 1
        assert not any(at % 8 for at in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


# FlashAttention-2: rows of several lengths, windows, the last query aligned with the last key.


def _flash_rows(a: Any) -> tuple[Tensor, ...]:
    """Queries, keys, values and, of a backward, gradients and outputs as (B, L, H, K)."""
    names = ("query", "key", "value", "grad_out", "out")
    results = [getattr(a, name) for name in names if hasattr(a, name)]
    return tuple(x if a.cum_seq_q is None else x[None] for x in results)


def _flash_bias(a: Any) -> Tensor:
    q, k = _flash_rows(a)[:2]
    length, keys = q.shape[1], k.shape[1]
    ends_q = [0, length] if a.cum_seq_q is None else a.cum_seq_q.tolist()
    ends_k = [0, keys] if a.cum_seq_k is None else a.cum_seq_k.tolist()
    assert (ends_q[-1], ends_k[-1]) == (length, keys)
    assert a.window_size_right == (0 if a.is_causal else -1)
    seen, left = torch.zeros(length, keys, dtype=torch.bool), a.window_size_left
    for start, end, first, last in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        rows, columns = end - start, last - first
        assert 0 <= rows <= a.max_q
        assert columns >= 0
        assert columns <= a.max_k or not rows
        distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        here = torch.ones(rows, columns, dtype=torch.bool)
        here = here & (distance >= 0) if a.is_causal else here
        seen[start:end, first:last] = here & (distance <= left) if left >= 0 else here
    return _hidden(seen)


def flash_forward(a: Any) -> tuple[Tensor, ...]:
    assert a.query.shape[-1] == a.value.shape[-1]
    assert (a.dropout_p, a.return_debug_mask) == (0, False)
    out, lse = _plain_forward(a.scale, _flash_bias(a), *_flash_rows(a))
    # This is the kernel's "no key".
    out, lse = out.nan_to_num(0.0), lse.masked_fill(lse == -torch.inf, torch.inf)
    out, lse = (out, lse) if a.cum_seq_q is None else (out[0], lse[0])
    return out, lse, a.query.new_empty(2), a.query.new_empty(()), a.query.new_empty(0)


def flash_backward(a: Any) -> tuple[Tensor, ...]:
    assert a.logsumexp.is_contiguous()
    lse = a.logsumexp if a.cum_seq_q is None else a.logsumexp[None]
    result = _plain_backward(a.scale, _flash_bias(a), lse, *_flash_rows(a))
    return tuple(x.reshape(y.shape) for x, y in zip(result, (a.query, a.key, a.value), strict=True))


# cuDNN: heads first, the first query aligned with the first key, a log-sum-exp of four dims.


def _top_left(a: Any) -> Tensor:
    seen = torch.ones(a.query.shape[2], a.key.shape[2], dtype=torch.bool)
    return _hidden(seen.tril() if a.is_causal else seen)


def _heads_second(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, L, H, K) of (B, H, L, K), or the other way round."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _check_dense(*tensors: Tensor) -> None:
    """cuDNN's graph has the strides of an output as dense as it can be, also where a size is 1."""
    for rows in _heads_second(*tensors):
        assert rows.stride() == torch.empty(rows.shape).stride()


def cudnn_forward(a: Any) -> tuple[Any, ...]:
    _check_dense(a.query)
    given = (a.attn_bias, a.compute_log_sumexp, a.dropout_p, a.return_debug_mask)
    assert given == (None, True, 0.0, False)
    rows = _heads_second(a.query, a.key, a.value)
    out, lse = _plain_forward(a.scale, _top_left(a), *rows)
    empty, sizes = a.query.new_empty(0), (a.query.shape[2], a.key.shape[2])
    return out.transpose(1, 2), lse[..., None], empty, empty, *sizes, empty, empty, empty


def cudnn_backward(a: Any) -> tuple[Tensor, ...]:
    given = (a.query, a.key, a.value, a.grad_out, a.out)
    _check_dense(*given)
    assert (a.max_q, a.max_k, a.dropout_p) == (a.query.shape[2], a.key.shape[2], 0.0)
    assert a.logsumexp.shape == (*a.query.shape[:3], 1)
    assert a.logsumexp.stride() == torch.empty(a.logsumexp.shape).stride()
    lse = a.logsumexp[..., 0]
    return _heads_second(*_plain_backward(a.scale, _top_left(a), lse, *_heads_second(*given)))


# The efficient kernel: heads first, as many of keys as of queries, a mask, a padded log-sum-exp.


def _efficient_bias(a: Any) -> Tensor:
    bias = a.attn_bias
    if bias is None:
        return _top_left(a)
    assert not a.is_causal
    assert bias.shape == (*a.query.shape[:3], a.key.shape[2])
    assert bias.dtype == a.query.dtype
    assert bias.stride(-1) == 1
    assert not any(stride % 8 for stride in bias.stride()[:-1])
    assert bias.stride(2) >= a.key.shape[2] + -a.key.shape[2] % 16
    return bias


def efficient_forward(a: Any) -> tuple[Any, ...]:
    assert a.query.shape[1] == a.key.shape[1] == a.value.shape[1]
    assert (a.dropout_p, a.compute_log_sumexp) == (0.0, True)
    rows = _heads_second(a.query, a.key, a.value)
    out, lse = _plain_forward(a.scale, _efficient_bias(a), *rows)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return out.contiguous().transpose(1, 2), lse, a.query.new_empty(0), a.query.new_empty(0)


def efficient_backward(a: Any) -> tuple[Tensor, ...]:
    length, lse = a.query.shape[2], a.logsumexp
    assert a.out.transpose(1, 2).is_contiguous()
    assert (a.dropout_p, a.grad_input_mask) == (0.0, [True, True, True, False])
    assert not any(stride % 8 for n, stride in zip(lse.shape[:-1], lse.stride(), strict=False) if n > 1)
    assert lse.shape[-1] >= length
    assert lse.stride(-1) == 1
    assert (lse[..., length:] == torch.inf).all()
    rows = _heads_second(a.query, a.key, a.value, a.grad_out_, a.out)
    result = _plain_backward(a.scale, _efficient_bias(a), lse[..., :length], *rows)
    return *_heads_second(*result), a.query.new_empty(0)


OPERATORS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}


def arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """The arguments of a call by the names of the operator's schema, and its defaults."""
    known = getattr(torch.ops.aten, name).default._schema.arguments
    defaults = {each.name: each.default_value for each in known}
    return SimpleNamespace(**(defaults | dict(zip(defaults, args, strict=False)) | kwargs))


@contextmanager
def on_cpu(calls: list[str] | None = None) -> Iterator[None]:
    """The operators run on a CPU. Their names are added to ``calls``."""
    library = torch.library.Library("aten", "IMPL", "CPU")

    def noted(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if calls is not None:
                calls.append(name)
            given = arguments(name, args, kwargs)
            _check_widths(given)
            return OPERATORS[name](given)

        return run

    try:
        for name in OPERATORS:
            library.impl(name, noted(name), "CPU")
        yield
    finally:
        library._destroy()


def play(monkeypatch: pytest.MonkeyPatch, device: Gpu, kind: torch.dtype) -> None:
    """Attention chooses kernels as for tensors on ``device``, of type ``kind`` and of even length."""
    result = attention.problem_of

    def problem_of(task: AttentionTask, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        return replace(result(task, q, k, v), dtype=kind, even=True)

    monkeypatch.setattr(operators, "device_of", lambda q: "cuda")
    monkeypatch.setattr(kernel_table, "device_of", lambda q: device)
    monkeypatch.setattr(attention, "problem_of", problem_of)
