"""Frozen weights of linear layers in 8 or 4 bits (QLoRA: Dettmers et al. 2023, arXiv:2305.14314).

torchao quantizes them. A row of a weight (N, D) becomes bytes, its scales in float32 before its codes:

    int8  a scale for the row, a code of 8 bits for each element     D + 4 bytes
    nf4   a scale for each 64 elements, a code of 4 bits             9/16 D bytes

The rows (N, R), uint8, are a plain parameter in place of the weight. So FSDP cuts, sends and offloads
it like others, and a row has the same bytes on every mesh. torchao's subclasses are not used: they
cannot be made on meta and cut unevenly, and NF4Tensor quantizes its scales too, by a mean over the
whole weight, which a rank with a part of it does not know.
"""

import functools
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compose.errors import ConfigError
from compose.memory.float8 import import_quietly

Base = Literal["full", "int8", "nf4"]
BLOCK = 64  # elements of nf4 that share a scale
_AT_ONCE = 2**20  # elements that are quantized at a time: torchao compares each with all 16 codes


class QuantizedLinear(nn.Linear):
    """An nn.Linear (D, N) whose weight are the bytes of its rows, (N, R)."""

    base: Base

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs (..., N) of (..., D)."""
        output = _QuantizedProduct.apply(input, self.weight, self)
        return output if self.bias is None else output + self.bias

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (N, D)."""
        return unpacked(self.weight, self.in_features, self.base, dtype)


def quantize(model: nn.Module, names: Iterable[str], base: Base) -> None:
    """Make linear layers, which are on meta or have values, quantized ones in place."""
    for name in names:
        layer = model.get_submodule(name)
        if type(layer) is not nn.Linear:  # it is quantized already
            continue
        rows, columns = layer.out_features, layer.in_features
        if base == "nf4" and columns % BLOCK:
            raise ConfigError(
                f'model.lora.base: "nf4" has a scale for each {BLOCK} inputs, and {name} has {columns};'
                ' use model.lora.base = "int8"'
            )
        width = 4 + columns if base == "int8" else columns // BLOCK * 4 + columns // 2
        held = torch.empty(rows, width, dtype=torch.uint8, device=layer.weight.device)
        if not held.is_meta:
            held = packed(layer.weight.detach().float(), base)
        layer.__class__ = QuantizedLinear
        assert isinstance(layer, QuantizedLinear)
        layer.base = base
        layer.weight = nn.Parameter(held, requires_grad=False)


def packed(weight: Tensor, base: Base) -> Tensor:
    """Return the bytes (N, R) of rows (N, D) in float32."""
    import_quietly()
    from torchao.quantization import Int8Tensor, NF4Tensor, PerRow

    if base == "int8":
        held = Int8Tensor.from_hp(weight, PerRow())
        scales, codes = held.scale, held.qdata.view(torch.uint8)
    else:
        blocks = weight.unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        values = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).flatten()
        table = _codes_of_nf4().to(weight.device)
        parts = [NF4Tensor.quantize_tensor_nearest(part, table) for part in values.split(_AT_ONCE)]
        pairs = torch.cat(parts).to(torch.uint8).view(len(weight), -1, 2)
        codes = pairs[..., 0] << 4 | pairs[..., 1]
    return torch.cat([scales.float().contiguous().view(torch.uint8), codes], -1)


def unpacked(rows: Tensor, columns: int, base: Base, dtype: torch.dtype) -> Tensor:
    """Return the weight (N, ``columns``) of the bytes of its rows, multiplied in float32 or wider."""
    rows = rows.to(torch.uint8)  # FSDP of torch before 2.13 casts it, without loss
    count = 1 if base == "int8" else columns // BLOCK
    wide = torch.promote_types(dtype, torch.float32)
    scales = rows[:, : 4 * count].contiguous().view(torch.float32).to(wide)
    codes = rows[:, 4 * count :]
    if base == "int8":
        return (codes.view(torch.int8).to(wide) * scales).to(dtype)
    numbers = torch.stack([codes >> 4, codes & 15], -1).flatten(1).int()
    values = _codes_of_nf4().to(rows.device, wide)[numbers]
    return (values.view(len(rows), count, BLOCK) * scales[..., None]).flatten(1).to(dtype)


def rounded(weight: Tensor, base: Base) -> Tensor:
    """Return a weight (N, D) in float32 as a quantized layer computes with it."""
    return unpacked(packed(weight, base), weight.shape[1], base, weight.dtype)


def weight_shape(layer: nn.Module) -> torch.Size:
    """Return the shape (N, D) of a linear layer's weight, however it is kept."""
    assert isinstance(layer, nn.Linear)
    return torch.Size((layer.out_features, layer.in_features))


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers of a model by the names of their weights."""
    return {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; quantized ones count as what they stand for."""
    quantized = quantized_layers(model)
    return sum(
        weight_shape(quantized[name]).numel() if name in quantized else p.numel()
        for name, p in model.named_parameters()
    )


@functools.cache
def _codes_of_nf4() -> Tensor:
    import_quietly()
    from torchao.quantization import NF4Tensor

    return NF4Tensor.from_tensor(torch.zeros(BLOCK, device="cpu"), BLOCK, 1).nf4


class _QuantizedProduct(torch.autograd.Function):
    """The product with a quantized weight, of which only the bytes are kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.columns, ctx.base = layer.in_features, layer.base
        return F.linear(x, unpacked(rows, ctx.columns, ctx.base, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grads[0] @ unpacked(rows, ctx.columns, ctx.base, grads[0].dtype), None, None
