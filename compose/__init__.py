"""PyTorch's parallelisms, composed: a Plan, a mesh, and the proof that they equal one process."""

from typing import TYPE_CHECKING

from compose.lazy import export

if TYPE_CHECKING:
    from compose.activation_checkpointing import ActivationCheckpoint, Recompute
    from compose.apply import apply
    from compose.compilation import Compile
    from compose.composition import Composition
    from compose.errors import ConfigError
    from compose.evaluate import evaluate
    from compose.loss import IGNORE, cross_entropy
    from compose.mesh import Comm, Parallel, init_mesh
    from compose.options import Options
    from compose.plan import Pipeline, Plan
    from compose.precision import Precision
    from compose.schedules import Schedule
    from compose.step import clip_grad_norm_, forward_backward
    from compose.verify import Trial, verify
    from compose.weights import init_weights

__all__ = [
    "IGNORE",
    "ActivationCheckpoint",
    "Comm",
    "Compile",
    "Composition",
    "ConfigError",
    "Options",
    "Parallel",
    "Pipeline",
    "Plan",
    "Precision",
    "Recompute",
    "Schedule",
    "Trial",
    "apply",
    "clip_grad_norm_",
    "cross_entropy",
    "evaluate",
    "forward_backward",
    "init_mesh",
    "init_weights",
    "verify",
]

export(
    __name__,
    {
        "ActivationCheckpoint": "compose.activation_checkpointing",
        "Comm": "compose.mesh",
        "Compile": "compose.compilation",
        "Composition": "compose.composition",
        "ConfigError": "compose.errors",
        "IGNORE": "compose.loss",
        "Options": "compose.options",
        "Parallel": "compose.mesh",
        "Pipeline": "compose.plan",
        "Plan": "compose.plan",
        "Precision": "compose.precision",
        "Recompute": "compose.activation_checkpointing",
        "Schedule": "compose.schedules",
        "Trial": "compose.verify",
        "apply": "compose.apply",
        "clip_grad_norm_": "compose.step",
        "cross_entropy": "compose.loss",
        "evaluate": "compose.evaluate",
        "forward_backward": "compose.step",
        "init_mesh": "compose.mesh",
        "init_weights": "compose.weights",
        "verify": "compose.verify",
    },
)
