"""The proof that a composition equals one process: loss, norm, every gradient, the weights after.

Rank 0 runs the whole batch through the whole model with plain PyTorch: none of compose's code takes
part. Every rank then holds what the composition gave it against that, since replicas that have
drifted apart look right on one rank.
"""

import copy
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.activation_checkpointing import KEEP_ALL, Recompute
from compose.applied import applied_to
from compose.apply import apply
from compose.errors import ConfigError
from compose.float8 import Choice, Recipe, apply_float8
from compose.loss import LossFunction, count_targets, cross_entropy
from compose.mesh import batch_share
from compose.pipeline_parallel import Schedule
from compose.plan import Plan
from compose.report import Judge, Report, Tolerance, tolerance_of
from compose.routing import routers
from compose.step import clip_grad_norm_, forward_backward
from compose.witness import (
    Choices,
    Difference,
    compare_choices,
    follow,
    gathered,
    ids_of_calls,
    watch,
)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


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
    activation_checkpoint: Recompute = KEEP_ALL,
    pipeline: Schedule | None = None,
    ep: int = 1,
    float8: Recipe = "off",
    loss_function: LossFunction = cross_entropy,
    optimizer: OptimizerFactory | None = None,
    max_norm: float = 1.0,
    tolerance: Tolerance | None = None,
) -> Report:
    """Prove that ``plan`` on ``mesh`` trains ``model`` as one process does.

    model: holds its weights, those of rank 0 counting; it is left as it was.
    batch: the global batch, the same on every rank, as ``forward_backward`` takes it; a list of
        batches runs one optimizer step for each (gradients are compared on the first).
    optimizer: makes an optimizer from parameters; AdamW by default.
    """
    batches = [batch] if isinstance(batch, Mapping) else list(batch)
    composed = apply(
        copy.deepcopy(model),
        plan,
        mesh,
        zero=zero,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        activation_checkpoint=activation_checkpoint,
        pipeline=pipeline,
        ep=ep,
        float8=float8,
    )
    return compare(
        model,
        composed,
        mesh,
        batches,
        micro_batch=micro_batch,
        param_dtype=param_dtype,
        loss_function=loss_function,
        optimizer=optimizer or partial(torch.optim.AdamW, lr=1e-3, foreach=False),
        max_norm=max_norm,
        tolerance=tolerance or tolerance_of(param_dtype, float8),
    )


def compare(
    model: nn.Module,
    composed: nn.Module,
    mesh: DeviceMesh,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    micro_batch: int | None,
    param_dtype: torch.dtype,
    loss_function: LossFunction,
    optimizer: OptimizerFactory,
    max_norm: float,
    tolerance: Tolerance,
    loss_scale: float = 1.0,
    reference_optimizer: OptimizerFactory | None = None,
) -> Report:
    """The comparison that :func:`verify` makes, of a model already cut and filled by the caller.

    reference_optimizer: of the one process; None is ``optimizer`` there too.
    """
    # DTensor warns that full_tensor() of a strided shard takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    index, count = batch_share(mesh)
    samples = {len(value) for batch in batches for value in batch.values()}
    if any(number % count for number in samples):
        raise ConfigError(f"batch: {max(samples)} samples cannot be shared by {count} ranks")
    judge = Judge(torch.device(mesh.device_type))
    reference: _OneProcess | None = None
    if dist.get_rank() == 0:
        reference = _OneProcess(
            model,
            param_dtype,
            loss_function,
            reference_optimizer or optimizer,
            max_norm,
            micro_batch,
            tolerance.loss,
            loss_scale,
            applied_to(composed).float8,
        )
    held = _held(composed)
    before = {name: [whole(p) for p in parameters] for name, parameters in held.items()}
    for name, parameter in model.named_parameters():
        expected = reference and reference.initial[name]
        judge.tensor("initial weight", name, before.get(name, []), parameter.shape, expected, 0.0)
    buffers = dict(composed.named_buffers())
    for name, buffer in model.named_buffers():
        value = [buffers[name]] if name in buffers else []
        expected = reference and reference.buffers[name]
        judge.tensor("buffer", name, value, buffer.shape, expected, 0.0)

    composed_optimizer = optimizer(composed.parameters())
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
        found: dict[str, list[Choices]] = {}
        if routers(model):
            calls = ids_of_calls(composed, batch["targets"].shape, mesh, micro_batch)
            found = gathered(witness.choices(calls))
        _on_first_rank(partial(reference.step, batch, found) if reference else None)
        if reference:
            differences += [
                compare_choices(name, step + 1, expected, found.get(name, []))
                for name, expected in reference.choices.items()
            ]
        for name, parameter in model.named_parameters() if step == 0 else ():
            gradients = [_gradient(p) / loss_scale for p in held.get(name, ())]
            expected = reference and reference.gradients.get(name)
            judge.tensor("gradient", name, gradients, parameter.shape, expected, tolerance.gradient)
        norm = clip_grad_norm_(composed.parameters(), max_norm, mesh, loss_scale)
        composed_optimizer.step()
        composed_optimizer.zero_grad()
        label = f"step {step + 1}"
        expected = reference and reference.loss
        judge.tensor("loss", label, [loss], loss.shape, expected, tolerance.loss)
        expected = reference and reference.norm
        judge.tensor("grad_norm", label, [norm], norm.shape, expected, tolerance.gradient)
    buffers = dict(composed.named_buffers())
    for name, buffer in model.named_buffers():
        value = [buffers[name]] if name in buffers else []
        expected = reference and reference.model.get_buffer(name)
        judge.tensor("buffer after", name, value, buffer.shape, expected, tolerance.loss)
    after = {name: [whole(p) for p in parameters] for name, parameters in held.items()}
    for name, parameter in model.named_parameters():
        pairs = zip(after.get(name, ()), before.get(name, ()), strict=True)
        expected = reference and reference.change(name)
        changes = [new.float() - old.float() for new, old in pairs]
        judge.tensor("update", name, changes, parameter.shape, expected, tolerance.update)
    pipeline = applied_to(composed).pipeline
    for tied in pipeline.ties if pipeline else ():
        judge.copies(tied.name, after.get(tied.name, []), model.get_parameter(tied.name).shape)
    return judge.report(differences, tolerance.loss)


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
    problem: list[str | None] = [None]
    try:
        if work:
            work()
    except Exception:
        problem[0] = traceback.format_exc()
    dist.broadcast_object_list(problem, src=0)
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


