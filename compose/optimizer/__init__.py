"""Optimizers: AdamW and Muon over any mesh, what each trains, how fast, and in which precision."""

from compose.optimizer.adamw import AdamW
from compose.optimizer.build import build_optimizer
from compose.optimizer.muon import Muon, orthogonalized
from compose.optimizer.offload import OffloadedAdamW
from compose.optimizer.rates import learning_rate, set_learning_rate
from compose.optimizer.rules import Rule, parameter_rules
from compose.optimizer.state import make_state

__all__ = [
    "AdamW",
    "Muon",
    "OffloadedAdamW",
    "Rule",
    "build_optimizer",
    "learning_rate",
    "make_state",
    "orthogonalized",
    "parameter_rules",
    "set_learning_rate",
]
