"""The table [outer]: training on islands, which exchange weights every so many steps."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from compose.errors import Decay, NonNegative

Density = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(ge=0)]

ROW = 4096
"""Elements of which top_k sends the largest; a place among them takes 12 bits."""
_BEST = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}


@dataclass(frozen=True)
class Outer:
    """The table [outer]: how often islands exchange what they have learned, and in which form."""

    every: NonNegative = 0
    """Steps between exchanges: each rank of dp_replicate becomes an island, which trains alone between
    them; 0: no islands."""
    lr: Rate = 0.0
    """Learning rate of the outer step; 0: by the number of islands, 0.4 to 0.8."""
    momentum: Decay = 0.9
    """Nesterov momentum of the outer step."""
    fragments: NonNegative = 0
    """Layers that are exchanged at a time, each such fragment once in every steps; 0: all at once."""
    delay: NonNegative = 0
    """Steps that an exchange may take while training goes on; less than those between two exchanges."""
    mix: Decay = 0.0
    """How much of an island's own weights stays when the common ones arrive."""
    dtype: Literal["float32", "bfloat16", "int8", "e3m0", "top_k"] = "float32"
    """How the change of the weights is sent; e3m0 is a float of 4 bits, top_k are the largest in 2."""
    density: Density = 0.015625
    """With top_k: the part of each 4,096 elements that is sent."""
    offload: bool = True
    """Keep the outer weights and their momentum in host memory."""
    grace: NonNegative = 0
    """Seconds that an exchange waits for islands that are late, once half of them are there; a late one
    trains on, and joins the next exchange. 0: it waits for all."""


def best_lr(islands: int) -> float:
    """Return the outer learning rate that fits a number of islands.

    The values are those of the scaling laws of DiLoCo (Charles et al. 2025, arXiv:2503.09799, figure
    7): 0.4 for one island, 0.6 for two and four, 0.8 for eight.

    Args:
        islands: The number of islands.

    Returns:
        The rate for the largest of those numbers that is not above ``islands``.
    """
    return _BEST[max(known for known in _BEST if known <= islands)]
