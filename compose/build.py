"""From a checked Config to a model that is cut and filled, or to a description of one."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compose.activation_checkpointing import Recompute
from compose.apply import apply
from compose.compilation import Compile
from compose.config import Config
from compose.errors import ConfigError
from compose.float8 import Choice, choose
from compose.hugging_face import config_problems, load_hf, name_of
from compose.output import CrossEntropy
from compose.pipeline_parallel import Schedule
from compose.plan import Plan, resolve
from compose.registry import InitialisedModel, build_model
from compose.weights import init_weights, materialize


def apply_options(config: Config) -> dict[str, Any]:
    """The keyword arguments of ``compose.apply`` that ``config`` asks for."""
    return {
        "zero": config.parallel.zero,
        "param_dtype": getattr(torch, config.precision.param),
        "reduce_dtype": getattr(torch, config.precision.reduce),
        "master_dtype": getattr(torch, config.precision.master),
        "activation_checkpoint": recompute(config),
        "pipeline": pipeline_schedule(config),
        "ep": config.parallel.ep,
        "float8": config.precision.float8,
        "compile": Compile(config.compile.mode, config.compile.async_tp),
        "offload": config.parallel.offload == "cpu",
        "offload_activations": config.activation_checkpoint.offload,
        "zero3_reshard": config.parallel.zero3_reshard,
        "prefetch": config.comm.prefetch,
    }


def float8_choice(config: Config, model: nn.Module, plan: Plan, device_type: str) -> Choice:
    """What of the whole ``model`` computes in float8 as ``config`` says."""
    tp, recipe = config.parallel.tp, config.precision.float8
    return choose(model, resolve(plan, model), tp, recipe, device_type)


def recompute(config: Config) -> Recompute:
    """What ``config`` says of activation checkpointing."""
    chosen = config.activation_checkpoint
    return Recompute(chosen.mode, chosen.every, chosen.keep, chosen.budget, config.train.seq_len)


def pipeline_schedule(config: Config) -> Schedule:
    """What ``config`` says of its pipeline."""
    parallel = config.parallel
    return Schedule(
        parallel.pp_schedule, parallel.pp_virtual_stages, parallel.pp_layers, config.train.seq_len
    )


def loss_function(config: Config) -> CrossEntropy:
    """The loss that ``config`` asks for."""
    return CrossEntropy(config.train.loss_chunk, config.train.z_loss)


def cut(config: Config, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model, cut over ``mesh``, with memory on ``device`` for weights that are yet to come."""
    model, plan = build_model(config)
    apply(model, plan, mesh, **apply_options(config))
    materialize(model, device)
    return model


def build(config: Config, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model, cut over ``mesh``, with its first weights on ``device``."""
    model = cut(config, mesh, device)
    fill(model, config, device)
    return model


def fill(model: nn.Module, config: Config, device: torch.device) -> None:
    """Weights of ``checkpoint.load_hf``, or drawn by ``train.seed``, for a whole model or a cut one, on
    meta or on ``device``.

    Raises ConfigError where the former do not fit.
    """
    if config.checkpoint.load_hf:
        chosen, folder = config.model, Path(config.checkpoint.load_hf)
        problems = config_problems(folder, chosen.name, chosen.config)
        if problems:
            raise ConfigError(*problems)
        whole, _ = build_model(config)
        materialize(model, device)
        load_hf(model, folder, name_of(chosen.name, chosen.config), whole)
        return
    initialised = cast(InitialisedModel, model)
    init_weights(model, initialised.init_parameter, config.train.seed, device)
