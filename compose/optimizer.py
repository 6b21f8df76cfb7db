"""AdamW and the learning rate as a function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from compose.config import Optimizer


def build_optimizer(parameters: Iterable[nn.Parameter], options: Optimizer) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused, decay on matrices only."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )


def learning_rate(step: int, steps: int, options: Optimizer) -> float:
    """Learning rate of step ``step`` (from 0) of ``steps``.

    Linear warmup to ``lr`` at step ``warmup``; then a half cosine (Loshchilov and Hutter 2017,
    arXiv:1608.03983) or a line down to ``min_lr * lr`` at the end, or constant with a line down over
    the last ``decay`` steps.
    """
    if step < options.warmup:
        return options.lr * (step + 1) / (options.warmup + 1)
    start = options.warmup
    if options.schedule == "constant":
        start = max(start, steps - options.decay)
    progress = max(0.0, (step - start) / max(1, steps - start))
    cosine = options.schedule == "cosine"
    remaining = (1 + math.cos(math.pi * progress)) / 2 if cosine else 1 - progress
    return options.lr * (options.min_lr + (1 - options.min_lr) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate ``lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr
