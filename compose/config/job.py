"""A checked run, with everything that the check worked out."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from compose.composition import Options
from compose.config.addons import brought
from compose.config.models import Task, batch_on_meta, find_model
from compose.config.rule import Setup
from compose.config.tables import Config
from compose.errors import ConfigError
from compose.memory.lora import adapt
from compose.parallel.mesh import Parallel
from compose.plan import Plan, Resolved, resolve


@dataclass(frozen=True)
class Job:
    """A config on a number of ranks. Later code takes this and does not compute any of it again."""

    config: Config
    """The tables. The degrees are known. In a checked job the layers of each stage are known too."""
    world_size: int
    """Number of ranks."""
    model: nn.Module
    """The whole model, on meta, with its adapters. Code that changes it must copy it first."""
    plan: Plan
    """The model's plan for the config's degrees."""
    resolved: Resolved
    """The plan, resolved for the model."""
    islands: int = 1
    """Islands that train alone ([outer]). Then all else here is of one island: its ranks, its degrees
    and its part of the global batch."""

    @property
    def whole(self) -> Config:
        """The tables of the whole job, as they were given: of all islands together."""
        if self.islands == 1:
            return self.config
        parallel, train = self.config.parallel, self.config.train
        return replace(
            self.config,
            parallel=replace(parallel, dp_replicate=self.islands),
            train=replace(train, global_batch=train.global_batch * self.islands),
        )

    @property
    def degrees(self) -> Parallel:
        """The table [parallel]."""
        return self.config.parallel

    @property
    def on_cuda(self) -> bool:
        """Whether the run is on a GPU, as far as this machine can tell."""
        return self.config.run.device != "cpu" and torch.cuda.is_available()

    @property
    def device_type(self) -> str:
        """The device's type, as far as this machine can tell."""
        return "cuda" if self.on_cuda else "cpu"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in a step; 0 if the division has a remainder."""
        train, ranks = self.config.train, self.degrees.dp_replicate * self.degrees.dp_shard
        whole, rest = divmod(train.global_batch, ranks * train.micro_batch)
        return 0 if rest else whole

    @property
    def options(self) -> Options:
        """The options for ``compose.apply``."""
        task = find_model(self.config.model.name).task
        inputs = partial(_inputs_on_meta, task, self.config) if task else None
        return replace(self.config.options, inputs=inputs)

    @property
    def setup(self) -> Setup:
        """The request that ``compose.apply`` will get."""
        return Setup(
            self.model,
            self.resolved,
            self.options,
            self.world_size,
            self.device_type,
            self.micro_batches,
        )


def make_job(config: Config, world_size: int, model: nn.Module | None = None) -> Job:
    """Build the model of ``config`` on meta, and resolve its plan.

    With [outer] the job is that of one island.

    Args:
        config: The config; its degrees are known.
        world_size: Number of ranks, of all islands.
        model: The model of the config, on meta, if it is there already.

    Returns:
        The job, not checked yet.

    Raises:
        ConfigError: The model cannot be built, or the plan does not fit it.
    """
    folder, shape = find_model(config.model.name), config.model.config
    model, islands = model or folder.on_meta(shape), 1
    for _, islands_of in brought("islands"):
        islands *= islands_of(config)
    if islands > 1:
        config, world_size = of_one_island(config), world_size // islands
    plan = adapt(model, folder.plan(shape, config.parallel), config.model.lora, config.parallel.tp)
    return Job(config, world_size, model, plan, resolve(plan, model), islands)


def of_one_island(config: Config) -> Config:
    """Return the tables of one island of a config with [outer].

    Args:
        config: The config of all islands, the ranks of dp_replicate.

    Returns:
        The same with one replica, and an island's part of the global batch.

    Raises:
        ConfigError: The global batch cannot be dealt to the islands.
    """
    islands, train = config.parallel.dp_replicate, config.train
    if train.global_batch % islands:
        nearest = max(1, round(train.global_batch / islands)) * islands
        raise ConfigError(
            f"train.global_batch: {train.global_batch} cannot be dealt to {islands} islands, the"
            f" ranks of dp_replicate; nearest: {nearest}"
        )
    return replace(
        config,
        parallel=replace(config.parallel, dp_replicate=1),
        train=replace(train, global_batch=train.global_batch // islands),
    )


def _inputs_on_meta(task: Task, config: Config) -> dict[str, Tensor]:
    return {name: value for name, value in batch_on_meta(task, config).items() if name != "targets"}
