"""Forward alone, on any mesh: the loss of a batch or of all validation data, or the model's output."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from compose.composition import Composition
from compose.config.job import Job
from compose.data.batches import in_order
from compose.data.samples import Samples
from compose.memory.float8 import shared_scales
from compose.ops.batch import targets_of
from compose.ops.cross_entropy import LossFunction, count_for, cross_entropy
from compose.parallel.mesh import BATCH_AXES, batch_share, sum_over
from compose.parallel.output_projection import step_loss
from compose.parallel.step_rules import check_loss, check_micro_batches, kept_gathered
from compose.train.heartbeat import report_phase
from compose.train.step import (
    begun,
    local_batch,
    micro_batches,
    on_device,
    samples_at_once,
)


def evaluate(
    composition: Composition,
    batch: Mapping[str, Tensor],
    *,
    micro_batch: int | None = None,
    loss_function: LossFunction = cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of a batch, and change nothing: the next step is what it would have been.

    Dropout and the like are off. There are no gradients, and routers neither count nor balance.

    Args:
        composition: What ``compose.apply`` returned.
        batch: As ``forward_backward`` takes it. A row that only fills up a share has targets from which
            nothing is learnt, and positions of -1.
        micro_batch: Samples in one forward; None is the whole share.
        loss_function: As ``forward_backward`` takes it.

    Returns:
        The sum of the loss over all targets of all ranks, float64, and the number of targets, int64, or
        what ``count`` of the loss returns.

    Raises:
        ValueError: ``micro_batch`` is below 1.
        ConfigError: As in ``forward_backward``, except for gradients.
    """
    mesh, targets = composition.mesh, targets_of(batch)
    check_loss(loss_function)
    micro_batch = samples_at_once(batch, micro_batch)
    own, runs = count_for(loss_function, targets), -(-len(targets) // micro_batch)
    count, all_runs = sum_over(torch.stack([own, torch.full_like(own, runs)]), mesh, BATCH_AXES)
    check_micro_batches(composition.data, runs, all_runs, mesh, zero=3)
    total = torch.zeros((), dtype=torch.float64, device=targets.device)
    local = local_batch(composition, batch)
    loss_function, local = begun(loss_function, composition, local, micro_batch)

    with step_loss(loss_function, torch.ones_like(total), composition.output) as loss:

        def add(output: Tensor, part: Mapping[str, Tensor]) -> None:
            total.add_(loss(output, part["targets"]))

        def expect(part: Mapping[str, Tensor]) -> None:
            loss.expect(part["targets"])

        forward(composition, local, micro_batch=micro_batch, each=add, before=expect)
    return sum_over(total, mesh, ("pp", *BATCH_AXES, "cp")), count


@torch.no_grad()
def forward(
    composition: Composition,
    batch: Mapping[str, Any],
    *,
    micro_batch: int | None = None,
    each: Callable[[Tensor, Mapping[str, Tensor]], None],
    before: Callable[[Mapping[str, Tensor]], None] = lambda part: None,
) -> None:
    """Run a batch of ``local_batch`` through the model, which is left as it was.

    ``each(output, part)`` is called for every micro-batch in order, and ``before(part)`` before its
    forward; in a pipeline on the rank of the last stage. The model does not see ``targets``.
    """
    model, pipeline = composition.model, composition.pipeline
    size = samples_at_once(batch, micro_batch)
    parts = list(micro_batches(batch, size))
    stages = [stage.module for stage in pipeline.stages] if pipeline else []
    scales = shared_scales(model, composition.float8)
    gathered = kept_gathered(composition.data)
    with gathered, loss_parallel(), scales, _evaluating(model, *stages):
        if pipeline:
            pipeline.forward(parts, each, before)
            return
        for part in parts:
            before(part)
            each(model(**{name: value for name, value in part.items() if name != "targets"}), part)
        composition.data[0].finish_backward(last=True)


@contextmanager
def _evaluating(*models: nn.Module) -> Iterator[None]:
    """Put each module of ``models`` in evaluation mode, and afterwards back in the mode that it had."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Validation:
    """Measures the loss of ``data.validation`` every ``train.validate_every`` steps, and at the end."""

    def __init__(
        self, job: Job, samples: Samples | None, device: torch.device, function: LossFunction
    ) -> None:
        self.job, self.samples, self.device, self.function = job, samples, device, function

    def loss(self, composition: Composition, step: int) -> float | None:
        """Return the mean loss over all targets after a step, in nats; None if it is not due."""
        train = self.job.config.train
        if not self.samples or not (step % train.validate_every == 0 or step == train.last_step):
            return None
        report_phase(step, "validation")
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        share = batch_share(composition.mesh)
        unit = share[1] * train.micro_batch  # each rank runs equally many micro-batches
        rows = -(-self.job.global_batch // unit) * unit
        for batch in in_order(self.samples, rows, share):
            here = on_device(batch, self.device)
            loss, targets = evaluate(
                composition, here, micro_batch=train.micro_batch, loss_function=self.function
            )
            total, count = total + loss, count + targets
        mean = total / count.clamp(min=1)
        dist.broadcast(mean, src=0)  # decisions follow from it, which must be the same on every rank
        return mean.item()

    def enough(self, validations: Sequence[tuple[int, float | None]]) -> str:
        """Return why a run with these (step, loss) ends by ``train.patience``; "" if it goes on."""
        train, best, at, waited = self.job.config.train, math.inf, 0, 0
        # One at the end of an earlier start, between two that are due, decides nothing.
        due = [each for each in validations if train.patience and not each[0] % train.validate_every]
        for step, loss in due:
            if loss is not None and loss < best - train.min_delta:
                best, at, waited = loss, step, 0
            else:
                waited += 1
        if not 0 < train.patience <= waited:
            return ""
        than = f"on {best:.4f} of step {at}" if at else "on a loss that is not finite"
        return f"{waited} validations in a row are no improvement {than} (train.patience)"
