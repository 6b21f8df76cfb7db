"""The reference of a preference loss: the model as the run began, and its forward in every step.

With adapters it is the run's own model without them, and needs no memory. Else it is a frozen copy, cut
over the same mesh in the same way. Neither is in a checkpoint: both are made again of the weights that
the run began with, whose digest is kept in the run's folder.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.build import build
from compose.checkpoint import store
from compose.checkpoint.peft import WEIGHTS, base_identity, digest_of, name_of_base
from compose.checkpoint.safetensors_files import TensorFiles
from compose.composition import Composition
from compose.config.job import Job
from compose.config.tables import Config
from compose.errors import ConfigError, or_say, write_whole
from compose.object_storage import as_path
from compose.ops.tensors import on_first_rank
from compose.parallel.lora_parallel import Adapter
from compose.preference.pairs import PairLoss, log_probabilities
from compose.train.evaluate import forward
from compose.train.hooks import Hook
from compose.train.readings import Reading

if TYPE_CHECKING:
    from compose.train.held_state import PlacedParameter
    from compose.train.trainer import Trainer

KEPT = "reference.txt"
"""The file in run.dir that says which weights the reference has."""
_ADAPTERS = ", adapters "  # comes before the digest of those that were loaded, if there are any


@dataclass(frozen=True)
class ReferenceForward:
    """The second forward of a preference loss."""

    copy: Composition | None
    """The frozen copy; None is the run's own model without its adapters."""

    def __call__(
        self, composition: Composition, batch: Mapping[str, Any], micro_batch: int | None
    ) -> Tensor:
        """Return the targets (B, L, 3) of a local batch with the reference's log-probabilities.

        In a pipeline the rank of the last stage alone has them.
        """
        targets, parts = batch["targets"], list[Tensor]()

        def note(output: Tensor, part: Mapping[str, Tensor]) -> None:
            parts.append(log_probabilities(output, part["targets"]))

        with without_adapters(composition) if self.copy is None else nullcontext():
            forward(self.copy or composition, batch, micro_batch=micro_batch, each=note)
        if not parts:
            return targets
        known = torch.cat(parts).to(targets).where(targets[..., 2].isfinite(), torch.nan)
        return torch.stack([targets[..., 0], targets[..., 1], known], -1)


def needs_copy(config: Config) -> bool:
    """Return whether the weights that a run begins with are more than those that are frozen."""
    return not config.model.lora.rank or bool(config.model.lora.load)


def reference_of(job: Job, mesh: DeviceMesh, device: torch.device) -> ReferenceForward:
    """Return the reference of a job, with the weights that a new run begins with; a collective."""
    if not needs_copy(job.config):
        return ReferenceForward(None)
    frozen = copy.deepcopy(job.model).requires_grad_(False)
    comm = replace(job.config.comm, weights="off", gradients="off", activations="off")
    options = replace(job.options, comm=comm)
    return ReferenceForward(build(replace(job, model=frozen), mesh, device, options))


def as_line(job: Job, stages: Sequence[Sequence["PlacedParameter"]]) -> str:
    """Return what the reference takes on the rank that holds most, of the parameters of all stages."""
    if not needs_copy(job.config):
        return "reference: the model without its adapters; a second forward in each step"
    width = job.config.precision.param_dtype.itemsize

    def held(p: "PlacedParameter") -> int:
        """Return the bytes of a parameter in the copy, which a frozen one has already."""
        return math.prod(p.local_shape) * width if p.trained else p.local_bytes

    most = max(sum(map(held, stage)) for stage in stages)
    return f"reference: a frozen copy, {most:,} bytes per rank; a second forward in each step"


@contextmanager
def without_adapters(composition: Composition) -> Iterator[None]:
    """Let a composition compute without its adapters meanwhile."""
    stages = composition.pipeline.stages if composition.pipeline else ()
    whole = [composition.model, *(stage.module for stage in stages)]
    adapters = [each for one in whole for each in one.modules() if isinstance(each, Adapter)]
    for each in adapters:
        each.off = True
    try:
        yield
    finally:
        for each in adapters:
            each.off = False


class Preferences(Hook):
    """Gives the run's loss its reference, and reports the rewards of each step."""

    def __init__(self, trainer: "Trainer") -> None:
        assert isinstance(trainer.loss, PairLoss)
        self.loss, self.mesh = trainer.loss, trainer.mesh
        self.loss.reference = reference_of(trainer.job, trainer.mesh, trainer.device)
        config, self.path = trainer.config, trainer.run_folder.place / KEPT
        self.speaks = trainer.worker.speaks
        self.where = config.checkpoint.load_hf, config.train.seed
        self.adapters, self.copied = config.model.lora.load, needs_copy(config)
        self.rewards: dict[str, float] = {}

    def start(self, done: int) -> None:
        """Note the reference's weights; raise ConfigError if the run began with others."""
        on_first_rank(lambda: self._note(done) if self.speaks else None)

    def _note(self, done: int) -> None:
        own = base_identity(*self.where)
        if self.adapters:
            own += f"{_ADAPTERS}{digest_of(TensorFiles(as_path(self.adapters), WEIGHTS))}"
        imported = store.sent(self.path.parent / "checkpoints") if not done else []
        if imported and self.copied and not self._is_of(imported[0]):
            raise ConfigError(
                f"{imported[0]}: has the weights that the run begins with, and its reference would"
                " have others; set checkpoint.load_hf to the folder that they were imported from"
            )
        if not done:
            write_whole(self.path, own.encode())
        elif (kept := _read(self.path)) != own:
            raise ConfigError(f"{self.path.parent}: {_why(kept, own, self.where, self.adapters)}")

    def _is_of(self, imported: Path) -> bool:
        """Return whether a checkpoint was imported from ``checkpoint.load_hf``."""
        folder, known = self.where[0], store.read_state(imported).hugging_face
        return bool(folder and known) and str(as_path(folder).resolve()) == known

    def see(self, reading: Reading, scale: float) -> None:
        """Take the rewards of the step; a collective."""
        chosen, rejected, right, pairs = self.loss.take_rewards(self.mesh).tolist()
        pairs = pairs or 1.0
        self.rewards = {
            "chosen": chosen / pairs,
            "rejected": rejected / pairs,
            "margin": (chosen - rejected) / pairs,
            "accuracy": right / pairs,
        }

    def metrics(self) -> dict[str, Any]:
        """Return ``rewards``."""
        return {"rewards": self.rewards}


def _read(path: Path) -> str:
    with or_say(str(path)):
        try:
            return path.read_text()
        except (FileNotFoundError, ValueError):
            return ""


def _why(kept: str, own: str, where: tuple[str, int], adapters: str) -> str:
    if not kept:
        return f"its run was no DPO, or {KEPT} is gone; begin a new run.dir, with checkpoint.load_hf"
    if kept.partition(_ADAPTERS)[0] == own.partition(_ADAPTERS)[0]:
        key = f'model.lora.load = "{adapters}"'
        return f"its reference had other adapters than {key} now gives; give it what the run began with"
    return f"its reference had other weights than {name_of_base(*where)} now has; give it those again"
