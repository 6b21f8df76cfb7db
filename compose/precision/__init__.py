"""In which types a step computes, reduces and keeps. Exports the table [precision]; float8 layers and
the loss scale of float16 stand beside it."""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.precision.loss_scale import LossScale
    from compose.precision.options import Precision

__all__ = ["LossScale", "Precision"]

export(
    __name__, {"LossScale": "compose.precision.loss_scale", "Precision": "compose.precision.options"}
)
