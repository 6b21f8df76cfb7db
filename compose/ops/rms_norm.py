"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) in few passes over memory.

On a CPU PyTorch composes it of eight operators, each with a backward of its own. Here forward takes
three passes and backward six. A GPU has PyTorch's fused kernel, and a compiler fuses PyTorch's
operators. Both get those. On meta, where bytes are counted, each saves the input and a number a row.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, computed by :func:`rms_norm`; the factor may be an offset plus the weight.

    Gemma's norms have the offset 1, so that a weight of 0 changes nothing (Gemma team 2024,
    arXiv:2403.08295). With an offset all is computed in float32 or wider: close to 1 a narrow type
    would round a small weight away.
    """

    offset = 0.0

    def __init__(self, dim: int, eps: float | None = None, offset: float = 0.0) -> None:
        """Take the width, the epsilon of :func:`rms_norm`, and the offset."""
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
    """Return x / sqrt(mean(x^2) + eps) * weight, as ``F.rms_norm`` does."""
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
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


class _RMSNorm(torch.autograd.Function):
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
        of_weight = each.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        # With y = x * scale: dx = scale * (g w - y mean(g w y)).
        mean = (each @ weight)[..., None].div_(-x.shape[-1])
        of_x = (gradient * weight).addcmul_(normal, mean).mul_(scale)
        return of_x, of_weight, None
