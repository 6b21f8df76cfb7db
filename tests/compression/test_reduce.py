"""Sums of gradients: what error feedback keeps, and that it is given back."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.codec import Blocks
from compose.compression.gather import Sender, Traffic, levels_of
from compose.compression.packing import BlockFeedback, Feedback, Packing, ReusedMemory, UnitLayout
from compose.compression.reduce import GRADIENT_CODES, GradientCode, SumSettings
from compose.ops.tensors import gathered
from compose.parallel.comm import Comm
from compose.parallel.mesh import Parallel
from tests.compression.cases import drawn
from tests.support.pool import Pool, make_mesh


def feedback_of(numel: int) -> Feedback:
    return Feedback(Sender(Traffic()), numel, ReusedMemory())


def test_error_feedback_gives_all_of_it_in_the_end() -> None:
    """Messages and the residual add up to all gradients, but for the residual's 8 bits."""
    code, feedback = Blocks(4, 256, rotate=True), feedback_of(2048)
    asked, sent = torch.zeros(1, 2048), torch.zeros(1, 2048)
    for step in range(20):
        x = drawn("t", 2048, step)[None]
        scale = 2.0 ** (step % 5)  # of the loss: the residual is for gradients without it
        wanted = feedback.added_to(x * scale, scale)
        got = code.decode(code.encode(wanted.view(-1, 256)), torch.float32).view(1, -1)
        wanted.sub_(got)
        feedback.keep(scale)
        asked, sent = asked + x, sent + got / scale
    left = feedback.added_to(torch.zeros(1, 2048), 1.0)
    whole = float(asked.norm())
    assert float((asked - sent - left).norm()) < 0.01 * whole
    assert float((asked - sent).norm()) < 0.1 * whole


@pytest.mark.parametrize("bits", [8, 4])
def test_feedback_of_blocks_gives_all_of_it_in_the_end(bits: int) -> None:
    code = Blocks(bits, 256, rotate=bits == 4)
    feedback = BlockFeedback(Sender(Traffic()), Packing(UnitLayout.of([(8, 256 * 2)], 2), code), 1)
    asked, sent = torch.zeros(8, 256), torch.zeros(8, 256)
    for step in range(20):
        x, scale = drawn("t", 2048, step).view(8, 256), 2.0 ** (step % 5)
        got = code.decode(feedback.encode(scale, (x * scale)[None]), torch.float32)[0]
        asked, sent = asked + x, sent + got / scale
    assert float((asked - sent).norm()) == pytest.approx(float(feedback.blocks().norm()), rel=0.1)
    assert float((asked - sent).norm()) < 0.05 * float(asked.norm())
    # A block that is not finite keeps its residual, and the others get theirs.
    before = feedback.codes(asked).clone()
    broken = drawn("t", 2048, 30).view(8, 256)
    broken[3, 7] = torch.inf
    result = code.decode(feedback.encode(1.0, broken[None]), torch.float32)[0]
    assert not result[3].isfinite().all()
    assert torch.equal(feedback.codes(asked)[3], before[3])
    assert not torch.equal(feedback.codes(asked)[2], before[2])


