"""PyTorch's parallelisms, composed.

This package exports the Plan, the mesh, the functions that apply and train with them, and the proof
that the result equals one process.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
PARENT = os.getppid()  # a torchrun may end while PyTorch is imported

if TYPE_CHECKING:
    from compose.apply import apply as apply
    from compose.composition import Composition as Composition
    from compose.composition import Options as Options
    from compose.errors import ConfigError as ConfigError
    from compose.memory.activation_checkpointing import ActivationCheckpoint as ActivationCheckpoint
    from compose.memory.activation_checkpointing import Recompute as Recompute
    from compose.memory.compilation import Compile as Compile
    from compose.memory.precision import Precision as Precision
    from compose.ops.attention import AttentionOptions as AttentionOptions
    from compose.ops.attention import attention as attention
    from compose.ops.batch import IGNORE as IGNORE
    from compose.ops.batch import Documents as Documents
    from compose.ops.cross_entropy import cross_entropy as cross_entropy
    from compose.ops.dropout import DropoutKey as DropoutKey
    from compose.parallel.comm import Comm as Comm
    from compose.parallel.mesh import Parallel as Parallel
    from compose.parallel.mesh import init_mesh as init_mesh
    from compose.pipeline.schedules import Schedule as Schedule
    from compose.plan import Pipeline as Pipeline
    from compose.plan import Plan as Plan
    from compose.plan_of import plan_code as plan_code
    from compose.plan_of import plan_of as plan_of
    from compose.proof.verify import Trial as Trial
    from compose.proof.verify import verify as verify
    from compose.train.evaluate import evaluate as evaluate
    from compose.train.step import clip_grad_norm_ as clip_grad_norm_
    from compose.train.step import forward_backward as forward_backward
    from compose.weights import init_weights as init_weights

_NAMES = {
    "compose.apply": "apply",
    "compose.composition": "Composition Options",
    "compose.errors": "ConfigError",
    "compose.memory.activation_checkpointing": "ActivationCheckpoint Recompute",
    "compose.memory.compilation": "Compile",
    "compose.memory.precision": "Precision",
    "compose.ops.attention": "AttentionOptions attention",
    "compose.ops.batch": "Documents IGNORE",
    "compose.ops.cross_entropy": "cross_entropy",
    "compose.ops.dropout": "DropoutKey",
    "compose.parallel.comm": "Comm",
    "compose.parallel.mesh": "Parallel init_mesh",
    "compose.pipeline.schedules": "Schedule",
    "compose.plan": "Pipeline Plan",
    "compose.plan_of": "plan_code plan_of",
    "compose.proof.verify": "Trial verify",
    "compose.train.evaluate": "evaluate",
    "compose.train.step": "clip_grad_norm_ forward_backward",
    "compose.weights": "init_weights",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


class _Package(ModuleType):
    """Imports a name at its first use, so that importing the package imports no torch."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_MODULES})

    def __setattr__(self, name: str, value: Any) -> None:
        # compose.apply is the function. Python would replace it by the module of that name.
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
