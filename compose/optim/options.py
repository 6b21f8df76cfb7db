"""The table [optimizer]."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from compose.errors import Decay, Epsilon, Fraction, LocalPath, NonNegative


@dataclass(frozen=True)
class Optimizer:
    """The table [optimizer]."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalized momentum for the matrices in layers, AdamW for all else."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's AdamWs, where weights and state are float32."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where AdamW keeps its state: none: on the device; cpu: in host memory; nvme: in files."""
    offload_dir: LocalPath = ""
    """With offload = nvme: folder for these files, on a fast local disk; empty is run.dir/offload."""
    lr: Annotated[float, Field(ge=0)] = 3e-3
    """Highest learning rate."""
    lr_scale: tuple[str, ...] = ()
    """Factors of it for modules or parameters, by patterns as in a plan: ["output=0.5"]."""
    beta1: Decay = 0.9
    """AdamW: decay of the gradient's running mean."""
    beta2: Decay = 0.95
    """AdamW: decay of the squared gradient's running mean."""
    eps: Epsilon = 1e-8
    """AdamW: added to the root of the squared gradient's mean."""
    momentum: Decay = 0.95
    """Muon: decay of the sum of gradients."""
    muon_except: tuple[str, ...] = ()
    """Muon: patterns of matrices in layers that AdamW trains all the same."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, on parameters of two or more dims."""
    weight_decay_scale: tuple[str, ...] = ()
    """Factors of it, as for lr_scale, on parameters of any dims, as ["tok_embeddings=0"]."""
    warmup: NonNegative = 20
    """Steps of linear warmup."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warmup."""
    decay: NonNegative = 0
    """With schedule = constant: linear decay over this many last steps."""
    min_lr: Fraction = 0.1
    """Learning rate at the end of the decay, as a fraction of lr."""
