"""The state that an optimizer makes in its first step, made without one: to load a checkpoint into."""

from typing import Any

import torch
from torch import nn


class MakesState(torch.optim.Optimizer):
    """An optimizer that can make the state of a parameter before it takes a step."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of ``parameter``, which is made if there is none."""
        raise NotImplementedError

    def make_state(self) -> None:
        """Make the state of every parameter that is trained."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.state_of(parameter)


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter that is trained the state of no steps, and change none.

    A step with gradients of zero would do the same, for the price of a step and of the gradients.
    optimizer: one of this package, or torch's AdamW; of the latter the running means are not filled.
    """
    if isinstance(optimizer, MakesState):
        optimizer.make_state()
        return
    assert isinstance(optimizer, torch.optim.AdamW), type(optimizer).__name__
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    # The fused step counts on the device.
                    "step": torch.zeros((), device=parameter.device if group["fused"] else None),
                    "exp_avg": torch.empty_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
                }
