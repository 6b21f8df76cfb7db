"""The numbers of a step, which all ranks read at once, and the time that steps take."""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from compose.composition import Composition
from compose.parallel.mesh import axis_size


@dataclass(frozen=True)
class Reading:
    """The numbers of a step, the same on every rank."""

    loss: float
    """The mean loss."""
    norm: float
    """The norm of the gradients, before clipping."""
    z_loss: float | None
    """The z-loss, if there is one."""
    flags: tuple[int, ...]
    """The greatest of all ranks, for each number that ranks say."""

    @property
    def problem(self) -> str:
        """Say which number is not finite; empty if none is."""
        named = {"loss": self.loss, "gradient norm": self.norm}
        wrong = [f"the {name} is {value}" for name, value in named.items() if not math.isfinite(value)]
        return wrong[0] if wrong else ""


def read_step(loss: Tensor, norm: Tensor, z_loss: Tensor | None, flags: Sequence[int]) -> Reading:
    """Read the numbers of a step from the device at once; a collective.

    A read waits until the device has done all its work. So a step has one read: after clipping, and
    before the optimizer's step, which a loss or gradient that is not finite must not reach. ``flags``
    are numbers that this rank says, such as the code of a signal.
    """
    # A fill takes its value along. A tensor made of a list would be copied, and waited for.
    words = torch.stack([torch.full((), float(word), device=norm.device) for word in flags])
    if dist.get_world_size() > 1:
        dist.all_reduce(words, dist.ReduceOp.MAX)
    results = [loss, norm, *([] if z_loss is None else [z_loss])]
    wide = torch.stack([each.to(norm.device, torch.float64) for each in results])
    numbers = torch.cat([wide, words.double()]).tolist()
    rest = tuple(map(int, numbers[len(results) :]))
    return Reading(numbers[0], numbers[1], None if z_loss is None else numbers[2], rest)


class Readings:
    """Reads the numbers of a run's steps: each at its end, or ``composition.late`` steps later.

    In a late reading no stage of the pipeline waits for another. The numbers are sums over stages then.
    """

    def __init__(self, composition: Composition) -> None:
        self.late, mesh = composition.late, composition.mesh
        self.stage = mesh.size() // axis_size(mesh, "pp")
        """The ranks of one stage."""
        self.begun: deque[tuple[list[Tensor], dist.Work | None]] = deque()

    def read(
        self, loss: Tensor, norm: Tensor, z_loss: Tensor | None, flags: Sequence[int]
    ) -> Reading | None:
        """Take the numbers of a step, as :func:`read_step`; return the reading that is due, if any."""
        if not self.late:
            return read_step(loss, norm, z_loss, flags)
        words = [torch.full((), float(word), device=norm.device) for word in flags]
        mine = torch.stack([each.double() for each in (loss, norm.square(), *words)])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        self.begun.append((everyone, dist.all_gather(everyone, mine, async_op=True)))
        return self._oldest() if len(self.begun) > self.late else None

    def rest(self) -> Iterator[Reading]:
        """Yield the readings of the steps that were not read; now stages wait for one another."""
        while self.begun:
            yield self._oldest()

    def _oldest(self) -> Reading:
        everyone, work = self.begun.popleft()
        if work is not None:
            work.wait()
        rows = torch.stack(everyone).tolist()
        # All ranks of a stage have the same numbers.
        losses, squares = ([row[i] for row in rows[:: self.stage]] for i in (0, 1))
        flags = tuple(int(max(row[i] for row in rows)) for i in range(2, len(rows[0])))
        return Reading(sum(losses), sum(squares) ** 0.5, None, flags)


class StepClock:
    """Measures steps from one reading to the next, without what goes on between two steps."""

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
