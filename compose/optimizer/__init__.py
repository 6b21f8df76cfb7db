"""This room answers how weights are updated: by AdamW or Muon, over any mesh, in which precision."""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.optimizer.adamw import AdamW
    from compose.optimizer.lr_schedule import learning_rate, set_learning_rate
    from compose.optimizer.muon import Muon, orthogonalized
    from compose.optimizer.offload import OffloadedAdamW
    from compose.optimizer.rules import ParameterRule, parameter_rules
    from compose.optimizer.state import make_state

__all__ = [
    "AdamW",
    "Muon",
    "OffloadedAdamW",
    "ParameterRule",
    "learning_rate",
    "make_state",
    "orthogonalized",
    "parameter_rules",
    "set_learning_rate",
]

export(
    __name__,
    {
        "AdamW": "compose.optimizer.adamw",
        "Muon": "compose.optimizer.muon",
        "OffloadedAdamW": "compose.optimizer.offload",
        "ParameterRule": "compose.optimizer.rules",
        "learning_rate": "compose.optimizer.lr_schedule",
        "make_state": "compose.optimizer.state",
        "orthogonalized": "compose.optimizer.muon",
        "parameter_rules": "compose.optimizer.rules",
        "set_learning_rate": "compose.optimizer.lr_schedule",
    },
)
