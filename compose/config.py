"""A run's whole configuration: train.toml as one value.

Each table is a frozen dataclass that stands beside what it is for, and is assembled here. Reading files
and the command line is in toml.py; what holds between keys is in legality/
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from compose.activation_checkpointing import ActivationCheckpoint
from compose.checkpoint.options import Checkpoint
from compose.compilation import Compile
from compose.data.options import Data
from compose.fields import NonNegative, Positive
from compose.mesh import Comm, Parallel
from compose.metrics import Metrics
from compose.optimizer.options import Optimizer
from compose.options import Options
from compose.precision import Precision
from compose.profiling.options import Profile

__all__ = [
    "TABLES",
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Compile",
    "Config",
    "Data",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallel",
    "Precision",
    "Profile",
    "Run",
    "Train",
]


@dataclass(frozen=True)
class Run:
    dir: str = ""
    """Folder that holds all a run leaves; empty is runs/<timestamp>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto is cuda where there is one."""


@dataclass(frozen=True)
class Model:
    name: str = "llama"
    """Folder under models/."""
    preset: str = "debug"
    """Named shape of that model; any field of its config set here overrides the preset's."""
    config: Any = None  # the model's own config, with the fields set here


@dataclass(frozen=True)
class Train:
    steps: Positive = 250
    """Optimizer steps of the whole schedule."""
    stop_after: NonNegative = 0
    """End after this many steps, the learning-rate schedule unchanged; 0 runs all."""
    seq_len: Positive = 256
    """Tokens per sample."""
    global_batch: Positive = 16
    """Samples per optimizer step over all ranks."""
    micro_batch: Positive = 2
    """Samples per rank in one forward pass; the rest of the rank's share is accumulated."""
    validate_every: NonNegative = 0
    """Steps between measurements of the validation loss, one at the end besides; 0 is never."""
    seed: NonNegative = 0
    """Seed of the initial weights and of the order of the samples."""
    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    loss_chunk: NonNegative = 0
    """Tokens of a micro-batch whose logits a rank holds at a time, in forward and backward; 0: all."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the square of each target's log-sum-exp of logits, beside its cross-entropy."""
    skip_nonfinite: bool = False
    """Leave the weights as they are after a step whose loss or gradient is not finite, and count it;
    false stops the run."""


@dataclass(frozen=True)
class Config:
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = field(default_factory=Precision)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profile: Profile = field(default_factory=Profile)
    comm: Comm = field(default_factory=Comm)
    source: str = "train.toml"  # the file's name, which begins every message about a key

    @property
    def options(self) -> Options:
        """What ``compose.apply`` is told."""
        return Options(
            self.parallel,
            self.precision,
            self.activation_checkpoint,
            self.compile,
            self.comm,
            self.train.seq_len,
        )


TABLES: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]
    for f in dataclasses.fields(Config)
    if f.name != "source"
}
