"""Attention as one operator of PyTorch, for every device.

``compose.attention`` is what each model's core calls. The operator is opaque to a compiler, so a layer
with it is one graph. Its memory grows with the length, not with the length's square.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from compose.errors import ConfigError
from compose.ops import kernel_table, operators
from compose.ops.attention_kernels import FlashParts, Index, Parts, PlainParts
from compose.ops.attention_layout import AttentionTask, pairs_of, task_of
from compose.ops.batch import Documents
from compose.ops.gpu_attention import EfficientParts, VarlenParts, problem_of
from compose.ops.kernel_table import kernel_of, widths_of
from compose.ops.operators import operator


@dataclass(frozen=True)
class AttentionOptions:
    """Who attends to whom, and how scores are made."""

    causal: bool = True
    """Whether a query sees only the keys up to its own."""
    window: int | None = None
    """Keys that a query sees, the last of them its own; None is all. It needs ``causal``."""
    scale: float | None = None
    """Scores are products times this; None is the root of 1 / K."""
    softcap: float = 0.0
    """Unless it is 0, a score s becomes softcap tanh(s / softcap)."""

    def given(self, q: Tensor) -> tuple[bool, int, float, float]:
        """Return them as the operator takes them: causal, window (0 is all), scale and softcap."""
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return self.causal, self.window or 0, scale, self.softcap


def check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions) -> None:
    """Raise ConfigError, in one line, if attention cannot be computed."""
    heads, groups = q.shape[2], k.shape[2]
    if options.window is not None and options.window < 1:
        raise ConfigError(f"attention: window {options.window} should be at least 1, or None for all")
    if options.window is not None and not options.causal:
        raise ConfigError("attention: a window needs causal = True")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        kinds = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
        raise ConfigError(f"attention: q, k and v are {kinds}; give them one floating-point type")
    if q.shape[-1] != k.shape[-1]:
        raise ConfigError(
            f"attention: queries are {q.shape[-1]} wide and keys {k.shape[-1]}; they should be equal"
        )
    if heads % groups or v.shape[2] != groups:
        raise ConfigError(
            f"attention: {heads} query heads cannot share {groups} heads of keys and {v.shape[2]} of"
            " values"
        )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ConfigError(
            f"attention: sinks {tuple(sinks.shape)} should be ({heads},), one for each query head"
        )
    if len(q) != len(k) or k.shape[:2] != v.shape[:2]:
        sizes = ", ".join(f"{len(x)} x {x.shape[1]}" for x in (q, k, v))
        raise ConfigError(
            f"attention: q, k and v are of {sizes} tokens; they need equal rows, and k and v equal"
            " lengths"
        )
    if options.causal and q.shape[1] != k.shape[1]:
        raise ConfigError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys are not one sequence; causal"
            " attention needs as many"
        )


def check_documents(documents: Documents | None, rows: int, length: int) -> None:
    """Raise ConfigError if documents are those of another batch."""
    if documents is not None and documents.shape != (rows, length):
        raise ConfigError(
            f"attention: documents of {' x '.join(map(str, documents.shape))} tokens, and keys of"
            f" {rows} x {length}"
        )


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
    if documents and q.shape[1] != k.shape[1]:
        raise ConfigError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys have no documents in common; give"
            " documents where both are one sequence"
        )
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


def parts_of(task: AttentionTask, q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Return the parts of a task by the kernel that the device has for it."""
    kind = operators.device_of(q)
    if kind == "cuda":
        packed = q.is_meta and task.bounds is not None and kernel_table.planned().packed
        task = _with_documents_that_matter(task, len(q))
        device, problem = kernel_table.device_of(q), problem_of(task, q, k, v)
        problem = replace(problem, documents=True) if packed else problem
        kernel = kernel_of(device, problem)
        if kernel in ("flash", "cudnn"):
            return VarlenParts(task, q, k, kernel, widths_of(kernel, device, problem))
        if kernel == "efficient":
            return EfficientParts(task, q, k, problem.square)
    if kind == "cpu" and not task.softcap:
        return FlashParts(task, q, k)
    return PlainParts(task, q, k)


def _with_documents_that_matter(task: AttentionTask, rows: int) -> AttentionTask:
    """Return the task without documents if each row is one; on meta none can be read."""
    extents = task.extents
    if extents is None or not (extents.is_meta or int(extents.numpy()[0]) == rows):
        return task
    return replace(task, bounds=None, extents=None)


class MergedOutput:
    """The output of some queries over parts of the keys, added one by one.

    Sums are in float32 or wider. If each query comes once, nothing is summed, and the output is in its
    own type.
    """

    def __init__(self, q: Tensor, width: int, once: bool = False) -> None:
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


class GradientParts:
    """The gradients of queries, or of keys and values, added part by part, in float32 or wider."""

    def __init__(self, like: Sequence[Tensor], once: bool) -> None:
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


def merged(task: AttentionTask, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (B, L, H, V) and the log-sum-exp (B, L, H), without a sink."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    parts = parts_of(task, q, k, v)
    if parts.whole:
        ((_, out, lse),) = parts.forward(q, k, v)
    else:
        total = MergedOutput(q, v.shape[-1], parts.queries_once)
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
def empty_result(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors like an operator's output and log-sum-exp."""
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
    task: AttentionTask,
    grads: tuple[Tensor, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, each contiguous, in the type of its tensor or a wider one."""
    (grad, out), lse = widened(grads, result[0]), result[1]
    value = inputs[2] if grads[1] is None else F.pad(inputs[2], (0, 1), value=1.0)
    grad, out, q, k, v = (x.transpose(1, 2) for x in (grad, out, *inputs[:2], value))
    parts = parts_of(task, q, k, v)
    results = parts.backward(grad, (q, k, v), (out, lse.transpose(1, 2)))
    if parts.whole:
        ((_, _, made),) = results
    else:
        of_q, of_kv = GradientParts([q], parts.queries_once), GradientParts([k, v], parts.keys_once)
        for at_q, at_k, (dq, dk, dv) in results:
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
    of_k, of_v = (x.new_empty(x.shape, dtype=kept) for x in (k, v))
    return q.new_empty(q.shape), of_k, of_v


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save an operator's tensors; its other arguments become ``ctx.others``."""
    q, k, v, bounds, extents, sinks, *ctx.others = inputs
    ctx.save_for_backward(q, k, v, bounds, extents, sinks, *output)
    ctx.set_materialize_grads(False)


def backward_by(
    run: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return an operator's backward: ``run`` as :func:`attention_backward`, and the sinks' gradient."""

    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, extents, sinks, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        result = run(grad, grad_lse, q, k, v, out, lse, bounds, extents, *ctx.others)
        of_sinks = None if sinks is None else sink_gradient((grad, grad_lse), (out, lse), sinks)
        return *result, None, None, of_sinks, *[None] * len(ctx.others)

    return backward


def sink_gradient(
    grads: tuple[Tensor, Tensor | None], result: tuple[Tensor, Tensor], sinks: Tensor
) -> Tensor:
    """Return the gradient of the sinks (H,): that of a score whose value is zero."""
    (grad, of_lse), (out, lse) = grads, result
    change = -(grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    change = change if of_lse is None else change + of_lse
    return ((sinks.to(lse.dtype) - lse).exp() * change).sum((0, 1)).to(sinks.dtype)


attention_forward.register_autograd(backward_by(attention_backward), setup_context=save_for_backward)


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
