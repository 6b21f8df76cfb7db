"""The optimizer that a config asks for."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.applied import applied_to
from compose.config import Config
from compose.errors import ConfigError
from compose.mesh import axis_size
from compose.optimizer.adamw import AdamW
from compose.optimizer.muon import Muon
from compose.optimizer.offload import OffloadedAdamW
from compose.optimizer.rates import set_learning_rate
from compose.optimizer.rules import Rule, parameter_rules
from compose.optimizer.scratch import remove_left
from compose.optimizer.state import MakesState, make_state
from compose.registry import build_model

_NOWHERE = "compose-offload-"  # folders of files in the system's own, where there is no run


def build_optimizer(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh,
    muon_dtype: torch.dtype | None = None,
    folder: Path | None = None,
) -> torch.optim.Optimizer:
    """Of a ``model`` that was cut over ``mesh`` as ``config`` says; every rank calls it.

    muon_dtype: see Muon. folder: of the run; None: a new one where files are needed.
    Raises ConfigError as ``parameter_rules`` does.
    """
    whole, plan = build_model(config)
    rules = parameter_rules(whole, plan, config.optimizer)
    aliases = applied_to(model).aliases
    named = [(aliases.get(name, name), p) for name, p in model.named_parameters()]
    group = stage_group(mesh, config.comm.timeout) if config.optimizer.name == "muon" else None
    parts: list[torch.optim.Optimizer] = []
    matrices = [(name, p) for name, p in named if rules[name].muon]
    others = [(name, p) for name, p in named if not rules[name].muon]
    if matrices:
        parts.append(_muon(grouped(matrices, rules, False), config, group, muon_dtype))
    if others:
        parts.append(_adamw(others, rules, config, folder))
    optimizer = parts[0] if len(parts) == 1 else Together(parts)
    set_learning_rate(optimizer, config.optimizer.lr)
    return optimizer


def stage_group(mesh: DeviceMesh, timeout: int) -> dist.ProcessGroup:
    """The ranks that share this rank's stage of the pipeline, all but those of the pp axis; a
    collective."""
    stages = mesh.mesh.reshape(axis_size(mesh, "pp"), -1).tolist()
    if len(stages) == 1:
        return dist.group.WORLD  # type: ignore[return-value]
    own, _ = dist.new_subgroups_by_enumeration(stages, timeout=timedelta(seconds=timeout))
    assert isinstance(own, dist.ProcessGroup)
    return own


def grouped(
    named: Iterable[tuple[str, nn.Parameter]], rules: Mapping[str, Rule], by_mesh: bool
) -> list[dict[str, Any]]:
    """Parameter groups, one for each learning rate and weight decay. ``by_mesh``: and for each mesh,
    since torch's fused step takes DTensors of one."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in named:
        rule = rules[name]
        mesh = parameter.device_mesh if by_mesh and isinstance(parameter, DTensor) else None
        options = {"lr_scale": rule.lr_scale, "weight_decay": rule.weight_decay}
        group = groups.setdefault((rule.lr_scale, rule.weight_decay, mesh), {"params": [], **options})
        group["params"].append((name, parameter))
    return list(groups.values())


def _muon(
    groups: list[dict[str, Any]],
    config: Config,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
) -> Muon:
    state: torch.dtype = getattr(torch, config.precision.optimizer_state)
    if dtype is not None and dtype == torch.float64:  # as in the proof, where nothing is to be rounded
        state = dtype
    return Muon(
        groups,
        lr=config.optimizer.lr,
        momentum=config.optimizer.momentum,
        group=group,
        dtype=dtype,
        state_dtype=state,
        seed=config.train.seed,
    )


def _adamw(
    named: Sequence[tuple[str, nn.Parameter]],
    rules: Mapping[str, Rule],
    config: Config,
    folder: Path | None,
) -> torch.optim.Optimizer:
    options, precision = config.optimizer, config.precision
    common: dict[str, Any] = {
        "lr": options.lr,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
    }
    if options.offload != "none":
        scratch = _scratch(config, folder) if options.offload == "nvme" else None
        return OffloadedAdamW(grouped(named, rules, by_mesh=False), **common, folder=scratch)
    if precision.master == precision.optimizer_state == "float32":
        how = options.implementation
        common |= {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
        return torch.optim.AdamW(grouped(named, rules, by_mesh=True), **common)
    return AdamW(
        grouped(named, rules, by_mesh=False),
        **common,
        state_dtype=getattr(torch, precision.optimizer_state),
        seed=config.train.seed,
    )


def _scratch(config: Config, folder: Path | None) -> Path:
    """This rank's own folder for what does not outlive the run."""
    given, run = config.optimizer.offload_dir, config.run.dir or folder
    if not given and not run:
        remove_left(Path(tempfile.gettempdir()).glob(f"{_NOWHERE}*"))
        return Path(tempfile.mkdtemp(prefix=_NOWHERE))
    base = Path(given) if given else Path(run or "") / "offload"
    if not given and base.is_symlink():  # a run writes nothing outside its folder unless told to
        raise ConfigError(
            f"optimizer.offload_dir: {base} is a link; give optimizer.offload_dir = where it leads"
        )
    remove_left(p for p in base.glob("rank-*") if _number(p) >= dist.get_world_size())
    return base / f"rank-{dist.get_rank()}"


def _number(folder: Path) -> int:
    """Of the rank whose folder it is; -1 where that is no number."""
    digits = folder.name.removeprefix("rank-")
    return int(digits) if digits.isdecimal() else -1


class Together(MakesState):
    """Several optimizers as one: their groups, their state, one step after another."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take each part's step."""
        for part in self.parts:
            part.step()

    def make_state(self) -> None:
        """Each part's."""
        for part in self.parts:
            make_state(part)
