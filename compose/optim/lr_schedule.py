"""The learning rate as a function of the step."""

import math
from collections.abc import Callable, Iterator

import torch

from compose.optim.optimizers import Optimizer

Schedule = Callable[[int, int, Optimizer], float]
"""Returns the remaining part of the learning rate, 1 to 0, in a step after warmup, of all steps."""


def cosine(step: int, steps: int, options: Optimizer) -> float:
    """Half a cosine from the end of warmup (Loshchilov and Hutter 2017, arXiv:1608.03983)."""
    return (1 + math.cos(math.pi * _progress(step, steps, options))) / 2


def linear(step: int, steps: int, options: Optimizer) -> float:
    """A line from the end of warmup."""
    return 1 - _progress(step, steps, options)


def constant(step: int, steps: int, options: Optimizer) -> float:
    """The highest rate, and a line over the last ``decay`` steps."""
    return linear(step, steps, options) if options.decay else 1.0


def _progress(step: int, steps: int, options: Optimizer) -> float:
    """Return how far the decay has come, 0 to 1."""
    start = max(options.warmup, steps - options.decay) if options.decay else options.warmup
    return min(max(0.0, (step - start) / max(1, steps - start)), 1.0)


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "linear": linear, "constant": constant}


def learning_rate(step: int, steps: int, options: Optimizer) -> float:
    """Return the learning rate of one step, from 0, of all ``steps``.

    It rises linearly from 0 at step ``warmup_from`` to ``lr`` at step ``warmup``, then follows the
    schedule to ``min_lr * lr`` at step ``decay_end``, or ``steps``.
    """
    if step < options.warmup:
        begun = max(0, step - options.warmup_from)
        return options.lr * begun / max(1, options.warmup - options.warmup_from)
    remaining = SCHEDULES[options.schedule](step, options.decay_end or steps, options)
    return options.lr * (options.min_lr + (1 - options.min_lr) * remaining)


def rate_problems(options: Optimizer) -> Iterator[str]:
    """Yield a line for each key by which the rate would not rise, or would fall in one step."""
    start, warmup, end = options.warmup_from, options.warmup, options.decay_end
    if start >= warmup:
        why = (
            "which leaves a learning rate of 0 in all of warmup" if warmup else "where nothing reads it"
        )
        yield (
            f"optimizer.warmup_from: {start} is not below optimizer.warmup = {warmup}, {why}; nearest:"
            f" {warmup - 1}"
        )
    if 0 < end <= warmup:
        yield (
            f"optimizer.decay_end: {end} is not above optimizer.warmup = {warmup}, and the learning"
            f" rate would fall in one step; nearest: {warmup + 1}, or 0 for train.steps"
        )


def short_of_warmup(steps: int, options: Optimizer) -> str:
    """Return a note if all steps are within warmup, so that the rate never reaches ``lr``."""
    if steps > options.warmup:
        return ""
    last = learning_rate(steps - 1, steps, options)
    return (
        f"optimizer.warmup = {options.warmup} is not over after train.steps = {steps}: the learning"
        f" rate ends at {last:.3g} and never reaches optimizer.lr = {options.lr:g}"
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate ``lr``, times the group's own ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
