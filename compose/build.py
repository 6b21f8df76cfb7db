"""Builds a model from a checked job: cut and filled, with its loss and its optimizer."""

import copy
import tempfile
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.apply import apply
from compose.composition import Composition, Options
from compose.config.hugging_face import config_problems
from compose.config.job import Job
from compose.config.models import InitialisedModel
from compose.config.tables import Config
from compose.data.datasets import task_of
from compose.errors import ConfigError, whole_number
from compose.memory.lora import MAGNITUDE, init_adapter, is_adapter
from compose.memory.quantized import quantized_layers, weight_shape
from compose.object_storage import Remote, as_path
from compose.ops.cross_entropy import LossFunction
from compose.optim.lr_schedule import set_learning_rate
from compose.optim.offload_files import remove_left
from compose.optim.optimizers import OPTIMIZERS, OptimizerSettings, make_optimizer, stage_group
from compose.optim.parameter_rules import parameter_rules
from compose.weights import fill_from_rows, init_weights, materialize

_NOWHERE = "compose-offload-"  # prefix of temporary folders for files, without a run


def loss_function(config: Config) -> LossFunction:
    """Return the loss that ``config`` asks for: that of its model's task."""
    return task_of(config).loss(config)


def parallelize(
    job: Job, mesh: DeviceMesh, device: torch.device, options: Options | None = None
) -> Composition:
    """Cut a copy of the job's model over ``mesh``, with memory on ``device`` but no values in it.

    ``options`` of None are those of the job's config.
    """
    composition = apply(copy.deepcopy(job.model), job.resolved, mesh, options or job.options)
    materialize(composition, device)
    return composition


def build(
    job: Job, mesh: DeviceMesh, device: torch.device, options: Options | None = None
) -> Composition:
    """Cut a copy of the job's model over ``mesh``, and give it its first weights."""
    composition = parallelize(job, mesh, device, options)
    fill_weights(composition, job, device)
    return composition


def fill_weights(
    whole: nn.Module | Composition,
    job: Job,
    device: torch.device,
    base: bool = True,
    adapters: bool = True,
) -> None:
    """Give a model its first weights, from ``checkpoint.load_hf`` or drawn by ``train.seed``.

    Adapters come from ``model.lora.load``, or are drawn. ``whole`` is the job's model, on meta or on
    ``device``, or the composition of it. Raises ConfigError if published weights do not fit.

    ``adapters`` of False leaves out those of ``model.lora.load``, which a checkpoint may hold, and
    ``base`` of False all else.
    """
    if base:
        _fill_base(whole, job, device)
    if job.config.model.lora.load and adapters:
        from compose.checkpoint.peft import load_adapters

        load_adapters(whole, job)


def _fill_base(whole: nn.Module | Composition, job: Job, device: torch.device) -> None:
    config, chosen = job.config, job.config.model
    if not config.checkpoint.load_hf:
        init_weights(whole, cast(InitialisedModel, job.model).init_parameter, config.train.seed, device)
        return
    from compose.checkpoint.hf_folder import TensorFiles, fill_shard, load_hf, name_of, stored
    from compose.checkpoint.local_shards import LocalShard

    folder, hf_name = as_path(config.checkpoint.load_hf), name_of(chosen.name, chosen.config)
    if problems := config_problems(folder, chosen.name, chosen.config):
        raise ConfigError(*problems)
    materialize(whole, device)
    load_hf(whole, folder, hf_name, job.model)

    def drawn(name: str) -> bool:
        return is_adapter(name) and not name.endswith(MAGNITUDE)

    init_weights(whole, init_adapter, config.train.seed, device, only=drawn)
    if not (quantized_layers(job.model) or chosen.lora.dora):
        return
    files = TensorFiles(folder)

    def read(layer: str, rows: slice) -> Tensor:
        shape = weight_shape(job.model.get_submodule(layer))
        part = torch.empty(rows.stop - rows.start, shape[1], device=device)
        place = stored(hf_name(f"{layer}.weight"))
        fill_shard(files, place, LocalShard(shape, torch.Size((rows.start, 0)), part))
        return part

    loads = bool(chosen.lora.load)
    fill_from_rows(whole, read, only=lambda name: not (loads and is_adapter(name)))


def build_optimizer(
    composition: Composition,
    job: Job,
    muon_dtype: torch.dtype | None = None,
    folder: Path | None = None,
    part: str = "",
) -> torch.optim.Optimizer:
    """Make the optimizer of a job, at the highest learning rate; a collective.

    ``muon_dtype`` is that of Muon's products; None lets Muon choose for the device. ``folder`` is the
    run's; None makes a new one if files are needed. ``part`` names the part of the job that has its own
    optimizer, if that is not the whole job.
    """
    config = job.config
    rules = parameter_rules(job.model, job.plan, config.optimizer)
    of_matrices = OPTIMIZERS[config.optimizer.name].of_matrices
    settings = OptimizerSettings(
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


def _scratch(config: Config, folder: Path | None, part: str) -> Path:
    """Return this rank's own folder for files that are not needed after the run."""
    given, run = config.optimizer.offload_dir, config.run.dir or folder
    if isinstance(as_path(run or ""), Remote):  # such files stay here
        run = folder
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
    ranks = dist.get_world_size()
    remove_left(p for p in base.glob("rank-*") if whole_number(p.name.removeprefix("rank-")) >= ranks)
    return base / f"rank-{dist.get_rank()}"
