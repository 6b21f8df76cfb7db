"""What happens beside a run's steps: a feature that the trainer does not know by name is a hook."""

import gc
from typing import TYPE_CHECKING, Any

from compose.checkpoint.state import HasState
from compose.config.addons import brought
from compose.memory.compilation import GraphCount
from compose.train.processes import TrainingError
from compose.train.replica_check import replica_mismatches

if TYPE_CHECKING:
    from compose.train.trainer import Trainer

_COLLECT_EVERY = 100  # steps between two collections of garbage


class Hook(HasState):
    """What a feature does around each step and at a run's ends; here it is nothing.

    All ranks make the same hooks, and call them alike. Steps are counted from 1. What a checkpoint
    saves of a hook is in :class:`HasState`. No hook holds the trainer: a cycle would keep a run's
    memory until garbage is collected.
    """

    def start(self, done: int) -> None:
        """Begin: the weights are there, and ``done`` steps were taken before."""

    def before_step(self, step: int) -> None:
        """Act before the step's batch is made; the time is not the step's."""

    def before_update(self, step: int) -> None:
        """Act on the clipped gradients, which were read: nothing is waited for."""

    def after_update(self, step: int) -> None:
        """Act on the new weights."""

    def metrics(self) -> dict[str, Any]:
        """Return what metrics.jsonl gets of the step, by key."""
        return {}

    def after_step(self, step: int) -> None:
        """Act when the step is measured; the time is not the step's."""

    def finish(self) -> None:
        """End what goes over several steps, since none follows; before the last save."""

    def close(self, failed: bool) -> None:
        """Let go of files, threads and the like; other ranks may be gone if the run has ``failed``."""


def hooks_of(trainer: "Trainer") -> list[Hook]:
    """Return the hooks of a run, in the order in which they act; the add-ons' are among them."""
    config = trainer.config
    found: list[Hook] = [Graphs(trainer), Offload(trainer)]
    if config.comm.check_every:
        found.append(ReplicaCheck(trainer))
    for _, hooks in brought("hooks"):
        found += hooks(trainer)
    return [*found, Garbage()]


class Graphs(Hook):
    """Reports how many graphs torch.compile has made."""

    def __init__(self, trainer: "Trainer") -> None:
        self.worker, self.count = trainer.worker, GraphCount(trainer.config.compile.mode)

    def metrics(self) -> dict[str, Any]:
        """Return ``recompiles``; nothing without a compiler."""
        graphs = self.count.after_step(self.worker.say)
        return {} if graphs is None else {"recompiles": graphs}


class Offload(Hook):
    """Reports what the optimizer and activations move off the device, and removes their files."""

    def __init__(self, trainer: "Trainer") -> None:
        self.optimizer: Any = trainer.optimizer if trainer.config.optimizer.offload != "none" else None
        self.activations = trainer.composition.activations

    def metrics(self) -> dict[str, Any]:
        """Return the bytes copied off the device and back in this step, and the seconds waited."""
        moved = self.optimizer.metrics if self.optimizer else {}
        return {"offload": moved | (self.activations.metrics() if self.activations else {})}

    def close(self, failed: bool) -> None:
        """Remove the optimizer's files."""
        if self.optimizer:
            self.optimizer.close()


class ReplicaCheck(Hook):
    """Compares copies on several ranks, bit by bit, every ``comm.check_every`` steps."""

    def __init__(self, trainer: "Trainer") -> None:
        self.composition, self.optimizer = trainer.composition, trainer.optimizer
        self.every = trainer.config.comm.check_every

    def before_update(self, step: int) -> None:
        """Raise TrainingError if ranks' copies differ."""
        if step % self.every == 0 and (found := replica_mismatches(self.composition, self.optimizer)):
            raise TrainingError(
                f"step {step}: {'; '.join(found)}: silent corruption; the last checkpoint is"
                " of before, and these machines want a test"
            )


class Garbage(Hook):
    """Collects garbage between steps only; else ranks would stop for it at different moments."""

    def before_step(self, step: int) -> None:
        """Stop collection at other times."""
        if gc.isenabled():
            gc.collect()
            gc.disable()

    def after_step(self, step: int) -> None:
        """Collect after some steps."""
        if step % _COLLECT_EVERY == 0:
            gc.collect()

    def close(self, failed: bool) -> None:
        """Collect at any time again."""
        gc.enable()
