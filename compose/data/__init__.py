"""Token sources, and batches whose samples are a function of (seed, step) alone."""

from compose.data.batches import Batches
from compose.data.opening import data_problems, training_batches, training_sets, validation_set
from compose.data.packing import pack, random_batch

__all__ = [
    "Batches",
    "data_problems",
    "pack",
    "random_batch",
    "training_batches",
    "training_sets",
    "validation_set",
]
