"""The proof that a composition equals one process: loss, norm, every gradient, the weights after.

Rank 0 runs the whole batch through the whole model, as compose/proof/one_process.py does. Every rank
then compares its part of the composition with that result, since replicas that differ from each other
look right on one rank. A composition in a reduced precision first runs in float64, where a fault of its
logic cannot hide behind rounding.
"""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.apply import apply, with_degrees
from compose.composition import Composition, Options
from compose.errors import ConfigError, refused_if
from compose.memory.float8 import NOTHING, Choice, select_layers
from compose.memory.precision import Precision
from compose.ops.cross_entropy import LossFunction, cross_entropy
from compose.ops.dropout import DropoutKey
from compose.ops.tensors import (
    checksums,
    gathered_objects,
    local_shard,
    local_tensor,
    on_first_rank,
)
from compose.optim.adamw import AdamW
from compose.parallel.expert_parallel import routers
from compose.parallel.mesh import Share, axis_size, batch_share, rows_of
from compose.plan import Plan, resolve
from compose.proof.comparison import Comparison, buffers_of, gradient_of, parameters_of, shared, whole
from compose.proof.observers import (
    CODES,
    MemoryKeys,
    MessageEffects,
    Observer,
    Subject,
    parts_of_add_ons,
)
from compose.proof.one_process import (
    EXACT,
    FromComposition,
    OptimizerOf,
    Widened,
    kept_dtype,
    type_names,
)
from compose.proof.optimizers import Named, OptimizerFactory, RoundedWeights
from compose.proof.references import Expected, References, check_provable, difference, examine
from compose.proof.report import Report, State, Tolerance, joined, or_infinite, tolerance_of
from compose.proof.routing_trace import (
    Choices,
    Difference,
    compare_choices,
    gathered,
    ids_of_calls,
    watch,
)
from compose.train.step import clip_grad_norm_, forward_backward, samples_at_once
from compose.weights import named_generator

# The standard deviation of the noise that is added to a parameter whose elements are all equal.
_SPREAD = 0.02
_T = TypeVar("_T")


@dataclass(frozen=True)
class Trial:
    """The training step that a proof takes."""

    micro_batch: int | None = None
    """Samples in one forward; None is a rank's whole share."""
    loss_function: LossFunction = cross_entropy
    """The loss function, as ``forward_backward`` takes it."""
    optimizer: OptimizerFactory | None = None
    """Makes an optimizer from parameters (named ones, if master weights are bfloat16); None: AdamW."""
    max_norm: float = 1.0
    """The limit of ``clip_grad_norm_``; half of the first norm if that is less. 0 clips nothing."""
    shares: tuple[Share, ...] = ()
    """The shares of the data ranks, if they need not be equal."""
    tolerance: Tolerance | None = None
    """Tolerance of the run in the asked types; None: that of ``report.tolerance_of``."""


