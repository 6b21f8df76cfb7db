"""Models that no proof can compare, and ordinary code that float64 needs help with."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compose import Compile, Options, Parallel, Plan, Precision, Trial, attention, verify
from compose.proof.one_process import Widened
from compose.proof.report import LOOSE, Report
from tests.support.faults import reduce_scatter_keeps_own_part
from tests.support.helpers import refusal
from tests.support.pool import Pool, make_mesh


class Around(nn.Module):
    """A part between two layers. It changes its input in place."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(6, 8), part, nn.Linear(8, 5)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.part(self.first(input.mul_(0.5))))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Seldom(nn.Module):
    """A path that is left out once in a million forwards; one of another rate never is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x if torch.rand([]) < 0 else x + self.inner(x)
        kept = torch.empty(len(x), 1).bernoulli_(1.0)
        return x if torch.rand([]) < 1e-6 else x + kept * self.inner(x)


class Renormed(nn.Module):
    """It changes its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(2.0)
        return x * self.weight


class Functional(nn.Module):
    """Random in its own forward, around a module that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.5))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - 0.1 * x.mean(0)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class CountsLater(Counts):
    """Its buffer is made by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls = torch.zeros(()) if self.calls is None else self.calls
        return super().forward(x)


class Fixed(nn.Module):
    """A table that the first forward makes, and frozen parameters: a mask, and one without elements."""

    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)
        mask, nothing = torch.full((8, 8), -math.inf).triu(1), torch.zeros(0, 8)
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.nothing = nn.Parameter(nothing, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.linspace(1, 2, 8) if self.table is None else self.table
        return self.nothing.sum() + x * self.table @ self.mask.softmax(-1)


class Fourier(nn.Module):
    """Float32 buffers in products; one holds infinities, as masks do."""

    frequencies: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "frequencies", torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
        )

        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.frequencies) @ self.mask.softmax(-1)


class Float32Norm(nn.Module):
    """It computes in float32 by its own word, as the norms of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attends(nn.Module):
    """Four tokens of two elements each."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 4, 1, 2)
        return attention(tokens, tokens, tokens)[0].flatten(1)


