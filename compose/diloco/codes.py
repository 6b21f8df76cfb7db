"""The forms in which islands send a change of weights: vectors as bytes, and back.

The blocks of 8 bits are those of compose/compression/codec.py. The others are published: floats of
4 bits without a mantissa (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512), and the largest
elements in 2 bits with error feedback (SparseLoCo, Sarfi et al. 2025, arXiv:2508.15706).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compose.compression.codec import SCALE_BYTES, Blocks, numbers
from compose.diloco.options import ROW, Outer

BLOCK = 256
"""Elements that share a scale in int8 and e3m0."""
_ROWS = 32
"""Rows that share the two magnitudes of top_k."""


class Code(Protocol):
    """A form of vectors."""

    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes, (size,) uint8, of a vector of floats."""
        ...

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes, with the length and the type of ``like``."""
        ...


def code_of(options: Outer, dtype: torch.dtype) -> Code:
    """Return the code that the table asks for, for vectors of a type."""
    if options.dtype in ("float32", "bfloat16"):
        return Plain(dtype if options.dtype == "float32" else torch.bfloat16)
    if options.dtype == "int8":
        return Int8()
    return E3M0() if options.dtype == "e3m0" else TopK(round(options.density * ROW))


@dataclass(frozen=True)
class Plain:
    """Elements of a type, without a scale; in a proof in float64 they are that instead of float32."""

    dtype: torch.dtype

    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""
        return elements * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of a vector."""
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes."""
        return numbers(codes[None], self.dtype)[0].to(like.dtype)


class Int8:
    """Blocks of integers of 8 bits with a scale."""

    blocks = Blocks(8, BLOCK)

    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""
        return -(-elements // BLOCK) * self.blocks.width(torch.float32)

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of a vector."""
        return self.blocks.encode(_rows(x, BLOCK)).flatten()

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes."""
        width = self.blocks.width(torch.float32)
        return self.blocks.decode(codes.view(-1, width), like.dtype).flatten()[: len(like)]


class E3M0:
    """Blocks of floats with a sign and 3 bits of exponent: 0, or the largest magnitude over 1 to 64."""

    width = BLOCK // 2 + SCALE_BYTES

    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""
        return -(-elements // BLOCK) * self.width

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of a vector."""
        rows = _rows(x, BLOCK).float()
        scales = rows.abs().amax(1, keepdim=True).to(torch.bfloat16)
        ratio = rows.abs() / scales.float().clamp(min=torch.finfo(torch.float32).tiny)
        # Powers of two have their borders at 0.75 of the upper one; that to 0 is at half the least.
        exponent = torch.frexp(ratio / 0.75).exponent + 6
        codes = torch.where(ratio < 2.0**-7, 0, exponent.clamp(1, 7))
        codes = (codes | (rows < 0).int() << 3).to(torch.uint8)
        low, high = codes.chunk(2, 1)
        return torch.cat([low | high << 4, scales.view(torch.uint8)], 1).flatten()

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes."""
        rows = codes.view(-1, self.width)
        packed, scales = rows[:, :-SCALE_BYTES], numbers(rows[:, -SCALE_BYTES:], torch.bfloat16)
        values = torch.cat([packed & 15, packed >> 4], 1).int()
        exponent = values & 7
        size = torch.where(exponent > 0, torch.exp2((exponent - 7).float()), 0.0)
        signed = torch.where(values >> 3 > 0, -size, size)
        return (signed * scales.float()).flatten()[: len(like)].to(like.dtype)


@dataclass(frozen=True)
class TopK:
    """The largest elements of each row: 12 bits for the place, one for the sign, one for the magnitude.

    A magnitude is one of two, which 32 rows share: the means of those below and above their mean. A row
    with fewer elements than are sent repeats its largest.
    """

    kept: int
    """Elements of a row that are sent, a multiple of 4."""

    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""
        rows = -(-elements // ROW)
        return rows * (self.kept * 3 // 2 + self.kept // 4) + -(-rows // _ROWS) * 2 * SCALE_BYTES

    def encode(self, x: Tensor) -> Tensor:
        """Return the bytes of a vector."""
        rows = _rows(x, ROW).float()
        places = rows.abs().topk(self.kept, 1).indices
        kept = rows.gather(1, places)
        places = torch.where(kept == 0, places[:, :1], places)
        kept = torch.where(kept == 0, kept[:, :1], kept)
        groups = _rows(kept.abs().flatten(), _ROWS * self.kept)
        middle = _mean(groups, groups > 0)
        upper = groups > middle
        low, high = _mean(groups, (groups > 0) & ~upper), _mean(groups, upper)
        levels = torch.cat([low, high], 1).to(torch.bfloat16)
        bits = upper.flatten()[: kept.numel()].view_as(kept).int() | (kept < 0).int() << 1
        a, b, c, d = bits.to(torch.uint8).unflatten(1, (-1, 4)).unbind(2)
        first, second = places.int().unflatten(1, (-1, 2)).unbind(2)
        thirds = [first & 255, first >> 8 | (second & 15) << 4, second >> 4]
        body = torch.cat([torch.stack(thirds, 2).to(torch.uint8).flatten(1), _fours(a, b, c, d)], 1)
        return torch.cat([body.flatten(), levels.view(torch.uint8).flatten()])

    def decode(self, codes: Tensor, like: Tensor) -> Tensor:
        """Return the vector of the bytes."""
        rows, wide = -(-len(like) // ROW), self.kept * 3 // 2 + self.kept // 4
        body = codes[: rows * wide].view(rows, wide)
        levels = numbers(codes[rows * wide :][None], torch.bfloat16).view(-1, 2).float()
        one, two, three = body[:, : self.kept * 3 // 2].int().unflatten(1, (-1, 3)).unbind(2)
        places = torch.stack([one | (two & 15) << 8, two >> 4 | three << 4], 2).flatten(1)
        packed = body[:, self.kept * 3 // 2 :].int()
        bits = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
        of_row = levels.repeat_interleave(_ROWS, 0)[:rows]
        size = torch.where(bits & 1 > 0, of_row[:, 1:], of_row[:, :1])
        out = torch.zeros(rows, ROW, device=codes.device)
        out.scatter_(1, places.long(), torch.where(bits & 2 > 0, -size, size))
        return out.flatten()[: len(like)].to(like.dtype)


def _rows(x: Tensor, width: int) -> Tensor:
    """Return a vector as rows; the last one is filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width)


def _mean(x: Tensor, where: Tensor) -> Tensor:
    """Return the mean of the elements of each row that are chosen, (rows, 1); 0 if none is.

    It is in float64, where the order of the sum does not matter: all devices send the same levels.
    """
    return torch.where(where, x, 0.0).double().sum(1, keepdim=True) / where.sum(1, keepdim=True).clamp(
        min=1
    )


def _fours(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a | b << 2 | c << 4 | d << 6
