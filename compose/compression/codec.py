"""Codecs: tensors as integers of a few bits with a scale for each block, and back.

Each block of N elements is sent as N integers of 8 or 4 bits, and one scale behind them, the value of
the integer 1. With ``rotate`` a block is multiplied by the orthogonal Hadamard matrix first, so that an
outlier's weight is spread over its block (SDP4Bit, Jia et al. 2024, arXiv:2410.15526). The scale is
bfloat16: float16 would turn the scales of gradients below 1e-6 into 0. With ``compiled``, torch.compile
makes kernels of the steps; in 4 bits it sums in another order, so a few codes differ by rounding.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compose.ops.operators import kernel, operator

SCALE_BYTES = 2
AT_ONCE = 2**18  # elements that a CPU works on at once
ADDED = 0.2  # the part of what was not sent yet that the next message tries to send
_TERMS = 2  # the most whose sum and rotation are one kernel; its code grows with each term
_SMALLEST = 16  # the smallest block that this kernel takes
_OF_NORMAL = 0.35  # the best step of 15 levels for normal values, over their root mean square


@dataclass(frozen=True)
class Blocks:
    """The codec of blocks."""

    bits: int
    """8 or 4; 16 is bfloat16 without a scale. With 0, for proofs, elements travel as they are."""
    size: int  # elements of a block, a power of two
    rotate: bool = False
    compiled: bool = False

    def width(self, dtype: torch.dtype) -> int:
        """Return the bytes of a block of elements that had this type."""
        if self.bits in (4, 8):
            return self.size * self.bits // 8 + SCALE_BYTES
        return self.size * self._without_scale(dtype).itemsize

    def _without_scale(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which elements of a type travel if they have no scale."""
        return torch.bfloat16 if self.bits == 16 else dtype

    def encode(self, x: Tensor) -> Tensor:
        """Return the codes (..., N, width), uint8, of blocks (..., N, size) of any float type."""
        if self.bits in (4, 8):
            return encode_blocks(x, self.bits, self.rotate, self.compiled)
        return x.to(self._without_scale(x.dtype)).contiguous().view(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the elements (..., N, size) of codes (..., N, width)."""
        out = codes.new_empty(*codes.shape[:-1], self.size, dtype=dtype)
        self.sum_into(out, codes[None], dtype)
        return out

    def sum_into(self, out: Tensor, codes: Tensor, dtype: torch.dtype, add: bool = False) -> None:
        """Write the sum of T codes (T, ..., N, width) of a type to blocks (..., N, size), or add it.

        The sum is in float32 or wider.
        """
        if self.bits in (4, 8):
            decode_into(out, codes, self.bits, self.rotate, add, self.compiled)
            return
        kind = self._without_scale(dtype)
        wide = torch.promote_types(kind, torch.float32)
        total = sum(numbers(term, kind).to(wide) for term in codes)
        out.copy_(out + total if add else total)  # type: ignore[arg-type]

    def rotated(self, x: Tensor) -> Tensor:
        """Return blocks (..., size) as they are rounded: rotated or not."""
        return rotated_blocks(x, self.compiled) if self.rotate else x


def numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes (..., N), a part of a message, as numbers of a type, (..., N / its size)."""
    # Bytes may begin anywhere; numbers may not.
    out = codes.new_empty(*codes.shape[:-1], codes.shape[-1] // dtype.itemsize, dtype=dtype)
    out.view(torch.uint8).copy_(codes)
    return out


@operator("compose::encode_blocks")
def encode_blocks(x: Tensor, bits: int, rotate: bool, compiled: bool = False) -> Tensor:
    """Return the codes (..., N, size bits / 8 + 2), uint8, of blocks (..., N, size)."""
    out = empty_codes(x, bits)
    codes, steps = integers(out), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    for at in pieces(x):
        steps[at] = kernel(_round_into, compiled)(codes[at], _floats(x[at], rotate, compiled), bits)
    write_steps(out, steps)
    return out


encode_blocks.register_fake(lambda x, bits, *_: empty_codes(x, bits))


@operator("compose::encode_with_residual", mutates=("kept",))
def encode_with_residual(
    x: Tensor, kept: Tensor, scale: float, bits: int, rotate: bool, compiled: bool = False
) -> Tensor:
    """Return the codes of blocks to which ADDED of the residual was added, and keep the new residual.

    The new one is the last one and the blocks (..., N, size) of a loss ``scale``, less what is sent.
    It is in blocks of 8 bits (..., N, size + 2), rotated like what is sent, without a loss scale. If a
    block is not finite, its residual stays what it was, since such a step is skipped.
    """
    out, factor = empty_codes(x, bits), torch.tensor(scale)
    codes, steps = integers(out), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    left, left_steps = integers(kept), read_steps(kept)
    for at in pieces(x):
        steps[at], left_steps[at] = kernel(_round_with_residual, compiled)(
            codes[at], left[at], left_steps[at], _floats(x[at], rotate, compiled), factor, bits
        )
    write_steps(out, steps)
    write_steps(kept, left_steps)
    return out


encode_with_residual.register_fake(lambda x, kept, scale, bits, *_: empty_codes(x, bits))


@operator("compose::keep_blocks", mutates=("kept",))
def keep_blocks(x: Tensor, kept: Tensor, scale: float, compiled: bool = False) -> None:
    """Write finite blocks (N, size) of a loss scale to a residual (N, size + 2) without one."""
    factor, left, left_steps = torch.tensor(scale), integers(kept), read_steps(kept)
    for at in pieces(x):
        left_steps[at] = kernel(_keep_scaled, compiled)(left[at], left_steps[at], x[at].float(), factor)
    write_steps(kept, left_steps)


@operator("compose::decode_into", mutates=("out",))
def decode_into(
    out: Tensor, codes: Tensor, bits: int, rotate: bool, add: bool, compiled: bool = False
) -> None:
    """Write the sum of T codes (T, ..., N, bytes), rotated back, to blocks (..., N, size)."""
    result, steps = integers(codes), read_steps(codes)
    for at in pieces(out):
        place = out[at]
        terms = [(result[term][at], steps[term][at]) for term in range(len(codes))]
        if rotate:
            end_rotation(place, _mixed_sum(place, terms, bits, compiled), add)
        elif place.dtype == torch.float32:
            _sum_into(place, terms, bits, add, compiled)
        else:
            wide = torch.empty_like(place, dtype=torch.float32)
            total = _sum_into(wide, terms, bits, False, compiled)
            place.copy_(place + total if add else total)


def empty_codes(x: Tensor, bits: int) -> Tensor:
    """Return memory for the codes of blocks (..., size)."""
    width = x.shape[-1] * bits // 8 + SCALE_BYTES
    return x.new_empty(*x.shape[:-1], width, dtype=torch.uint8)


def integers(codes: Tensor) -> Tensor:
    """Return the integers of codes (..., bytes + 2), uint8, without their scales: a view, int8."""
    # A view as int8 inside a compiled step would not be vectorized.
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
    """Return bfloat16 scales (..., 1) of blocks (..., size); ``largest`` is the largest code."""
    return _as_bfloat16(x.abs().amax(-1, keepdim=True) / largest)


def _as_bfloat16(exact: Tensor) -> Tensor:
    # Inductor would leave out a cast to bfloat16 and back, and codes would not fit the scale sent.
    rounded = ((exact.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(exact.isfinite(), rounded, exact)


def top_code(bits: int) -> int:
    """Return the largest integer of so many bits; the least is its negative."""
    return 2 ** (bits - 1) - 1


def block_steps(x: Tensor, bits: int) -> Tensor:
    """Return the distance (..., 1) between the values that codes of a block stand for, as it is sent.

    In 8 bits the largest magnitude gets the largest code. In 4 bits a finer step loses less of most
    blocks: of normal values 0.35 of their root mean square is best for 15 levels (Max 1960, "Quantizing
    for minimum distortion"). Each block has the step whose expected loss, step^2 / 12 for each element
    and what is cut off, is less.
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


def _round_with_residual(
    codes: Tensor, kept: Tensor, kept_steps: Tensor, x: Tensor, scale: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Write the integers of blocks with a residual, and those of the new one; return both steps."""
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
    top = top_code(bits)
    return (x * inverse_of(steps)).round_().clamp_(-top, top)


def inverse_of(steps: Tensor) -> Tensor:
    """Return 1 / steps, and 0 for a step whose inverse may be infinite: the codes are 0 too then."""
    return torch.where(steps >= torch.finfo(torch.float32).tiny, 1 / steps, 0.0)


def _packed(rounded: Tensor, bits: int) -> Tensor:
    """Return integers (..., size) as codes (..., size bits / 8), int8."""
    codes = rounded.to(torch.int8)
    if bits == 8:
        return codes
    # The first half of a block is in the lower bits.
    low, high = codes.chunk(2, -1)
    return (low & 15) | (high << 4)


Terms = list[tuple[Tensor, Tensor]]  # integers (..., N, size bits / 8) and scales (..., N, 1)


def _sum_into(out: Tensor, terms: Terms, bits: int, add: bool, compiled: bool) -> Tensor:
    for number, term in enumerate(terms):
        kernel(_decode_into, compiled)(out, *term, bits, add or number > 0)
    return out


def _decode_into(out: Tensor, codes: Tensor, steps: Tensor, bits: int, add: bool) -> None:
    """Write the elements of codes (..., bytes), int8, with steps (..., 1), to (..., size), float32."""
    if bits == 8:
        result = codes.float() * steps
    else:
        # Shifted left and back right, the lower four bits get their sign.
        halves = ((codes << 4) >> 4).float() * steps, (codes >> 4).float() * steps
        result = torch.cat(halves, -1)
    if add:
        out.add_(result)
    else:
        out.copy_(result)


def _mixed_sum(like: Tensor, terms: Terms, bits: int, compiled: bool) -> Tensor:
    """Return the sum of rotated blocks after the first part of the rotation."""
    if compiled and len(terms) <= _TERMS and bits == 4 and like.shape[-1] >= _SMALLEST:
        return kernel(_decode_mixed, compiled)(*(x for term in terms for x in term))
    total = torch.empty_like(like, dtype=torch.float32)
    return mixed(_sum_into(total, terms, bits, False, compiled), compiled)


def _decode_mixed(*terms: Tensor) -> Tensor:
    """Return the first product of the sum of codes of 4 bits, given with their scales in turn."""
    few, each = factors(2 * terms[0].shape[-1])
    rows: list[Tensor] = []
    for codes, steps in zip(terms[::2], terms[1::2], strict=True):
        packed = codes.unflatten(-1, (few // 2, each)).unbind(-2)
        results = [((row << 4) >> 4).float() * steps for row in packed]
        results += [(row >> 4).float() * steps for row in packed]
        rows = [a + b for a, b in zip(rows, results, strict=True)] if rows else results
    return _mixed_rows(rows)


def _floats(x: Tensor, rotate: bool, compiled: bool) -> Tensor:
    return rotated_blocks(x.float(), compiled) if rotate else x.float()


# The Hadamard matrix of a block is the Kronecker product of two small ones, and two products with these
# take far fewer FLOPs. A block is seen as rows (few, each). The first product mixes them by sums and
# differences, of which a compiler makes one kernel. The second is a matrix product.


def rotated_blocks(x: Tensor, compiled: bool = False) -> Tensor:
    """Return blocks (..., size) times the orthogonal Hadamard matrix, which is its own inverse."""
    _, each = factors(x.shape[-1])
    return (mixed(x, compiled).view(-1, each) @ _second(x)).view(x.shape)


def mixed(x: Tensor, compiled: bool) -> Tensor:
    """Return blocks (..., size) after the first product, whose matrix has elements of 1 and -1."""
    few, each = factors(x.shape[-1])
    blocks = x.reshape(-1, few, each)
    if compiled:
        return kernel(_mixed, compiled)(blocks).view(x.shape)
    return (_hadamard(few, x.dtype, x.device) @ blocks).view(x.shape)


def _mixed(x: Tensor) -> Tensor:
    return _mixed_rows(x.unbind(1))


def _mixed_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return the first product of blocks, given as rows (..., each), as (..., few each)."""
    rows, distance = list(rows), 1
    while distance < len(rows):
        for i in range(len(rows)):
            if not i & distance:
                one, other = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = one + other, one - other
        distance *= 2
    return torch.cat(rows, -1)


def end_rotation(out: Tensor, x: Tensor, add: bool) -> None:
    """Write the second product of what :func:`mixed` returned, or add it to ``out``, (..., size)."""
    _, each = factors(x.shape[-1])
    if out.dtype == x.dtype and out.is_contiguous():
        out.view(-1, each).addmm_(x.view(-1, each), _second(x), beta=int(add))
        return
    result = (x.view(-1, each) @ _second(x)).view(out.shape)
    out.copy_(out + result if add else result)


def factors(size: int) -> tuple[int, int]:
    """Return two powers of two whose product is ``size``; the second is not the smaller one."""
    few = 1 << (size.bit_length() - 1) // 2
    return few, size // few


def _second(x: Tensor) -> Tensor:
    """Return the matrix of the second product, which also makes up for the length of the first."""
    few, each = factors(x.shape[-1])
    return _hadamard(each, x.dtype, x.device) / math.sqrt(few * each)


@functools.cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = torch.ones(1, 1, dtype=dtype)
    while len(whole) < size:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)])
    return whole.to(device)


def pieces(x: Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Yield places of blocks (N, size) or (R, N, size), as many as stay in the caches of a CPU."""
    *rows, count, size = x.shape
    many = max(1, AT_ONCE // max(1, size))
    if x.device.type != "cpu" or math.prod(rows) * count <= many:
        yield (0,) if rows == [1] else (slice(None),)
    elif not rows:
        for start in range(0, count, many):
            yield (slice(start, start + many),)
    elif count < many:
        together = many // max(1, count)
        for row in range(0, rows[0], together):
            yield (slice(row, row + together),)
    else:
        # A dim of one row would need kernels of its own.
        for row in range(rows[0]):
            for start in range(0, count, many):
                yield row, slice(start, start + many)
