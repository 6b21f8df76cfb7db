"""The hook of a DiLoCo worker: the outer loop after each step, and its state in checkpoints."""

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.profiler import record_function

from compose.checkpoint.state import LocalShard, local_shard_of
from compose.diloco.loop import OuterLoop
from compose.parallel.islands import current
from compose.parallel.processes import start_timeout
from compose.train.hooks import Hook

if TYPE_CHECKING:
    from compose.train.trainer import Trainer

_PREFIX = "outer."


class DiLoCo(Hook):
    """The outer loop of a run on several workers."""

    def __init__(self, trainer: "Trainer") -> None:
        options, job = trainer.config.outer, trainer.job
        layers, timeout = job.resolved.checkpoint, start_timeout(trainer.config.comm)
        self.loop = OuterLoop(options, trainer.composition, layers, current(), timeout)
        self.last = trainer.config.train.steps
        # Messages of an earlier version had other parts of parameters than rows.
        self.fingerprint = (asdict(options), *(("rows",) if options.fragments else ()))

    def start(self, done: int) -> None:
        """Let the outer weights be those of the model, unless they were loaded."""
        if not self.loop.started:
            self.loop.start()

    def after_update(self, step: int) -> None:
        """Begin and end the exchanges that are due."""
        with record_function("compose::outer"):
            self.loop.after_step(step, self.last)

    def metrics(self) -> dict[str, Any]:
        """Return what the step has sent and received."""
        return {"outer": self.loop.metrics()}

    def tensors(self) -> dict[str, LocalShard]:
        """Return this rank's part of the outer weights and their momentum, by name."""
        return {
            name: replace(local_shard_of(parameter), local=value)
            for name, (parameter, value) in self.loop.tensors().items()
        }

    def state(self) -> dict[str, Tensor] | None:
        """Return messages on their way and residuals; waits for messages."""
        if not self.loop.keeps:
            return None
        return {f"{_PREFIX}{name}": value for name, value in self.loop.state().items()}

    def load(self, state: dict[str, Tensor], read: Collection[str], step: int) -> None:
        """Go on with outer weights that were read; others begin as the model's."""
        self.loop.start(read)
        own = [name for name in state if name.startswith(_PREFIX)] if self.loop.keeps else []
        self.loop.restore({name.removeprefix(_PREFIX): state.pop(name) for name in own}, step)

    def close(self, failed: bool) -> None:
        """Wait until other workers have read all messages; after an error some may be gone."""
        if not failed:
            self.loop.close()
