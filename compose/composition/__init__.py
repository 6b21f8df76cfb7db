"""This room answers what compose.apply may be asked for, and what it returns.

It exports Options (tables of train.toml) and Composition (the cut model and what was done to it).
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.composition.options import Options
    from compose.composition.state import Composition, module_of

__all__ = ["Composition", "Options", "module_of"]

export(
    __name__,
    {
        "Composition": "compose.composition.state",
        "Options": "compose.composition.options",
        "module_of": "compose.composition.state",
    },
)
