"""Tensors in blocks of a few bits: the codes that compressed collectives send.

A tensor is cut into blocks of N elements. Each block is sent as N integers of 8 or 4 bits, and one
scale: the largest magnitude over the largest integer. With ``rotate`` a block is multiplied by the
orthogonal Hadamard matrix first, so that an outlier's weight is spread over its block (SDP4Bit, Jia et
al. 2024, arXiv:2410.15526).

The scale is bfloat16. float16 would turn the scales of gradients below 1e-6 into zero.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compose.operators.registered import operator

SCALE_BYTES = 2
AT_ONCE = 2**18
"""Elements that a CPU works on at once."""


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
        """Undo the rotation of (N, size), in place, and return it in ``dtype``."""
        if self.rotate and self.bits:
            matrices = _matrices(x, x.dtype)
            for some in pieces(x):
                x[some] = _rotated(x[some], matrices)
        return x.to(dtype)

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
        return _steps(rotated_blocks(wide) if self.rotate else wide, self.bits)[:, 0]


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
    matrices, run = _matrices(x) if rotate else None, kernel(_encoded)
    out = x.new_empty(x.shape[0], x.shape[1] * bits // 8 + SCALE_BYTES, dtype=torch.uint8)
    for some in pieces(x):
        out[some] = run(x[some], bits, matrices)
    return out


@encode_blocks.register_fake
def _(x: Tensor, bits: int, rotate: bool) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * bits // 8 + SCALE_BYTES, dtype=torch.uint8)


@operator("compose::encode_with_remainder")
def encode_with_remainder(
    x: Tensor, kept: Tensor, scale: float, bits: int, rotate: bool
) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks to which the last remainder was added, and the new remainder.

    A remainder is in blocks of 8 bits, rotated like what is sent, and for gradients without a loss
    scale. If a block is not finite, its remainder stays what it was: such a step is skipped, and it
    must not spoil those that follow.

    Args:
        x: (N, size), of any float type.
        kept: The last remainder, (N, size + 2), uint8.
        scale: The loss scale of ``x``.
        bits: 8 or 4.
        rotate: Whether to rotate blocks first.

    Returns:
        The codes (N, size bits / 8 + 2) and the remainder (N, size + 2), uint8.
    """
    matrices, run = _matrices(x) if rotate else None, kernel(_encoded_with_remainder)
    out = x.new_empty(x.shape[0], x.shape[1] * bits // 8 + SCALE_BYTES, dtype=torch.uint8)
    left = torch.empty_like(kept)
    for some in pieces(x):
        out[some], left[some] = run(x[some], kept[some], scale, bits, matrices)
    return out, left


@encode_with_remainder.register_fake
def _(x: Tensor, kept: Tensor, scale: float, bits: int, rotate: bool) -> tuple[Tensor, Tensor]:
    width = x.shape[1] * bits // 8 + SCALE_BYTES
    return x.new_empty(x.shape[0], width, dtype=torch.uint8), torch.empty_like(kept)


@operator("compose::decode_blocks")
def decode_blocks(codes: Tensor, bits: int) -> Tensor:
    """Return the elements of blocks, which may be rotated.

    Args:
        codes: (N, size bits / 8 + 2), uint8.
        bits: 8 or 4.

    Returns:
        (N, size), float32.
    """
    run, size = kernel(_decoded), (codes.shape[1] - SCALE_BYTES) * 8 // bits
    out = codes.new_empty(len(codes), size, dtype=torch.float32)
    for some in pieces(out):
        out[some] = run(codes[some], bits)
    return out


@decode_blocks.register_fake
def _(codes: Tensor, bits: int) -> Tensor:
    width = (codes.shape[1] - SCALE_BYTES) * 8 // bits
    return codes.new_empty(codes.shape[0], width, dtype=torch.float32)


Matrices = tuple[Tensor, Tensor]


def _encoded(x: Tensor, bits: int, matrices: Matrices | None) -> Tensor:
    return _rounded(_rotated(x.float(), matrices), bits)


def _encoded_with_remainder(
    x: Tensor, kept: Tensor, scale: float, bits: int, matrices: Matrices | None
) -> tuple[Tensor, Tensor]:
    wanted = _rotated(x.float(), matrices) + _decoded(kept, 8) * scale
    codes = _rounded(wanted, bits)
    lost = (wanted - _decoded(codes, bits)) / scale
    # A value that is not finite makes its block's largest magnitude so too.
    finite = lost.abs().amax(1, keepdim=True).isfinite()
    return codes, torch.where(finite, _rounded(torch.where(finite, lost, 0.0), 8), kept)


def _rounded(x: Tensor, bits: int) -> Tensor:
    """Return the codes of blocks (N, size), float32."""
    steps = _steps(x, bits)
    # A block of zeros has the scale 0; its codes are 0 too.
    inverse = torch.where(steps > 0, 1 / steps, 0.0)
    top = _top(bits)
    codes = (x * inverse).round().clamp(-top, top).to(torch.int8)
    if bits == 4:
        # The first half of a block is in the lower bits.
        low, high = codes.view(torch.uint8).chunk(2, 1)
        packed = (low & 15) | (high << 4)
    else:
        packed = codes.view(torch.uint8)
    return with_scales(packed, steps)


def with_scales(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes (N, bytes) with scales (N, 1) of :func:`block_scales` behind them."""
    return torch.cat([codes, scales.view(torch.uint8)[:, -SCALE_BYTES:]], 1)


def _decoded(codes: Tensor, bits: int) -> Tensor:
    packed, steps = codes[:, :-SCALE_BYTES], read_scales(codes)
    if bits == 8:
        return packed.view(torch.int8).float() * steps
    # Shifted left and back right, the lower four bits get their sign.
    low, high = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4
    return torch.cat([low, high], 1).float() * steps


def read_scales(codes: Tensor) -> Tensor:
    """Return the scales behind codes (N, width), float32 (N, 1)."""
    # Two bytes of bfloat16 are the upper half of a float32's four.
    low, high = codes[:, -SCALE_BYTES:].to(torch.int32).unbind(1)
    return (low << 16 | high << 24).view(torch.float32)[:, None]


def pieces(x: Tensor) -> Iterator[slice]:
    """Yield blocks of (N, size), as many at a time as stay in the caches of a CPU."""
    many = max(1, AT_ONCE // x.shape[1]) if x.device.type == "cpu" else max(1, len(x))
    for start in range(0, len(x), many):
        yield slice(start, start + many)


_COMPILED: dict[Any, Callable[..., Any]] = {}
_COMPILES = False


def compile_kernels() -> None:
    """Let torch.compile make one kernel of each operator here, in this process."""
    global _COMPILES
    _COMPILES = True


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, compiled if :func:`compile_kernels` was called."""
    if not _COMPILES:
        return function
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function, dynamic=True)
    return _COMPILED[function]


def rotated_blocks(x: Tensor) -> Tensor:
    """Return blocks (N, size) times the orthogonal Hadamard matrix, which is its own inverse."""
    return _rotated(x, _matrices(x, x.dtype))


def _rotated(x: Tensor, matrices: Matrices | None) -> Tensor:
    if matrices is None:
        return x
    left, right = matrices
    return (left @ (x.unflatten(1, (len(left), len(right))) @ right)).flatten(1)


def _matrices(x: Tensor, dtype: torch.dtype = torch.float32) -> Matrices:
    """Return two Hadamard matrices, whose Kronecker product is that of blocks ``x``.

    A product with each takes far fewer FLOPs than one with the whole.
    """
    size = x.shape[1]
    few = 1 << (size.bit_length() - 1) // 2
    return _hadamard(few, dtype, x.device), _hadamard(size // few, dtype, x.device)


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


def _steps(x: Tensor, bits: int) -> Tensor:
    return block_scales(x, _top(bits))


def block_scales(x: Tensor, largest: float) -> Tensor:
    """Return the scale of each block, (N, 1): float32 whose lower 16 bits are zero, as in bfloat16.

    It is rounded by integers. Inductor would leave out a cast to bfloat16 and back, and codes would not
    fit the scale that is sent.

    Args:
        x: Blocks (N, size), float32.
        largest: The code of a block's largest magnitude.

    Returns:
        The scales.
    """
    exact = x.abs().amax(1, keepdim=True) / largest
    rounded = ((exact.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(exact.isfinite(), rounded, exact)
