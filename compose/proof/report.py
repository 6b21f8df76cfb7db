"""The result of a proof: rows of errors, and the errors that are allowed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from compose.memory.precision import Precision

State = Literal["", "zero", "unused", "loose", "coarse"]


@dataclass(frozen=True)
class Tolerance:
    """The largest relative errors that are allowed whatever one process's own rounding is."""

    loss: float
    gradient: float
    update: float
    """The change of a weight over all steps. AdamW divides by the gradient's own size, so rounding
    near zero weighs more here, unless both sides take the same gradients.
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
        """
        return base and max(base, self.times * max(own, mean))


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


def tolerance_of(precision: Precision) -> Tolerance:
    """Return what a run in these types is allowed.

    A reduced run is compared with one process's own error, and one rounding is always allowed.
    """
    if not precision.reduced:
        return EXACTLY if precision.param_dtype == torch.float64 else FLOAT32
    step = max(_STEP[precision.param_dtype], _STEP[precision.reduce_dtype])
    if precision.float8 != "off":
        step = max(step, _FLOAT8_STEP)
    kept = max(_STEP[precision.master_dtype], _STEP[precision.state_dtype])
    return Tolerance(
        # The loss is a mean over tokens. A token's error is that of a logit times a probability, and
        # has any sign.
        loss=max(min(step, 2.0**-6), FLOAT32.loss),
        gradient=max(step, FLOAT32.gradient),
        update=max(step, kept, FLOAT32.update),
        times=TIMES,
        same_bits=0.0 if max(step, _STEP[precision.master_dtype]) > _STEP[torch.float32] else SAME_BITS,
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
class ComparisonRow:
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
        return _REMARKS[self.state] if self.ok else "FAILED"


@dataclass(frozen=True)
class Report:
    """The result of a proof, the same on every rank; ``print`` shows a table, worst first."""

    rows: list[ComparisonRow]
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
    def failed(self) -> list[ComparisonRow]:
        """The rows whose error is not allowed."""
        return [row for row in self.rows if not row.ok]

    @property
    def not_proved(self) -> list[ComparisonRow]:
        """The gradients that are zero on one process."""
        unproved = (row for row in self.rows if row.state in ("zero", "unused"))
        return [row for row in unproved if "gradient" in row.quantity]

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


def unused(key: str) -> ComparisonRow:
    """Return the row of a key of the config, as "comm.near", that took no part in the proof."""
    return ComparisonRow(_OPTION, key, 0.0, 0.0, 0, "unused")


def joined(reports: Sequence[Report]) -> Report:
    """Return one report made of several."""
    return Report(
        [row for report in reports for row in report.rows],
        tuple(dict.fromkeys(note for report in reports for note in report.notes)),
    )


def _severity(row: ComparisonRow) -> float:
    """Return the error over its tolerance; an error that should be 0 and is not comes first."""
    if row.tolerance == 0:
        return 0.0 if row.ok else float("inf")
    return or_infinite(row.error / row.tolerance)


def or_infinite(error: float) -> float:
    """Return an error, and infinity if it is no number."""
    return float("inf") if math.isnan(error) else error
