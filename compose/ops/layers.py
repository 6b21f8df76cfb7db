"""RMSNorm, and the products of a mixture of experts: a router's and the experts'."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from compose.ops import operators
from compose.ops.operators import operator


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, computed by :func:`rms_norm`; the factor may be an offset plus the weight.

    Gemma's norms have the offset 1, so that a weight of 0 changes nothing (Gemma team 2024,
    arXiv:2403.08295). With an offset all is computed in float32 or wider: close to 1 a narrow type
    would round a small weight away.
    """

    offset = 0.0

    def __init__(self, dim: int, eps: float | None = None, offset: float = 0.0) -> None:
        super().__init__(dim, eps=eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input, of the same shape and type."""
        return self.normalized(x, self.weight)

    def normalized(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return the normalized input."""
        if not self.offset or weight is None:
            return rms_norm(x, self.normalized_shape, weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        factor = self.offset + weight.to(wide)
        return rms_norm(x.to(wide), self.normalized_shape, factor, self.eps).to(x.dtype)


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, as ``F.rms_norm`` does, in few passes over memory.

    The source is Zhang and Sennrich 2019, arXiv:1910.07467. On a CPU PyTorch composes it of eight
    operators, each with a backward of its own. Here forward takes three passes and backward six. A GPU
    has PyTorch's fused kernel, and a compiler fuses PyTorch's operators. Both get those. On meta, where
    bytes are counted, each saves the input and a number a row.
    """
    types = {type(x), type(weight)} - {nn.Parameter}
    fused = (
        x.device.type in ("cpu", "meta")
        and types == {Tensor}
        and weight is not None
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and len(shape) == 1
        and eps is not None
        and not torch.compiler.is_compiling()
    )
    if not fused:
        return F.rms_norm(x, shape, weight, eps)
    return cast(Tensor, _RMSNormFunction.apply(x, weight, eps))


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        each = gradient * normal
        of_weight = each.reshape(-1, each.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        # With y = x * scale: dx = scale * (g w - y mean(g w y)).
        mean = (each @ weight)[..., None].div_(-x.shape[-1])
        of_x = (gradient * weight).addcmul_(normal, mean).mul_(scale)
        return of_x, of_weight, None


def wide_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows (N, K) times a transposed weight (M, K) in float32 or wider, as choices need it.

    float32 holds the product of two numbers of bfloat16 exactly. So where input and weight are
    bfloat16, a GPU's tensor cores, which add in float32, give what a product of the same numbers in
    float32 gives. That product would not run on them, without TF32. A float32 weight has bits that they
    would not see, so it is multiplied as it is.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    if operators.device_of(rows) == "cuda" and rows.dtype == weight.dtype == torch.bfloat16:
        out: Tensor = _WideLinear.apply(rows, weight)
        return out if bias is None else out + bias
    return F.linear(rows.to(wide), weight.to(wide), bias)


class _WideLinear(torch.autograd.Function):
    """The product in bfloat16. The gradient is float32, and goes as the sum of two in bfloat16.

    They hold 16 of its bits, and the gradients of rows and weight are rounded to 8.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _to_float32(rows, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        high = grads[0].to(rows.dtype)
        both = torch.cat([high, (grads[0] - high).to(rows.dtype)], 1)
        of_weight = _to_float32(both.t(), rows).unflatten(0, (2, -1)).sum(0)
        return both @ torch.cat([weight, weight]), of_weight.to(weight.dtype)


def _to_float32(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right, out_dtype=torch.float32)


@operator("compose::grouped_mm")
def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return (N, M): each expert's ``counts`` (E,) of rows (N, K), by its transposed weight (M, K).

    A loop over experts is one operator, since a graph does not know how many rows an expert gets.
    ``aten._grouped_mm`` does not ask: it reads where rows end on the device. It serves bfloat16 alone
    (torch 2.11 to 2.15). This operator serves other types.
    """
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(*each) for each in zip(parts, weight, strict=True)])


@operator("compose::grouped_mm_weight")
def _weight_gradient(rows: Tensor, grads: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.tolist()
    pairs = zip(rows.split(sizes), grads.split(sizes), strict=True)
    return torch.stack([grad.t() @ part for part, grad in pairs])


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])  # len() would fix the number


@_weight_gradient.register_fake
def _(rows: Tensor, grads: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(counts.shape[0], grads.shape[1], rows.shape[1])


def _save_grouped(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_grouped(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, counts = ctx.saved_tensors
    of_rows = grouped_mm(grad, weight.transpose(1, 2), counts)
    return of_rows, _weight_gradient(rows, grad, counts), None


grouped_mm.register_autograd(_backward_grouped, setup_context=_save_grouped)
