"""The table [optimizer], the optimizers that it names, and several of them as one.

To add one, write its class in a file of its own, and give it an entry in ``OPTIMIZERS``.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.errors import Decay, Epsilon, Fraction, LocalPath, NonNegative
from compose.memory.precision import Precision
from compose.optim.adamw import AdamW
from compose.optim.muon import Muon
from compose.optim.offload import OffloadedAdamW
from compose.optim.rounding import FixedGroups, load_state, steps
from compose.parallel.mesh import axis_size


@dataclass(frozen=True)
class Optimizer:
    """The table [optimizer]."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalized momentum for the matrices in layers, AdamW for all other parameters."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Implementation of torch's AdamW; read where weights and state are float32."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where AdamW keeps its state: none: on the device; cpu: in host memory; nvme: in files."""
    offload_dir: LocalPath = ""
    """With offload = nvme: folder for these files, on a fast local disk; empty is run.dir/offload."""
    lr: Annotated[float, Field(ge=0)] = 3e-3
    """Highest learning rate."""
    lr_scale: tuple[str, ...] = ()
    """Factors of lr for modules or parameters, by patterns as in a plan: ["output=0.5"]."""
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
    """Factors of weight_decay by patterns, for parameters of any dims: ["tok_embeddings=0"]."""
    warmup: NonNegative = 20
    """Steps of linear warmup."""
    warmup_from: Annotated[int, Field(ge=-1, lt=2**63)] = -1
    """Step with a learning rate of 0, from which warmup rises; -1: the one before the first."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warmup."""
    decay: NonNegative = 0
    """Steps of the decay, the last ones; with constant it is linear. 0: with cosine and linear all
    after warmup, with constant none."""
    decay_end: NonNegative = 0
    """Step at which the decay ends, and from which the rate stays; 0 is train.steps."""
    min_lr: Fraction = 0.1
    """Learning rate at the end of the decay, as a fraction of lr."""


@dataclass(frozen=True)
class ParameterRule:
    """The way in which one parameter is trained."""

    optimizer: str
    """The optimizer that trains it, a name of ``OPTIMIZERS``."""
    lr_scale: float
    """The factor of the learning rate."""
    weight_decay: float


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of an optimizer, besides its parameters and their rules."""

    options: Optimizer
    precision: Precision
    seed: int
    mesh: DeviceMesh
    group: dist.ProcessGroup | None
    """The ranks that share matrices, for optimizers of matrices."""
    matrix_dtype: torch.dtype | None
    """Type of products of matrices; None lets the optimizer choose for the device."""
    files: Path | None
    """The folder for state in files."""


Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters by their names in the whole model."""
Rules = Mapping[str, ParameterRule]


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that ``optimizer.name`` may name."""

    make: Callable[[Named, Rules, OptimizerSettings], torch.optim.Optimizer]
    state: tuple[str, ...]
    """The state of a parameter that has the parameter's size."""
    of_matrices: bool = False
    """Whether it trains the matrices in layers alone; then AdamW trains all else."""


def _adamw(named: Named, rules: Rules, settings: OptimizerSettings) -> torch.optim.Optimizer:
    options, precision = settings.options, settings.precision
    common: dict[str, Any] = {
        "lr": options.lr,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
    }
    if options.offload != "none":
        return OffloadedAdamW(grouped(named, rules), **common, folder=settings.files)
    if precision.master == precision.optimizer_state == "float32":
        how = options.implementation
        common |= {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
        return torch.optim.AdamW(grouped(named, rules, by_mesh=True), **common)
    groups = grouped(named, rules)
    return AdamW(groups, **common, state_dtype=settings.precision.state_dtype, seed=settings.seed)


def _muon(named: Named, rules: Rules, settings: OptimizerSettings) -> Muon:
    dtype, state = settings.matrix_dtype, settings.precision.state_dtype
    if dtype == torch.float64:  # as in the proof, which must not round
        state = torch.float64
    return Muon(
        grouped(named, rules),
        lr=settings.options.lr,
        momentum=settings.options.momentum,
        group=settings.group,
        mesh=settings.mesh,
        dtype=dtype,
        state_dtype=state,
        seed=settings.seed,
    )


OPTIMIZERS = {
    "adamw": OptimizerEntry(_adamw, ("exp_avg", "exp_avg_sq")),
    "muon": OptimizerEntry(_muon, ("momentum_buffer",), of_matrices=True),
}


def make_optimizer(named: Named, rules: Rules, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Make the optimizer of parameters; if several train them, they are one."""
    parts = []
    for name in dict.fromkeys((settings.options.name, "adamw")):
        own = [(which, p) for which, p in named if rules[which].optimizer == name]
        if own:
            parts.append(OPTIMIZERS[name].make(own, rules, settings))
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def stage_group(mesh: DeviceMesh, timeout: int) -> dist.ProcessGroup:
    """Return the ranks that share this rank's stage of the pipeline; a collective.

    These are the ranks of all axes except pp.
    """
    stages = mesh.mesh.reshape(axis_size(mesh, "pp"), -1).tolist()
    if len(stages) == 1:
        return dist.group.WORLD  # type: ignore[return-value]
    own, _ = dist.new_subgroups_by_enumeration(stages, timeout=timedelta(seconds=timeout))
    assert isinstance(own, dist.ProcessGroup)
    return own


def grouped(
    named: Iterable[tuple[str, nn.Parameter]], rules: Rules, by_mesh: bool = False
) -> list[dict[str, Any]]:
    """Return parameter groups, one for each learning rate and weight decay, as torch takes them.

    With ``by_mesh`` there is one for each mesh too, since torch's fused step takes DTensors of one.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in named:
        rule = rules[name]
        mesh = parameter.device_mesh if by_mesh and isinstance(parameter, DTensor) else None
        options = {"lr_scale": rule.lr_scale, "weight_decay": rule.weight_decay}
        group = groups.setdefault((rule.lr_scale, rule.weight_decay, mesh), {"params": [], **options})
        group["params"].append((name, parameter))
    return list(groups.values())


class CombinedOptimizer(FixedGroups):
    """Several optimizers as one: their groups, their state, one step after another."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    load_state_dict = load_state  # type: ignore[assignment]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of ``parameter``, and make it if there is none."""
        make_state(self, {parameter})
        return self.state[parameter]

    @steps
    def step(self) -> None:  # type: ignore[override]
        """Take each part's step."""
        for part in self.parts:
            part.step()


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer, only: Container[nn.Parameter] | None = None) -> None:
    """Give every parameter that is trained the state of no steps, so that a checkpoint can fill it.

    ``only``: the parameters that get one; None is all. One without a gradient so far has no state.
    A step with gradients of zero would do the same, but costs a step and the gradients.
    """
    for part in getattr(optimizer, "parts", [optimizer]):
        for group in part.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad or (only is not None and parameter not in only):
                    continue
                if make := getattr(part, "state_of", None):
                    make(parameter)
                elif not part.state[parameter]:
                    assert isinstance(part, torch.optim.AdamW), type(part).__name__
                    part.state[parameter] = {
                        # The fused step has its count on the device.
                        "step": torch.zeros((), device=parameter.device if group["fused"] else None),
                        "exp_avg": torch.empty_like(parameter, requires_grad=False),
                        "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
                    }
