"""What a proof found: rows of errors against tolerances, gathered from every rank."""

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from compose.proof.one_process import Arithmetic, Expected, State
from compose.proof.routing_trace import Difference


@dataclass(frozen=True)
class Tolerance:
    """Largest relative error that is allowed without a look at one process's own rounding.

    An update is the change of a weight over all steps; AdamW divides by the gradient's own size, so
    rounding near zero weighs more there. Where one process itself is further from float64, a
    composition may be ``times`` as far from it: see :meth:`allowed`. same_bits: of one process's own
    error, how much updates may differ by where both round by the same random bits; 0: not asked.
    """

    loss: float
    gradient: float
    update: float
    times: float = 10.0
    same_bits: float = 0.0

    def allowed(self, base: float, own: float, mean: float) -> float:
        """The relative error allowed where one process's own is ``own``, and ``mean`` over all values
        of the same quantity: of a few elements the error may be small by chance. ``base`` is one of the
        above; 0 stays 0."""
        return base and max(base, self.times * max(own, mean))

    def update_of(self, elements: int) -> float:
        """The same as ``update`` for a parameter of so many elements, where gradients are rounded.

        AdamW's elements take steps of like size. One whose gradient is nothing but rounding may take it
        in the other direction, which is 2 / elements^0.5 of the whole; one process may have none such.
        """
        return max(self.update, 2 / max(elements, 1) ** 0.5)


# In float64 rounding is 1e-16 of a value; what is left after a step's sums is far below 1e-10.
EXACTLY = Tolerance(loss=1e-10, gradient=1e-10, update=1e-10)
FLOAT32 = Tolerance(loss=1e-5, gradient=1e-4, update=1e-3)

# Steps between neighbouring numbers, relative: one rounding of a value in each type.
_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_FLOAT8_STEP = 2.0**-3  # of e4m3; of e5m2, in which gradients are, twice that

# How many times one process's own error a reduced run may differ from it. Two runs that round
# independently are 2^0.5 apart; collectives and the sums of parts round a few times more.
TIMES = 3.0

# By how many times the error of all gradients together may be above or below one process's. A type
# that is not applied at all makes this some hundreds.
SAME_ROUNDING = 3.0

# Where the optimizer's running means alone are coarse, gradients are exact beside their rounding, and
# the same random bits give the same means: 0.01 of one process's error is left. With other bits, other
# types or no rounding it is 0.5 to 1.5.
SAME_BITS = 0.2


def tolerance_of(arithmetic: Arithmetic) -> Tolerance:
    """What a run in these types is allowed.

    A reduced run is held against one process's own error, and one rounding is free.
    """
    if not arithmetic.reduced:
        return EXACTLY if arithmetic.param == torch.float64 else FLOAT32
    step = max(_STEP[arithmetic.param], _STEP[arithmetic.reduce])
    if arithmetic.float8 != "off":
        step = max(step, _FLOAT8_STEP)
    kept = max(_STEP[arithmetic.master], _STEP[arithmetic.state])
    return Tolerance(
        # A mean over tokens, whose errors are those of logits times a probability, of any sign.
        loss=max(min(step, 2.0**-6), FLOAT32.loss),
        gradient=max(step, FLOAT32.gradient),
        update=max(step, kept, FLOAT32.update),
        times=TIMES,
        same_bits=0.0 if max(step, _STEP[arithmetic.master]) > _STEP[torch.float32] else SAME_BITS,
    )


@dataclass(frozen=True)
class Row:
    """One comparison: ``error`` is relative, the largest over ranks, and ``rank`` the one with it.

    state: "zero" and "unused" as ``Expected`` has them; then the row proves little, or nothing.
    """

    quantity: str
    name: str
    error: float
    tolerance: float
    rank: int
    state: State = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    @property
    def verdict(self) -> str:
        """What stands behind the row in a table."""
        if not self.ok:
            return "FAILED"
        return {"": "", "zero": "not proved: zero but for rounding", "unused": "not proved: unused"}[
            self.state
        ]


