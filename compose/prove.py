"""The proof for a config: the run that ``train.py`` would start, held against one process."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compose.build import build, fill, loss_function
from compose.config import Config
from compose.data import random_batch
from compose.loss_scale import first_scale
from compose.optimizer import build_optimizer, parameter_rules
from compose.optimizer.reference import Reference
from compose.registry import build_model
from compose.report import MASTER_UPDATE, Report, tolerance_of
from compose.verify import compare

STEPS = 2
# AdamW divides by a gradient's own size plus eps: with 1e-8 one element whose gradient is rounding
# noise takes a full-sized step of random sign, and a small tensor fails for it.
EPS = 1e-6


def prove(config: Config, mesh: DeviceMesh, device: torch.device) -> Report:
    """Compare ``config`` on ``mesh`` with one process over two steps on random documents.

    The composed model is made as training makes it, from meta, so initial weights are compared too.
    """
    train = config.train
    reference, plan = build_model(config)
    if dist.get_rank() == 0:
        fill(reference, config, device)
        for parameter in reference.parameters():  # as bfloat16 holds them, where it does
            parameter.data = parameter.data.to(getattr(torch, config.precision.master)).float()
    batches = [
        {
            name: value.to(device)
            for name, value in random_batch(
                train.global_batch, train.seq_len, config.model.config.vocab_size, train.seed + step
            ).items()
        }
        for step in range(STEPS)
    ]
    param_dtype = getattr(torch, config.precision.param)
    scale = first_scale(config.precision)
    options = replace(config.optimizer, eps=max(config.optimizer.eps, EPS))
    config = replace(config, optimizer=options)
    composed, rules = build(config, mesh, device), parameter_rules(reference, plan, options)
    tolerance = tolerance_of(param_dtype, config.precision.float8)
    if config.precision.master == "bfloat16":
        tolerance = replace(tolerance, update=MASTER_UPDATE)
    # Rounded to bfloat16, Muon's matrices differ by more than float32's tolerance.
    muon_dtype = torch.float32 if param_dtype == torch.float32 else None
    return compare(
        reference,
        composed,
        mesh,
        batches,
        micro_batch=train.micro_batch,
        param_dtype=param_dtype,
        loss_function=loss_function(config),
        optimizer=lambda _: build_optimizer(composed, config, mesh, muon_dtype),
        reference_optimizer=lambda parameters: Reference(
            {name: p for (name, _), p in zip(reference.named_parameters(), parameters, strict=True)},
            rules,
            config,
        ),
        max_norm=train.max_norm,
        tolerance=tolerance,
        loss_scale=scale.value if scale else 1.0,
    )
