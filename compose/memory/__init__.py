"""This room answers what of a forward is kept for backward: recomputed, or moved to host memory.

It exports the table [activation_checkpoint] and the functions that apply it.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.memory.activation_checkpointing import (
        ActivationCheckpoint,
        Recompute,
        apply_activation_checkpointing,
        recomputed_units,
    )
    from compose.memory.activation_offload import ActivationOffload

__all__ = [
    "ActivationCheckpoint",
    "ActivationOffload",
    "Recompute",
    "apply_activation_checkpointing",
    "recomputed_units",
]

export(
    __name__,
    {
        "ActivationCheckpoint": "compose.memory.activation_checkpointing",
        "ActivationOffload": "compose.memory.activation_offload",
        "Recompute": "compose.memory.activation_checkpointing",
        "apply_activation_checkpointing": "compose.memory.activation_checkpointing",
        "recomputed_units": "compose.memory.activation_checkpointing",
    },
)
