"""The operators that turn blocks of elements into codes of a few bits, and back.

Each code has the integers of a block and its scale behind them. On a CPU an operator works on as many
blocks at a time as stay in the caches. torch.compile makes kernels of the steps, if
:func:`compile_kernels` was called. Both ways are bitwise the same in 8 bits. In 4 bits the sums over a
block are made in another order, so the steps of a few blocks differ by rounding.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from compose.operators.registered import operator

SCALE_BYTES = 2
_OF_NORMAL = 0.35
"""The best step of 15 levels for normal values, over their root mean square."""
ADDED = 0.2
"""The part of what was not sent yet that the next message tries to send."""
AT_ONCE = 2**18
"""Elements that a CPU works on at once."""


@operator("compose::encode_blocks")
def encode_blocks(x: Tensor, bits: int, rotate: bool) -> Tensor:
    """Return the codes of blocks, each with its scale behind it.

    Args:
        x: (..., N, size), of any float type.
        bits: 8 or 4.
        rotate: Whether to rotate blocks first.

    Returns:
        (..., N, size bits / 8 + 2), uint8.
    """
    out = _empty_codes(x, bits)
    for at in pieces(x):
        codes, steps = kernel(_rounded)(_floats(x[at], rotate), bits)
        write_codes(out[at], codes, steps)
    return out


@encode_blocks.register_fake
def _(x: Tensor, bits: int, rotate: bool) -> Tensor:
    return _empty_codes(x, bits)


@operator("compose::encode_with_remainder", mutates=("kept",))
def encode_with_remainder(x: Tensor, kept: Tensor, scale: float, bits: int, rotate: bool) -> Tensor:
    """Return the codes of blocks to which ADDED of the remainder was added, and keep the new remainder.

    The remainder is all that was not sent yet: the last one, and the blocks, less what is sent now. It
    is in blocks of 8 bits, rotated like what is sent, and for gradients without a loss scale. If a
    block is not finite, its remainder stays what it was: such a step is skipped, and it must not spoil
    those that follow.

    Args:
        x: (..., N, size), of any float type.
        kept: The last remainder, (..., N, size + 2), uint8; the new one is written to it.
        scale: The loss scale of ``x``.
        bits: 8 or 4.
        rotate: Whether to rotate blocks first.

    Returns:
        The codes (..., N, size bits / 8 + 2), uint8.
    """
    out, factor = _empty_codes(x, bits), torch.tensor(scale)
    for at in pieces(x):
        floats, last = _floats(x[at], rotate), read_codes(kept[at])
        codes, steps, left, left_steps = kernel(_with_remainder)(floats, *last, factor, bits)
        write_codes(out[at], codes, steps)
        write_codes(kept[at], left, left_steps)
    return out


@encode_with_remainder.register_fake
def _(x: Tensor, kept: Tensor, scale: float, bits: int, rotate: bool) -> Tensor:
    return _empty_codes(x, bits)


@operator("compose::decode_blocks")
def decode_blocks(codes: Tensor, bits: int) -> Tensor:
    """Return the elements of blocks that were not rotated.

    Args:
        codes: (..., N, size bits / 8 + 2), uint8.
        bits: 8 or 4.

    Returns:
        (..., N, size), float32.
    """
    out = _empty_blocks(codes, bits)
    write_sum(out, codes[None], bits, False, False)
    return out


@decode_blocks.register_fake
def _(codes: Tensor, bits: int) -> Tensor:
    return _empty_blocks(codes, bits)


@operator("compose::decode_into", mutates=("out",))
def decode_into(out: Tensor, codes: Tensor, bits: int, rotate: bool, add: bool) -> None:
    """Write the sum of what T codes hold for each block. The sum is in float32.

    Args:
        out: (..., N, size), of any float type.
        codes: (T, ..., N, size bits / 8 + 2), uint8.
        bits: 8 or 4.
        rotate: Whether the blocks were rotated; of the sum this is undone once.
        add: Whether to add to ``out`` what it holds.
    """
    write_sum(out, codes, bits, rotate, add)


@decode_into.register_fake
def _(out: Tensor, codes: Tensor, bits: int, rotate: bool, add: bool) -> None:
    return None


def write_sum(out: Tensor, codes: Tensor, bits: int, rotate: bool, add: bool) -> None:
    """Do what :func:`decode_into` says."""
    for at in pieces(out):
        total = kernel(_decoded)(*read_codes(codes[0][at]), bits)
        for term in codes[1:]:
            total += kernel(_decoded)(*read_codes(term[at]), bits)
        if rotate:
            total = _rotated(total)
        place = out[at]
        if add:
            place += total.view(place.shape)
        else:
            place.copy_(total.view(place.shape))


def write_codes(out: Tensor, codes: Tensor, steps: Tensor) -> Tensor:
    """Write codes and their scales to one tensor.

    Args:
        out: (..., bytes + 2), uint8; it is filled.
        codes: (n, bytes), int8 or of another type of one byte.
        steps: The scales (n, 1), float32.

    Returns:
        ``out``.
    """
    out[..., :-SCALE_BYTES] = codes.view(torch.uint8).view(*out.shape[:-1], codes.shape[-1])
    # bfloat16 is the upper half of a float32.
    out[..., -SCALE_BYTES:] = steps.view(torch.uint8)[:, -SCALE_BYTES:].view(
        *out.shape[:-1], SCALE_BYTES
    )
    return out


def read_codes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return what :func:`write_codes` has written: codes (n, bytes), int8, and scales (n, 1), float32.

    A view as int8 inside a compiled step would not be vectorized.
    """
    steps = codes.new_zeros(codes.shape[:-1].numel(), 4)
    steps[:, -SCALE_BYTES:] = codes[..., -SCALE_BYTES:].reshape(-1, SCALE_BYTES)
    packed = codes[..., :-SCALE_BYTES].view(torch.int8)
    return packed.reshape(-1, packed.shape[-1]), steps.view(torch.float32)


