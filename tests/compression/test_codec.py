"""Codes of few bits: their error, their bytes, and what becomes of strange values."""

import math

import pytest
import torch
from torch import Tensor

from compose.compression import codec
from compose.compression.codec import (
    Blocks,
    decode_into,
    encode_blocks,
    encode_with_residual,
    keep_blocks,
    rotated_blocks,
)
from compose.compression.losses import expected_of_blocks
from tests.compression.cases import drawn

# Relative error of blocks of 64, 256 and 1024 elements, measured with scales of 16 bits: normal values,
# and Student's t with 3 degrees of freedom. (What the proof expects is the same.)
STATED = {
    (8, False, "normal"): {64: 0.0059, 256: 0.0070, 1024: 0.0079},
    (4, False, "normal"): {64: 0.105, 256: 0.113, 1024: 0.114},
    (4, True, "normal"): {64: 0.105, 256: 0.112, 1024: 0.113},
    (8, False, "t"): {64: 0.011, 256: 0.019, 1024: 0.032},
    (4, False, "t"): {64: 0.184, 256: 0.282, 1024: 0.379},
    (4, True, "t"): {64: 0.098, 256: 0.109, 1024: 0.111},
}


@pytest.mark.parametrize("case", STATED, ids=str)
def test_error_is_as_stated_and_as_expected(case: tuple[int, bool, str]) -> None:
    bits, rotate, kind = case
    for size, stated in STATED[case].items():
        x = drawn(kind).view(-1, size)
        code = Blocks(bits, size, rotate)
        error = code.decode(code.encode(x), torch.float32) - x
        relative = float(error.norm() / x.norm())
        assert relative < 1.25 * stated
        assert relative > 0.7 * stated, "more bits than were asked for"
        expected = float(expected_of_blocks(code, x).sum().sqrt() / x.norm())
        # Most elements of heavy tails round to zero in 4 bits, losing less than a random remainder.
        sure = 0.03 if rotate or bits == 8 or kind == "normal" else 0.3
        assert relative == pytest.approx(expected, rel=sure)
        assert abs(float(error.mean())) < 3 * float(error.std()) / math.sqrt(error.numel())
        width = size * bits // 8 + 2
        assert code.encode(x).shape == (len(x), width) == (len(x), code.width(torch.float32))


def test_each_block_of_4_bits_has_the_better_step() -> None:
    """One very large value, values of one size, and many normal ones."""
    x = torch.zeros(2, 256)
    x[0, 3] = 16.0
    x[1] = torch.where(torch.arange(256) % 3 == 0, 2.0, -2.0)
    many, code = drawn("normal").view(-1, 256), Blocks(4, 256)
    alike, error = (code.decode(code.encode(each), torch.float32) - each for each in (x, many))
    # A step is sent in 8 bits and an exponent.
    assert (alike.norm(dim=1) < 2**-8 * x.norm(dim=1)).all()
    # 0.1123 is the error of 15 levels with a step of 0.35; that of the largest value over 7 is 0.126.
    assert float(error.norm() / many.norm()) == pytest.approx(0.1123, rel=0.01)


@pytest.mark.parametrize("bits", [8, 4])
def test_strange_blocks(bits: int) -> None:
    code = Blocks(bits, 16, rotate=bits == 4)
    x = torch.zeros(5, 16)
    x[1] = 1e-30 * torch.arange(16)
    x[2] = 1e30 * torch.arange(16)
    x[3, 5] = torch.inf
    x[4, 3] = torch.nan
    back = code.decode(code.encode(x), torch.float32)
    assert torch.equal(back[0], x[0])
    for small_or_large in (1, 2):
        right, result = x[small_or_large].double(), back[small_or_large].double()
        assert (result - right).norm() < 0.2 * right.norm()
    assert not back[3].isfinite().all(), "an overflow must be seen"
    assert not back[4].isfinite().all()


def test_16_bits_are_bfloat16_and_0_lose_nothing() -> None:
    x = drawn("t", 512).view(2, 256)
    assert torch.equal(
        Blocks(16, 256).decode(Blocks(16, 256).encode(x), torch.float32), x.bfloat16().float()
    )
    wide = x.double() / 3
    assert torch.equal(Blocks(0, 256).decode(Blocks(0, 256).encode(wide), torch.float64), wide)


@pytest.mark.parametrize("size", [16, 32, 256, 512])
def test_the_rotation_is_orthogonal_and_its_own_inverse(size: int) -> None:
    whole = rotated_blocks(torch.eye(size, dtype=torch.float64))
    assert torch.allclose(whole.abs(), torch.full_like(whole, size**-0.5))
    torch.testing.assert_close(whole @ whole.T, torch.eye(size, dtype=torch.float64))
    x = drawn("t", 4 * size).view(4, size).double()
    torch.testing.assert_close(rotated_blocks(rotated_blocks(x)), x)


