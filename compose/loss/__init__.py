"""This room answers how logits become a loss: whole, in chunks of tokens, or sharded by vocabulary.

It exports the cross-entropy as a function, and as an object with options.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.loss.cross_entropy import (
        IGNORE,
        LossFunction,
        at_least_float32,
        count_targets,
        cross_entropy,
        logits_of,
    )
    from compose.loss.output import CrossEntropy

__all__ = [
    "IGNORE",
    "CrossEntropy",
    "LossFunction",
    "at_least_float32",
    "count_targets",
    "cross_entropy",
    "logits_of",
]

export(
    __name__,
    {
        "CrossEntropy": "compose.loss.output",
        "IGNORE": "compose.loss.cross_entropy",
        "LossFunction": "compose.loss.cross_entropy",
        "at_least_float32": "compose.loss.cross_entropy",
        "count_targets": "compose.loss.cross_entropy",
        "cross_entropy": "compose.loss.cross_entropy",
        "logits_of": "compose.loss.cross_entropy",
    },
)
