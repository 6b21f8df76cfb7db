"""The learning rate as a function of the step."""

import math

import torch

from compose.optim.options import Optimizer


def learning_rate(step: int, steps: int, options: Optimizer) -> float:
    """Return the learning rate of one step.

    It rises linearly to ``lr`` at step ``warmup``. Then it follows a half cosine (Loshchilov and Hutter
    2017, arXiv:1608.03983) or a line down to ``min_lr * lr`` at the end. Or it stays constant and falls
    linearly over the last ``decay`` steps.

    Args:
        step: The step, from 0.
        steps: All steps of the schedule.
        options: The table [optimizer].

    Returns:
        The learning rate.
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


def short_of_warmup(steps: int, options: Optimizer) -> str:
    """Return a note if the steps end within warmup, so that the rate never reaches ``lr``.

    Args:
        steps: All steps of the schedule.
        options: The table [optimizer].

    Returns:
        The note; empty if the rate reaches ``lr``.
    """
    if steps > options.warmup:
        return ""
    last = learning_rate(steps - 1, steps, options)
    return (
        f"optimizer.warmup = {options.warmup} is not over after train.steps = {steps}: the learning"
        f" rate ends at {last:.3g} and never reaches optimizer.lr = {options.lr:g}"
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate ``lr``, times the group's own ``lr_scale``.

    Args:
        optimizer: The optimizer.
        lr: The learning rate.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
