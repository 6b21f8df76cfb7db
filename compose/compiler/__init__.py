"""This room answers which parts of a model torch.compile makes graphs of.

It exports the table [compile] and the function that applies it.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.compiler.compilation import Compile, apply_compile

__all__ = ["Compile", "apply_compile"]

export(
    __name__,
    {"Compile": "compose.compiler.compilation", "apply_compile": "compose.compiler.compilation"},
)
