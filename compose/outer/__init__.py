"""This room answers how islands train alone and still become one model.

It exports the table [outer] and the loop.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.outer.loop import OuterLoop
    from compose.outer.options import Outer

__all__ = ["Outer", "OuterLoop"]

__getattr__ = export(
    __name__,
    {
        "Outer": "compose.outer.options",
        "OuterLoop": "compose.outer.loop",
    },
)
