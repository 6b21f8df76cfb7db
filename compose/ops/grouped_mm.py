"""The products of experts' rows as a loop over experts, in one operator of a compiled graph.

A graph does not know how many rows an expert gets. ``aten._grouped_mm`` does not ask: it reads where
rows end on the device. It serves bfloat16 alone (torch 2.11 to 2.15). This operator serves other types.

Shapes: E experts, N rows sorted by expert, K and M the widths of rows before and after.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.ops.registered import operator


@operator("compose::grouped_mm")
def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the rows (N, M) of each expert: its ``counts`` of rows (N, K) by its transposed (M, K)."""
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


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, counts = ctx.saved_tensors
    of_rows = grouped_mm(grad, weight.transpose(1, 2), counts)
    return of_rows, _weight_gradient(rows, grad, counts), None


grouped_mm.register_autograd(_backward, setup_context=_save)
