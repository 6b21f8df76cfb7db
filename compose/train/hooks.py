"""Hooks: features around a run's steps that the trainer does not know by name."""

import gc
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from compose.checkpoint.rank_state import HasState
from compose.config.addons import provided
from compose.config.tables import Config
from compose.memory.compilation import graphs_compiled
from compose.ops.tensors import column_sums, gathered_objects, local_tensor, persistent_buffers
from compose.parallel.message_checks import MessageChecks
from compose.train import held_state
from compose.train.processes import TrainingError
from compose.train.readings import Reading

if TYPE_CHECKING:
    from compose.train.trainer import Trainer

_COLLECT_EVERY = 100  # steps between two collections of garbage


class Hook(HasState):
    """A feature around each step and at a run's ends; here its methods do nothing.

    All ranks make the same hooks, and call them in the same order. Steps are counted from 1. No
    hook holds the trainer: a cycle would keep a run's memory until garbage is collected.
    """

    def start(self, done: int) -> None:
        """Begin: the weights are there, and ``done`` steps were taken before."""

    def before_step(self, step: int) -> None:
        """Act before the step's batch is made; the time is not the step's."""

    def gradients_ready(self, step: int) -> None:
        """Act on the clipped gradients, before the step's numbers are read."""

    def see(self, reading: Reading, scale: float) -> None:
        """Take the numbers of the step, whose gradients were multiplied by ``scale``."""

    def before_update(self, step: int) -> None:
        """Act on the clipped gradients, which were read: nothing is waited for."""

    def after_update(self, step: int) -> None:
        """Act on the new weights."""

    def metrics(self) -> dict[str, Any]:
        """Return what metrics.jsonl gets of the step, by key."""
        return {}

    def after_step(self, step: int) -> None:
        """Act when the step is measured; the time is not the step's."""

    def measure(self, step: int) -> dict[str, Any]:
        """Return what metrics.jsonl gets of the weights after the step, by key; the time is not its."""
        return {}

    def finish(self) -> None:
        """End what goes over several steps, since none follows; before the last save."""

    def close(self, failed: bool) -> None:
        """Let go of files, threads and the like; other ranks may be gone if the run has ``failed``."""


def hooks_of(trainer: "Trainer") -> list[Hook]:
    """Return the hooks of a run, in the order in which they act; the add-ons' are among them."""
    # These modules import this one.
    from compose.train.noise_scale import NoiseScale
    from compose.train.rank_times import RankTimes
    from compose.train.samples import PromptSamples

    config = trainer.config
    wanted: dict[Callable[[Trainer], Hook], object] = {
        Offload: True,
        KeptBuffers: skips_steps(config),
        Versions: trainer.composition.late,
        Graphs: config.compile.mode != "off",
        ReplicaCheck: config.comm.check_every,
        NoiseScale: config.metrics.noise_scale,
        RankTimes: config.metrics.slow_rank or config.parallel.speeds == "measure",
        PromptSamples: config.metrics.samples_every,
    }
    results = [kind(trainer) for kind, is_wanted in wanted.items() if is_wanted]
    for _, hooks in provided("hooks"):
        results += hooks(trainer)
    if config.comm.check_messages:
        results.append(MessageCheck())
    if config.comm.check_state:  # the last to see what an update leaves, the outer one of islands too
        results.append(StateCheck(trainer))
    return [*results, Garbage()]


def skips_steps(config: Config) -> bool:
    """Return whether a step whose numbers are not finite may be skipped."""
    return config.train.skip_nonfinite or config.precision.param == "float16"


class KeptBuffers(Hook):
    """Puts buffers back that a skipped step has changed: routers act in forward_backward."""

    def __init__(self, trainer: "Trainer") -> None:
        self.buffers = [local_tensor(b) for b in persistent_buffers(trainer.composition.model).values()]
        self.kept: list[Tensor] = []

    def before_step(self, step: int) -> None:
        """Copy them."""
        self.kept = [buffer.clone() for buffer in self.buffers]

    def see(self, reading: Reading, scale: float) -> None:
        """Put them back if the step is not taken."""
        if reading.problem:
            for buffer, kept in zip(self.buffers, self.kept, strict=True):
                buffer.copy_(kept)


