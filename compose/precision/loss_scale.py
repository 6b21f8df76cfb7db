"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

Gradients below 6e-8 are zero in float16, so the loss is multiplied by a scale before backward, and the
gradients divided by it after. There is one scale: whether a gradient overflowed is seen in the norm of
all gradients, which is the same number on every rank and stage.
"""

import math
from dataclasses import dataclass, replace

from compose.precision.options import Precision

_FIRST = 2.0**16
GROW_AFTER = 2000  # steps without overflow
_LEAST = 2.0**-14


@dataclass(frozen=True)
class LossScale:
    """value: a power of two, so that scaling rounds nothing. clean: steps since it last changed."""

    value: float
    clean: int = 0

    def may_overflow(self, loss: float) -> bool:
        """Whether gradients that are not finite may be so for the scale alone."""
        return math.isfinite(loss) and self.value > _LEAST

    def after(self, finite: bool) -> "LossScale":
        """The scale of the next step: half after an overflow, twice after many steps without one."""
        if not finite:
            return LossScale(max(self.value / 2, _LEAST))
        if self.clean + 1 >= GROW_AFTER:
            return LossScale(self.value * 2)
        return replace(self, clean=self.clean + 1)


def first_scale(precision: Precision) -> LossScale | None:
    """That a run begins with; other types than float16 need none."""
    return LossScale(_FIRST) if precision.param == "float16" else None