def test_an_overflow_does_not_stay_in_the_residual() -> None:
    feedback, other = feedback_of(8192), drawn("normal", 8192)[None]

    def lose(x: Tensor) -> None:
        feedback.added_to(torch.zeros_like(x), 1.0).copy_(x)
        feedback.keep(1.0)

    x = drawn("normal", 8192, 1)[None]
    lose(0.1 * x)
    before = feedback.added_to(torch.zeros_like(x), 1.0).clone()
    torch.testing.assert_close(before, 0.1 * x, rtol=0.02, atol=0.02)
    other[0, 17] = torch.inf
    lose(other)
    after = feedback.added_to(torch.zeros_like(x), 1.0)
    assert torch.equal(after[:, :4096], before[:, :4096])
    torch.testing.assert_close(after[:, 4096:], other[:, 4096:], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_residual_is_added_in_float32_or_wider(dtype: torch.dtype) -> None:
    """Values too small for bfloat16 must not get lost between a residual and a gradient."""
    feedback, x = feedback_of(2100), drawn("normal", 2100).view(3, 700).to(dtype)
    feedback.added_to(x, 1.0).fill_(2.0**-12)
    feedback.keep(1.0)
    wanted = feedback.added_to(x, 1.0)
    assert wanted.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(wanted - x, torch.full_like(wanted, 2.0**-12), rtol=0.01, atol=2.0**-22)


def _third_sum(kind: Any) -> list[Tensor]:
    """The third sum of gradients: without a break, after a restore, and with nothing restored."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    layout = UnitLayout.of([(96, 64), (64,)], ranks)
    settings = SumSettings(Comm(gradients=kind, density=0.1), Traffic())
    whole, begun, restored, empty = (GRADIENT_CODES[kind](settings, layout, 0) for _ in range(4))

    def sums(code: GradientCode, steps: range) -> Tensor:
        out = torch.empty(layout.numel)
        for step in steps:
            generator = torch.Generator().manual_seed(ranks * step + dist.get_rank())
            rows = torch.randn(ranks, layout.numel, generator=generator)
            code.reduce_scatter(rows, group, 1.0, out)
        return out

    sums(begun, range(2))
    restored.kept.update({name: value.clone() for name, value in begun.kept.items()})
    return [sums(whole, range(3)), sums(restored, range(2, 3)), sums(empty, range(2, 3))]


@pytest.mark.parametrize("kind", ["int4", "powersgd", "top_k"])
def test_residuals_are_restored(pool: Pool, kind: str) -> None:
    for expected, result, without in pool.run(_third_sum, 2, kind):
        assert torch.equal(expected, result)
        assert not torch.equal(expected, without)


def _after_zeros() -> list[float]:
    """What two sums of gradients of rank 4 lack, whose first rows are zeros, after a sum of zeros."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    layout, out = UnitLayout.of([(96, 64)], ranks), torch.empty(96 * 64 // ranks)
    code = GRADIENT_CODES["powersgd"](SumSettings(Comm(gradients="powersgd"), Traffic()), layout, 0)
    code.reduce_scatter(torch.zeros(ranks, layout.numel), group, 1.0, out)
    matrix = drawn("normal", 96 * 4).view(96, 4) @ drawn("normal", 4 * 64, 1).view(4, 64)
    matrix[:4] = 0
    right, lacks = ranks * matrix.view(ranks, -1)[dist.get_rank()], []
    for _ in range(2):
        code.reduce_scatter(matrix.view(ranks, -1), group, 1.0, out)
        lacks.append(float((out - right).norm() / right.norm()))
    return lacks


def test_gradients_of_zero_leave_what_powersgd_begins_with(pool: Pool) -> None:
    """As those under a projection of zeros. Else nothing would ever be sent."""
    for lacks in pool.run(_after_zeros, 2):
        assert max(lacks) < 1e-4


def _repeated() -> list[float]:
    """The errors of sums of rank 2 over the least one; ranks send one matrix again and again."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    layout, out = UnitLayout.of([(96, 64)], ranks), torch.empty(96 * 64 // ranks)
    comm = Comm(gradients="powersgd", rank=2, error_feedback=False)
    code = GRADIENT_CODES["powersgd"](SumSettings(comm, Traffic()), layout, 0)
    u, _, v = torch.linalg.svd(drawn("normal", 96 * 64).view(96, 64), full_matrices=False)
    sizes = 0.8 ** torch.arange(64)
    matrix, lacks = (u * sizes) @ v, []
    for _ in range(12):
        code.reduce_scatter(matrix.view(ranks, -1), group, 1.0, out)
        lost = (out - ranks * matrix.view(ranks, -1)[dist.get_rank()]).square()[None]
        lacks.append(float(torch.cat(gathered(lost, group)).sum().sqrt() / ranks / sizes[2:].norm()))
    return lacks


def test_powersgd_goes_on_from_its_last_factor(pool: Pool) -> None:
    """Sums of equal gradients come to the best of that rank, which one step alone does not find."""
    for lacks in pool.run(_repeated, 2):
        assert lacks[0] > 1.05
        assert lacks[-1] == pytest.approx(1, abs=0.01)


def _sums_of(kind: Any, form: str) -> tuple[list[bool], float]:
    """Whether each plain part of a sum is exact, and the greatest error of one of the others."""
    ranks, group, whole = dist.get_world_size(), dist.group.WORLD, form == "all"
    assert group is not None
    layout = UnitLayout.of([(6,), (96, 64), (3, 4), (70, 68), (1,)], 1 if whole else ranks)
    levels = levels_of(make_mesh(Parallel(dp_shard=ranks)), 2, 3) if form == "near" else None
    settings = SumSettings(Comm(gradients=kind, density=1.0, rank=30), Traffic(), levels=levels)
    code = GRADIENT_CODES[kind](settings, layout, ranks if whole else 0)
    numel = layout.ranks * layout.numel
    each = torch.stack([drawn("normal", numel, rank).view(layout.ranks, -1) for rank in range(ranks)])
    rows = each[dist.get_rank()]
    if whole:
        out, expected = rows[0].clone(), each.sum(0)[0]
        code.all_reduce(out, group, 1.0)
    else:
        out, expected = torch.empty(layout.numel), each.sum(0)[dist.get_rank()]
        code.reduce_scatter(rows, group, 1.0, out)
    pairs = list(zip(layout.parts, layout.pieces(out), layout.pieces(expected), strict=True))
    exact = [
        torch.allclose(got, right, 1e-6, 1e-6) for part, got, right in pairs if not part.compressed
    ]
    errors = [(got - right).norm() / right.norm() for part, got, right in pairs if part.compressed]
    return exact, float(max(errors))


LIMITS = {"bfloat16": 0.005, "int8": 0.02, "int4": 0.3, "top_k": 0.005, "powersgd": 0.9}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, form) for kind in LIMITS for form in ("scatter", "all")),
        *((kind, "near") for kind in ("bfloat16", "int8", "int4")),
    ],
)
def test_sums_of_several_parts(pool: Pool, kind: str, form: str) -> None:
    """Those that travel plain are exact, wherever they are in a unit."""
    for exact, error in pool.run(_sums_of, 4 if form == "near" else 2, kind, form):
        assert exact == [True] * 3
        assert error < LIMITS[kind]
