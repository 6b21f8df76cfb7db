"""The proof for a job: the run that ``train.py`` would start is compared with one process."""

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compose.build import build_optimizer, fill_weights, loss_function, parallelize
from compose.composition.state import Composition
from compose.data.task import task_of
from compose.legality.job import Job
from compose.optimizer.reference import Reference
from compose.optimizer.rules import parameter_rules
from compose.precision.float8 import select_layers
from compose.precision.loss_scale import first_scale
from compose.precision.options import Precision
from compose.proof.one_process import EXACT, Arithmetic, Named, arithmetic_of, precision_of
from compose.proof.report import Report
from compose.proof.verify import Sides, Trial, prove_both

STEPS = 2
# AdamW divides by a gradient's own size plus eps. With 1e-8 an element whose gradient is only rounding
# noise takes a full step of random sign, and one such element makes a small tensor fail.
EPS = 1e-6
# The factor of train.max_norm. The first gradients are hardly larger than max_norm, and only clipping
# that acts can be compared.
CLIP = 0.1


def prove(job: Job, mesh: DeviceMesh, device: torch.device, steps: int | None = None) -> Report:
    """Compare a job on ``mesh`` with one process over some steps on random documents.

    The composition is made from meta, as training makes it. So initial weights are compared too.

    Args:
        job: A job for the ranks of ``mesh``.
        mesh: The mesh of ``compose.init_mesh``.
        device: This rank's device.
        steps: Optimizer steps; None: two, or three with coded messages. The second shows what the first
            left behind, such as optimizer state; differences of weights are sent from the second on.

    Returns:
        What was compared, and the verdict; the same on every rank.

    Raises:
        ConfigError: The job cannot run.
    """
    if steps is None:
        steps = STEPS + 1 if job.config.comm.compresses else STEPS
    whole = copy.deepcopy(job.model)
    if dist.get_rank() == 0:
        fill_weights(whole, job, device)
    eps = max(job.config.optimizer.eps, EPS)
    config = replace(job.config, optimizer=replace(job.config.optimizer, eps=eps))
    # A plain step first, and then as many coded ones as there are.
    start, notes = min(config.comm.start_step, steps - 1, 1), ()
    if start < config.comm.start_step:
        notes = (
            f"comm.start_step: {config.comm.start_step}, and here {start}: {steps} steps are taken",
        )
        config = replace(config, comm=replace(config.comm, start_step=start))
    job = replace(job, config=config)
    train, task = config.train, task_of(config)
    batches = [
        {
            name: value.to(device)
            for name, value in task.random_batch(config, train.global_batch, train.seed + step).items()
        }
        for step in range(steps)
    ]
    scale = first_scale(config.precision)
    rules = parameter_rules(job.model, job.plan, config.optimizer)

    def compose(arithmetic: Arithmetic) -> Composition:
        options = replace(job.options, precision=precision_of(arithmetic))
        composition = parallelize(job, mesh, device, options)
        fill_weights(composition, job, device)
        return composition

    def optimizer(arithmetic: Arithmetic, composition: Composition) -> torch.optim.Optimizer:
        # On CUDA Muon's products are in bfloat16 by default, which is too coarse for other proofs.
        muon_dtype = None if arithmetic.reduced else arithmetic.param
        return build_optimizer(composition, _in(arithmetic, job), muon_dtype)

    def reference_optimizer(arithmetic: Arithmetic, named: Named) -> torch.optim.Optimizer:
        here = _in(arithmetic, job).config
        return Reference(dict(named), rules, here.optimizer, here.precision, train.seed)

    sides = Sides(
        compose,
        optimizer,
        reference_optimizer,
        float8=select_layers(
            job.model, job.resolved, job.degrees.tp, config.precision.float8, mesh.device_type
        ),
        # The offloaded optimizer's memory and files are float32.
        logic=EXACT if config.optimizer.offload == "none" else Arithmetic(),
        loss_scale=scale.value if scale else 1.0,
    )
    trial = Trial(train.micro_batch, loss_function(config), max_norm=CLIP * train.max_norm)
    report = prove_both(whole, batches, arithmetic_of(config.precision), sides, trial)
    return replace(report, notes=(*notes, *report.notes))


def _in(arithmetic: Arithmetic, job: Job) -> Job:
    """Return ``job`` as it is, or in full precision if ``arithmetic`` is not reduced."""
    if arithmetic.reduced:
        return job
    return replace(job, config=replace(job.config, precision=Precision()))
