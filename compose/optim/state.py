"""The state of an optimizer, made without a first step, so that a checkpoint can be loaded into it."""

from typing import Any

import torch
from torch import nn


class MakesState(torch.optim.Optimizer):
    """An optimizer that can make the state of a parameter before it takes a step."""

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of ``parameter``, and make it if there is none."""
        raise NotImplementedError

    def make_state(self) -> None:
        """Make the state of every parameter that is trained."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.state_of(parameter)


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter that is trained the state of no steps, and change no parameter.

    A step with gradients of zero would do the same, but costs a step and the gradients. ``optimizer``
    is one of this package, or torch's AdamW, whose running means are not filled.
    """
    if isinstance(optimizer, MakesState):
        optimizer.make_state()
        return
    assert isinstance(optimizer, torch.optim.AdamW), type(optimizer).__name__
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    # The fused step has its count on the device.
                    "step": torch.zeros((), device=parameter.device if group["fused"] else None),
                    "exp_avg": torch.empty_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
                }