def verify(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    options: Options | None = None,
    trial: Trial | None = None,
) -> Report:
    """Prove that ``plan`` on ``mesh`` trains ``model`` as one process does.

    Every option takes part. The composition runs twice: in float64 without float8, and as it is.

    Args:
        model: The weights of rank 0 count; it is left as it was. A parameter whose elements are all
            equal gets noise in the proof: behind a projection of zeros all gradients are zero.
        plan: The model's parallelization.
        mesh: The mesh of ``compose.init_mesh``.
        batch: The global batch, the same on every rank, as ``forward_backward`` takes it. A list of
            batches runs one optimizer step for each; gradients are compared on the first.
        options: As ``compose.apply`` takes them.
        trial: The training step; None: the defaults.

    Returns:
        What was compared, and the verdict; the same on every rank.

    Raises:
        ConfigError: The plan does not fit the model, the batch has no target or is another one on some
            rank, or ``loss_function`` returns a mean.
    """
    trial = trial or Trial()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model: no parameter is trained, so that nothing can be proved")
    given = with_degrees(options, mesh)
    asked = given.precision
    chosen = replace(asked, optimizer_state=asked.master)
    resolved = resolve(plan, model)

    def compose(precision: Precision) -> Composition:
        here = replace(given, precision=precision)
        return apply(copy.deepcopy(model), resolved, mesh, here)

    narrow: OptimizerFactory = trial.optimizer or partial(AdamW, lr=1e-3)

    def optimizer_for(precision: Precision, named: Named) -> torch.optim.Optimizer:
        if precision.master_dtype.itemsize < 4:
            return narrow(named)
        default = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
        return (trial.optimizer or default)(parameter for _, parameter in named)

    def reference_optimizer(precision: Precision, named: Named) -> torch.optim.Optimizer:
        if precision.master_dtype.itemsize < 4:
            return RoundedWeights(narrow, precision.master_dtype, named)
        return optimizer_for(precision, named)

    setup = PrecisionSetup(
        compose,
        lambda precision, composition: optimizer_for(precision, list(composition.named_parameters())),
        reference_optimizer,
        float8=select_layers(model, resolved, axis_size(mesh, "tp"), asked.float8, mesh.device_type),
        options=given,
        units=resolved.checkpoint,
    )
    line = "plan: {}: the model fails in this composition; does it run by itself? else see docs/plan.md"
    with refused_if(line):
        batches = [batch] if isinstance(batch, Mapping) else list(batch)
        sums = [(list(b), checksums([*b.values()]).tolist()) for b in batches if b]
        if any(others != sums for others in gathered_objects(sums)):
            raise ConfigError(
                "batch: ranks have different ones; give all the whole one, as of one seed"
            )
        return prove_both(model, batches, chosen, setup, trial)


@dataclass(frozen=True)
class PrecisionSetup:
    """How the composition and the one process are made for some precision."""

    compose: Callable[[Precision], Composition]
    optimizer: Callable[[Precision, Composition], torch.optim.Optimizer]
    reference_optimizer: OptimizerOf
    float8: Choice = NOTHING
    """The layers that compute in float8 on one process."""
    logic: Precision = EXACT
    """The precision in which the logic runs, if the model can."""
    loss_scale: float = 1.0
    """The factor of the loss before backward."""
    options: Options = field(default_factory=Options)
    units: Sequence[str] = ()
    """The units of activation checkpointing, of the whole model."""
    begin_step: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None
    """Tells the composition's optimizer that step ``step`` begins, counted from 0."""


def prove_both(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    precision: Precision,
    setup: PrecisionSetup,
    trial: Trial,
    logic: bool = True,
) -> Report:
    """Prove a composition's logic in float64, and then the composition in ``precision``."""
    check_provable(batches, setup.options.parallel)
    for batch in batches:
        samples_at_once(batch, 1)
    widens, problem = on_first_rank(examine, model, batches[0], trial.loss_function, trial.micro_batch)
    if widens and setup.options.compile.mode != "off":
        problem = "it mixes types, which a compiler cannot trace"
    own, finest = setup.logic if logic else precision, EXACT
    if problem:
        own = finest = Precision()
    reports = []
    for kind in dict.fromkeys([own, precision]):
        # The caller's tolerance is for the run in the asked types only.
        how = trial if kind == precision else replace(trial, tolerance=None)
        label = "" if kind == precision else f"{type_names(kind)} "
        run = ProofRun(kind, setup, label, kind == own, finest, widens)
        reports.append(compare(model, setup.compose(kind), batches, run, how))
    report = joined(reports)
    note = f"the logic is proved in float32: the model does not run in float64 ({problem})"
    return replace(report, notes=(*report.notes, note)) if problem else report


@dataclass(frozen=True)
class ProofRun:
    """One run of a proof, in one precision."""

    precision: Precision
    setup: PrecisionSetup
    label: str = ""
    """Begins each quantity; empty in the run that computes in the asked types."""
    logic: bool = True
    """Whether this run proves the logic."""
    finest: Precision = EXACT
    """The most exact precision that the model runs in."""
    widens: bool = False
    """Whether float64 needs ``Widened``."""


