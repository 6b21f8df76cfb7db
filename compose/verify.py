"""The proof that a composition equals one process: loss, norm, every gradient, the weights after.

Rank 0 runs the whole batch through the whole model as ``compose.one_process`` does. Every rank then
holds what the composition gave it against that, since replicas that have drifted apart look right on
one rank. Where a composition computes in a reduced precision, its logic runs in float64 first: there a
fault cannot hide behind rounding.
"""

import copy
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.activation_checkpointing import KEEP_ALL, Recompute
from compose.applied import applied_to
from compose.apply import apply
from compose.compilation import NOTHING, Compile
from compose.errors import ConfigError
from compose.float8 import NOTHING as WHOLE
from compose.float8 import Choice, Recipe, choose
from compose.local import local_tensor
from compose.loss import LossFunction, count_targets, cross_entropy
from compose.mesh import axis_size, batch_share
from compose.one_process import (
    EXACT,
    Arithmetic,
    Expected,
    Named,
    OptimizerFactory,
    OptimizerOf,
    References,
    RoundedWeights,
)
from compose.optimizer.adamw import AdamW
from compose.pipeline_parallel import Schedule
from compose.plan import Plan, resolve
from compose.report import Judge, Report, Tolerance, joined, tolerance_of
from compose.routing import routers
from compose.step import clip_grad_norm_, forward_backward
from compose.weights import local_part, named_generator
from compose.witness import Choices, Difference, compare_choices, gathered, ids_of_calls, watch

# Of what is added to weights that are all alike, as zeros are.
_SPREAD = 0.02


def verify(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    batch: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    *,
    zero: int = 3,
    micro_batch: int | None = None,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    master_dtype: torch.dtype = torch.float32,
    activation_checkpoint: Recompute = KEEP_ALL,
    pipeline: Schedule | None = None,
    ep: int = 1,
    float8: Recipe = "off",
    compile: Compile = NOTHING,
    offload: bool = False,
    offload_activations: bool = False,
    zero3_reshard: int = 0,
    prefetch: int = 0,
    loss_function: LossFunction = cross_entropy,
    optimizer: OptimizerFactory | None = None,
    max_norm: float = 1.0,
    tolerance: Tolerance | None = None,
) -> Report:
    """Prove that ``plan`` on ``mesh`` trains ``model`` as one process does.

    The options are those of ``apply``, and each takes part. A reduced precision is run twice: in
    float64, without float8, and as it is.

    model: holds its weights, those of rank 0 counting; it is left as it was. Where a parameter is the
        same number throughout, as zeros are, the proof adds noise to it: behind a projection of zeros
        no gradient would be seen.
    batch: the global batch, the same on every rank, as ``forward_backward`` takes it; a list of
        batches runs one optimizer step for each (gradients are compared on the first).
    optimizer: makes an optimizer from parameters; AdamW by default. With a ``master_dtype`` other than
        float32 it is given pairs of name and parameter, as ``compose.optimizer.AdamW`` takes them.
    tolerance: of the run in the types asked for; None: ``compose.report.tolerance_of`` them.

    Raises ConfigError where the plan does not fit the model, where no target is trained on, and where
    ``loss_function`` returns a mean.
    """
    batches = [batch] if isinstance(batch, Mapping) else list(batch)
    chosen = Arithmetic(param_dtype, reduce_dtype, master_dtype, master_dtype, float8)

    def compose(arithmetic: Arithmetic) -> nn.Module:
        return apply(
            copy.deepcopy(model),
            plan,
            mesh,
            zero=zero,
            param_dtype=arithmetic.param,
            reduce_dtype=arithmetic.reduce,
            master_dtype=arithmetic.master,
            activation_checkpoint=activation_checkpoint,
            pipeline=pipeline,
            ep=ep,
            float8=float8 if arithmetic.float8 != "off" else "off",
            compile=compile,
            offload=offload,
            offload_activations=offload_activations,
            zero3_reshard=zero3_reshard,
            prefetch=prefetch,
        )

    def optimizer_for(arithmetic: Arithmetic, named: Named) -> torch.optim.Optimizer:
        if arithmetic.master.itemsize < 4:
            return (optimizer or partial(AdamW, lr=1e-3))(named)
        default = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
        return (optimizer or default)(parameter for _, parameter in named)

    def reference_optimizer(arithmetic: Arithmetic, named: Named) -> torch.optim.Optimizer:
        if arithmetic.master.itemsize < 4:
            return RoundedWeights(optimizer or partial(AdamW, lr=1e-3), arithmetic.master, named)
        return optimizer_for(arithmetic, named)

    return prove_both(
        model,
        compose,
        mesh,
        batches,
        chosen,
        optimizer=lambda arithmetic, composed: optimizer_for(arithmetic, _named(composed)),
        reference_optimizer=reference_optimizer,
        tolerance=tolerance,
        micro_batch=micro_batch,
        loss_function=loss_function,
        max_norm=max_norm,
        float8=choose(model, resolve(plan, model), axis_size(mesh, "tp"), float8, mesh.device_type),
    )


