"""Builds a model from a checked job: cut and filled, with its loss and its optimizer."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.apply import apply
from compose.composition import Composition, Options
from compose.config.job import Job
from compose.config.models import InitialisedModel
from compose.config.tables import Config
from compose.data.datasets import task_of
from compose.errors import ConfigError
from compose.memory.lora import init_adapter, is_adapter
from compose.ops.cross_entropy import LossFunction
from compose.optim.lr_schedule import set_learning_rate
from compose.optim.offload_files import remove_left
from compose.optim.optimizers import OPTIMIZERS, Settings, make_optimizer, stage_group
from compose.optim.parameter_rules import parameter_rules
from compose.weights import init_weights, materialize

_NOWHERE = "compose-offload-"  # prefix of temporary folders for files, without a run


def loss_function(config: Config) -> LossFunction:
    """Return the loss that ``config`` asks for: that of its model's task."""
    return task_of(config).loss(config)


def parallelize(
    job: Job, mesh: DeviceMesh, device: torch.device, options: Options | None = None
) -> Composition:
    """Cut the job's model over ``mesh``, with memory on ``device`` but without values for the weights.

    Args:
        job: The job. Its own model is not changed.
        mesh: The mesh of ``compose.init_mesh``.
        device: The device of the parameters, unless they are offloaded.
        options: Options of ``compose.apply``; None takes those of the job's config.

    Returns:
        The composition.
    """
    model = copy.deepcopy(job.model)
    composition = apply(model, job.resolved, mesh, options or job.options)
    materialize(composition, device)
    return composition


def build(job: Job, mesh: DeviceMesh, device: torch.device) -> Composition:
    """Cut the job's model over ``mesh``, and give it its first weights.

    Args:
        job: The job. Its own model is not changed.
        mesh: The mesh of ``compose.init_mesh``.
        device: The device of the parameters, unless they are offloaded.

    Returns:
        The composition.
    """
    composition = parallelize(job, mesh, device)
    fill_weights(composition, job, device)
    return composition


def fill_weights(whole: nn.Module | Composition, job: Job, device: torch.device) -> None:
    """Give a model its first weights, from ``checkpoint.load_hf`` or drawn by ``train.seed``.

    Adapters come from ``model.lora.load``, or are drawn.

    Args:
        whole: The job's model, on meta or on ``device``, or the composition of it.
        job: The job that names the weights.
        device: The device of the weights.

    Raises:
        ConfigError: The published weights do not fit.
    """
    config, chosen = job.config, job.config.model
    lora = chosen.lora
    if config.checkpoint.load_hf:
        from compose.checkpoint.hf_folder import config_problems, load_hf, name_of

        folder = Path(config.checkpoint.load_hf)
        problems = config_problems(folder, chosen.name, chosen.config)
        if problems:
            raise ConfigError(*problems)
        materialize(whole, device)
        load_hf(whole, folder, name_of(chosen.name, chosen.config), job.model)
        init_weights(whole, init_adapter, config.train.seed, device, only=is_adapter)
    else:
        init_weights(whole, _first_values(job), config.train.seed, device)
    if lora.load:
        from compose.checkpoint.hf_folder import name_of
        from compose.checkpoint.peft import load_adapters

        name = name_of(chosen.name, chosen.config)
        load_adapters(whole, Path(lora.load), lora, name, job.model)


def _first_values(job: Job) -> Callable[[str, Tensor, Generator], None]:
    model = cast(InitialisedModel, job.model)

    def fill(name: str, tensor: Tensor, generator: Generator) -> None:
        (init_adapter if is_adapter(name) else model.init_parameter)(name, tensor, generator)

    return fill


def build_optimizer(
    composition: Composition,
    job: Job,
    muon_dtype: torch.dtype | None = None,
    folder: Path | None = None,
    part: str = "",
) -> torch.optim.Optimizer:
    """Make the optimizer of a job; every rank must call it.

    Args:
        composition: The composition of the job's model.
        job: The job, with its tables [optimizer] and [precision].
        muon_dtype: Dtype of Muon's products; None lets Muon choose for the device.
        folder: The folder of the run; None makes a new folder if files are needed.
        part: The part of the job that has its own optimizer; empty if that is the whole job.

    Returns:
        The optimizer, at the highest learning rate.

    Raises:
        ConfigError: As in ``parameter_rules``.
    """
    config = job.config
    rules = parameter_rules(job.model, job.plan, config.optimizer)
    of_matrices = OPTIMIZERS[config.optimizer.name].of_matrices
    settings = Settings(
        config.optimizer,
        config.precision,
        config.train.seed,
        composition.mesh,
        stage_group(composition.mesh, config.comm.timeout) if of_matrices else None,
        muon_dtype,
        _scratch(config, folder, part) if config.optimizer.offload == "nvme" else None,
    )
    named = [(name, p) for name, p in composition.named_parameters() if p.requires_grad]
    optimizer = make_optimizer(named, rules, settings)
    set_learning_rate(optimizer, config.optimizer.lr)
    return optimizer


def _scratch(config: Config, folder: Path | None, part: str = "") -> Path:
    """Return this rank's own folder for files that are not needed after the run."""
    given, run = config.optimizer.offload_dir, config.run.dir or folder
    if not given and not run:
        remove_left(Path(tempfile.gettempdir()).glob(f"{_NOWHERE}*"))
        return Path(tempfile.mkdtemp(prefix=_NOWHERE))
    whole = Path(given) if given else Path(run or "") / "offload"
    base = whole / part
    links = [path for path in (whole, base) if path.is_symlink()]
    if links and not given:  # a run writes outside its folder only if told to
        raise ConfigError(
            f"optimizer.offload_dir: {links[0]} is a link; give optimizer.offload_dir = where it leads"
        )
    remove_left(p for p in base.glob("rank-*") if _number(p) >= dist.get_world_size())
    return base / f"rank-{dist.get_rank()}"


def _number(folder: Path) -> int:
    """Return the rank in a folder's name; -1 if that is no number."""
    digits = folder.name.removeprefix("rank-")
    return int(digits) if digits.isdecimal() else -1
