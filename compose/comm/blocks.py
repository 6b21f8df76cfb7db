"""Tensors in blocks of a few bits: the codes that compressed collectives send.

A tensor is cut into blocks of N elements. Each block is sent as N integers of 8 or 4 bits, and one
scale: the largest magnitude over the largest integer. With ``rotate`` a block is multiplied by the
orthogonal Hadamard matrix first, so that an outlier's weight is spread over its block (SDP4Bit, Jia et
al. 2024, arXiv:2410.15526).

The scale is bfloat16. float16 would turn the scales of gradients below 1e-6 into zero.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compose.operators.registered import operator

SCALE_BYTES = 2


@dataclass(frozen=True)
class Blocks:
    """The form of the codes."""

    bits: int
    """8 or 4; 16 is bfloat16 without a scale. 0 loses nothing: elements travel as they are, and a proof
    of the messages uses it."""
    size: int
    """Elements of a block, a power of two."""
    rotate: bool = False
    """Whether blocks are rotated by the Hadamard matrix."""

    def width(self, dtype: torch.dtype) -> int:
        """Return the bytes of a block of elements that had this type."""
        if self.bits == 0:
            return self.size * dtype.itemsize
        if self.bits == 16:
            return self.size * 2
        return self.size * self.bits // 8 + SCALE_BYTES

    def encode(self, x: Tensor) -> Tensor:
        """Return the codes of blocks.

        Args:
            x: (N, size), of any float type.

        Returns:
            (N, width), uint8.
        """
        if self.bits == 0:
            return x.contiguous().view(torch.uint8)
        if self.bits == 16:
            return x.to(torch.bfloat16).contiguous().view(torch.uint8)
        return encode_blocks(x, self.bits, self.rotate)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the elements of blocks.

        Args:
            codes: (N, width), uint8.
            dtype: The type of the result.

        Returns:
            (N, size).
        """
        return self.unrotate(self.decode_rotated(codes, dtype), dtype)

    def decode_rotated(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the blocks before the rotation is undone: of a sum it is undone once.

        Args:
            codes: (N, width), uint8.
            dtype: The type that was encoded.

        Returns:
            (N, size), in float32 or wider.
        """
        if self.bits == 0:
            wide = torch.promote_types(dtype, torch.float32)
            return numbers(codes, dtype).to(wide)
        if self.bits == 16:
            return numbers(codes, torch.bfloat16).float()
        return decode_blocks(codes, self.bits)

    def unrotate(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Undo the rotation of (N, size) and return it in ``dtype``."""
        rotated = self.rotate and self.bits
        return (rotated_blocks(x) if rotated else x).to(dtype)

    def step(self, x: Tensor) -> Tensor:
        """Return the distance between neighbouring values of each block, (N,), as it is sent.

        Rounding to the nearest makes an error of up to half of it. If all remainders are equally
        likely, its mean square is step^2 / 12.
        """
        if self.bits == 0:
            return x.new_zeros(len(x))
        if self.bits == 16:
            return x.float().abs().amax(1) * 2.0**-8
        wide = x.float()
        return _scales(rotated_blocks(wide) if self.rotate else wide, self.bits).float()


@operator("compose::encode_blocks")
def encode_blocks(x: Tensor, bits: int, rotate: bool) -> Tensor:
    """Return the codes of blocks, each with its scale behind it.

    Args:
        x: (N, size), of any float type.
        bits: 8 or 4.
        rotate: Whether to rotate blocks first.

    Returns:
        (N, size bits / 8 + 2), uint8.
    """
    wide = x.float()
    wide = rotated_blocks(wide) if rotate else wide
    scales = _scales(wide, bits)
    steps = scales.float()
    # A block of zeros has the scale 0; its codes are 0 too.
    inverse = torch.where(steps > 0, 1 / steps, 0.0)
    top = _top(bits)
    codes = (wide * inverse).round_().clamp_(-top, top).to(torch.int8)
    if bits == 4:
        low, high = codes.view(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
        packed = (low & 15) | (high << 4)
    else:
        packed = codes.view(torch.uint8)
    return torch.cat([packed, scales.view(torch.uint8)], 1)


@encode_blocks.register_fake
def _(x: Tensor, bits: int, rotate: bool) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * bits // 8 + SCALE_BYTES, dtype=torch.uint8)


@operator("compose::decode_blocks")
def decode_blocks(codes: Tensor, bits: int) -> Tensor:
    """Return the elements of blocks, which may be rotated.

    Args:
        codes: (N, size bits / 8 + 2), uint8.
        bits: 8 or 4.

    Returns:
        (N, size), float32.
    """
    packed, scales = codes[:, :-SCALE_BYTES], codes[:, -SCALE_BYTES:]
    steps = numbers(scales, torch.bfloat16).float()
    if bits == 8:
        return packed.view(torch.int8).float().mul_(steps)
    # Shifted left and back right, the lower four bits get their sign.
    low, high = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4
    return torch.stack([low, high], -1).flatten(1).float().mul_(steps)


@decode_blocks.register_fake
def _(codes: Tensor, bits: int) -> Tensor:
    width = (codes.shape[1] - SCALE_BYTES) * 8 // bits
    return codes.new_empty(codes.shape[0], width, dtype=torch.float32)


def rotated_blocks(x: Tensor) -> Tensor:
    """Return blocks (N, size) times the orthogonal Hadamard matrix, which is its own inverse.

    The matrix is the Kronecker product of two smaller ones. A product with each takes far fewer FLOPs.
    """
    size = x.shape[1]
    few = 1 << (size.bit_length() - 1) // 2
    cut = x.unflatten(1, (few, size // few))
    right = cut @ _hadamard(size // few, x.dtype, x.device)
    return (_hadamard(few, x.dtype, x.device) @ right).flatten(1)


@functools.cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = torch.ones(1, 1, dtype=dtype)
    while len(whole) < size:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)])
    return (whole / math.sqrt(size)).to(device)


def numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes (R, N), a part of a message, as numbers of a type, (R, N / its size)."""
    # Bytes may begin anywhere; numbers may not.
    out = codes.new_empty(len(codes), codes.shape[1] // dtype.itemsize, dtype=dtype)
    out.view(torch.uint8).copy_(codes)
    return out


def _top(bits: int) -> int:
    """Return the largest integer of so many bits; the least is its negative."""
    return 2 ** (bits - 1) - 1


def _scales(x: Tensor, bits: int) -> Tensor:
    """Return the scale of each block, (N, 1), bfloat16."""
    return (x.abs().amax(1, keepdim=True) / _top(bits)).to(torch.bfloat16)