class _OneProcess:
    """The same steps in plain PyTorch, with float32 master weights and autocast by hand."""

    def __init__(
        self,
        model: nn.Module,
        param_dtype: torch.dtype,
        loss_function: LossFunction,
        optimizer: OptimizerFactory,
        max_norm: float,
        micro_batch: int | None,
        tie: float,
        loss_scale: float,
        float8: Choice,
    ) -> None:
        self.tie, self.loss_scale = tie, loss_scale
        self.model = copy.deepcopy(model)
        apply_float8(self.model, float8)
        self.param_dtype, self.loss_function = param_dtype, loss_function
        self.max_norm, self.micro_batch = max_norm, micro_batch
        self.optimizer = optimizer(self.model.parameters())
        self.initial = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.buffers = {n: b.detach().clone() for n, b in self.model.named_buffers()}

    def step(self, batch: Mapping[str, Tensor], found: Mapping[str, Sequence[Choices]]) -> None:
        """One optimizer step on the global batch; leaves loss, norm, gradients and choices behind.

        Where routing is a tie, it goes as in the other run, which ``found``.
        """
        parameters = dict(self.model.named_parameters())
        count = count_targets(batch["targets"]).clamp(min=1)
        routing = routers(self.model).values()
        for router in routing:
            router.tokens_per_step, router.loss_scale = batch["targets"].numel(), self.loss_scale
        self.loss = torch.zeros((), device=count.device)
        ids = torch.arange(batch["targets"].numel()).view(batch["targets"].shape)
        calls = ids.split(self.micro_batch or len(ids))
        with follow(self.model, found, calls, self.tie) as self.choices:
            self._accumulate(batch, count, parameters)
        for router in routing:
            router.finish_step(router.tally)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.loss_scale
        self.gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        limit = self.max_norm if self.max_norm > 0 else float("inf")
        self.norm = nn.utils.clip_grad_norm_(list(parameters.values()), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _accumulate(
        self, batch: Mapping[str, Tensor], count: Tensor, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        samples = len(batch["targets"])
        size = self.micro_batch or samples
        for start in range(0, samples, size):
            part = {name: value[start : start + size] for name, value in batch.items()}
            targets = part.pop("targets")
            part = {n: v.to(self.param_dtype) if v.is_floating_point() else v for n, v in part.items()}
            cast = {name: p.to(self.param_dtype) for name, p in parameters.items()}
            output = torch.func.functional_call(self.model, cast, args=(), kwargs=part)
            loss = self.loss_function(output, targets) / count
            (loss * self.loss_scale).backward()
            self.loss += loss.detach()

    def change(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach() - self.initial[name]