def prove_both(
    model: nn.Module,
    compose: Callable[[Arithmetic], nn.Module],
    mesh: DeviceMesh,
    batches: Sequence[Mapping[str, Tensor]],
    arithmetic: Arithmetic,
    *,
    optimizer: Callable[[Arithmetic, nn.Module], torch.optim.Optimizer],
    logic: Arithmetic = EXACT,
    tolerance: Tolerance | None = None,
    **options: Any,
) -> Report:
    """The proof of a composition in ``arithmetic``: where this is reduced, of its logic first.

    compose: makes the composed model for some arithmetic. optimizer: makes its optimizer. logic: what
        the logic runs in. options: those of :func:`compare`.
    """
    reports = []
    for kind in [logic, arithmetic] if arithmetic.reduced else [arithmetic]:
        composed = compose(kind)
        allowed = tolerance_of(kind)
        report = compare(
            model,
            composed,
            mesh,
            batches,
            arithmetic=kind,
            optimizer=optimizer(kind, composed),
            tolerance=tolerance if tolerance and kind is arithmetic else allowed,
            label=f"{kind} " if arithmetic.reduced and kind is logic else "",
            **options,
        )
        reports.append(report)
    return joined(reports)


def compare(
    model: nn.Module,
    composed: nn.Module,
    mesh: DeviceMesh,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    optimizer: torch.optim.Optimizer,
    reference_optimizer: OptimizerOf,
    arithmetic: Arithmetic = Arithmetic(),  # noqa: B008
    micro_batch: int | None = None,
    loss_function: LossFunction = cross_entropy,
    max_norm: float = 1.0,
    tolerance: Tolerance | None = None,
    loss_scale: float = 1.0,
    float8: Choice = WHOLE,
    label: str = "",
) -> Report:
    """The comparison that :func:`verify` makes, of a model already cut and filled by the caller.

    optimizer: of ``composed``. float8: the layers that compute in it on one process. label: stands
        before each quantity.
    """
    # DTensor warns that full_tensor() of a strided shard takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    _check_batches(batches, mesh)
    tolerance = tolerance or tolerance_of(arithmetic)
    index, count = batch_share(mesh)
    judge = Judge(torch.device(mesh.device_type), tolerance, label)
    held = _held(composed)
    first = dist.get_rank() == 0

    model = copy.deepcopy(model) if first else model
    _judge_beginning(judge, model, composed, arithmetic.master if first else None)
    _spread(model, composed, first)

    reference: References | None = None
    if first:
        reference = References(
            model,
            arithmetic,
            loss_function,
            reference_optimizer,
            max_norm=max_norm,
            micro_batch=micro_batch,
            samples=len(batches[0]["targets"]),
            loss_scale=loss_scale,
            tie=tolerance.loss,
            float8=float8,
        )

    def expected(of: Callable[[References], Expected]) -> Expected | None:
        return of(reference) if reference else None

    before = {name: [whole(p) for p in parameters] for name, parameters in held.items()}
    differences: list[Difference] = []
    for step, batch in enumerate(batches):
        share = {name: _slice(value, index, count) for name, value in batch.items()}
        with watch(composed) as witness:
            loss = forward_backward(
                composed,
                share,
                mesh,
                micro_batch=micro_batch,
                loss_function=loss_function,
                loss_scale=loss_scale,
            )
        seen: dict[str, list[Choices]] = {}
        if routers(model):
            calls = ids_of_calls(composed, batch["targets"].shape, mesh, micro_batch)
            seen = gathered(witness.choices(calls))
        _on_first_rank(partial(reference.step, batch, seen) if reference else None)
        if reference:
            differences += [
                compare_choices(name, step + 1, natural, seen.get(name, []))
                for name, natural in reference.own.choices.items()
            ]
        for name, parameter in model.named_parameters() if step == 0 else ():
            gradients = [_gradient(p) / loss_scale for p in held.get(name, ())]
            right = expected(lambda r, name=name: r.gradient(name))
            judge.tensor("gradient", name, gradients, parameter.shape, right, tolerance.gradient)
            if arithmetic.reduced:
                judge.rounding(gradients, parameter.shape, right)
        norm = clip_grad_norm_(composed.parameters(), max_norm, mesh, loss_scale)
        optimizer.step()
        optimizer.zero_grad()
        row = f"step {step + 1}"
        judge.tensor("loss", row, [loss], loss.shape, expected(References.loss), tolerance.loss)
        right = expected(References.norm)
        judge.tensor("grad_norm", row, [norm], norm.shape, right, tolerance.gradient)
    # A lone data rank reduces nothing.
    reduces = arithmetic.reduce.itemsize < 4 and axis_size(mesh, "cp") * count > 1
    if arithmetic.param.itemsize < 4 or arithmetic.float8 != "off" or reduces:
        judge.same_rounding()
    for name, shape, values in _buffers(model, composed):
        right = expected(lambda r, name=name: r.buffer(name))
        judge.tensor("buffer after", name, values, shape, right, tolerance.loss)
    after = {name: [whole(p) for p in parameters] for name, parameters in held.items()}
    for name, parameter in model.named_parameters():
        pairs = zip(after.get(name, ()), before.get(name, ()), strict=True)
        changes = [new.double() - old.double() for new, old in pairs]
        right = expected(lambda r, name=name: r.update(name))
        allowed = tolerance.update_of(parameter.numel()) if arithmetic.reduced else tolerance.update
        judge.tensor("update", name, changes, parameter.shape, right, allowed)
        judge.same_everywhere(name, after.get(name, ()))
    pipeline = applied_to(composed).pipeline
    for tied in pipeline.ties if pipeline else ():
        judge.copies(tied.name, after.get(tied.name, []), model.get_parameter(tied.name).shape)
    return judge.report(differences, reference.tie if reference else tolerance.loss)