class Again(nn.Module):
    """A model's own checkpoint around two parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(8, 8), Float32Norm(), Attends())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class HalfInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)


class No64(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("this kernel has no float64\nand more lines")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return No64.apply(x)  # type: ignore[return-value]


def weighted_loss() -> Callable[..., Tensor]:
    weight = torch.linspace(0.5, 2.0, 5)
    return nn.CrossEntropyLoss(weight=weight, reduction="sum")


def plain_loss() -> Callable[..., Tensor]:
    return nn.CrossEntropyLoss(reduction="sum")


def _proof(
    part: Callable[[], nn.Module],
    loss: Callable[[], Callable[..., Tensor]] = plain_loss,
    precision: Precision = Precision(),  # noqa: B008
    broken: bool = False,
    compiled: bool = False,
) -> Report:
    torch.manual_seed(0)
    model, trial = Around(part()), Trial(loss_function=loss(), micro_batch=2)
    compile = Compile("block" if compiled else "off", backend="aot_eager")
    options = Options(Parallel(dp_shard=-1), precision, compile=compile)
    generator = torch.Generator().manual_seed(1)
    batch = {"input": torch.randn(8, 6, generator=generator)}
    batch["targets"] = torch.randint(5, (8,), generator=generator)
    with reduce_scatter_keeps_own_part() if broken else nullcontext():
        return verify(model, Plan(compile=["part"]), make_mesh(options.parallel), batch, options, trial)


RANDOM = (
    "model: part{inner} is random: one process gives two results for the same batch, so that nothing"
    " can be compared; use nn.Dropout, whose masks do not depend on the mesh, or call its eval()"
)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (Noise, RANDOM.format(inner=" (Noise)")),
        (Functional, RANDOM.format(inner=" (Functional)")),
        (partial(nn.Sequential, nn.Linear(8, 8), Noise()), RANDOM.format(inner=".1 (Noise)")),
        (Seldom, RANDOM.format(inner=" (Seldom)")),
        (
            Renormed,
            "model: forward changes the parameter part.weight, so that results depend on how a"
            " batch is cut into forwards; change it outside of forward",
        ),
        (
            partial(nn.BatchNorm1d, 8),
            "model: part is BatchNorm1d, whose result depends on which samples are in one forward, so"
            " that meshes differ; use GroupNorm or LayerNorm, or running statistics with eval()",
        ),
        (
            Centred,
            "loss_function: samples in one forward give another loss than one by one, so that meshes"
            " differ: it has to return the sum over targets, not their mean (with PyTorch's losses,"
            ' reduction="sum"), and the model may compute nothing over samples',
        ),
        (
            Counts,
            "model: forward changes the buffer part.calls, so that results depend on how a batch is cut"
            " into forwards; change it outside of forward",
        ),
        (
            CountsLater,
            "model: forward changes the buffer part.calls, so that results depend on how a batch is cut"
            " into forwards; change it outside of forward",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(pool: Pool, part: Any, line: str) -> None:
    assert pool.run(refusal, 2, _proof, part) == [line] * 2


def test_what_stays_as_it_is_accuses_nothing(pool: Pool) -> None:
    """A buffer that forward makes, infinities in a frozen weight, and a frozen one without elements."""
    report = pool.run(partial(_proof, Fixed), 2)[0]
    assert report.ok, str(report)
    frozen = {row.name for row in report.rows if row.quantity == "frozen weight"}
    assert frozen == {"part.mask", "part.nothing"}


@pytest.mark.parametrize(
    ("part", "loss", "types"),
    [
        (Fourier, weighted_loss, "float32"),
        (Float32Norm, weighted_loss, "float32"),
        (Float32Norm, plain_loss, "bfloat16"),
        (partial(Again, True), plain_loss, "bfloat16"),
        (partial(Again, False), plain_loss, "bfloat16"),
    ],
)
def test_float64_of_ordinary_code(pool: Pool, part: Any, loss: Any, types: str) -> None:
    """The logic runs in float64 whatever the precision is, and so finds more than float32 does."""
    precision = Precision(param=types)  # type: ignore[arg-type]
    proof = partial(_proof, part, loss, precision=precision)
    report = pool.run(proof, 2)[0]
    assert report.ok, str(report)
    assert not report.notes
    rows = [row for row in report.rows if row.quantity == "float64 gradient"]
    assert rows
    assert all(row.tolerance < 1e-8 for row in rows)
    broken = pool.run(partial(proof, broken=True), 2)[0]
    assert any(row.quantity == "float64 gradient" for row in broken.failed)


@pytest.mark.parametrize(
    ("part", "why", "compiled"),
    [
        (Kernel, "this kernel has no float64", False),
        (HalfInside, "torch.Tensor.to rounds float64 to fewer bits", False),
        (Float32Norm, "it mixes types, which a compiler cannot trace", True),
    ],
)
def test_what_has_no_float64_is_proved_in_float32(
    pool: Pool, part: Any, why: str, compiled: bool
) -> None:
    report = pool.run(partial(_proof, part, compiled=compiled), 2)[0]
    assert report.ok, str(report)
    note = f"the logic is proved in float32: the model does not run in float64 ({why})"
    assert report.notes == (note,)
    assert not [row for row in report.rows if row.quantity.startswith("float64")]
    broken = pool.run(partial(_proof, part, broken=True, compiled=compiled), 2)[0]
    assert any(row.quantity == "gradient" for row in broken.failed)


def test_widened_leaves_what_works_in_place() -> None:
    total, wide = torch.zeros(3), torch.ones(3, dtype=torch.float64, requires_grad=True)
    with Widened() as mode:
        total.add_(wide.detach())
        assert torch.einsum("i,i->", wide, torch.ones(3)).dtype == torch.float64
        assert wide.float().dtype == torch.float64
        assert torch.softmax(wide, 0, dtype=torch.float32).dtype == torch.float64
        assert torch.ones(3).to(torch.float32).dtype == torch.float32
    assert total.dtype == torch.float32
    assert total.tolist() == [1.0] * 3
    assert not mode.narrowed


class Saturated(nn.Module):
    """Its gradients are almost nothing but rounding, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e-6 * torch.tanh((x + 1e4) / 1e-3 - 1e7)


def test_a_loose_allowance_is_said(pool: Pool) -> None:
    report = pool.run(_proof, 2, Saturated)[0]
    coarse = [row for row in report.rows if row.state == "coarse"]
    assert coarse
    assert all(row.tolerance > LOOSE and not row.quantity.startswith("float64") for row in coarse)
    assert report.ok, str(report)
    assert "of which one process itself is sure to" in report.verdict
    assert report.verdict.endswith("(float64 proves them)")
    assert math.isfinite(max(row.tolerance for row in coarse))
