"""AdamW whose state and weights may be kept in bfloat16.

torch's AdamW keeps its state in the type of the parameters, and rounds to nearest.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from compose.ops.tensors import at_least_float32, local_region
from compose.optim.rounding import (
    check_named,
    chunks,
    load_state,
    local,
    random_bits,
    steps,
    store,
    within,
)


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); a step of bfloat16 is computed in float32.

    Parameters have their names in the whole model, and are plain or DTensors.
    Names and ``seed`` choose the random bits by which results are rounded to bfloat16 (rounding.py).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        check_named(self.param_groups)
        self.state_dtype, self.seed = state_dtype, seed

    @steps
    def step(self) -> None:  # type: ignore[override]
        """Take a step for the parameters that have a gradient."""
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._update(name, parameter, group)

    load_state_dict = load_state  # type: ignore[assignment]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of ``parameter``, and make it if there is none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # it is on the host, since the host reads it
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        return state

    def _update(self, name: str, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state_of(parameter)
        state["step"] += 1
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], group["lr"]
        rate, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        weight, gradient = local(parameter), local(parameter.grad)
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        shape, region = parameter.shape or (1,), local_region(parameter) or (slice(0, 1),)
        for part in chunks(region):
            here = within(part, region)
            g, m, v = (at_least_float32(each[here]) for each in (gradient, mean, square))
            m = m.lerp(g, 1 - beta1)
            v = (v * beta2).addcmul_(g, g, value=1 - beta2)
            new = at_least_float32(weight[here]) * (1 - lr * group["weight_decay"])
            new.addcdiv_(m, (v.sqrt() / root).add_(group["eps"]), value=-rate)
            bits = random_bits(self.seed, f"{name}/{step}/state", part, shape, mean)
            store(mean[here], m, bits)
            store(square[here], v, bits >> 16)
            bits = random_bits(self.seed, f"{name}/{step}/weight", part, shape, weight)
            store(weight[here], new, bits)
