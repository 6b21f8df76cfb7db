"""The numbers that the host must know before the weights change, read from the device at once.

On a GPU the host gives work to the device ahead of time, and a read waits until the device has done all
of it. So a step has one read: after clipping, and before the optimizer's step, which a loss or gradient
that is not finite must not reach. From there on the host is ahead again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """The numbers of a step, the same on every rank."""

    loss: float
    """The mean loss."""
    norm: float
    """The norm of the gradients, before clipping."""
    z_loss: float | None
    """The z-loss, if there is one."""
    said: tuple[int, ...]
    """The greatest of all ranks, for each number that ranks say."""


def read_step(loss: Tensor, norm: Tensor, z_loss: Tensor | None, said: Sequence[int]) -> Reading:
    """Read the numbers of a step; a collective.

    Args:
        loss: The mean loss, a scalar.
        norm: The norm of the gradients, a scalar on the device.
        z_loss: The z-loss, if there is one.
        said: Numbers that this rank says, such as the code of a signal.

    Returns:
        The numbers.
    """
    # A fill takes its value along. A tensor made of a list would be copied, and waited for.
    words = torch.stack([torch.full((), float(word), device=norm.device) for word in said])
    if dist.get_world_size() > 1:
        dist.all_reduce(words, dist.ReduceOp.MAX)
    found = [loss, norm, *([] if z_loss is None else [z_loss])]
    wide = torch.stack([each.to(norm.device, torch.float64) for each in found])
    numbers = torch.cat([wide, words.double()]).tolist()
    rest = tuple(map(int, numbers[len(found) :]))
    return Reading(numbers[0], numbers[1], None if z_loss is None else numbers[2], rest)


class StepClock:
    """Measures steps from one reading to the next, without what goes on between two steps.

    The device may still be in the optimizer's step when the host ends a step. Then that time is in the
    next reading's.
    """

    def __init__(self) -> None:
        self.since = self.left = time.perf_counter()

    def begin(self) -> None:
        """Note that a step begins."""
        self.since += time.perf_counter() - self.left

    def read(self) -> float:
        """Return the seconds since the last reading."""
        before, self.since = self.since, time.perf_counter()
        return self.since - before

    def end(self) -> None:
        """Note that a step ends."""
        self.left = time.perf_counter()
