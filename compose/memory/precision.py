"""The table [precision]: in which types a step computes, reduces and keeps; and float16's loss scale.

Gradients below 6e-8 are zero in float16. So the loss is multiplied by a scale before backward, and the
gradients are divided by it afterwards (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). One
scale is enough: an overflow of any gradient shows in the norm of all gradients, the same number on
every rank and stage.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from compose.errors import NonNegative, Weight

_FIRST = 2.0**16
GROW_AFTER = 2000  # steps without overflow
_LEAST = 2.0**-14


@dataclass(frozen=True)
class Precision:
    """The table [precision]."""

    param: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of parameters and activations in forward and backward; with float16 the loss is scaled
    dynamically."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are accumulated and reduced."""
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_gw_hp"] = "off"
    """How matrix products of the plan's float8 layers are scaled to 8 bits; needs torchao."""
    master: Literal["float32", "bfloat16"] = "float32"
    """Type in which weights are kept between steps; bfloat16 is rounded stochastically."""
    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    """Type of the optimizer's running means; bfloat16 is rounded stochastically."""

    @property
    def param_dtype(self) -> torch.dtype:
        """``param`` as torch's type."""
        return getattr(torch, self.param)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """``reduce`` as torch's type."""
        return getattr(torch, self.reduce)

    @property
    def master_dtype(self) -> torch.dtype:
        """``master`` as torch's type."""
        return getattr(torch, self.master)

    @property
    def state_dtype(self) -> torch.dtype:
        """``optimizer_state`` as torch's type."""
        return getattr(torch, self.optimizer_state)

    @property
    def reduced(self) -> bool:
        """Whether anything rounds more coarsely than float32 does."""
        types = (self.param_dtype, self.reduce_dtype, self.master_dtype, self.state_dtype)
        return self.float8 != "off" or any(kind.itemsize < 4 for kind in types)


@dataclass(frozen=True)
class LossScale:
    """The scale of the loss at one step."""

    value: Weight
    """The scale, a power of two, so that scaling rounds nothing."""
    clean: NonNegative = 0
    """Steps since it last changed."""

    def may_overflow(self, loss: float) -> bool:
        """Tell whether the scale alone may be the reason that gradients are not finite."""
        return math.isfinite(loss) and self.value > _LEAST

    def after(self, finite: bool, loss: float = 0.0) -> "LossScale":
        """Return the next step's scale: half after an overflow, twice after many steps without one.

        A ``loss`` that is not finite itself is no overflow: it tells nothing of the scale.
        """
        if not finite and math.isfinite(loss):
            return LossScale(max(self.value / 2, _LEAST))
        if self.clean + 1 >= GROW_AFTER:
            return LossScale(self.value * 2)
        return replace(self, clean=self.clean + 1)


def first_scale(precision: Precision) -> LossScale | None:
    """Return the scale that a run begins with; None for other types than float16, which need none."""
    return LossScale(_FIRST) if precision.param == "float16" else None
