"""Attention as one operator of PyTorch, for every device.

``compose.attention`` is what each model's core calls. The operator is opaque to a compiler, so a layer
with it is one graph. Its memory grows with the length, not with the length's square.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from compose.ops.attention_options import AttentionOptions, check, check_documents
from compose.ops.blocks import Layout
from compose.ops.documents import Documents
from compose.ops.kernels import Scores
from compose.ops.pairs import pairs_of
from compose.ops.parts import Merged, Sums, parts_of
from compose.ops.registered import operator
from compose.ops.task import Task


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    options: AttentionOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention with memory linear in the length.

    Args:
        q: Queries, (B, L, H, K).
        k: Keys, (B, S, G, K). G divides H; neighbouring query heads share a key/value head.
        v: Values, (B, S, G, V).
        documents: Attention stays within a document; None makes each row one. It needs L = S.
        sinks: (H,): a score of each head that takes part in the softmax and has no value (Xiao et al.
            2023, arXiv:2309.17453; as a parameter: OpenAI 2025, gpt-oss).
        options: None is causal attention without a window.

    Returns:
        The output (B, L, H, V) in the type of ``q``, and the log-sum-exp of the scores with the sink,
        (B, L, H), in float32 or wider. Both are differentiable, once.

    Raises:
        ConfigError: The shapes, types or options do not fit together.
    """
    chosen = options or AttentionOptions()
    check(q, k, v, sinks, chosen)
    check_documents(documents, q.shape[0], k.shape[1])
    return attention_forward(q, k, v, *tensors_of(documents), sinks, (0,), (0,), *chosen.given(q))


