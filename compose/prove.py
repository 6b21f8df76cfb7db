"""The proof for a config: the run that ``train.py`` would start, held against one process."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compose.apply import apply
from compose.build import apply_options, build, fill, float8_choice, loss_function
from compose.config import Config, Precision
from compose.data import random_batch
from compose.loss_scale import first_scale
from compose.one_process import EXACT, Arithmetic, Named
from compose.optimizer import build_optimizer, parameter_rules
from compose.optimizer.reference import Reference
from compose.registry import build_model
from compose.report import Report
from compose.verify import prove_both
from compose.weights import materialize

STEPS = 2
# AdamW divides by a gradient's own size plus eps: with 1e-8 one element whose gradient is rounding
# noise takes a full-sized step of random sign, and a small tensor fails for it.
EPS = 1e-6
# Of train.max_norm. First gradients are hardly larger than it, and clipping has to act to be seen.
CLIP = 0.1


def prove(config: Config, mesh: DeviceMesh, device: torch.device) -> Report:
    """Compare ``config`` on ``mesh`` with one process over two steps on random documents.

    The composed model is made as training makes it, from meta, so initial weights are compared too.
    """
    train = config.train
    whole, plan = build_model(config)
    if dist.get_rank() == 0:
        fill(whole, config, device)
    batches = [
        {
            name: value.to(device)
            for name, value in random_batch(
                train.global_batch, train.seq_len, config.model.config.vocab_size, train.seed + step
            ).items()
        }
        for step in range(STEPS)
    ]
    scale = first_scale(config.precision)
    options = replace(config.optimizer, eps=max(config.optimizer.eps, EPS))
    config = replace(config, optimizer=options)
    rules = parameter_rules(whole, plan, options)
    # The offloaded optimizer's memory and files are float32.
    logic = EXACT if options.offload == "none" else Arithmetic()

    def compose(arithmetic: Arithmetic) -> nn.Module:
        if not arithmetic.reduced and arithmetic.param != torch.float32:
            return _build_exactly(config, mesh, device)
        return build(_in(arithmetic, config), mesh, device)

    def optimizer(arithmetic: Arithmetic, composed: nn.Module) -> torch.optim.Optimizer:
        # On CUDA Muon's products are in bfloat16 by default, too coarse for another proof.
        muon_dtype = None if arithmetic.reduced else arithmetic.param
        return build_optimizer(composed, _in(arithmetic, config), mesh, muon_dtype)

    def reference_optimizer(arithmetic: Arithmetic, named: Named) -> torch.optim.Optimizer:
        return Reference(dict(named), rules, _in(arithmetic, config))

    return prove_both(
        whole,
        compose,
        mesh,
        batches,
        _arithmetic(config.precision),
        logic=logic,
        optimizer=optimizer,
        reference_optimizer=reference_optimizer,
        micro_batch=train.micro_batch,
        loss_function=loss_function(config),
        max_norm=CLIP * train.max_norm,
        loss_scale=scale.value if scale else 1.0,
        float8=float8_choice(config, whole, plan, mesh.device_type),
    )


def _arithmetic(precision: Precision) -> Arithmetic:
    return Arithmetic(
        param=getattr(torch, precision.param),
        reduce=getattr(torch, precision.reduce),
        master=getattr(torch, precision.master),
        state=getattr(torch, precision.optimizer_state),
        float8=precision.float8,
    )


def _in(arithmetic: Arithmetic, config: Config) -> Config:
    """``config`` as it is, or in full precision where ``arithmetic`` is."""
    return config if arithmetic.reduced else replace(config, precision=Precision())


def _build_exactly(config: Config, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """As ``build`` does, all in float64."""
    config = replace(config, precision=Precision())
    model, plan = build_model(config)
    options = apply_options(config)
    options.update(dict.fromkeys(("param_dtype", "reduce_dtype", "master_dtype"), torch.float64))
    apply(model, plan, mesh, **options)
    materialize(model, device)
    fill(model, config, device)
    return model
