"""PyTorch's parallelisms, composed.

This package exports the Plan, the mesh, the functions that apply and train with them, and the proof
that the result equals one process.
"""

from typing import TYPE_CHECKING

from compose.base.former import keep_former_names
from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.apply import apply
    from compose.comm.options import Comm
    from compose.compiler.compilation import Compile
    from compose.composition.options import Options
    from compose.composition.state import Composition
    from compose.errors import ConfigError
    from compose.loss.cross_entropy import IGNORE, cross_entropy
    from compose.memory.activation_checkpointing import ActivationCheckpoint, Recompute
    from compose.operators.attention import attention
    from compose.operators.attention_options import AttentionOptions
    from compose.operators.documents import Documents
    from compose.operators.dropout import DropoutKey
    from compose.parallel.mesh import Parallel, init_mesh
    from compose.pipeline.schedules import Schedule
    from compose.plan import Pipeline, Plan
    from compose.precision.options import Precision
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

export(
    __name__,
    {
        "ActivationCheckpoint": "compose.memory.activation_checkpointing",
        "AttentionOptions": "compose.operators.attention_options",
        "Comm": "compose.comm.options",
        "Compile": "compose.compiler.compilation",
        "Composition": "compose.composition.state",
        "ConfigError": "compose.errors",
        "Documents": "compose.operators.documents",
        "DropoutKey": "compose.operators.dropout",
        "IGNORE": "compose.loss.cross_entropy",
        "Options": "compose.composition.options",
        "Parallel": "compose.parallel.mesh",
        "Pipeline": "compose.plan",
        "Plan": "compose.plan",
        "Precision": "compose.precision.options",
        "Recompute": "compose.memory.activation_checkpointing",
        "Schedule": "compose.pipeline.schedules",
        "Trial": "compose.proof.verify",
        "apply": "compose.apply",
        "attention": "compose.operators.attention",
        "clip_grad_norm_": "compose.train.step",
        "cross_entropy": "compose.loss.cross_entropy",
        "evaluate": "compose.train.evaluate",
        "forward_backward": "compose.train.step",
        "init_mesh": "compose.parallel.mesh",
        "init_weights": "compose.weights",
        "verify": "compose.proof.verify",
    },
)
keep_former_names()
