"""Codes of few bits: their error, their bytes, and what becomes of strange values."""

import math

import pytest
import torch
from torch import Tensor

from compose.compression import kernels
from compose.compression.blocks import Blocks
from compose.compression.codecs import (
    decode_blocks,
    decode_into,
    encode_blocks,
    encode_with_remainder,
    keep_blocks,
)
from compose.compression.exchange import Scratch
from compose.compression.feedback import BlockFeedback, Feedback
from compose.compression.layout import Layout, Packing
from compose.compression.rotation import rotated_blocks

# Relative error of blocks of 64, 256 and 1024 elements, measured with scales of 16 bits: normal values,
# and Student's t with 3 degrees of freedom. (What Blocks.expected says gives the same.)
STATED = {
    (8, False, "normal"): {64: 0.0059, 256: 0.0070, 1024: 0.0079},
    (4, False, "normal"): {64: 0.105, 256: 0.113, 1024: 0.114},
    (4, True, "normal"): {64: 0.105, 256: 0.112, 1024: 0.113},
    (8, False, "t"): {64: 0.011, 256: 0.019, 1024: 0.032},
    (4, False, "t"): {64: 0.184, 256: 0.282, 1024: 0.379},
    (4, True, "t"): {64: 0.098, 256: 0.109, 1024: 0.111},
}


def drawn(kind: str, count: int = 2**18, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, count, generator=generator)
    return normal[0] if kind == "normal" else normal[0] / (normal[1:].square().mean(0)).sqrt()


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
        expected = float(code.expected(x).sum().sqrt() / x.norm())
        # Of heavy tails in 4 bits most elements round to zero, and lose less than a random remainder.
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
        right, found = x[small_or_large].double(), back[small_or_large].double()
        assert (found - right).norm() < 0.2 * right.norm()
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
    torch.library.opcheck(decode_blocks, (encode_blocks(x, bits, False), bits))
    kept = encode_blocks(x, 8, False)
    torch.library.opcheck(encode_with_remainder, (x, kept, 2.0, bits, bits == 4))
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
    # Of integers a rotation is exact. Else a product's rounding may depend on how many blocks it takes.
    wide = (8 * drawn("t", 2 * math.prod(shape))).round().view(*shape[:-1], -1)
    x, rotate, places = wide[..., : shape[-1]], bits == 4, [2**18, 64, 640]
    made: list[list[Tensor]] = []
    for many in places:
        monkeypatch.setattr(kernels, "AT_ONCE", many)
        kept = encode_blocks(0.1 * x, 8, False)
        codes = encode_with_remainder(x, kept, 2.0, bits, rotate)
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


SHAPES = [(70, 67), (5,), (3, 4), (129, 40), (1,)]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("bits", [0, 4, 8, 16])
def test_rows_come_back_with_odd_sizes(monkeypatch: pytest.MonkeyPatch, bits: int, ranks: int) -> None:
    packing = Packing(Layout.of(SHAPES, ranks), Blocks(bits, 64, rotate=bits == 4))
    rows = drawn("normal", ranks * packing.layout.numel).view(ranks, -1)
    messages = packing.pack(rows)
    assert messages.shape == (ranks, packing.bytes(rows.dtype))
    back, moved = torch.empty_like(rows), rows.clone()
    packing.unpack(messages, back)
    packing.unpack(messages, moved, base=True)
    # Larger units have a call for each run of coded parameters, not one for all.
    monkeypatch.setattr(kernels, "AT_ONCE", 64)
    assert torch.equal(packing.pack(rows), messages)
    for base, found in ((False, back), (True, moved)):
        out = rows.clone()
        packing.unpack(messages, out, base)
        assert torch.equal(out, found)
    begin = 0
    for part in packing.layout.parts:
        place = slice(begin, begin + part.numel)
        begin += part.numel
        error = float((back[:, place] - rows[:, place]).norm() / rows[:, place].norm())
        limit = {0: 0.0, 4: 0.2, 8: 0.02, 16: 0.004}[bits]
        assert error <= (limit if part.coded else 0.0)
    torch.testing.assert_close(packing.sum(messages, rows.dtype), back.sum(0, keepdim=True))
    assert [part.coded for part in packing.layout.parts] == [True, False, False, True, False]


def test_error_feedback_gives_all_of_it_in_the_end() -> None:
    """What was sent and what is kept add up to what was to be sent, but for the rounding of 8 bits."""
    code, feedback = Blocks(4, 256, rotate=True), Feedback(Scratch())
    asked, sent = torch.zeros(1, 2048), torch.zeros(1, 2048)
    for step in range(20):
        x = drawn("t", 2048, step)[None]
        scale = 2.0 ** (step % 5)  # of the loss: the remainder is for gradients without it
        wanted = feedback.added(x * scale, scale)
        got = code.decode(code.encode(wanted.view(-1, 256)), torch.float32).view(1, -1)
        wanted.sub_(got)
        feedback.keep(scale)
        asked, sent = asked + x, sent + got / scale
    left = feedback.added(torch.zeros(1, 2048), 1.0)
    whole = float(asked.norm())
    assert float((asked - sent - left).norm()) < 0.01 * whole
    assert float((asked - sent).norm()) < 0.1 * whole


