"""The tables [run], [train] and [metrics]."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from compose.errors import LocalPath, NonNegative, Positive


@dataclass(frozen=True)
class Run:
    """The table [run]."""

    dir: LocalPath = ""
    """Folder that holds all a run leaves; empty is runs/<timestamp>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto is cuda where there is one."""


@dataclass(frozen=True)
class Train:
    """The table [train]."""

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
class Metrics:
    """The table [metrics]."""

    tensorboard: bool = True
    """Write TensorBoard events into run.dir."""
    console_every: Positive = 10
    """Steps between console lines; metrics.jsonl has one line for every step."""
