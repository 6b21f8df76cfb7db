"""The operators that turn blocks of elements into codes of a few bits, and back.

Each code has the integers of a block and its scale behind them. On a CPU an operator works on as many
blocks at a time as stay in the caches. After ``compile_kernels``, torch.compile makes kernels of the
steps. Both ways are bitwise the same in 8 bits. In 4 bits the sums over a block are made in another
order, so the codes of a few blocks differ by rounding.
"""

import torch
from torch import Tensor

from compose.compression.kernels import compiles, kernel, pieces
from compose.compression.rotation import end_rotation, factors, mixed, mixed_rows, rotated_blocks
from compose.ops.operators import operator

SCALE_BYTES = 2
_TOGETHER = 2
"""The most terms whose sum and rotation are one kernel. Its code grows with each term."""
_LEAST = 16
"""The smallest block that this kernel takes."""
_OF_NORMAL = 0.35
"""The best step of 15 levels for normal values, over their root mean square."""
ADDED = 0.2
"""The part of what was not sent yet that the next message tries to send."""


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
    codes, steps = integers(out), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    for at in pieces(x):
        steps[at] = kernel(_round_into)(codes[at], _floats(x[at], rotate), bits)
    write_steps(out, steps)
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
    codes, steps = integers(out), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    left, left_steps = integers(kept), read_steps(kept)
    for at in pieces(x):
        floats = _floats(x[at], rotate)
        steps[at], left_steps[at] = kernel(_round_with_remainder)(
            codes[at], left[at], left_steps[at], floats, factor, bits
        )
    write_steps(out, steps)
    write_steps(kept, left_steps)
    return out


@encode_with_remainder.register_fake
def _(x: Tensor, kept: Tensor, scale: float, bits: int, rotate: bool) -> Tensor:
    return _empty_codes(x, bits)


@operator("compose::keep_blocks", mutates=("kept",))
def keep_blocks(x: Tensor, kept: Tensor, scale: float) -> None:
    """Write blocks to a remainder. If a block is not finite, its remainder stays what it was.

    Args:
        x: (N, size), of any float type.
        kept: The remainder, for gradients without a loss scale, (N, size + 2), uint8.
        scale: The loss scale of ``x``.
    """
    factor, left, left_steps = torch.tensor(scale), integers(kept), read_steps(kept)
    for at in pieces(x):
        left_steps[at] = kernel(_keep_scaled)(left[at], left_steps[at], x[at].float(), factor)
    write_steps(kept, left_steps)


@keep_blocks.register_fake
def _(x: Tensor, kept: Tensor, scale: float) -> None:
    return None


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
    found, steps = integers(codes), read_steps(codes)
    for at in pieces(out):
        place = out[at]
        terms = [(found[term][at], steps[term][at]) for term in range(len(codes))]
        if rotate:
            end_rotation(place, _mixed_sum(place, terms, bits), add)
        elif place.dtype == torch.float32:
            _sum_into(place, terms, bits, add)
        else:
            total = _sum_into(torch.empty_like(place, dtype=torch.float32), terms, bits, False)
            place.copy_(place + total if add else total)


Terms = list[tuple[Tensor, Tensor]]
"""Integers (..., N, size bits / 8) and scales (..., N, 1) of what is summed."""


def _sum_into(out: Tensor, terms: Terms, bits: int, add: bool) -> Tensor:
    for number, term in enumerate(terms):
        kernel(_decode_into)(out, *term, bits, add or number > 0)
    return out


def _mixed_sum(like: Tensor, terms: Terms, bits: int) -> Tensor:
    """Return the sum of rotated blocks after the first part of the rotation."""
    if compiles() and len(terms) <= _TOGETHER and bits == 4 and like.shape[-1] >= _LEAST:
        return kernel(_decode_mixed)(*(x for term in terms for x in term))
    total = torch.empty_like(like, dtype=torch.float32)
    return mixed(_sum_into(total, terms, bits, False))


def integers(codes: Tensor) -> Tensor:
    """Return the integers of codes (..., bytes + 2), uint8, without their scales: a view, int8.

    A view as int8 inside a compiled step would not be vectorized.
    """
    return codes[..., :-SCALE_BYTES].view(torch.int8)


def write_steps(codes: Tensor, steps: Tensor) -> None:
    """Write the scales (..., 1), float32, behind the integers of codes (..., bytes + 2), uint8."""
    # bfloat16 is the upper half of a float32.
    codes[..., -SCALE_BYTES:] = steps.view(torch.uint8)[..., -SCALE_BYTES:]


def read_steps(codes: Tensor) -> Tensor:
    """Return the scales (..., 1), float32, of codes (..., bytes + 2), uint8."""
    steps = codes.new_zeros(*codes.shape[:-1], 4)
    steps[..., -SCALE_BYTES:] = codes[..., -SCALE_BYTES:]
    return steps.view(torch.float32)


