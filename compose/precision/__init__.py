"""This room answers in which types a step computes, reduces and keeps its tensors.

It exports the table [precision]. Float8 layers and the loss scale of float16 are modules beside it.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.precision.loss_scale import LossScale
    from compose.precision.options import Precision

__all__ = ["LossScale", "Precision"]

export(
    __name__, {"LossScale": "compose.precision.loss_scale", "Precision": "compose.precision.options"}
)