def _judge_beginning(
    judge: Judge, model: nn.Module, composed: nn.Module, master: torch.dtype | None
) -> None:
    """Compare weights and buffers before the first step; ``master`` is None but on the first rank."""
    held = _held(composed)
    for name, parameter in model.named_parameters():
        values = [whole(p) for p in held.get(name, [])]
        right = None if master is None else Expected(parameter.detach().to(master))
        judge.tensor("initial weight", name, values, parameter.shape, right, 0.0)
    whole_buffers = dict(model.named_buffers())
    for name, shape, values in _buffers(model, composed):
        right = None if master is None else Expected(whole_buffers[name])
        judge.tensor("buffer", name, values, shape, right, 0.0)


def _buffers(model: nn.Module, composed: nn.Module) -> Iterator[tuple[str, torch.Size, list[Tensor]]]:
    """Name and shape of each buffer of the whole model, and what this rank has of it."""
    here = dict(composed.named_buffers())
    for name, buffer in model.named_buffers():
        yield name, buffer.shape, [here[name]] if name in here else []


def _check_batches(batches: Sequence[Mapping[str, Tensor]], mesh: DeviceMesh) -> None:
    _, count = batch_share(mesh)
    samples = {len(value) for batch in batches for value in batch.values()}
    if any(number % count for number in samples):
        raise ConfigError(f"batch: {max(samples)} samples cannot be shared by {count} ranks")
    for batch in batches:
        if not count_targets(batch["targets"]):
            raise ConfigError(
                "batch: no target is trained on, so that nothing can be proved; give targets other"
                " than -100"
            )


@torch.no_grad()
def _spread(model: nn.Module, composed: nn.Module, first: bool) -> None:
    """Add noise to the parameters that are one number throughout, in the whole model on the first rank
    and in what each rank holds. Zeros hide what is behind them, and ones an order of shards."""
    alike = [
        name
        for name, p in model.named_parameters()
        if first and p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all())
    ]
    shared = [alike]
    dist.broadcast_object_list(shared, src=0)
    aliases = applied_to(composed).aliases
    held = [(aliases.get(name, name), p) for name, p in composed.named_parameters()]
    for name, parameter in [*held, *(model.named_parameters() if first else ())]:
        if name in shared[0]:
            noise = torch.empty(parameter.shape, dtype=torch.float32)
            noise.normal_(0.0, _SPREAD, generator=named_generator(0, name))
            local = local_tensor(parameter)
            changed = local.float() + local_part(noise, parameter).to(local.device)
            local.copy_(changed)


def _named(composed: nn.Module) -> Named:
    """Its parameters by their names in the whole model."""
    return [(name, p) for name, held in _held(composed).items() for p in held]


def _held(composed: nn.Module) -> dict[str, list[nn.Parameter]]:
    """This rank's parameters by their names in the whole model, of which it may have copies."""
    aliases = applied_to(composed).aliases
    held: dict[str, list[nn.Parameter]] = {}
    for name, parameter in composed.named_parameters():
        held.setdefault(aliases.get(name, name), []).append(parameter)
    return held


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.shape, device=parameter.device)
    return whole(parameter.grad)


def _on_first_rank(work: Callable[[], None] | None) -> None:
    """Do what rank 0 alone has to do; if it raises, every rank does, rather than wait for it."""
    problem: list[list[str] | str | None] = [None]
    try:
        if work:
            work()
    except ConfigError as error:
        problem[0] = error.problems
    except Exception:
        problem[0] = traceback.format_exc()
    dist.broadcast_object_list(problem, src=0)
    if isinstance(problem[0], list):
        raise ConfigError(*problem[0])
    if problem[0] is not None:
        raise RuntimeError(f"the model failed on one process:\n{problem[0]}")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor (a collective), or the tensor itself; a detached copy."""
    if isinstance(tensor, DTensor):  # whose part may be in host memory, where no collective reaches
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return tensor.detach().clone()


def _slice(value: Tensor, index: int, count: int) -> Tensor:
    share = len(value) // count
    return value[index * share : (index + 1) * share]