def block_scales(x: Tensor, largest: float) -> Tensor:
    """Return the scale of each block: float32 whose lower 16 bits are zero, as in bfloat16.

    It is rounded by integers. Inductor would leave out a cast to bfloat16 and back, and codes would not
    fit the scale that is sent.

    Args:
        x: Blocks (..., size), float32.
        largest: The code of a block's largest magnitude.

    Returns:
        The scales (..., 1).
    """
    return _as_bfloat16(x.abs().amax(-1, keepdim=True) / largest)


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
    block has the step that is expected to lose less. The expected loss is step^2 / 12 for each element,
    and what is cut off.

    Args:
        x: Blocks (..., size), float32.
        bits: 8 or 4.

    Returns:
        The steps (..., 1), float32 whose lower 16 bits are zero.
    """
    top = top_code(bits)
    widest = block_scales(x, top)
    if bits == 8:
        return widest
    finer = _as_bfloat16(x.square().mean(-1, keepdim=True).sqrt() * _OF_NORMAL)
    finer = torch.minimum(finer, widest)
    cut_off = (x.abs() - (top + 0.5) * finer).clamp_(min=0).square().sum(-1, keepdim=True)
    rounded = x.shape[-1] / 12
    better = cut_off + finer.square() * rounded < widest.square() * rounded
    return torch.where(better, finer, widest)


def _round_into(codes: Tensor, x: Tensor, bits: int) -> Tensor:
    """Write the integers of blocks (..., size), float32, to (..., size bits / 8); return the steps."""
    steps = block_steps(x, bits)
    codes.copy_(_packed(_rounded(x, steps, bits), bits))
    return steps


def _round_with_remainder(
    codes: Tensor, kept: Tensor, kept_steps: Tensor, x: Tensor, scale: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Write the integers of blocks with a remainder, and those of the new one; return both steps."""
    # In place where it can be: new memory costs an eager CPU more than the arithmetic.
    rest = kept.float().mul_(kept_steps * scale)
    wanted = x + rest * ADDED
    steps = block_steps(wanted, bits)
    rounded = _rounded(wanted, steps, bits)
    codes.copy_(_packed(rounded, bits))
    left = rest.add_(x).sub_(rounded * steps).mul_(1 / scale)
    return steps, _keep(kept, kept_steps, left)


def _keep(kept: Tensor, kept_steps: Tensor, left: Tensor) -> Tensor:
    """Write the integers of finite blocks (..., size), float32, to ``kept``; return all steps."""
    steps = block_steps(left, 8)
    finite = steps.isfinite()
    # A choice between integers of 8 bits would not be vectorized.
    kept.copy_(torch.where(finite, _rounded(left, steps, 8), kept.float()).to(torch.int8))
    return torch.where(finite, steps, kept_steps)


def _keep_scaled(kept: Tensor, kept_steps: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    return _keep(kept, kept_steps, x * (1 / scale))


def _rounded(x: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Return the integers of blocks (..., size), float32, for steps (..., 1)."""
    # A block of zeros has the step 0; its codes are 0 too.
    inverse = torch.where(steps > 0, 1 / steps, 0.0)
    top = top_code(bits)
    return (x * inverse).round_().clamp_(-top, top)


def _packed(rounded: Tensor, bits: int) -> Tensor:
    """Return integers (..., size) as codes (..., size bits / 8), int8."""
    codes = rounded.to(torch.int8)
    if bits == 8:
        return codes
    # The first half of a block is in the lower bits.
    low, high = codes.chunk(2, -1)
    return (low & 15) | (high << 4)


def _decode_into(out: Tensor, codes: Tensor, steps: Tensor, bits: int, add: bool) -> None:
    """Write the elements of codes (..., bytes), int8, with steps (..., 1), to (..., size), float32."""
    if bits == 8:
        found = codes.float() * steps
    else:
        # Shifted left and back right, the lower four bits get their sign.
        halves = ((codes << 4) >> 4).float() * steps, (codes >> 4).float() * steps
        found = torch.cat(halves, -1)
    if add:
        out.add_(found)
    else:
        out.copy_(found)


def _decode_mixed(*terms: Tensor) -> Tensor:
    """Return :func:`mixed_rows` of the sum of codes of 4 bits, given with their scales in turn."""
    few, each = factors(2 * terms[0].shape[-1])
    rows: list[Tensor] = []
    for codes, steps in zip(terms[::2], terms[1::2], strict=True):
        packed = codes.unflatten(-1, (few // 2, each)).unbind(-2)
        found = [((row << 4) >> 4).float() * steps for row in packed]
        found += [(row >> 4).float() * steps for row in packed]
        rows = [a + b for a, b in zip(rows, found, strict=True)] if rows else found
    return mixed_rows(rows)


def _floats(x: Tensor, rotate: bool) -> Tensor:
    """Return blocks as float32, rotated if asked for."""
    return rotated_blocks(x.float()) if rotate else x.float()


def _empty_codes(x: Tensor, bits: int) -> Tensor:
    width = x.shape[-1] * bits // 8 + SCALE_BYTES
    return x.new_empty(*x.shape[:-1], width, dtype=torch.uint8)


def _empty_blocks(codes: Tensor, bits: int) -> Tensor:
    size = (codes.shape[-1] - SCALE_BYTES) * 8 // bits
    return codes.new_empty(*codes.shape[:-1], size, dtype=torch.float32)
