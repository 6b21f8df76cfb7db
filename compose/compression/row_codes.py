"""Rows of activations in 8 bits, as tensor and expert parallel send them.

A row of D elements is cut into equal blocks, of at most so many elements. A block is sent as integers
of 8 bits or as numbers in float8 (e4m3, Micikevicius et al. 2022, arXiv:2209.05433), and one scale.
Each row has scales of its own, so that any rows can go to any rank.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.compression.codecs import (
    SCALE_BYTES,
    block_scales,
    decode_blocks,
    encode_blocks,
    integers,
    read_steps,
    write_steps,
)
from compose.compression.kernels import kernel, pieces
from compose.ops.operators import operator

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
_MANTISSA = 3
_LEAST = -6
"""The exponent of the least normal number of e4m3."""


@dataclass(frozen=True)
class RowCode:
    """The form of the codes of rows."""

    kind: Literal["int8", "float8"]
    block: int
    """Elements that share a scale, at most."""

    def bytes(self, width: int) -> int:
        """Return the bytes of a row of so many elements."""
        count, size = self._blocks(width)
        return count * (size + SCALE_BYTES)

    def encode(self, rows: Tensor) -> Tensor:
        """Return the codes of rows.

        Args:
            rows: (..., D), of any float type.

        Returns:
            (..., bytes), uint8.
        """
        cut = self._cut(rows)
        flat = cut.flatten(0, -2)
        codes = encode_blocks(flat, 8, False) if self.kind == "int8" else encode_float8(flat)
        return codes.view(*rows.shape[:-1], self.bytes(rows.shape[-1]))

    def decode(self, codes: Tensor, width: int) -> Tensor:
        """Return the elements of rows.

        Args:
            codes: (..., bytes), uint8.
            width: D.

        Returns:
            (..., D), float32.
        """
        count, size = self._blocks(width)
        flat = codes.reshape(-1, size + SCALE_BYTES)
        blocks = decode_blocks(flat, 8) if self.kind == "int8" else decode_float8(flat)
        return blocks.view(*codes.shape[:-1], count * size)[..., :width]

    def expected(self, rows: Tensor) -> Tensor:
        """Return the expected square of the norm of what rows lose, a float64 scalar.

        Rounding to numbers that are s apart makes a mean square error of s^2 / 12.
        """
        x = self._cut(rows).flatten(0, -2).float()
        scales = block_scales(x, 127 if self.kind == "int8" else _LARGEST)
        if self.kind == "int8":
            apart = scales.expand_as(x)
        else:
            _, exponents = torch.frexp(x / scales.clamp(min=torch.finfo(torch.float32).tiny))
            apart = torch.exp2((exponents - 1).clamp(min=_LEAST) - float(_MANTISSA)) * scales
        return apart.double().square().sum() / 12

    def _blocks(self, width: int) -> tuple[int, int]:
        """Return how many blocks a row has, and their elements."""
        count = -(-width // self.block)
        return count, -(-width // count)

    def _cut(self, rows: Tensor) -> Tensor:
        """Return padded blocks, (..., count, size)."""
        count, size = self._blocks(rows.shape[-1])
        return F.pad(rows, (0, count * size - rows.shape[-1])).unflatten(-1, (count, size))


@operator("compose::encode_float8")
def encode_float8(x: Tensor) -> Tensor:
    """Return blocks in float8 (e4m3), each with its scale behind it.

    Args:
        x: (N, size), of any float type.

    Returns:
        (N, size + 2), uint8.
    """
    out = x.new_empty(x.shape[0], x.shape[1] + SCALE_BYTES, dtype=torch.uint8)
    for at in pieces(x):
        codes, scales = kernel(_encoded)(x[at])
        integers(out[at]).copy_(codes.view(torch.int8))
        write_steps(out[at], scales)
    return out


@encode_float8.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] + SCALE_BYTES, dtype=torch.uint8)


@operator("compose::decode_float8")
def decode_float8(codes: Tensor) -> Tensor:
    """Return the elements of blocks.

    Args:
        codes: (N, size + 2), uint8.

    Returns:
        (N, size), float32.
    """
    out = codes.new_empty(len(codes), codes.shape[1] - SCALE_BYTES, dtype=torch.float32)
    for at in pieces(out):
        found = integers(codes[at]).contiguous().view(FLOAT8)
        out[at] = kernel(_decoded)(found, read_steps(codes[at]))
    return out


@decode_float8.register_fake
def _(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[0], codes.shape[1] - SCALE_BYTES, dtype=torch.float32)


def _encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    scales = block_scales(x, _LARGEST)
    # A block of zeros has the scale 0; its codes are 0 too.
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    # The scale is rounded, so the largest element may be a little above the largest code.
    return (x * inverse).clamp(-_LARGEST, _LARGEST).to(FLOAT8), scales


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales
