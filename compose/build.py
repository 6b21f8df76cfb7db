"""From a checked Config to a model that is cut and filled, or to a description of one."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compose.apply import apply
from compose.config import Config
from compose.pipeline_parallel import Schedule
from compose.registry import InitialisedModel, build_model
from compose.weights import init_weights


def apply_options(config: Config) -> dict[str, Any]:
    """The keyword arguments of ``compose.apply`` that ``config`` asks for."""
    return {
        "zero": config.parallel.zero,
        "param_dtype": getattr(torch, config.precision.param),
        "reduce_dtype": getattr(torch, config.precision.reduce),
        "activation_checkpoint": config.activation_checkpoint.mode,
        "pipeline": pipeline_schedule(config),
        "ep": config.parallel.ep,
    }


def pipeline_schedule(config: Config) -> Schedule:
    """What ``config`` says of its pipeline."""
    parallel = config.parallel
    return Schedule(
        parallel.pp_schedule, parallel.pp_virtual_stages, parallel.pp_layers, config.train.seq_len
    )


def build(config: Config, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model on meta, cut over ``mesh``, then given memory on ``device`` and initial weights."""
    model, plan = build_model(config)
    apply(model, plan, mesh, **apply_options(config))
    fill(model, config, device)
    return model


def fill(model: nn.Module, config: Config, device: torch.device) -> None:
    """Initial weights of ``train.seed``, for a whole model or a cut one."""
    initialised = cast(InitialisedModel, model)
    init_weights(model, initialised.init_parameter, config.train.seed, device)