def tensors_of(documents: Documents | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the documents as the operator takes them."""
    return (None, None) if documents is None else (documents.bounds, documents.extents)


@operator("compose::attention_forward")
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    extents: Tensor | None,
    sinks: Tensor | None,
    q_starts: Sequence[int],
    k_starts: Sequence[int],
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, L, H, V) and log-sum-exp (B, L, H) of pieces of a sequence.

    ``bounds`` and ``extents`` are those of the Documents of the whole sequence. ``q_starts`` and
    ``k_starts`` are the first tokens of the pieces of q and k, which have one length. A window of 0 is
    all. The rest is as in :func:`attention` and AttentionOptions; see docs/attention.md.
    """
    task = task_of((bounds, extents), (q_starts, k_starts), (causal, window, scale, softcap))
    return finish(*merged(task, q, k, v), sinks, q.dtype)


def task_of(
    documents: tuple[Tensor | None, Tensor | None],
    starts: tuple[Sequence[int], Sequence[int]],
    scores: tuple[bool, int, float, float],
) -> Task:
    """Return the task that the operator's arguments stand for."""
    causal, window, scale, softcap = scores
    layout = Layout(tuple(starts[0]), tuple(starts[1]), causal, window)
    return Task(layout, Scores(scale, softcap), *documents)


def merged(task: Task, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (B, L, H, V) and the log-sum-exp (B, L, H), without a sink."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    parts = parts_of(task, q, k, v)
    if parts.whole:
        ((_, out, lse),) = parts.forward(q, k, v)
    else:
        total = Merged(q, v.shape[-1], parts.queries_once)
        for part in parts.forward(q, k, v):
            total.add(*part)
        out, lse = total.out, total.lse
    return out.transpose(1, 2), lse.transpose(1, 2)


def finish(out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp as the operator does: with the sink, and contiguous."""
    if sinks is not None:
        whole = torch.logaddexp(lse, sinks.to(lse.dtype))
        out, lse = out * (lse - whole).exp()[..., None], whole
    return out.to(dtype).contiguous(), lse.contiguous()


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide)


@operator("compose::attention_backward")
def attention_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    extents: Tensor | None,
    q_starts: Sequence[int],
    k_starts: Sequence[int],
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`attention_forward` for q, k and v.

    With ``wide`` those of k and v are in float32 or wider, to be summed over ranks.
    """
    task = task_of((bounds, extents), (q_starts, k_starts), (causal, window, scale, softcap))
    dq, dk, dv = gradients(task, (grad, grad_lse), (q, k, v), (out, lse))
    kept = torch.promote_types(k.dtype, torch.float32) if wide else k.dtype
    return dq.to(q.dtype), dk.to(kept), dv.to(kept)


def gradients(
    task: Task,
    grads: tuple[Tensor, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, each contiguous, in the type of its tensor or a wider one."""
    (grad, out), lse = widened(grads, result[0]), result[1]
    value = inputs[2] if grads[1] is None else F.pad(inputs[2], (0, 1), value=1.0)
    grad, out, q, k, v = (x.transpose(1, 2) for x in (grad, out, *inputs[:2], value))
    parts = parts_of(task, q, k, v)
    found = parts.backward(grad, (q, k, v), (out, lse.transpose(1, 2)))
    if parts.whole:
        ((_, _, made),) = found
    else:
        of_q, of_kv = Sums([q], parts.queries_once), Sums([k, v], parts.keys_once)
        for at_q, at_k, (dq, dk, dv) in found:
            of_q.add(at_q, [dq])
            of_kv.add(at_k, [dk, dv])
        made = (*of_q.of, *of_kv.of)
    dq, dk, dv = (
        d.transpose(1, 2)[..., : x.shape[-1]].contiguous() for d, x in zip(made, inputs, strict=True)
    )
    return dq, dk, dv


def widened(grads: tuple[Tensor, Tensor | None], out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the output and the output, with a column more if lse has a gradient.

    A score's gradient is its weight times (grad . v - grad . out + the gradient of lse). With a column
    of ones in v, of the gradient of lse in grad, and of zeros in out, the kernels add it.
    """
    grad, of_lse = grads
    if of_lse is None:
        return grad, out
    return torch.cat([grad, of_lse[..., None].to(grad.dtype)], -1), F.pad(out, (0, 1))


@attention_backward.register_fake
def _(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Any,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide or others[-1] is True
    kept = torch.promote_types(k.dtype, torch.float32) if wide else k.dtype
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape, dtype=kept),
        v.new_empty(v.shape, dtype=kept),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, extents, sinks, *ctx.others = inputs
    ctx.save_for_backward(q, k, v, bounds, extents, sinks, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, extents, sinks, out, lse = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv = attention_backward(grad, grad_lse, q, k, v, out, lse, bounds, extents, *ctx.others)
    of_sinks = None if sinks is None else sink_gradient((grad, grad_lse), (out, lse), sinks)
    return dq, dk, dv, None, None, of_sinks, *[None] * len(ctx.others)


def sink_gradient(
    grads: tuple[Tensor, Tensor | None], result: tuple[Tensor, Tensor], sinks: Tensor
) -> Tensor:
    """Return the gradient of the sinks (H,): that of a score whose value is zero."""
    (grad, of_lse), (out, lse) = grads, result
    change = -(grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    change = change if of_lse is None else change + of_lse
    return ((sinks.to(lse.dtype) - lse).exp() * change).sum((0, 1)).to(sinks.dtype)


attention_forward.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.compose.attention_forward)
def _forward_flops(q: Any, k: Any, v: Any, *others: Any, **kwargs: Any) -> int:
    starts, _, causal, window = others[3:7]
    return round(2 * pairs_of(q, k, starts, causal, window) * (q[3] + v[3]))


@register_flop_formula(torch.ops.compose.attention_backward)
def _backward_flops(
    grad: Any, grad_lse: Any, q: Any, k: Any, v: Any, *others: Any, **kwargs: Any
) -> int:
    # The scores again, and four products (Dao 2023, arXiv:2307.08691).
    starts, _, causal, window = others[4:8]
    return round(2 * pairs_of(q, k, starts, causal, window) * (3 * q[3] + 2 * v[3]))
