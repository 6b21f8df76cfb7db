"""The table [outer]: training on islands, which exchange weights every so many steps."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from compose.errors import Decay, NonNegative, ReadWith

Density = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(ge=0)]

ROW = 4096
"""Elements of which top_k sends the largest; a place among them takes 12 bits."""
_ISLANDS = ReadWith("is read with islands; set {}", every=())
_TOP_K = ReadWith("is read with top_k; set {}", dtype=("top_k",))
_BEST = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}


@dataclass(frozen=True)
class Outer:
    """The table [outer]: how often islands exchange what they have learned, and in which form."""

    every: NonNegative = 0
    """Steps between exchanges: each rank of dp_replicate becomes an island, which trains alone between
    them; 0: no islands."""
    lr: Annotated[Rate, _ISLANDS] = 0.0
    """Learning rate of the outer step; 0: by the number of islands, 0.4 to 0.8."""
    momentum: Annotated[Decay, _ISLANDS] = 0.9
    """Nesterov momentum of the outer step."""
    fragments: Annotated[NonNegative, _ISLANDS] = 0
    """Layers that are exchanged at a time, each such fragment once in every steps; 0: all at once."""
    delay: Annotated[NonNegative, _ISLANDS] = 0
    """Steps that an exchange may take while training goes on; less than those between two exchanges."""
    mix: Annotated[Decay, _ISLANDS] = 0.0
    """How much of an island's own weights stays when the common ones arrive."""
    dtype: Annotated[Literal["float32", "bfloat16", "int8", "e3m0", "top_k"], _ISLANDS] = "float32"
    """How the change of the weights is sent; e3m0 is a float of 4 bits, top_k are the largest in 2."""
    density: Annotated[Density, _ISLANDS, _TOP_K] = 0.015625
    """With top_k: the part of each 4,096 elements that is sent."""
    offload: Annotated[bool, _ISLANDS] = True
    """Keep the outer weights and their momentum in host memory."""
    grace: Annotated[NonNegative, _ISLANDS] = 0
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
