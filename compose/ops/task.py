"""One attention, apart from its tensors of queries, keys and values."""

from dataclasses import dataclass

from torch import Tensor

from compose.ops.blocks import Layout
from compose.ops.kernels import Scores

Index = tuple[slice, slice, slice]
"""Rows, heads and tokens of a tensor (B, H, L, K) or (B, H, L)."""
ALL = slice(None)
Gradients = tuple[Tensor, Tensor, Tensor]
"""Those of queries, keys and values."""


@dataclass(frozen=True)
class Task:
    """One attention, apart from its tensors of queries, keys and values."""

    layout: Layout
    scores: Scores
    bounds: Tensor | None
    """Where the documents of the whole batch begin, as Documents has them; None: each row is one."""
    extents: Tensor | None
    """How many there are, and the longest."""