class Graphs(Hook):
    """Reports how many graphs torch.compile has made.

    It says so when a graph is compiled after the first two steps, since shapes or types have changed.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.say, self.steps, self.known = trainer.worker.say, 0, 0

    def metrics(self) -> dict[str, Any]:
        """Return ``recompiles``."""
        before, self.known = self.known, graphs_compiled()
        self.steps += 1
        if self.steps > 2 and self.known > before:
            self.say(
                f"torch.compile compiled {self.known - before} more graphs, {self.known} in all:"
                " TORCH_LOGS=recompiles tells why"
            )
        return {"recompiles": self.known}


class Versions(Hook):
    """Keeps, in checkpoints, the versions of weights of a pipeline without a flush."""

    def __init__(self, trainer: "Trainer") -> None:
        self.runner: Any = trainer.composition.pipeline

    def state(self) -> dict[str, Tensor]:
        """Return the versions that batches in flight use."""
        return {f"version.{name}": tensor for name, tensor in self.runner.stashed().items()}

    def load(self, state: dict[str, Tensor], read: Collection[str], step: int) -> None:
        """Go on with them; without any the pipeline is empty."""
        names = [name for name in state if name.startswith("version.")]
        self.runner.restore({name.removeprefix("version."): state.pop(name) for name in names})


class Offload(Hook):
    """Reports what the optimizer and activations move off the device, and removes their files."""

    def __init__(self, trainer: "Trainer") -> None:
        self.optimizer: Any = trainer.optimizer if trainer.config.optimizer.offload != "none" else None
        self.activations = trainer.composition.activations

    def metrics(self) -> dict[str, Any]:
        """Return the bytes copied off the device and back in this step, and the seconds waited."""
        moved = self.optimizer.metrics() if self.optimizer else {}
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
        if step % self.every == 0:
            self.before_save(step)

    def before_save(self, step: int) -> None:
        """Raise TrainingError before a save if copies differ: a restart reads one of them for all."""
        if result := held_state.replica_mismatches(self.composition, self.optimizer):
            raise _corruption(step, result)


def _corruption(step: int, lines: Sequence[str]) -> TrainingError:
    return TrainingError(
        f"step {step}: {'; '.join(lines)}: silent corruption; the last checkpoint is older; test these"
        " machines"
    )


def _stop_if_any(step: int, found: Tensor, lines: Callable[[], list[str]]) -> None:
    """Raise TrainingError on every rank, with the ``lines`` of all, if one has found corruption."""
    result = found.int()
    dist.all_reduce(result, dist.ReduceOp.MAX)
    if result.item():  # the one read of a check
        raise _corruption(step, [line for of_rank in gathered_objects(lines()) for line in of_rank])


class MessageCheck(Hook):
    """Compares what each rank has received in a step with what was sent (``comm.check_messages``)."""

    messages: MessageChecks

    def start(self, done: int) -> None:
        """Look at messages from now on."""
        self.messages = MessageChecks()

    def before_update(self, step: int) -> None:
        """Raise TrainingError if a message was not received as it was sent."""
        lines = self.messages.problems()
        _stop_if_any(step, torch.tensor(bool(lines)), lambda: lines)

    def before_save(self, step: int) -> None:
        """Raise TrainingError before a save if a message of the update was not received as sent."""
        self.before_update(step)

    def close(self, failed: bool) -> None:
        """Look at messages no longer."""
        self.messages.close()


class StateCheck(Hook):
    """Compares bytes with those that were written last, on each rank alone (``comm.check_state``).

    Weights and the optimizer's state are written by an update, gradients by clipping, and buffers by an
    update or in backward, by routers.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.composition, self.optimizer = trainer.composition, trainer.optimizer
        self.kept: dict[str, Tensor] = {}
        self.buffers: tuple[list[str], Tensor] = ([], torch.zeros(0, dtype=torch.bool))

    def start(self, done: int) -> None:
        """Note what the run begins with."""
        # Listing them takes as long as the sums of a small model.
        self.parameters = list(self.composition.named_parameters())
        self.after_update(done)

    def after_update(self, step: int) -> None:
        """Note what the update leaves."""
        self.kept |= {kind: self._sums(kind)[1] for kind in ("state", "buffer")}

    def before_step(self, step: int) -> None:
        """Look at buffers, before routers change them."""
        self.buffers = self._changed("buffer")

    def gradients_ready(self, step: int) -> None:
        """Note the gradients."""
        self.kept["gradient"] = self._sums("gradient")[1]

    def before_update(self, step: int) -> None:
        """Raise TrainingError before an update, if a bit of what it reads has changed."""
        self._stop(step, self._changed("state"), self._changed("gradient"), self.buffers)

    def before_save(self, step: int) -> None:
        """Raise TrainingError before a save, if a bit of it has changed."""
        self._stop(step, self._changed("state"), self._changed("buffer"))

    @torch.no_grad()
    def _sums(self, kind: str) -> tuple[list[str], Tensor]:
        if kind == "buffer":
            named = list(held_state.buffers_of(self.composition.model))
        elif kind == "gradient":
            named = list(held_state.gradients_of(self.parameters))
        else:
            named = list(held_state.weights_and_state(self.parameters, self.optimizer, steps=True))
        names = [name for name, _, _ in named]
        device = self.composition.mesh.device_type
        sums = [column_sums(local_tensor(tensor)).to(device) for *_, tensor in named]
        return names, torch.cat(sums) if sums else torch.zeros(0, 1)

    def _changed(self, kind: str) -> tuple[list[str], Tensor]:
        names, sums = self._sums(kind)
        return names, (sums != self.kept[kind]).any(1)

    def _stop(self, step: int, *results: tuple[list[str], Tensor]) -> None:
        device = self.composition.mesh.device_type
        changed = torch.cat([result.to(device) for _, result in results])

        def lines() -> list[str]:
            names = [name for result, _ in results for name in result]
            wrong = [name for name, bad in zip(names, changed.tolist(), strict=True) if bad]
            if not wrong:
                return []
            return [f"rank {dist.get_rank()}: {held_state.first_of(wrong)} is not what was written"]

        _stop_if_any(step, changed.any(), lines)


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
