"""All that a composition sends in fewer bytes: its steps, and what it keeps between them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from compose.comm.exchange import Traffic
from compose.comm.gathers import DifferenceGather
from compose.comm.options import Comm
from compose.comm.units import Units


class Compression:
    """The coded messages of a composition. Each stage has its own Units."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.traffic = comm, Traffic()
        self.stages: list[Units] = []

    def stage(self) -> Units:
        """Return the units of a new stage."""
        self.stages.append(Units(self.comm, self.traffic))
        return self.stages[-1]

    def open_accounts(self) -> None:
        """Note from now on what messages lose, and begin a step; a proof calls it before each."""
        for units in self.stages:
            units.open_accounts()

    @contextmanager
    def optimizer_step(self, scale: float) -> Iterator[None]:
        """Let gradients be those of one optimizer step; weights must not change inside.

        Args:
            scale: The loss scale of the gradients.
        """
        for units in self.stages:
            units.moment.scale = scale
        differences = [
            unit.gather
            for units in self.stages
            for unit in units.units
            if isinstance(unit.gather, DifferenceGather)
        ]
        for gather in differences:
            gather.begin()
        try:
            yield
        finally:
            for gather in differences:
                gather.end()
        for units in self.stages:
            units.moment.step += 1

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on, by name: remainders, factors and what was sent last."""
        found: dict[str, Tensor] = {}
        for units in self.stages:
            found["step"] = torch.tensor(units.moment.step)
            for unit in units.units:
                parts = {**({"gather": unit.gather} if unit.gather else {}), **unit.reductions}
                for kind, part in parts.items():
                    for name, value in part.state().items():
                        found[f"{unit.cut.names[0]}.{kind}.{name}"] = value
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned."""
        for units in self.stages:
            units.moment.step = int(state["step"])
            for unit in units.units:
                parts = {**({"gather": unit.gather} if unit.gather else {}), **unit.reductions}
                for kind, part in parts.items():
                    begin = f"{unit.cut.names[0]}.{kind}."
                    part.restore(
                        {k.removeprefix(begin): v for k, v in state.items() if k.startswith(begin)}
                    )
