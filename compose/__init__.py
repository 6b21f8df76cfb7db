"""PyTorch's parallelisms, composed: a Plan, a mesh, and the proof that they equal one process."""

from compose.activation_checkpointing import Recompute
from compose.apply import apply
from compose.config import Parallel
from compose.errors import ConfigError
from compose.evaluate import evaluate
from compose.loss import IGNORE, cross_entropy
from compose.mesh import init_mesh
from compose.pipeline_parallel import Schedule
from compose.plan import Pipeline, Plan
from compose.step import clip_grad_norm_, forward_backward
from compose.verify import verify
from compose.weights import init_weights

__all__ = [
    "IGNORE",
    "ConfigError",
    "Parallel",
    "Pipeline",
    "Plan",
    "Recompute",
    "Schedule",
    "apply",
    "clip_grad_norm_",
    "cross_entropy",
    "evaluate",
    "forward_backward",
    "init_mesh",
    "init_weights",
    "verify",
]
