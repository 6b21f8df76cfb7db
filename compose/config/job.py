"""A checked run, with everything that the check worked out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from compose.composition import Options
from compose.config.addons import provided
from compose.config.models import Task, batch_on_meta, find_model
from compose.config.setup import Setup, Target
from compose.config.tables import Config
from compose.errors import ConfigError
from compose.memory.lora import adapt
from compose.parallel.mesh import Parallel, Share, deal
from compose.pipeline.schedules import build_table
from compose.plan import Plan, ResolvedPlan, resolve

_TRIED = 1_000_000  # most sizes to try for a size that divides


@dataclass(frozen=True)
class Job:
    """A config on a number of ranks. Later code takes this and does not compute any of it again."""

    config: Config
    """The tables. The degrees are known. In a checked job the layers of each stage are known too."""
    world_size: int
    """Number of ranks; of one island, if there are several."""
    model: nn.Module
    """The whole model, on meta, with its adapters. Code that changes it must copy it first."""
    plan: Plan
    resolved: ResolvedPlan
    """The plan, with the names of the model's modules."""
    islands: int = 1
    """Groups of ranks that train alone: the ranks of dp_replicate with [outer]. The tables are those of
    all; what is computed from them here is of one."""
    target: Target | None = None
    """The devices that the run is planned for; None: those of this machine."""

    @property
    def degrees(self) -> Parallel:
        """The table [parallel], of one island."""
        parallel = self.config.parallel
        return replace(parallel, dp_replicate=parallel.dp_replicate // self.islands)

    @property
    def global_batch(self) -> int:
        """Samples of one island in a step."""
        return self.config.train.global_batch // self.islands

    @property
    def on_cuda(self) -> bool:
        """Whether the run is on a GPU: the target's, or else as far as this machine can tell."""
        if self.target:
            return self.target.device_type == "cuda"
        return self.config.run.device != "cpu" and torch.cuda.is_available()

    @property
    def device_type(self) -> str:
        """The device's type: the target's, or else as far as this machine can tell."""
        return "cuda" if self.on_cuda else "cpu"

    @property
    def shares(self) -> tuple[Share, ...]:
        """The part of a global batch that each data rank trains on; () if they are equal."""
        degrees, micro_batch = self.degrees, self.config.train.micro_batch
        whole = self.global_batch % (degrees.data_ranks * micro_batch) == 0
        if not degrees.speeds and (whole or not self.config.run.elastic):
            return ()
        shares = self.dealt(degrees.data_speeds)
        equal = len({(share.samples, share.micro_batch) for share in shares}) == 1
        return () if whole and equal and degrees.speeds != "measure" else shares

    def dealt(self, speeds: Sequence[float]) -> tuple[Share, ...]:
        """Return the data ranks' shares by these speeds."""
        degrees, micro_batch = self.degrees, self.config.train.micro_batch
        # Units are gathered or reduced in each micro-batch, or tokens travel between data ranks.
        together = degrees.zero >= 2 or degrees.cp * degrees.tp % degrees.ep != 0
        return deal(self.global_batch, speeds, micro_batch, together, self.can_run)

    def can_run(self, micro_batches: int) -> bool:
        """Tell whether the pipeline's schedule can run so many micro-batches."""
        degrees = self.degrees
        if degrees.pp > 1:
            try:
                build_table(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages, micro_batches)
            except ConfigError:
                return False
        return True

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in a step, at most; 0 if the division has a remainder."""
        if shares := self.shares:
            return max(share.micro_batches for share in shares)
        ranks = self.degrees.dp_replicate * self.degrees.dp_shard
        whole, rest = divmod(self.global_batch, ranks * self.config.train.micro_batch)
        return 0 if rest else whole

    @property
    def options(self) -> Options:
        """The options for ``compose.apply``."""
        task = find_model(self.config.model.name).task
        inputs = partial(_inputs_on_meta, task, self.config) if task else None
        return replace(self.config.options, parallel=self.degrees, inputs=inputs)

    @property
    def setup(self) -> Setup:
        """The values that the rules of a composition read."""
        float8 = self.target and self.target.float8
        ranks = self.world_size, self.device_type, self.micro_batches
        return Setup(self.model, self.resolved, self.options, *ranks, float8)


def make_job(config: Config, world_size: int, model: nn.Module | None = None) -> Job:
    """Return the job of a config with known degrees, not checked yet.

    The model is built on meta, unless it is given, and its plan resolved. Raises ConfigError if one of
    these fails.
    """
    folder, shape = find_model(config.model.name), config.model.config
    model, islands = model or folder.on_meta(shape), 1
    for _, islands_of in provided("islands"):
        islands *= islands_of(config)
    degrees = replace(config.parallel, dp_replicate=config.parallel.dp_replicate // islands)
    unit = degrees.data_ranks * config.train.micro_batch
    check_dealt(config.train.global_batch, islands, unit)
    plan = adapt(model, folder.plan(shape, degrees), config.model.lora, degrees.tp)
    return Job(config, world_size // islands, model, plan, resolve(plan, model), islands)


def check_dealt(global_batch: int, islands: int, unit: int = 1) -> None:
    """Raise ConfigError if the samples of a step cannot be dealt to so many islands.

    ``unit``: what the samples of one island should be a multiple of.
    """
    if global_batch % islands:
        unit *= islands
        nearest = max(1, round(global_batch / unit)) * unit
        raise ConfigError(
            f"train.global_batch: {global_batch} cannot be dealt to {islands} islands, the"
            f" ranks of dp_replicate; nearest: {nearest}"
        )


def share_problems(job: Job) -> Iterator[str]:
    """Yield why the data ranks cannot share a global batch."""
    train, degrees = job.config.train, job.config.parallel
    ranks = degrees.dp_replicate * degrees.dp_shard
    unit, of_speeds = ranks * train.micro_batch, degrees.pp * job.degrees.data_ranks
    if degrees.speeds != "measure" and len(degrees.speeds) not in (0, of_speeds):
        yield (
            f"parallel.speeds: has {len(degrees.speeds)} numbers for the {of_speeds} ranks of pp x"
            " dp_replicate x dp_shard; give each of them one"
        )
    if job.shares:
        yield from _unequal_problems(job)
        return
    if train.global_batch % unit == 0:
        return
    nearest, smaller = max(1, round(train.global_batch / unit)) * unit, ""
    share, rest = divmod(train.global_batch, ranks)
    if not rest and (most := min(train.micro_batch, share)) <= _TRIED:
        best = max(size for size in range(1, most + 1) if share % size == 0)
        smaller = f", or train.micro_batch = {best}"
    yield (
        f"train.global_batch: {train.global_batch} is not a multiple of dp_replicate x dp_shard x"
        f" train.micro_batch = {ranks} x {train.micro_batch} = {unit}; nearest: {nearest}{smaller}"
    )


def _unequal_problems(job: Job) -> Iterator[str]:
    config, degrees = job.config, job.degrees
    idle = sum(share.samples == 0 for share in job.shares)
    if config.run.elastic and idle:
        yield (
            f"train.global_batch: {job.global_batch} leaves {idle} of {degrees.data_ranks} data ranks"
            f" without a sample; nearest: {degrees.data_ranks}"
        )
    because = "and the ranks have unequal shares of train.global_batch"
    if job.islands > 1:
        yield f"outer.every: {config.outer.every} makes islands of equal shares, {because}; use 0"
    if config.metrics.noise_scale:
        yield f"metrics.noise_scale: true compares equal micro-batches, {because}; use false"
    if config.precision.float8 != "off":
        yield (
            f'precision.float8: "{config.precision.float8}" would scale by rows of padding, {because};'
            ' use "off"'
        )


def _inputs_on_meta(task: Task, config: Config) -> dict[str, Tensor]:
    return {name: value for name, value in batch_on_meta(task, config).items() if name != "targets"}