def compare(
    model: nn.Module,
    composition: Composition,
    batches: Sequence[Mapping[str, Tensor]],
    run: ProofRun,
    trial: Trial,
) -> Report:
    """Return the report of :func:`verify`, for a model that the caller has cut and filled."""
    precision, loss_scale, mesh = run.precision, run.setup.loss_scale, composition.mesh
    micro_batch, limit = trial.micro_batch, trial.max_norm
    optimizer = run.setup.optimizer(precision, composition)
    # DTensor warns that full_tensor() of a strided shard takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    index, count = batch_share(mesh)
    mine = trial.shares[index] if trial.shares else None
    rows = [rows_of(mesh, batch, mine) for batch in batches]
    tolerance = trial.tolerance or tolerance_of(precision)
    loose: State = "loose" if run.logic else "" if precision.reduced else "coarse"
    comparison = Comparison(torch.device(mesh.device_type), tolerance, run.label, loose)
    held = parameters_of(composition)
    first = dist.get_rank() == 0
    model = copy.deepcopy(model) if first else model
    for name, parameter in model.named_parameters():
        values = [whole(p) for p in held.get(name, [])]
        begins = Expected(parameter.detach().to(kept_dtype(precision, parameter))) if first else None
        comparison.tensor("initial weight", name, values, parameter.shape, begins, 0.0)
    for name, shape, values in buffers_of(model, composition.model):
        begins = Expected(model.get_buffer(name)) if first else None
        comparison.tensor("buffer", name, values, shape, begins, 0.0)
    spread(model, composition, first)

    samples = len(batches[0]["targets"])
    reference = References(model, run, trial, samples, count, tolerance.loss) if first else None

    def expected(of: Callable[[References], _T]) -> _T | None:
        return of(reference) if reference else None

    def run_batch(here: Composition, step: int) -> Tensor:
        with Widened() if run.widens and precision == EXACT else nullcontext():
            return forward_backward(
                here,
                {name: value[rows[step]].clone() for name, value in batches[step].items()},
                micro_batch=mine or micro_batch,
                loss_function=trial.loss_function,
                loss_scale=loss_scale,
                dropout=DropoutKey(step),
            )

    def train_again(prepare: Callable[[Composition], None]) -> Composition:
        again = run.setup.compose(precision)
        prepare(again)
        other = run.setup.optimizer(precision, again)
        for step in range(len(batches)):
            run.setup.begin_step(step, other)
            run_batch(again, step)
            clip_grad_norm_(again, limit, loss_scale)
            other.step()
            other.zero_grad()
        return again

    subject = Subject(composition, model, comparison, run, train_again)
    results = [observe(subject) for observe in (MemoryKeys, *parts_of_add_ons("observe"))]
    observers: list[Observer] = [observer for observer in results if observer]
    # Then one process takes the composition's gradients at the end of each step. Of its own, AdamW's
    # steps would differ wherever a gradient is only rounding, and the next gradients with them.
    rounds = precision.reduced or any(observer.lossy_messages for observer in observers)
    before = {name: [whole(p) for p in parameters] for name, parameters in held.items()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    differences: list[Difference] = []
    for step, batch in enumerate(batches):
        run.setup.begin_step(step, optimizer)
        with watch(composition.model) as recorder, ExitStack() as watching:
            for observer in observers:
                watching.enter_context(observer.watch(step))
            loss = run_batch(composition, step)
        seen: dict[str, list[Choices]] = {}
        if routers(model):
            calls = ids_of_calls(composition, batch["targets"].shape[:2], micro_batch, mine)
            seen = gathered(recorder.choices(calls))
        if step == 0 and limit > 0:  # a fault of clipping has no effect if nothing is clipped
            limit = min(limit, float(clip_grad_norm_(composition, 0.0)) / loss_scale / 2)
            if reference:
                reference.clip_at(limit)
        messages, sent = MessageEffects(), None
        if rounds:
            own = {name: some[0] for name, some in held.items() if name in trained}
            got = {name: gradient_of(parameter) / loss_scale for name, parameter in own.items()}
            for observer in observers:
                messages = observer.after_backward(got) or messages
            sent = FromComposition(messages.received, shared(got, comparison.device))
        on_first_rank(References.step, reference, batch, seen, sent)
        if reference:
            for name, natural in reference.own.choices.items():
                differences += compare_choices(name, step + 1, natural, seen.get(name, []))
        for name, parameter in trained.items() if step == 0 or rounds else ():
            gradients = [gradient_of(p) / loss_scale for p in held.get(name, ())]
            if name in messages.missing:
                gradients = [gradient + messages.missing[name] for gradient in gradients]
            right = expected(lambda r, name=name: r.gradient(name))
            quantity = f"gradient {step + 1}" if step else "gradient"
            # A code is summed in float32. What travels plain keeps its type, and loses nothing.
            least = max(tolerance.gradient, CODES) if name in messages.lossy else tolerance.gradient
            comparison.tensor(quantity, name, gradients, parameter.shape, right, least)
            if precision.reduced:
                comparison.rounding(gradients, parameter.shape, right)
        norm = clip_grad_norm_(composition, limit, loss_scale)
        optimizer.step()
        optimizer.zero_grad()
        row = f"step {step + 1}"
        comparison.tensor("loss", row, [loss], loss.shape, expected(References.loss), tolerance.loss)
        right = expected(References.norm)
        comparison.tensor("grad_norm", row, [norm], norm.shape, right, tolerance.gradient)
    # One data rank alone reduces nothing.
    reduces = precision.reduce_dtype.itemsize < 4 and axis_size(mesh, "cp") * count > 1
    if precision.param_dtype.itemsize < 4 or precision.float8 != "off" or reduces:
        comparison.same_rounding()
    for name, shape, values in buffers_of(model, composition.model):
        right = expected(lambda r, name=name: r.buffer(name))
        comparison.tensor("buffer after", name, values, shape, right, tolerance.loss)
    after = {name: [whole(p) for p in parameters] for name, parameters in held.items()}
    for name, parameter in model.named_parameters():
        pairs = zip(after.get(name, ()), before.get(name, ()), strict=True)
        changes = [difference(new, old) for new, old in pairs]
        comparison.same_everywhere(name, after.get(name, ()))
        if name not in trained:
            moved = [or_infinite(float(change.norm())) for change in changes]
            moved += [math.inf for p in held.get(name, ()) if p.grad is not None]
            comparison.value("frozen weight", name, max(moved, default=None), 0.0)
            continue
        right = expected(lambda r, name=name: r.update(name))
        comparison.tensor("update", name, changes, parameter.shape, right, tolerance.update)
    for tied in composition.pipeline.ties if composition.pipeline else ():
        comparison.copies(tied.name, after.get(tied.name, []))
    for observer in observers:
        observer.compare()
    return comparison.report(differences, reference.tie if reference else tolerance.loss)


@torch.no_grad()
def spread(model: nn.Module, composition: Composition, first: bool) -> None:
    """Add noise to each parameter whose elements are all equal, on the whole model and on every rank.

    Zeros would hide the modules behind them, and ones would hide a wrong order of shards.
    """
    uniform = on_first_rank(
        lambda: [
            name
            for name, p in model.named_parameters()
            if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all())
        ]
    )
    for name, parameter in [
        *composition.named_parameters(),
        *(model.named_parameters() if first else ()),
    ]:
        if name in uniform:
            noise = torch.empty(parameter.shape, dtype=torch.float32)
            noise.normal_(0.0, _SPREAD, generator=named_generator(0, name))
            local = local_tensor(parameter)
            local.copy_(local.float() + local_shard(noise, parameter).to(local.device))
