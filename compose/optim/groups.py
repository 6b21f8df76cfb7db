"""Parameters in groups, and several optimizers as one."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.optim.rules import ParameterRule
from compose.optim.state import MakesState, make_state
from compose.parallel.mesh import axis_size


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
    named: Iterable[tuple[str, nn.Parameter]], rules: Mapping[str, ParameterRule], by_mesh: bool
) -> list[dict[str, Any]]:
    """Return parameter groups, one for each learning rate and weight decay.

    Args:
        named: Parameters by their names in the whole model.
        rules: The rule of each parameter.
        by_mesh: Whether to make a group for each mesh too; torch's fused step takes DTensors of one
            mesh.

    Returns:
        The groups, as torch's optimizers take them.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in named:
        rule = rules[name]
        mesh = parameter.device_mesh if by_mesh and isinstance(parameter, DTensor) else None
        options = {"lr_scale": rule.lr_scale, "weight_decay": rule.weight_decay}
        group = groups.setdefault((rule.lr_scale, rule.weight_decay, mesh), {"params": [], **options})
        group["params"].append((name, parameter))
    return list(groups.values())


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
        """Make each part's state."""
        for part in self.parts:
            make_state(part)
