"""The learning rate as a function of the step."""

import math

import torch

from compose.optimizer.options import Optimizer


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
    """Give every parameter group the learning rate ``lr``, times the group's own ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
