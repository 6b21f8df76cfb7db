"""What a proof found: rows of errors and tolerances, gathered from every rank."""

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
    """The largest relative errors that are allowed whatever one process's own rounding is."""

    loss: float
    """Of the loss."""
    gradient: float
    """Of a gradient."""
    update: float
    """Of the change of a weight over all steps. AdamW divides by the gradient's own size, so rounding
    near zero weighs more here.
    """
    times: float = 10.0
    """If one process itself has an error, a composition's may be this many times as large."""
    same_bits: float = 0.0
    """How much updates may differ where both sides round by the same random bits, as a share of one
    process's own error; 0: not checked.
    """

    def allowed(self, base: float, own: float, mean: float) -> float:
        """Return the relative error that is allowed for one value.

        The mean is needed since the error of a few elements may be small by chance.

        Args:
            base: One of the tolerances above; 0 stays 0.
            own: One process's own error of the value.
            mean: One process's own error over all values of the same quantity.

        Returns:
            The allowed error.
        """
        return base and max(base, self.times * max(own, mean))

    def update_of(self, elements: int) -> float:
        """Return ``update`` for so many elements that have a gradient, where gradients are rounded.

        AdamW's elements take steps of like size. An element whose gradient is only rounding may step in
        the other direction, which is 2 / elements^0.5 of the whole. One process may have no such
        element.
        """
        return max(self.update, 2 / max(elements, 1) ** 0.5)


# In float64 rounding is 1e-16 of a value. After a step's sums the error is still far below 1e-10.
EXACTLY = Tolerance(loss=1e-10, gradient=1e-10, update=1e-10)
FLOAT32 = Tolerance(loss=1e-5, gradient=1e-4, update=1e-3)

# The relative step between neighbouring numbers of each type, which is one rounding of a value.
_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_FLOAT8_STEP = 2.0**-3  # for e4m3; gradients are in e5m2, whose step is twice as large

# A reduced run may differ from one process by this many times its own error. Two runs that round
# independently are 2^0.5 apart. Collectives and sums of parts round a few times more.
TIMES = 3.0

# The error of all gradients together may be above or below one process's by this factor. If a type is
# not applied at all, the factor is some hundreds.
SAME_ROUNDING = 3.0

# If only the optimizer's running means are coarse, gradients are exact in comparison, and the same
# random bits give the same means: 0.01 of one process's error is left. With other bits, other types or
# no rounding it is 0.5 to 1.5.
SAME_BITS = 0.2

# An allowed error above this hides faults. It is that large if one process's own results differ much.
LOOSE = 1e-2


def tolerance_of(arithmetic: Arithmetic) -> Tolerance:
    """Return what a run in these types is allowed.

    A reduced run is compared with one process's own error, and one rounding is always allowed.
    """
    if not arithmetic.reduced:
        return EXACTLY if arithmetic.param == torch.float64 else FLOAT32
    step = max(_STEP[arithmetic.param], _STEP[arithmetic.reduce])
    if arithmetic.float8 != "off":
        step = max(step, _FLOAT8_STEP)
    kept = max(_STEP[arithmetic.master], _STEP[arithmetic.state])
    return Tolerance(
        # The loss is a mean over tokens. A token's error is that of a logit times a probability, and
        # has any sign.
        loss=max(min(step, 2.0**-6), FLOAT32.loss),
        gradient=max(step, FLOAT32.gradient),
        update=max(step, kept, FLOAT32.update),
        times=TIMES,
        same_bits=0.0 if max(step, _STEP[arithmetic.master]) > _STEP[torch.float32] else SAME_BITS,
    )


_OPTION = "option"


_REMARKS: dict[State, str] = {
    "": "",
    "zero": "not proved: zero but for rounding",
    "unused": "not proved: unused",
    "loose": "not proved: one process is no surer",
    "coarse": "proved in float64 alone",
}