@dataclass(frozen=True)
class Report:
    """The same on every rank; ``print`` it for a table, worst first."""

    rows: list[Row]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and nothing is left unexercised by the batch.

        A gradient that is zero but for rounding, since what adds up to it cancels, is compared with
        zero and passes: its row and the verdict say that it is not proved.
        """
        return all(row.ok and row.state != "unused" for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    @property
    def not_proved(self) -> list[Row]:
        """Gradients that are zero on one process."""
        return [row for row in self.rows if row.state and "gradient" in row.quantity]

    def __str__(self) -> str:
        rows = sorted(self.rows, key=_severity, reverse=True)
        width = max([len("quantity"), *(len(row.quantity) for row in rows)]) + 2
        lines = [f"{'quantity':<{width}}{'error':>9}{'allowed':>10}  {'rank':>4}  name"]
        lines += [
            f"{row.quantity:<{width}}{row.error:>9.1e}{row.tolerance:>10.0e}  {row.rank:>4}  {row.name}"
            f"{'   ' + row.verdict if row.verdict else ''}"
            for row in rows
        ]
        return "\n".join([*lines, *self.notes, self.verdict])

    @property
    def verdict(self) -> str:
        """The last line."""
        if self.failed:
            differ = f"{len(self.failed)} of {len(self.rows)} quantities differ"
            return f"NOT equal to one process: {differ}"
        lacking = sorted({row.name for row in self.not_proved})
        if not lacking:
            return f"equal to one process: {len(self.rows)} quantities"
        some = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        unused = any(row.state == "unused" for row in self.not_proved)
        begin = "NOT PROVED" if unused else f"equal to one process: {len(self.rows)} quantities"
        link = ": " if unused else "; not proved: "
        return f"{begin}{link}{len(lacking)} parameters whose gradient is zero on one process ({some})"


def joined(reports: Sequence[Report]) -> Report:
    """One report of several."""
    return Report(
        [row for report in reports for row in report.rows],
        tuple(note for report in reports for note in report.notes),
    )


def _severity(row: Row) -> float:
    """How many times its tolerance an error is; what should be exact and is not comes first."""
    if row.tolerance == 0:
        return 0.0 if row.ok else float("inf")
    return _or_infinite(row.error / row.tolerance)


_NOT_HELD = -1.0  # the error of what a rank has no part of


class Judge:
    """Holds what each rank has against what rank 0 expects. Every call is a collective.

    prefix: of each row's quantity. times: see Tolerance.
    """

    def __init__(self, device: torch.device, tolerance: Tolerance, prefix: str = "") -> None:
        self.device, self.tolerance, self.prefix = device, tolerance, prefix
        self.compared: list[Row] = []
        self.errors: list[float] = []
        self.own: list[float] = []  # one process's error of each row, relative
        self.sums: dict[str, list[int]] = {}  # checksums of this rank's copies, by name
        # Of gradients: this rank's distance from float64, and one process's.
        self.from_exact: list[float] = []
        self.own_from_exact: list[float] = []
        self.gradients_size = 0.0

    def tensor(
        self,
        quantity: str,
        name: str,
        values: Sequence[Tensor],
        shape: torch.Size,
        expected: Expected | None,
        tolerance: float,
    ) -> None:
        """Compare one tensor of the composition with one process's; a collective.

        The error is ||value - expected|| / ||expected||, in Frobenius norms.

        Args:
            quantity: What it is, as "gradient".
            name: Of the parameter or buffer, or the step.
            values: What this rank holds of it, whole; it may be nothing.
            shape: Of the whole tensor.
            expected: What one process found; counts on rank 0.
            tolerance: Of the error. It grows with one process's own error as Tolerance.allowed says,
                but where it is 0.
        """
        self._tensor(quantity, name, values, shape, expected, tolerance, source=0)

    def _tensor(
        self,
        quantity: str,
        name: str,
        values: Sequence[Tensor],
        shape: torch.Size,
        expected: Expected | None,
        tolerance: float,
        source: int,
    ) -> None:
        right = torch.zeros(shape, dtype=torch.float64, device=self.device)
        state: State = ""
        if expected is not None:
            right.copy_(expected.value)
            state = expected.state
        rounding = torch.tensor(expected.rounding if expected else 0.0, dtype=torch.float64)
        rounding = rounding.to(self.device)
        dist.broadcast(right, src=source)
        dist.broadcast(rounding, src=source)
        size = float(right.norm()) or float(rounding)
        errors = [_relative(value.double(), right, size) for value in values]
        self.compared.append(Row(self.prefix + quantity, name, 0.0, tolerance, 0, state))
        self.own.append(float(rounding) / size if size else 0.0)
        self.errors.append(max(map(_or_infinite, errors), default=_NOT_HELD))

    def rounding(self, values: Sequence[Tensor], shape: torch.Size, expected: Expected | None) -> None:
        """Note how far a gradient is from float64, for :meth:`same_rounding`."""
        exact = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if expected is not None and expected.exact is not None:
            exact.copy_(expected.exact)
            self.own_from_exact.append(expected.rounding)
        dist.broadcast(exact, src=0)
        distances = [float((value.double() - exact).norm()) for value in values]
        self.from_exact.append(max(distances, default=0.0))

    def same_rounding(self) -> None:
        """That all gradients together are as far from float64 as one process's: a type that is not
        applied makes them more exact, one that is applied too often less."""
        worst = torch.tensor(self.from_exact, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found, own = float(worst.norm()), math.hypot(*self.own_from_exact)
        ratio = max(found / own, own / found) if found and own else float(found != own) * math.inf
        self.compared.append(Row(self.prefix + "rounding", "all gradients", 0.0, SAME_ROUNDING, 0))
        self.own.append(0.0)
        self.errors.append(ratio if dist.get_rank() == 0 else _NOT_HELD)

    def same_everywhere(self, name: str, values: Sequence[Tensor]) -> None:
        """That ranks which hold a parameter hold the same of it, bit for bit; no collective."""
        flat = [v.cpu().contiguous().flatten().view(torch.uint8) for v in values]
        self.sums[name] = [zlib.crc32(each.numpy().tobytes()) for each in flat]

    def copies(self, name: str, values: Sequence[Tensor], shape: torch.Size) -> None:
        """That all ranks' copies of one parameter are the same, bit for bit."""
        holds: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(holds, bool(values))
        source = holds.index(True)
        expected = Expected(values[0]) if dist.get_rank() == source else None
        self._tensor("tied copies", name, values, shape, expected, 0.0, source)

    def _copies(self) -> list[Row]:
        """Of all ranks' checksums: 0 where they are the same; else how many are not the first's."""
        everyone: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.sums)
        rows = []
        for name in self.sums:
            held = [(rank, value) for rank, sums in enumerate(everyone) for value in sums[name]]
            others = [rank for rank, value in held if value != held[0][1]]
            error = math.inf if others else 0.0
            rows.append(Row(f"{self.prefix}copies", name, error, 0.0, min(others, default=0)))
        return rows

    def _same_bits(self, rows: Sequence[Row]) -> Row:
        """The median over parameters of an update's error, in one process's own: a few may have
        gradients that are rounding alone."""
        pairs = zip(rows, self.own, strict=False)
        errors = [row.error / own for row, own in pairs if row.quantity.endswith("update") and own]
        middle = statistics.median(errors) if errors else 0.0
        return Row(f"{self.prefix}rounding", "all updates", middle, self.tolerance.same_bits, 0)

    def _means(self) -> dict[str, float]:
        """One process's error by quantity: the root of the mean square over what is not zero."""
        found: dict[str, list[float]] = {}
        for row, own in zip(self.compared, self.own, strict=True):
            found.setdefault(row.quantity, []).append(0.0 if row.state else own)
        return {name: math.hypot(*own) / len(own) ** 0.5 for name, own in found.items()}

    def report(self, routing: Sequence[Difference], tie: float) -> Report:
        """``routing``: of each router and step, on rank 0. ``tie``: a margin as good as none."""
        everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.errors)
        rows, means = [], self._means()
        for row, own, errors in zip(self.compared, self.own, zip(*everyone, strict=True), strict=True):
            rank = max(range(len(errors)), key=errors.__getitem__)
            lost = errors[rank] == _NOT_HELD
            error = math.inf if lost else errors[rank]
            allowed = self.tolerance.allowed(row.tolerance, own, means[row.quantity])
            rows.append(replace(row, error=error, rank=rank, tolerance=allowed))
        rows += [
            Row(f"{self.prefix}{d.kind}", f"{d.router}, step {d.step}", d.margin, tie, 0)
            for d in routing
        ]
        if self.tolerance.same_bits:
            rows.append(self._same_bits(rows))
        rows += self._copies()
        notes = [f"{d}{': a tie' if d.margin <= tie else ''}" for d in routing if d.tokens]
        shared = [rows, notes]
        dist.broadcast_object_list(shared, src=0)
        return Report(shared[0], tuple(shared[1]))


def _or_infinite(error: float) -> float:
    return float("inf") if math.isnan(error) else error


def _relative(value: Tensor, expected: Tensor, size: float) -> float:
    error = float((value - expected).norm())
    if error == 0.0:
        return 0.0
    return error / size if size else float("inf")