@pytest.mark.parametrize("bits", [8, 4])
def test_operators_are_well_formed(bits: int) -> None:
    x = drawn("normal", 512).view(2, 256)
    torch.library.opcheck(encode_blocks, (x, bits, bits == 4))
    kept = encode_blocks(x, 8, False)
    torch.library.opcheck(encode_with_residual, (x, kept, 2.0, bits, bits == 4))
    torch.library.opcheck(keep_blocks, (x, kept, 2.0))
    codes = encode_blocks(x, bits, bits == 4).expand(3, -1, -1)
    for add in (False, True):
        torch.library.opcheck(decode_into, (x, codes, bits, bits == 4, add))


@pytest.mark.parametrize("shape", [(5, 64), (3, 7, 64), (2, 40, 64)])
@pytest.mark.parametrize("bits", [8, 4])
def test_pieces_change_nothing(
    monkeypatch: pytest.MonkeyPatch, bits: int, shape: tuple[int, ...]
) -> None:
    """Rows of blocks that are views, in pieces of any size, are as if they were one piece."""
    # A rotation of integers is exact. Other rounding may depend on the number of blocks.
    wide = (8 * drawn("t", 2 * math.prod(shape))).round().view(*shape[:-1], -1)
    x, rotate, places = wide[..., : shape[-1]], bits == 4, [2**18, 64, 640]
    made: list[list[Tensor]] = []
    for many in places:
        monkeypatch.setattr(codec, "AT_ONCE", many)
        kept = encode_blocks(0.1 * x, 8, False)
        codes = encode_with_residual(x, kept, 2.0, bits, rotate)
        out = wide.clone()
        decode_into(out[..., : shape[-1]], torch.stack([codes, codes]), bits, rotate, True)
        left = kept.clone()
        keep_blocks(3 * x, left, 2.0)
        made.append([encode_blocks(x, bits, rotate), codes, kept, left, out])
    for others in made[1:]:
        assert all(torch.equal(one, other) for one, other in zip(made[0], others, strict=True))
    whole = encode_blocks(x.contiguous().flatten(0, -2), bits, rotate)
    assert torch.equal(made[0][0].flatten(0, -2), whole)
    assert torch.equal(made[0][-1][..., shape[-1] :], wide[..., shape[-1] :])


@pytest.mark.slow
def test_compiled_kernels_do_the_same() -> None:
    x = drawn("t", 2**16).view(-1, 256)

    def encoded(compiled: bool) -> list[Tensor]:
        left = encode_blocks(0.1 * drawn("t", 2**16, 1).view(-1, 256), 8, False, compiled)
        codes = encode_with_residual(x, left, 2.0, 4, True, compiled)
        made = [encode_blocks(x, b, b == 4, compiled) for b in (4, 8)] + [codes, left.clone()]
        keep_blocks(x, left, 2.0, compiled)
        made.append(left)
        for coded, bits in ((codes, 4), (left, 8)):
            made.append(Blocks(bits, 256, compiled=compiled).decode(coded, torch.float32))
        return made

    for number, (one, other) in enumerate(zip(encoded(False), encoded(True), strict=True)):
        blocks = int((one != other).any(1).sum())
        # In 4 bits the order of sums may change a step's last bit, and with it a block's codes.
        assert blocks <= (0 if number == 1 else 2)


@pytest.mark.slow
def test_a_kernel_is_compiled_once() -> None:
    """Units of other sizes and other places in a message need no other kernels; Dynamo has a limit."""
    torch.compiler.reset()

    def code(rows: int, count: int, begin: int) -> None:
        x = drawn("t", rows * 2 * count * 64).view(rows, 2 * count, 64)[:, begin : begin + count]
        kept = encode_blocks(torch.zeros(rows, 2 * count, 64), 8, False, True)[:, begin : begin + count]
        codes = encode_with_residual(x, kept, 1.0, 4, True, True)
        keep_blocks(x.flatten(0, 1), kept.flatten(0, 1), 1.0, True)
        for terms in (1, 2, 3):
            for add in (False, True):
                decode_into(x, codes.expand(terms, *codes.shape), 4, True, add, True)

    code(3, 5, 2)
    code(1, 6, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, count, begin in ((4, 7, 1), (2, 33, 3), (1, 9, 4), (1, 40, 0)):
            code(rows, count, begin)
