"""One process's optimizers: each formula and each rule is written out again, for whole tensors.

The proof compares a composition with these. So they share nothing with compose/optim but the random
bits of stochastic rounding: a fault in a shared rule would be the same on both sides.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from compose.memory.precision import Precision
from compose.optim.optimizers import Optimizer, ParameterRule
from compose.optim.rounding import random_bits, store
from compose.parallel.expert_parallel import routers
from compose.plan import Plan

Named = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]

# Muon's iteration (Jordan et al. 2024, kellerjordan.github.io/posts/muon) and its scale (Liu et al.
# 2025, arXiv:2502.16982).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MUON_EPS = 1e-7
_MUON_SCALE = 0.2


def stated_rules(model: nn.Module, plan: Plan, options: Optimizer) -> dict[str, ParameterRule]:
    """Return how each parameter of the whole model should be trained, by its first name.

    These are the rules of docs/optimizers.md.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    never = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    never += [*routers(model), *options.muon_except]
    layers = [plan.pipeline.layers] if plan.pipeline else []
    rules = {}
    for parameter, own in names.items():
        stacked = any(is_named(name, plan.expert) for name in own)
        matrix = parameter.ndim - stacked >= 2
        muon = (
            options.name == "muon"
            and matrix
            and parameter.ndim in (2, 3)
            and parameter.shape[-2] > 1
            and all(is_named(name, layers) for name in own)
            and not any(is_named(name, never) for name in own)
        )
        lr_scale = _last_scale(options.lr_scale, own, 1.0)
        decay = _last_scale(options.weight_decay_scale, own, float(matrix))
        rules[own[0]] = ParameterRule(
            "muon" if muon else "adamw", lr_scale, options.weight_decay * decay
        )
    return rules


def stated_rate(step: int, steps: int, options: Optimizer) -> float:
    """Return the learning rate that step ``step`` of ``steps`` should have, counted from 0."""
    if step < options.warmup:
        rising = range(options.warmup_from, options.warmup)
        return options.lr * (max(step, rising.start) - rising.start) / max(1, len(rising))
    begin, steps = options.warmup, options.decay_end or steps
    constant, last = options.schedule == "constant", steps - options.decay
    if constant and not options.decay:
        return options.lr
    begin = max(begin, last) if options.decay else begin
    done = min(max(0.0, step - begin) / max(1, steps - begin), 1.0)
    falls = math.cos(math.pi / 2 * done) ** 2 if options.schedule == "cosine" else 1.0 - done
    return options.lr * (options.min_lr + (1.0 - options.min_lr) * falls)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern of a plan names a parameter or module, or a module around it."""
    parts = name.split(".")
    return any(
        len(parts) >= len(own := pattern.split(".")) and all(map(fnmatchcase, parts, own))
        for pattern in patterns
    )


def _last_scale(lines: Sequence[str], names: Sequence[str], otherwise: float) -> float:
    """Return the number of the last line "PATTERN=NUMBER" that names a parameter."""
    for line in reversed(lines):
        pattern, _, number = line.rpartition("=")
        if any(is_named(name, [pattern.strip()]) for name in names):
            return float(number)
    return otherwise


class ReferenceOptimizer(torch.optim.Optimizer):
    """AdamW and Muon as their papers define them, one parameter after another."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        rules: Mapping[str, ParameterRule],
        options: Optimizer,
        precision: Precision,
        seed: int,
        rates: Sequence[float] = (),
        products: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(list(named.values()), {"lr": options.lr})
        self.named, self.rules = named, rules
        self.options, self.precision, self.seed = options, precision, seed
        self.rates, self.taken, self.products = rates, 0, products

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step for the parameters that have a gradient."""
        rate = self.rates[self.taken] if self.rates else self.options.lr
        self.taken += 1
        for name, weight in self.named.items():
            if weight.grad is None:
                continue
            state, rule = self.state[weight], self.rules[name]
            state["step"] = state.get("step", 0) + 1
            by = {"adamw": self._adamw, "muon": self._muon}[rule.optimizer]
            direction = by(name, weight.grad, state)
            lr = rate * rule.lr_scale
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
            return torch.stack([_muon_step(matrix, self.products) for matrix in ahead])
        return _muon_step(ahead, self.products)

    def _bits(self, name: str, state: dict[str, Any], what: str, like: Tensor) -> Tensor:
        whole = [slice(0, size) for size in like.shape]
        purpose = f"{name}/{state['step']}/{what}"
        return random_bits(self.seed, purpose, whole, like.shape, like.bfloat16())


def _rounded(value: Tensor, bits: Tensor, kind: str) -> Tensor:
    if kind != "bfloat16":
        return value
    target = torch.empty_like(value, dtype=getattr(torch, kind))
    store(target, value, bits)
    return target.float()


def _muon_step(matrix: Tensor, products: torch.dtype) -> Tensor:
    """Return the step of a matrix, by its Gram matrix on the smaller side; products are of a type."""
    a, b, c = _COEFFICIENTS
    x = (matrix.double() / (matrix.double().norm() + _MUON_EPS)).to(products)
    one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for _ in range(_ITERATIONS):
        gram = x.mT @ x
        x = x @ (a * one + b * gram + c * gram @ gram)
    return (_MUON_SCALE * max(matrix.shape) ** 0.5 * x).to(matrix.dtype)


class RoundedWeights(torch.optim.Optimizer):
    """An optimizer's steps on weights of a coarser type. Wide parameters hold the coarse values."""

    def __init__(self, make: OptimizerFactory, dtype: torch.dtype, named: Named) -> None:
        self.pairs = [(name, p, nn.Parameter(p.detach().to(dtype))) for name, p in named]
        super().__init__([p for _, p, _ in self.pairs], {})
        self.inner = make([(name, rounded) for name, _, rounded in self.pairs])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the inner optimizer's step, and copy the weights that it left."""
        for _, wide, rounded in self.pairs:
            rounded.grad = None if wide.grad is None else wide.grad.to(rounded.dtype)
        self.inner.step()
        for _, wide, rounded in self.pairs:
            wide.copy_(rounded)