@dataclass(frozen=True)
class Row:
    """One comparison."""

    quantity: str
    name: str
    error: float
    """The relative error, the largest over ranks."""
    tolerance: float
    rank: int
    """The rank with that error."""
    state: State = ""
    """"zero" or "unused", as in ``Expected``; or "loose" or "coarse", if the allowed error is above
    ``LOOSE``. Then the row proves little or nothing.
    """

    @property
    def ok(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.tolerance  # False for NaN

    @property
    def verdict(self) -> str:
        """The remark after the row in a table."""
        if not self.ok:
            return "FAILED"
        return _REMARKS[self.state]


@dataclass(frozen=True)
class Report:
    """The result of a proof, the same on every rank; ``print`` shows a table, worst first."""

    rows: list[Row]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no quantity differs, the batch exercises everything, and no allowed error is loose.

        A gradient may be zero but for rounding, since its terms cancel. It is compared with zero and
        passes; its row and the verdict say that it is not proved. A float32 row may be coarse, since
        a float64 row proves the same.
        """
        return all(row.ok and row.state not in ("unused", "loose") for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        """The rows whose error is not allowed."""
        return [row for row in self.rows if not row.ok]

    @property
    def not_proved(self) -> list[Row]:
        """The gradients that are zero on one process."""
        return [
            row for row in self.rows if row.state in ("zero", "unused") and "gradient" in row.quantity
        ]

    @property
    def unused(self) -> list[str]:
        """The keys of the config that took no part in the proof."""
        return sorted({row.name for row in self.rows if row.quantity == _OPTION})

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
        """The last line of the table."""
        if self.failed:
            differ = f"{len(self.failed)} of {len(self.rows)} quantities differ"
            return f"NOT equal to one process: {differ}"
        lacking = sorted({row.name for row in self.not_proved})
        some = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        reasons = [f"{len(lacking)} parameters whose gradient is zero on one process ({some})"]
        reasons = reasons * bool(lacking) + [f"{key} took no part" for key in self.unused]
        for state, what in (("loose", ""), ("coarse", " (float64 proves them)")):
            loose = [row for row in self.rows if row.state == state]
            if loose:
                most = max(row.tolerance for row in loose)
                names = ", ".join(dict.fromkeys(f"{row.quantity} {row.name}" for row in loose[:3]))
                reasons.append(
                    f"{len(loose)} quantities of which one process itself is sure to {most:.0e} alone"
                    f" ({names}{', ...' if len(loose) > 3 else ''}){what}"
                )
        equal = f"equal to one process: {len(self.rows)} quantities"
        if self.ok:
            return "; not proved: ".join([equal, *reasons])
        return f"NOT PROVED: {', and '.join(reasons)}"


def unused(key: str) -> Row:
    """Return the row of a key of the config, as "comm.near", that took no part in the proof."""
    return Row(_OPTION, key, 0.0, 0.0, 0, "unused")


def joined(reports: Sequence[Report]) -> Report:
    """Return one report made of several."""
    return Report(
        [row for report in reports for row in report.rows],
        tuple(note for report in reports for note in report.notes),
    )


def _severity(row: Row) -> float:
    """Return the error over its tolerance; an error that should be 0 and is not comes first."""
    if row.tolerance == 0:
        return 0.0 if row.ok else float("inf")
    return _or_infinite(row.error / row.tolerance)


_NOT_HELD = -1.0  # the error of a tensor of which this rank has no part


class Comparison:
    """Compares what each rank has with what rank 0 expects.

    ``prefix`` begins each row's quantity. ``loose`` is the state of a row whose allowed error is above
    ``LOOSE``.
    """

    def __init__(
        self, device: torch.device, tolerance: Tolerance, prefix: str = "", loose: State = ""
    ) -> None:
        self.device, self.tolerance, self.prefix, self.loose = device, tolerance, prefix, loose
        self.compared: list[Row] = []
        self.errors: list[float] = []
        self.own: list[float] = []  # one process's error of each row, relative
        # The size of an element of each row, a root mean square; 0 if one process has no such value.
        self.scales: list[float] = []
        self.sums: dict[str, list[int]] = {}  # checksums of this rank's copies, by name
        # The distance of gradients from float64: this rank's, and one process's.
        self.from_exact: list[float] = []
        self.own_from_exact: list[float] = []
        self.gradients_size = 0.0
        self.unused: list[str] = []  # keys of the config that took no part, the same on every rank

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
            name: The name of the parameter or buffer, or the step.
            values: The whole tensors that this rank holds; there may be none.
            shape: The shape of the whole tensor.
            expected: What one process found; only rank 0's counts.
            tolerance: The allowed error. Unless it is 0, it grows with one process's own error
                (``Tolerance.allowed``).
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
        root = max(shape.numel(), 1) ** 0.5
        size = float(right.norm()) or float(rounding)
        if not size:  # all zeros: the error is an element's, a root mean square
            size, tolerance = root, 0.0
        errors = [_relative(value.double(), right, size) for value in values]
        self.compared.append(Row(self.prefix + quantity, name, 0.0, tolerance, 0, state))
        self.own.append(float(rounding) / size if size else 0.0)
        self.scales.append(size / root)
        self.errors.append(max(map(_or_infinite, errors), default=_NOT_HELD))

    def value(self, quantity: str, name: str, error: float | None, tolerance: float) -> None:
        """Note an error that this rank has found itself; no collective.

        Args:
            quantity: What it is.
            name: The name of the parameter.
            error: The error; None if this rank does not hold it.
            tolerance: The allowed error, the same on every rank.
        """
        self.compared.append(Row(self.prefix + quantity, name, 0.0, tolerance, 0))
        self.own.append(0.0)
        self.scales.append(0.0)
        self.errors.append(_NOT_HELD if error is None else error)

    def rounding(self, values: Sequence[Tensor], shape: torch.Size, expected: Expected | None) -> None:
        """Note how far a gradient is from float64, for :meth:`same_rounding`; a collective.

        Args:
            values: The whole gradients that this rank holds; there may be none.
            shape: The shape of the whole gradient.
            expected: What one process found; only rank 0's counts.
        """
        exact = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if expected is not None and expected.exact is not None:
            exact.copy_(expected.exact)
            self.own_from_exact.append(expected.rounding)
        dist.broadcast(exact, src=0)
        distances = [float((value.double() - exact).norm()) for value in values]
        self.from_exact.append(max(distances, default=0.0))

    def same_rounding(self) -> None:
        """Check that all gradients together are as far from float64 as one process's; a collective.

        A type that is not applied makes them more exact; one that is applied too often, less exact.
        """
        worst = torch.tensor(self.from_exact, dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found, own = float(worst.norm()), math.hypot(*self.own_from_exact)
        ratio = max(found / own, own / found) if found and own else float(found != own) * math.inf
        self.compared.append(Row(self.prefix + "rounding", "all gradients", 0.0, SAME_ROUNDING, 0))
        self.own.append(0.0)
        self.scales.append(0.0)
        self.errors.append(ratio if dist.get_rank() == 0 else _NOT_HELD)

    def same_everywhere(self, name: str, values: Sequence[Tensor]) -> None:
        """Note a parameter's checksums, to check that ranks hold the same bits of it; no collective.

        Args:
            name: The parameter's name.
            values: The whole parameters that this rank holds; there may be none.
        """
        flat = [v.cpu().contiguous().flatten().view(torch.uint8) for v in values]
        self.sums[name] = [zlib.crc32(each.numpy().tobytes()) for each in flat]

    def copies(self, name: str, values: Sequence[Tensor], shape: torch.Size) -> None:
        """Check that all ranks' copies of a tied parameter have the same bits; a collective.

        Args:
            name: The parameter's name.
            values: The whole copies that this rank holds; there may be none.
            shape: The shape of the whole parameter.
        """
        holds: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(holds, bool(values))
        source = holds.index(True)
        expected = Expected(values[0]) if dist.get_rank() == source else None
        self._tensor("tied copies", name, values, shape, expected, 0.0, source)

    def _copies(self) -> list[Row]:
        """Compare all ranks' checksums: the error is 0 where they are the same, else infinite."""
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
        """Return the median over parameters of an update's error, in units of one process's own.

        A median is taken because the gradients of a few parameters may be only rounding.
        """
        pairs = zip(rows, self.own, strict=False)
        errors = [row.error / own for row, own in pairs if row.quantity.endswith("update") and own]
        middle = statistics.median(errors) if errors else 0.0
        return Row(f"{self.prefix}rounding", "all updates", middle, self.tolerance.same_bits, 0)

    def _means(self) -> dict[str, float]:
        """Return one process's error by quantity: its root mean square over values that are not 0."""
        found: dict[str, list[float]] = {}
        for row, own in zip(self.compared, self.own, strict=True):
            found.setdefault(row.quantity, []).append(0.0 if row.state else own)
        return {name: math.hypot(*own) / len(own) ** 0.5 for name, own in found.items()}

    def _elements_errors(self) -> dict[str, float]:
        """Return one process's error of an element by quantity, over values that are not 0."""
        found: dict[str, list[float]] = {}
        for row, own, scale in zip(self.compared, self.own, self.scales, strict=True):
            if not row.state:
                found.setdefault(row.quantity, []).append(own * scale)
        return {name: math.hypot(*own) / len(own) ** 0.5 for name, own in found.items()}

    def report(self, routing: Sequence[Difference], tie: float) -> Report:
        """Gather the errors of all ranks, and return the report; a collective.

        Args:
            routing: The differences of each router and step; only rank 0's count.
            tie: The margin up to which a choice of a router is as good as random.

        Returns:
            The report, the same on every rank.
        """
        everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.errors)
        rows, means, elements = [], self._means(), self._elements_errors()
        each = zip(self.compared, self.own, self.scales, zip(*everyone, strict=True), strict=True)
        for row, own, scale, errors in each:
            rank = max(range(len(errors)), key=errors.__getitem__)
            lost = errors[rank] == _NOT_HELD
            error = math.inf if lost else errors[rank]
            allowed = self.tolerance.allowed(row.tolerance, own, means[row.quantity])
            state = row.state
            if not state and scale and row.tolerance and allowed > LOOSE:
                state = self.loose
            if state == "zero" and scale:
                # Terms cancel here, and their rounding is left. It depends on the kernels, and one
                # process's may be very small by chance, or none. So the rounding of other values is
                # allowed.
                allowed = max(allowed, elements.get(row.quantity, 0.0) / scale)
            rows.append(replace(row, error=error, rank=rank, tolerance=allowed, state=state))
        rows += [
            Row(f"{self.prefix}{d.kind}", f"{d.router}, step {d.step}", d.margin, tie, 0)
            for d in routing
        ]
        if self.tolerance.same_bits:
            rows.append(self._same_bits(rows))
        rows += [*self._copies(), *map(unused, self.unused)]
        notes = [f"{d}{': a tie' if d.margin <= tie else ''}" for d in routing if d.tokens]
        shared = [rows, notes]
        dist.broadcast_object_list(shared, src=0)
        return Report(shared[0], tuple(shared[1]))


def _or_infinite(error: float) -> float:
    return float("inf") if math.isnan(error) else error


def _relative(value: Tensor, expected: Tensor, size: float) -> float:
    return float((value - expected).norm()) / size