def pieces(x: Tensor) -> Iterator[tuple[slice, ...]]:
    """Yield places of blocks (N, size) or (R, N, size), as many as stay in the caches of a CPU."""
    *rows, count, size = x.shape
    many = max(1, AT_ONCE // max(1, size))
    if x.device.type != "cpu" or math.prod(rows) * count <= many:
        yield (slice(None),)
    elif not rows:
        for start in range(0, count, many):
            yield (slice(start, start + many),)
    else:
        together = max(1, many // max(1, count))
        for row in range(0, rows[0], together):
            for start in range(0, count, many):
                yield slice(row, row + together), slice(start, start + many)


_COMPILED: dict[Any, Callable[..., Any]] = {}
_COMPILES = False


def compile_kernels() -> None:
    """Let torch.compile make one kernel of each step here, in this process."""
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
    return _rotated(x)


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
    return _as_bfloat16(x.abs().amax(1, keepdim=True) / largest)


def _as_bfloat16(exact: Tensor) -> Tensor:
    rounded = ((exact.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(exact.isfinite(), rounded, exact)


def top_code(bits: int) -> int:
    """Return the largest integer of so many bits; the least is its negative."""
    return 2 ** (bits - 1) - 1


def block_steps(x: Tensor, bits: int) -> Tensor:
    """Return the distance between the values that codes of each block stand for, as it is sent.

    In 8 bits the largest magnitude gets the largest code. In 4 bits a finer step, which cuts off what
    is beyond it, loses less of most blocks: of normal values, which rotated blocks resemble, 0.35 of
    their root mean square is best for 15 levels (Max 1960, "Quantizing for minimum distortion"). Each
    block has the better one of the two steps.

    Args:
        x: Blocks (N, size), float32.
        bits: 8 or 4.

    Returns:
        The steps (N, 1), float32 whose lower 16 bits are zero.
    """
    widest = block_scales(x, top_code(bits))
    if bits == 8:
        return widest
    finer = _as_bfloat16(x.square().mean(1, keepdim=True).sqrt() * _OF_NORMAL)
    finer = torch.minimum(finer, widest)
    better = _lost(x, finer, bits) < _lost(x, widest, bits)
    return torch.where(better, finer, widest)


def _lost(x: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Return the square of the norm of what blocks lose with steps (n, 1), (n, 1)."""
    return (x - _integers(x, steps, bits) * steps).square().sum(1, keepdim=True)


def _rounded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of blocks (n, size), float32, as (n, size bits / 8), and the steps (n, 1)."""
    steps = block_steps(x, bits)
    return _packed(_integers(x, steps, bits), bits), steps


def _with_remainder(
    x: Tensor, kept: Tensor, kept_steps: Tensor, scale: Tensor, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and steps of blocks with a remainder, and codes and steps of the new remainder."""
    # In place where it can be: new memory costs an eager CPU more than the arithmetic.
    rest = kept.float().mul_(kept_steps).mul_(scale)
    wanted = x + rest * ADDED
    steps = block_steps(wanted, bits)
    integers = _integers(wanted, steps, bits)
    left = rest.add_(x).sub_(integers * steps).mul_(1 / scale)
    left_steps = block_steps(left, 8)
    finite = left_steps.isfinite()
    # A choice between integers of 8 bits would not be vectorized.
    left = torch.where(finite, _integers(left, left_steps, 8), kept.float())
    return (
        _packed(integers, bits),
        steps,
        left.to(torch.int8),
        torch.where(finite, left_steps, kept_steps),
    )


def _integers(x: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Return the integers of blocks (n, size), float32, for steps (n, 1)."""
    # A block of zeros has the step 0; its codes are 0 too.
    inverse = torch.where(steps > 0, 1 / steps, 0.0)
    top = top_code(bits)
    return (x * inverse).round_().clamp_(-top, top)


def _packed(integers: Tensor, bits: int) -> Tensor:
    """Return integers (n, size) as codes (n, size bits / 8), int8."""
    codes = integers.to(torch.int8)
    if bits == 8:
        return codes
    # The first half of a block is in the lower bits.
    low, high = codes.chunk(2, 1)
    return (low & 15) | (high << 4)


def _decoded(packed: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Return the elements of codes (n, bytes), int8, with steps (n, 1): (n, size), float32."""
    if bits == 8:
        return packed.float() * steps
    # Shifted left and back right, the lower four bits get their sign.
    return torch.cat([((packed << 4) >> 4).float() * steps, (packed >> 4).float() * steps], 1)


def _floats(x: Tensor, rotate: bool) -> Tensor:
    """Return blocks as (n, size), float32, rotated if asked for."""
    flat = x.reshape(-1, x.shape[-1]).float()
    return _rotated(flat) if rotate else flat


def _rotated(x: Tensor) -> Tensor:
    """Return blocks (n, size) times the Hadamard matrix.

    The matrix is the Kronecker product of two small ones. Two products with these take far fewer FLOPs
    than one with the whole.
    """
    size = x.shape[1]
    few = 1 << (size.bit_length() - 1) // 2
    left, right = (_hadamard(n, x.dtype, x.device) for n in (few, size // few))
    return (left @ (x.unflatten(1, (few, size // few)) @ right)).flatten(1)


@functools.cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = torch.ones(1, 1, dtype=dtype)
    while len(whole) < size:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)])
    return (whole / math.sqrt(size)).to(device)


def _empty_codes(x: Tensor, bits: int) -> Tensor:
    width = x.shape[-1] * bits // 8 + SCALE_BYTES
    return x.new_empty(*x.shape[:-1], width, dtype=torch.uint8)


def _empty_blocks(codes: Tensor, bits: int) -> Tensor:
    size = (codes.shape[-1] - SCALE_BYTES) * 8 // bits
    return codes.new_empty(*codes.shape[:-1], size, dtype=torch.float32)