@pytest.mark.parametrize("bits", [8, 4])
def test_feedback_of_blocks_gives_all_of_it_in_the_end(bits: int) -> None:
    code, feedback = Blocks(bits, 256, rotate=bits == 4), BlockFeedback()
    asked, sent = torch.zeros(8, 256), torch.zeros(8, 256)
    for step in range(20):
        x, scale = drawn("t", 2048, step).view(8, 256), 2.0 ** (step % 5)
        got = code.decode(feedback.encode(code, 8, scale, (x * scale)[None]), torch.float32)[0]
        asked, sent = asked + x, sent + got / scale
    assert float((asked - sent).norm()) == pytest.approx(float(feedback.norm()), rel=0.1)
    assert float((asked - sent).norm()) < 0.05 * float(asked.norm())
    # A block that is not finite keeps its remainder, and the others get theirs.
    assert feedback.codes is not None
    before = feedback.codes.clone()
    broken = drawn("t", 2048, 30).view(8, 256)
    broken[3, 7] = torch.inf
    found = code.decode(feedback.encode(code, 8, 1.0, broken[None]), torch.float32)[0]
    assert not found[3].isfinite().all()
    assert torch.equal(feedback.codes[3], before[3])
    assert not torch.equal(feedback.codes[2], before[2])


@pytest.mark.slow
def test_compiled_kernels_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn("t", 2**16).view(-1, 256)

    def found() -> list[Tensor]:
        left = encode_blocks(0.1 * drawn("t", 2**16, 1).view(-1, 256), 8, False)
        codes = encode_with_remainder(x, left, 2.0, 4, True)
        made = [encode_blocks(x, 4, True), encode_blocks(x, 8, False), codes, left.clone()]
        keep_blocks(x, left, 2.0)
        return [*made, decode_blocks(codes, 4), left, decode_blocks(left, 8)]

    plain = found()
    monkeypatch.setattr(kernels, "_COMPILES", True)
    for number, (one, other) in enumerate(zip(plain, found(), strict=True)):
        blocks = int((one != other).any(1).sum())
        # In 4 bits the order of sums may change a step's last bit, and with it a block's codes.
        assert blocks <= (0 if number == 1 else 2)


@pytest.mark.slow
def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of other sizes and other places in a message need no other kernels; Dynamo has a limit."""
    monkeypatch.setattr(kernels, "_COMPILES", True)
    torch.compiler.reset()

    def code(rows: int, count: int, begin: int) -> None:
        x = drawn("t", rows * 2 * count * 64).view(rows, 2 * count, 64)[:, begin : begin + count]
        kept = encode_blocks(torch.zeros(rows, 2 * count, 64), 8, False)[:, begin : begin + count]
        codes = encode_with_remainder(x, kept, 1.0, 4, True)
        keep_blocks(x.flatten(0, 1), kept.flatten(0, 1), 1.0)
        for terms in (1, 2, 3):
            for add in (False, True):
                decode_into(x, codes.expand(terms, *codes.shape), 4, True, add)

    code(3, 5, 2)
    code(1, 6, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, count, begin in ((4, 7, 1), (2, 33, 3), (1, 9, 4), (1, 40, 0)):
            code(rows, count, begin)


def test_an_overflow_does_not_stay_in_the_remainder() -> None:
    feedback, other = Feedback(Scratch()), drawn("normal", 8192)[None]

    def lose(x: Tensor) -> None:
        feedback.added(torch.zeros_like(x), 1.0).copy_(x)
        feedback.keep(1.0)

    x = drawn("normal", 8192, 1)[None]
    lose(0.1 * x)
    before = feedback.added(torch.zeros_like(x), 1.0).clone()
    torch.testing.assert_close(before, 0.1 * x, rtol=0.02, atol=0.02)
    other[0, 17] = torch.inf
    lose(other)
    after = feedback.added(torch.zeros_like(x), 1.0)
    assert torch.equal(after[:, :4096], before[:, :4096])
    torch.testing.assert_close(after[:, 4096:], other[:, 4096:], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_remainder_is_added_in_float32_or_wider(dtype: torch.dtype) -> None:
    """What is too small for bfloat16 must not get lost between a remainder and a gradient."""
    feedback, x = Feedback(Scratch()), drawn("normal", 2100).view(3, 700).to(dtype)
    feedback.added(x, 1.0).fill_(2.0**-12)
    feedback.keep(1.0)
    wanted = feedback.added(x, 1.0)
    assert wanted.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(wanted - x, torch.full_like(wanted, 2.0**-12), rtol=0.01, atol=2.0**-22)
