"""PyTorch's parallelisms, composed.

This package exports the Plan, the mesh, the functions that apply and train with them, and the proof
that the result equals one process.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compose.apply import apply
    from compose.composition import Composition, Options
    from compose.errors import ConfigError
    from compose.memory.activation_checkpointing import ActivationCheckpoint, Recompute
    from compose.memory.compilation import Compile
    from compose.memory.precision import Precision
    from compose.ops.attention import AttentionOptions, attention
    from compose.ops.batch import IGNORE, Documents
    from compose.ops.cross_entropy import cross_entropy
    from compose.ops.dropout import DropoutKey
    from compose.parallel.comm import Comm
    from compose.parallel.mesh import Parallel, init_mesh
    from compose.pipeline.schedules import Schedule
    from compose.plan import Pipeline, Plan
    from compose.proof.verify import Trial, verify
    from compose.train.evaluate import evaluate
    from compose.train.step import clip_grad_norm_, forward_backward
    from compose.weights import init_weights

__all__ = [
    "IGNORE",
    "ActivationCheckpoint",
    "AttentionOptions",
    "Comm",
    "Compile",
    "Composition",
    "ConfigError",
    "Documents",
    "DropoutKey",
    "Options",
    "Parallel",
    "Pipeline",
    "Plan",
    "Precision",
    "Recompute",
    "Schedule",
    "Trial",
    "apply",
    "attention",
    "clip_grad_norm_",
    "cross_entropy",
    "evaluate",
    "forward_backward",
    "init_mesh",
    "init_weights",
    "verify",
]

_MODULES = {
    "ActivationCheckpoint": "compose.memory.activation_checkpointing",
    "AttentionOptions": "compose.ops.attention",
    "Comm": "compose.parallel.comm",
    "Compile": "compose.memory.compilation",
    "Composition": "compose.composition",
    "ConfigError": "compose.errors",
    "Documents": "compose.ops.batch",
    "DropoutKey": "compose.ops.dropout",
    "IGNORE": "compose.ops.batch",
    "Options": "compose.composition",
    "Parallel": "compose.parallel.mesh",
    "Pipeline": "compose.plan",
    "Plan": "compose.plan",
    "Precision": "compose.memory.precision",
    "Recompute": "compose.memory.activation_checkpointing",
    "Schedule": "compose.pipeline.schedules",
    "Trial": "compose.proof.verify",
    "apply": "compose.apply",
    "attention": "compose.ops.attention",
    "clip_grad_norm_": "compose.train.step",
    "cross_entropy": "compose.ops.cross_entropy",
    "evaluate": "compose.train.evaluate",
    "forward_backward": "compose.train.step",
    "init_mesh": "compose.parallel.mesh",
    "init_weights": "compose.weights",
    "verify": "compose.proof.verify",
}


class _Package(ModuleType):
    """Imports a name at its first use, so that importing the package imports no torch."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # compose.apply is the function. Python would replace it by the module of that name.
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
