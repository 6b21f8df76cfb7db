"""All that a composition sends in fewer bytes: its steps, and what it keeps between them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.activations import Activations
from compose.compression.exchange import Traffic
from compose.compression.forms import check
from compose.compression.gathers import DifferenceGather
from compose.compression.row_codes import RowCode
from compose.compression.units import Units
from compose.ops.tensors import local_tensor
from compose.parallel.comm import Comm


class Compression:
    """The coded messages of a composition. Each stage has its own Units if data parallel codes."""

    def __init__(self, comm: Comm, device: str) -> None:
        """Take the table, and the type of this rank's device."""
        self.comm, self.device, self.traffic = comm, device, Traffic()
        self.stages: list[Units] = []
        self.activations: Activations | None = None
        if comm.activations != "off":
            self.activations = Activations(RowCode(comm.activations, comm.block), self.traffic)
        self.alike: float | None = None

    def stage(self) -> Units:
        """Return the units of a new stage."""
        self.stages.append(Units(self.comm, self.traffic))
        return self.stages[-1]

    def open_accounts(self, opened: bool = True) -> None:
        """Note from now on what messages lose, and begin a step; or note nothing any more."""
        for units in self.stages:
            units.open_accounts(opened)

    @contextmanager
    def optimizer_step(self, scale: float) -> Iterator[None]:
        """Let gradients be those of one optimizer step; weights must not change inside."""
        every, self.alike = self.comm.measure_every, None
        # A proof's accounts are open already, and it reads them after the step.
        measures = every > 0 and any(not s.proving and s.moment.step % every == 0 for s in self.stages)
        if measures:
            self.open_accounts()
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
        if measures:
            self.alike = self._cosine()
            self.open_accounts(False)
        for units in self.stages:
            units.moment.step += 1

    def _cosine(self) -> float:
        """Return the cosine between the gradients and those of plain messages; a collective."""
        sums = torch.zeros(3, dtype=torch.float64)
        for units in self.stages:
            for unit in units.units:
                missing = unit.missing()
                for name, piece in unit.pieces(missing, True) if missing is not None else ():
                    assert units.module is not None
                    gradient = units.module.get_parameter(name).grad
                    assert gradient is not None
                    sent = local_tensor(gradient).double()
                    true = sent + piece[tuple(slice(size) for size in sent.shape)].to(sent.device)
                    pairs = ((sent, true), (sent, sent), (true, true))
                    sums += torch.stack([(a * b).sum() for a, b in pairs]).cpu()
        sums = sums.to(self.device)
        dist.all_reduce(sums)
        both, sent_square, true_square = sums.tolist()
        return both / max((sent_square * true_square) ** 0.5, 1e-300)

    def metrics(self) -> dict[str, float]:
        """Return what this rank has sent since the last call, for metrics.jsonl.

        Bytes of weights and gradients to near and far ranks, and of activations over tp and ep;
        ``ratio``, these over what plain messages would be; ``feedback_norm``, the norm of what was lost
        and will be sent; and, if it was measured in this step, ``cosine`` of the gradients and those of
        plain messages.
        """
        sent = self.traffic.take()
        plain = sum(size for (_, level), size in sent.items() if level == "plain")
        found: dict[str, float] = {
            f"{purpose}_{level}": size for (purpose, level), size in sent.items() if level != "plain"
        }
        if plain:
            found["ratio"] = sum(found.values()) / plain
        remainders = [
            feedback.norm()
            for units in self.stages
            for unit in units.units
            for reduction in unit.reductions.values()
            if (feedback := getattr(reduction, "feedback", None)) is not None
        ]
        if remainders:
            found["feedback_norm"] = float(torch.stack(remainders).norm())
        return found | ({} if self.alike is None else {"cosine": self.alike})

    def begin_at(self, step: int) -> None:
        """Note how many optimizer steps a run has taken."""
        for units in self.stages:
            units.moment.step = step

    def state(self) -> dict[str, Tensor]:
        """Return what the next step depends on, by name: remainders, factors and what was sent last."""
        return {
            f"{number}.{name}": value
            for number, units in enumerate(self.stages)
            for name, value in units.state().items()
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned. Raises ConfigError for anything else."""
        stages = tuple(f"{number}." for number, _ in enumerate(self.stages))
        check({name: v for name, v in state.items() if not name.startswith(stages)}, {})
        for begin, units in zip(stages, self.stages, strict=True):
            units.restore({k.removeprefix(begin): v for k, v in state.items() if k.startswith(begin)})
