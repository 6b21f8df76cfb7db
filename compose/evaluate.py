"""Forward alone, on any mesh: the loss of a batch, or what the model says to it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from compose.applied import applied_to
from compose.data_parallel import finish_backward
from compose.loss import LossFunction, count_targets, cross_entropy
from compose.mesh import BATCH_AXES, sum_over
from compose.output import step_loss
from compose.step import micro_batches, own_part, samples_at_once


def evaluate(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    micro_batch: int | None = None,
    loss_function: LossFunction = cross_entropy,
) -> tuple[Tensor, Tensor]:
    """(sum of the loss over all targets, their number), of all ranks together; float64 and int64.

    batch and micro_batch as ``forward_backward`` takes them. A row that fills up a share has IGNORE as
    its targets and positions of -1. Dropout and the like are off; there are no gradients, routers
    neither count nor balance, and nothing is changed: the next step is what it would have been.
    """
    total = torch.zeros((), dtype=torch.float64, device=batch["targets"].device)

    with step_loss(loss_function, torch.ones_like(total), applied_to(model).output) as loss:

        def add(output: Tensor, part: Mapping[str, Tensor]) -> None:
            total.add_(loss(output, part["targets"]))

        def expect(part: Mapping[str, Tensor]) -> None:
            loss.expect(part["targets"])

        forward(model, batch, mesh, micro_batch=micro_batch, each=add, before=expect)
    count = sum_over(count_targets(batch["targets"]), mesh, BATCH_AXES)
    return sum_over(total, mesh, ("pp", *BATCH_AXES, "cp")), count


@torch.no_grad()
def forward(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    micro_batch: int | None = None,
    each: Callable[[Tensor, Mapping[str, Tensor]], None],
    before: Callable[[Mapping[str, Tensor]], None] = lambda part: None,
) -> None:
    """Run ``batch`` through ``model``, and call ``each(output, part)`` for every micro-batch in order,
    and ``before(part)`` ahead of it.

    part: of ``batch``, whose ``targets``, if there are any, the model does not see; with cp, what this
    rank has of each sequence. In a pipeline both are called where the last stage is. The model is
    left as it was.
    """
    size, applied = samples_at_once(batch, micro_batch), applied_to(model)
    parts = list(micro_batches(own_part(model, batch, mesh), size))
    stages = [stage.module for stage in applied.pipeline.stages] if applied.pipeline else []
    with loss_parallel(), _evaluating(model, *stages):
        if applied.pipeline:
            applied.pipeline.forward(parts, each, before)
            return
        for part in parts:
            before(part)
            each(model(**{name: value for name, value in part.items() if name != "targets"}), part)
        finish_backward(model, applied.zero, last=True)


@contextmanager
def _evaluating(*models: nn.Module) -> Iterator[None]:
    """In evaluation mode, each module of ``models``; then in the mode it had."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
