"""A linear map to float32, as a router's: few results, on which choices depend.

float32 holds the product of two numbers of bfloat16 exactly. So where input and weight are bfloat16, a
GPU's tensor cores, which add in float32, give what a product of the same numbers in float32 gives. That
product would not run on them, without TF32. A float32 weight has bits that they would not see, so it is
multiplied as it is.

Shapes: N rows, K and M the widths of rows before and after.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.ops import devices


def wide_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows (N, K) times a transposed weight (M, K), in float32 or in a wider type of theirs."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    if devices.device_of(rows) == "cuda" and rows.dtype == weight.dtype == torch.bfloat16:
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
