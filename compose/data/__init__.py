"""This room answers which tokens a training step sees.

It exports the opened data of a run and the batches, whose samples depend on (seed, step) alone.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.data.batches import Batches
    from compose.data.datasets import OpenData, open_data, training_batches
    from compose.data.packing import pack, random_batch

__all__ = ["Batches", "OpenData", "open_data", "pack", "random_batch", "training_batches"]

export(
    __name__,
    {
        "Batches": "compose.data.batches",
        "OpenData": "compose.data.datasets",
        "open_data": "compose.data.datasets",
        "pack": "compose.data.packing",
        "random_batch": "compose.data.packing",
        "training_batches": "compose.data.datasets",
    },
)
