"""Tensors in blocks of a few bits: the codes that compressed collectives send.

A tensor is cut into blocks of N elements. Each block is sent as N integers of 8 or 4 bits, and one
scale, the value of the integer 1. With ``rotate`` a block is multiplied by the orthogonal Hadamard
matrix first, so that an outlier's weight is spread over its block (SDP4Bit, Jia et al. 2024,
arXiv:2410.15526).

The scale is bfloat16. float16 would turn the scales of gradients below 1e-6 into zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compose.compression.codecs import SCALE_BYTES, block_steps, decode_into, encode_blocks, top_code
from compose.compression.rotation import rotated_blocks


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
            x: (..., N, size), of any float type.

        Returns:
            (..., N, width), uint8.
        """
        if self.bits == 0:
            return x.contiguous().view(torch.uint8)
        if self.bits == 16:
            return x.to(torch.bfloat16).contiguous().view(torch.uint8)
        return encode_blocks(x, self.bits, self.rotate)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the elements of blocks.

        Args:
            codes: (..., N, width), uint8.
            dtype: The type of the result.

        Returns:
            (..., N, size).
        """
        out = codes.new_empty(*codes.shape[:-1], self.size, dtype=dtype)
        self.sum_into(out, codes[None], dtype)
        return out

    def sum_into(self, out: Tensor, codes: Tensor, dtype: torch.dtype, add: bool = False) -> None:
        """Write the sum of what T codes hold for each block. The sum is in float32 or wider.

        Args:
            out: (..., N, size), of any float type.
            codes: (T, ..., N, width), uint8.
            dtype: The type that was encoded.
            add: Whether to add to ``out`` what it holds.
        """
        if self.bits in (4, 8):
            decode_into(out, codes, self.bits, self.rotate, add)
            return
        kind = torch.bfloat16 if self.bits == 16 else dtype
        total = sum(numbers(term, kind).to(torch.promote_types(kind, torch.float32)) for term in codes)
        assert isinstance(total, Tensor)
        if add:
            out += total
        else:
            out.copy_(total)

    def turned(self, x: Tensor) -> Tensor:
        """Return blocks (..., size) as they are rounded: rotated or not."""
        return rotated_blocks(x.flatten(0, -2)).view(x.shape) if self.rotate else x

    def expected(self, x: Tensor) -> Tensor:
        """Return the expected square of the norm of what each block loses, (N,), float64.

        Rounding to values that are a step apart makes an error of up to half of it. If all remainders
        are equally likely, its mean square is step^2 / 12. What is beyond the largest code loses the
        difference.

        Args:
            x: Blocks (N, size), of any float type.
        """
        if self.bits == 0:
            return torch.zeros(len(x), dtype=torch.float64, device=x.device)
        wide = x.float()
        if self.bits == 16:
            return (wide.abs().amax(1).double() * 2.0**-8).square() * self.size / 12
        wide = self.turned(wide)
        steps, top = block_steps(wide, self.bits).double(), top_code(self.bits)
        beyond = wide.double().abs() - top * steps
        return torch.where(beyond > steps / 2, beyond.square(), steps.square() / 12).sum(1)


def numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes (..., N), a part of a message, as numbers of a type, (..., N / its size)."""
    # Bytes may begin anywhere; numbers may not.
    out = codes.new_empty(*codes.shape[:-1], codes.shape[-1] // dtype.itemsize, dtype=dtype)
    out.view(torch.uint8).copy_(codes)
    return out
