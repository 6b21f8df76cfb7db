"""AdamW and the learning rate as a function of the step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from compose.config import Optimizer


def build_optimizer(parameters: Iterable[nn.Parameter], options: Optimizer) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused, decay on matrices only."""
    # The fused step takes a list of DTensors on one mesh; experts are on another.
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": options.weight_decay if matrices else 0.0}
            for (matrices, _), group in groups.items()
        ],
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
