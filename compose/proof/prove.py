"""The proof for a job: the run that ``train.py`` would start is compared with one process."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.build import build, build_optimizer, fill_weights, loss_function
from compose.composition import Composition
from compose.config.job import Job
from compose.config.models import find_model
from compose.config.tables import TABLES, Config
from compose.data.datasets import task_of
from compose.memory.float8 import select_layers
from compose.memory.lora import ALL_LINEAR, linear_layers
from compose.memory.precision import Precision, first_scale
from compose.ops.batch import empty
from compose.optim.lr_schedule import learning_rate, set_learning_rate
from compose.optim.muon import product_dtype
from compose.optim.optimizers import Optimizer
from compose.parallel.expert_parallel import routers
from compose.proof.observers import parts_of_add_ons
from compose.proof.one_process import EXACT
from compose.proof.optimizers import Named, ReferenceOptimizer, is_named, stated_rate, stated_rules
from compose.proof.report import ComparisonRow, Report
from compose.proof.verify import PrecisionSetup, Trial, prove_both

STEPS = 2
# AdamW divides by a gradient's own size plus eps. With 1e-8 an element whose gradient is only rounding
# noise takes a full step of random sign, and one such element makes a small tensor fail.
EPS = 1e-6


def prove(
    job: Job, mesh: DeviceMesh, device: torch.device, steps: int | None = None, logic: bool = True
) -> Report:
    """Compare a job on ``mesh`` with one process over some steps on random documents.

    The composition is made from meta, as training makes it. So initial weights are compared too.
    """
    if steps is None:
        steps = STEPS + sum(more(job.config) for more in parts_of_add_ons("extra_steps"))
    whole = copy.deepcopy(job.model)
    if dist.get_rank() == 0:
        fill_weights(whole, job, device)
    asked, notes = job.config.optimizer.eps, tuple[str, ...]()
    config = replace(job.config, optimizer=replace(job.config.optimizer, eps=max(asked, EPS)))
    if asked < EPS:
        why = "with less, rounding decides the step of an element whose gradient is only rounding"
        notes = (f"optimizer.eps: {asked:g}, and here {EPS:g}: {why}",)
    for shortened in parts_of_add_ons("shortened"):
        config, more = shortened(config, steps)
        notes += more
    job = replace(job, config=config)
    train, task = config.train, task_of(config)
    notes += tuple(_not_run(config))
    batches = [
        {
            name: value.to(device)
            for name, value in task.random_batch(config, job.global_batch, train.seed + step).items()
        }
        for step in range(steps)
    ]
    for batch in batches if routers(whole) else ():
        _end_in_padding(batch)
    scale = first_scale(config.precision)
    rules = stated_rules(whole, job.plan, config.optimizer)
    proved = proved_steps(config.optimizer, train.steps, steps)

    def compose(precision: Precision) -> Composition:
        options = replace(job.options, precision=precision)
        composition = build(job, mesh, device, options)
        for data in composition.data if config.metrics.noise_scale else ():
            data.on_first = lambda *_: None  # then the first micro-batch is reduced by itself
        return composition

    def optimizer(precision: Precision, composition: Composition) -> torch.optim.Optimizer:
        # On CUDA Muon's products are in bfloat16 by default, which is too coarse for other proofs.
        muon_dtype = None if precision.reduced else precision.param_dtype
        return build_optimizer(composition, _in(precision, job), muon_dtype)

    def reference_optimizer(precision: Precision, named: Named) -> torch.optim.Optimizer:
        here = _in(precision, job).config
        rates = [stated_rate(step, train.steps, config.optimizer) for step in proved]
        products = product_dtype(device.type) if precision.reduced else torch.float64
        return ReferenceOptimizer(
            dict(named), rules, here.optimizer, here.precision, train.seed, rates, products
        )

    def begin_step(step: int, optimizer: torch.optim.Optimizer) -> None:
        set_learning_rate(optimizer, learning_rate(proved[step], train.steps, config.optimizer))

    setup = PrecisionSetup(
        compose,
        optimizer,
        reference_optimizer,
        float8=select_layers(
            job.model, job.resolved, job.degrees.tp, config.precision.float8, mesh.device_type
        ),
        # Files of the offloaded optimizer are float32.
        logic=Precision() if config.optimizer.offload == "nvme" else EXACT,
        loss_scale=scale.value if scale else 1.0,
        options=job.options,
        units=job.resolved.checkpoint,
        begin_step=begin_step,
    )
    loss = loss_function(config)
    trial = Trial(train.micro_batch, loss, max_norm=train.max_norm, shares=job.shares)
    report = prove_both(whole, batches, config.precision, setup, trial, logic)
    rows = [*report.rows, _trained(whole, job)]
    return replace(report, rows=rows, notes=(*notes, *report.notes))


def _end_in_padding(batch: Mapping[str, Tensor]) -> None:
    """Make the last quarter of the last row padding, in place, as it is behind packed chats.

    Then ranks have unequal numbers of the tokens that routers count. A single row stays as it is, and
    so does a batch that has padding already, or no positions.
    """
    positions = batch.get("positions")
    if positions is None or len(positions) == 1 or bool((positions < 0).any()):
        return
    length = positions.shape[1]
    ends = {n: value[-1, length - length // 4 :] for n, value in batch.items() if value.ndim > 1}
    for name, value in empty(ends).items():
        # Padding is a document of its own, the next one.
        ends[name].copy_(batch[name][-1].max() + 1 if name == "document_ids" else value)


def _not_run(config: Config) -> Iterator[str]:
    """Yield a note on each key of which a run does more than is proved."""
    if config.parallel.speeds == "measure":
        yield 'parallel.speeds: "measure" deals samples by times; here all ranks have equal shares'
    if config.train.epochs:
        yield f"train.epochs: the rates are those of train.steps = {config.train.steps}"
    if "dpo" in TABLES and config.dpo.beta:
        yield "dpo.beta: the log-probabilities of the reference are drawn; its forward does not run"


def proved_steps(options: Optimizer, steps: int, count: int) -> list[int]:
    """Return the steps of the schedule that a proof takes, counted from 0.

    The first is in the middle of warmup, the others are spread over what follows. If the rate is
    constant before it decays, that is the decay. If the decay ends before the run, the last step is
    after it.
    """
    begin, end = options.warmup, min(options.decay_end or steps, steps)
    rising = max(0, options.warmup_from)
    first = max(rising + 1, (rising + begin) // 2) if rising + 1 < begin else begin // 2
    if options.schedule == "constant" or options.decay:
        begin = min(max(begin, end - options.decay), end)
    later = [min(begin + (end - begin) * n // (count + 1), end - 1) for n in range(1, count)]
    if later and end < steps:
        later[-1] = min(end + 1, steps - 1)
    return [min(first, steps - 1), *later]


def _trained(model: nn.Module, job: Job) -> ComparisonRow:
    """Return the row that says whether just the parameters are trained that the config means."""
    lora = job.config.model.lora
    if lora.rank:
        all_of_them = lora.targets == ALL_LINEAR
        every, named = (linear_layers(model, job.plan), ()) if all_of_them else ((), lora.targets)
        layers = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and (name in every or is_named(name, named))
        ]
        parts = ["A", "B", *(["magnitude"] if lora.dora else [])]
        meant = {f"{name}.lora.{part}" for name in layers for part in parts}
    else:  # the model's own class may freeze some, and nothing else may
        own = find_model(job.config.model.name).on_meta(job.config.model.config)
        meant = {name for name, p in own.named_parameters() if p.requires_grad}
    wrong = sorted({name for name, p in model.named_parameters() if p.requires_grad} ^ meant)
    return ComparisonRow(
        "trained", wrong[0] if wrong else "all that should be", float(len(wrong)), 0.0, 0
    )


def _in(precision: Precision, job: Job) -> Job:
    """Return ``job`` as it is, or in full precision if ``precision`` is not reduced.

    An optimizer that rounds is another class than one that does not. It computes here without rounding.
    """
    asked = job.config.precision
    if precision.reduced:
        return job
    rounds = "bfloat16" in (asked.master, asked.optimizer_state) and precision == EXACT
    full = replace(Precision(), optimizer_state=EXACT.optimizer_state) if rounds else Precision()
    return replace(job, config=replace(job.config, precision=full))
