"""This room answers in how many bytes weights and gradients are sent, and what that loses.

It exports the table [comm].
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.comm.options import Comm

__all__ = ["Comm"]

export(__name__, {"Comm": "compose.comm.options"})
