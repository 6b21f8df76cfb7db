"""The proof for a config: the run that ``train.py`` would start, held against one process."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compose.build import build, fill, loss_function
from compose.config import Config
from compose.data import random_batch
from compose.loss_scale import first_scale
from compose.optimizer import build_optimizer
from compose.registry import build_model
from compose.report import TOLERANCES, Report
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
    reference, _ = build_model(config)
    if dist.get_rank() == 0:
        fill(reference, config, device)
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
    return compare(
        reference,
        build(config, mesh, device),
        mesh,
        batches,
        micro_batch=train.micro_batch,
        param_dtype=param_dtype,
        loss_function=loss_function(config),
        optimizer=lambda parameters: build_optimizer(parameters, options),
        max_norm=train.max_norm,
        tolerance=TOLERANCES[param_dtype],
        loss_scale=scale.value if scale else 1.0,
    )
