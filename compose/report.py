"""What a proof found: rows of errors against tolerances, gathered from every rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from compose.witness import Difference


@dataclass(frozen=True)
class Tolerance:
    """Largest relative error allowed. An update is the change of a weight over all steps; AdamW
    divides by the gradient's own size, so rounding near zero weighs more there."""

    loss: float
    gradient: float
    update: float


# bfloat16 keeps 8 bits: one rounding is up to 2^-9 = 0.2%, and a gradient passes through many.
TOLERANCES = {
    torch.float32: Tolerance(loss=1e-5, gradient=1e-4, update=1e-3),
    torch.bfloat16: Tolerance(loss=1e-2, gradient=5e-2, update=3e-1),
    # Three bits more.
    torch.float16: Tolerance(loss=1.5e-3, gradient=1e-2, update=1e-1),
}

# Float8 keeps 3 bits of a value (2 of a gradient): a rounding is 2.5% (5%) in the mean. Both sides
# round, but where a scale or a value is a hair apart they round apart, and with cp each rank has scales
# of its own part: errors are then those of two roundings, up to 0.14 of a gradient (LOG.md). An update
# is near its gradient's sign; if that is e apart, a share e / pi of the signs turns: 2 (e / pi)^0.5.
FLOAT8 = Tolerance(loss=1e-2, gradient=2e-1, update=5e-1)

# Of weights kept in bfloat16. Both sides round by the same random bits, but a weight that is a hair
# apart may fall to the other side; and gradients come in bfloat16, which Muon amplifies where a matrix
# has little (LOG.md has the figures). Other bits, or a part left out, make 0.7 and more.
MASTER_UPDATE = 5e-1


def tolerance_of(param_dtype: torch.dtype, float8: str = "off") -> Tolerance:
    """What forward and backward in ``param_dtype``, with products in ``float8``, are allowed."""
    return TOLERANCES[param_dtype] if float8 == "off" else FLOAT8


@dataclass(frozen=True)
class Row:
    """One comparison: ``error`` is relative, the largest over ranks, and ``rank`` the one with it."""

    quantity: str
    name: str
    error: float
    tolerance: float
    rank: int

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Report:
    """The same on every rank; ``print`` it for a table, worst first."""

    rows: list[Row]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    def __str__(self) -> str:
        rows = sorted(self.rows, key=_severity, reverse=True)
        lines = [f"{'quantity':<16}{'error':>10}{'allowed':>10}  {'rank':>4}  name"]
        lines += [
            f"{row.quantity:<16}{row.error:>10.1e}{row.tolerance:>10.0e}  {row.rank:>4}  {row.name}"
            f"{'' if row.ok else '   FAILED'}".rstrip()
            for row in rows
        ]
        verdict = (
            f"equal to one process: {len(rows)} quantities"
            if self.ok
            else f"NOT equal to one process: {len(self.failed)} of {len(rows)} quantities differ"
        )
        return "\n".join([*lines, *self.notes, verdict])


def _severity(row: Row) -> float:
    """How many times its tolerance an error is; what should be exact and is not comes first."""
    if row.tolerance == 0:
        return 0.0 if row.ok else float("inf")
    return _or_infinite(row.error / row.tolerance)


_NOT_HELD = -1.0  # the error of what a rank has no part of


class Judge:
    """Holds what each rank has against what rank 0 expects. Every call is a collective."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compared: list[tuple[str, str, float]] = []
        self.errors: list[float] = []

    def tensor(
        self,
        quantity: str,
        name: str,
        values: Sequence[Tensor],
        shape: torch.Size,
        expected: Tensor | None,
        tolerance: float,
        source: int = 0,
    ) -> None:
        """``values``: what this rank holds of it, which may be nothing. ``expected`` counts on the rank
        ``source``, where None stands for zeros.

        The error is ||value - expected|| / ||expected||, in Frobenius norms.
        """
        right = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if expected is not None:
            right.copy_(expected)
        dist.broadcast(right, src=source)
        errors = [_relative(value.double(), right) for value in values]
        self.compared.append((quantity, name, tolerance))
        self.errors.append(max(map(_or_infinite, errors), default=_NOT_HELD))

    def copies(self, name: str, values: Sequence[Tensor], shape: torch.Size) -> None:
        """That all ranks' copies of one parameter are the same, bit for bit."""
        holds: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(holds, bool(values))
        source = holds.index(True)
        expected = values[0] if dist.get_rank() == source else None
        self.tensor("tied copies", name, values, shape, expected, 0.0, source)

    def report(self, routing: Sequence[Difference], tie: float) -> Report:
        """``routing``: of each router and step, on rank 0. ``tie``: a margin as good as none."""
        everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.errors)
        rows = []
        for (quantity, name, tolerance), errors in zip(
            self.compared, zip(*everyone, strict=True), strict=True
        ):
            rank = max(range(len(errors)), key=errors.__getitem__)
            lost = errors[rank] == _NOT_HELD
            rows.append(Row(quantity, name, math.inf if lost else errors[rank], tolerance, rank))
        rows += [Row("routing", f"{d.router}, step {d.step}", d.margin, tie, 0) for d in routing]
        notes = [f"{d}{': a tie' if d.margin <= tie else ''}" for d in routing if d.tokens]
        shared = [rows, notes]
        dist.broadcast_object_list(shared, src=0)
        return Report(shared[0], tuple(shared[1]))


def _or_infinite(error: float) -> float:
    return float("inf") if math.isnan(error) else error


def _relative(value: Tensor, expected: Tensor) -> float:
    error, size = float((value - expected).norm()), float(expected.norm())
    if error == 0.0:
        return 0.0
    return error / size if size else float("inf")
