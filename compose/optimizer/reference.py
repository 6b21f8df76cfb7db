"""The optimizers written out for whole tensors on one process; the proof compares with these."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compose.optimizer.muon import COEFFICIENTS, EPS, ITERATIONS
from compose.optimizer.options import Optimizer
from compose.optimizer.rounding import random_bits, store
from compose.optimizer.rules import ParameterRule
from compose.precision.options import Precision


class Reference(torch.optim.Optimizer):
    """AdamW and Muon as their papers define them, one parameter after another.

    Args:
        named: Whole parameters by name: float32, or float64 if ``precision`` rounds nothing. If it
            keeps weights or state in bfloat16, they are rounded to it by the same random bits, and stay
            float32.
        rules: The rule of each parameter.
        options: The table [optimizer].
        precision: The table [precision].
        seed: Chooses the random bits.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        rules: Mapping[str, ParameterRule],
        options: Optimizer,
        precision: Precision,
        seed: int,
    ) -> None:
        super().__init__(list(named.values()), {"lr": options.lr})
        self.named, self.rules = named, rules
        self.options, self.precision, self.seed = options, precision, seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step for the parameters that have a gradient."""
        for name, weight in self.named.items():
            if weight.grad is None:
                continue
            state, rule = self.state[weight], self.rules[name]
            state["step"] = state.get("step", 0) + 1
            direction = (self._muon if rule.muon else self._adamw)(name, weight.grad, state)
            lr = self.param_groups[0]["lr"] * rule.lr_scale
            new = weight - lr * rule.weight_decay * weight - lr * direction
            bits = self._bits(name, state, "weight", new)
            weight.copy_(_rounded(new, bits, self.precision.master))

    def _adamw(self, name: str, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        options, kind = self.options, self.precision.optimizer_state
        mean = options.beta1 * state.get("mean", 0) + (1 - options.beta1) * gradient
        square = options.beta2 * state.get("square", 0) + (1 - options.beta2) * gradient**2
        bits = self._bits(name, state, "state", gradient)
        state["mean"], state["square"] = _rounded(mean, bits, kind), _rounded(square, bits >> 16, kind)
        mean = mean / (1 - options.beta1 ** state["step"])
        square = square / (1 - options.beta2 ** state["step"])
        return mean / (square.sqrt() + options.eps)

    def _muon(self, name: str, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        factor, kind = self.options.momentum, self.precision.optimizer_state
        momentum = factor * state.get("momentum", 0) + gradient
        bits = self._bits(name, state, "state", gradient)
        state["momentum"] = _rounded(momentum, bits, kind)
        ahead = gradient + factor * momentum
        if ahead.ndim == 3:
            return torch.stack([_muon_step(matrix) for matrix in ahead])
        return _muon_step(ahead)

    def _bits(self, name: str, state: dict[str, Any], what: str, like: Tensor) -> Tensor:
        whole = [slice(0, size) for size in like.shape]
        purpose = f"{name}/{state['step']}/{what}"
        return random_bits(self.seed, purpose, whole, like.shape, like.bfloat16())


def _rounded(value: Tensor, bits: Tensor, kind: str) -> Tensor:
    if kind == "float32":
        return value  # or float64, if its parameter is
    target = torch.empty_like(value, dtype=getattr(torch, kind))
    store(target, value, bits)
    return target.float()


def _muon_step(matrix: Tensor) -> Tensor:
    """Return the step of a matrix, in float64, by its Gram matrix on the smaller side."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / (matrix.double().norm() + EPS)
    one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for _ in range(ITERATIONS):
        gram = x.mT @ x
        x = x @ (a * one + b * gram + c * gram @ gram)
    return (0.2 * max(matrix.shape) ** 0.5 * x).to(matrix.dtype)
