"""Where a model ends and its loss begins: logits that are handed on, or never made."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from compose.errors import ConfigError
from compose.loss.chunked import chunked_cross_entropy, log_z
from compose.loss.cross_entropy import (
    IGNORE,
    LossFunction,
    at_least_float32,
    count_targets,
    cross_entropy,
    logits_of,
)
from compose.parallel.mesh import BATCH_AXES, sum_over


class CrossEntropy:
    """``cross_entropy`` as a LossFunction with options.

    chunk: tokens whose logits exist at a time; 0: all. If not, ``forward_backward`` has the projection
    that Plan.output names return the loss, by :meth:`of_hidden`. Called, it takes whole logits even so.
    z_loss: weight of (log Z)^2, added to each target's loss (Chowdhery et al. 2022, arXiv:2204.02311).
    The gradient is of both; the value is the cross-entropy alone, and :meth:`mean_square` tells the
    other.
    """

    def __init__(self, chunk: int = 0, z_loss: float = 0.0) -> None:
        self.chunk, self.z_loss = chunk, z_loss
        self.tally: Tensor | None = None

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(logits, targets)
        if not self.z_loss:
            return loss
        squares = (
            log_z(at_least_float32(logits_of(logits)))
            .square()
            .masked_fill(targets == IGNORE, 0.0)
            .sum()
        )
        self._count(squares, targets)
        z = self.z_loss * squares
        return loss + (z - z.detach())

    def of_hidden(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """The same of logits ``hidden @ weight.T``: hidden (B, L, D), weight (V, D), targets (B, L)."""
        loss, squares = chunked_cross_entropy(hidden, weight, targets, self.chunk, self.z_loss)
        self._count(squares, targets)
        return loss

    def _count(self, squares: Tensor, targets: Tensor) -> None:
        if self.z_loss and torch.is_grad_enabled():  # nothing in evaluation, as a router does
            found = torch.stack([squares.detach(), count_targets(targets)]).double()
            self.tally = found if self.tally is None else self.tally + found

    def mean_square(self, mesh: DeviceMesh) -> float:
        """Of log Z, over all ranks' targets of forwards with gradients since this was last asked; a
        collective."""
        found = self.tally
        if found is None:
            found = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
        self.tally = None
        squares, targets = sum_over(found, mesh, ("pp", *BATCH_AXES, "cp")).tolist()
        return squares / max(targets, 1)


class Output:
    """The projection onto the vocabulary, which returns a loss in place of logits while it is asked to.

    The loss is found inside the module's own forward, where a style has laid out its input and FSDP has
    gathered its weight. It comes out as (1, 1, 1): as many dims as logits, so that the layouts that a
    style gives its output hold for it too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.logits = module, module.forward
        self.loss: CrossEntropy | None = None
        self.targets: Tensor | None = None
        module.forward = self._forward

    def _forward(self, hidden: Tensor) -> Tensor:
        if self.loss is None:
            return self.logits(hidden)
        assert self.targets is not None
        weight = self.module.get_parameter("weight")
        loss = self.loss.of_hidden(hidden, weight, self.targets).view(1, 1, 1)
        if isinstance(hidden, DTensor):
            loss = DTensor.from_local(loss, hidden.device_mesh, [Replicate()], run_check=False)
        return loss


class StepLoss:
    """The loss of an optimizer step, micro-batch by micro-batch: a sum over targets, divided by
    ``count``, their number in the step. Told the targets before a forward, then called with its output.
    """

    def __init__(self, function: LossFunction, count: Tensor, output: Output | None) -> None:
        self.function, self.count, self.output = function, count, output

    def expect(self, targets: Tensor) -> None:
        """Before the forward of a micro-batch with these targets."""
        if self.output:
            self.output.targets = targets

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        if self.output is None:
            return self.function(output, targets) / self.count
        whole = output.full_tensor() if isinstance(output, DTensor) else output
        return whole.sum() / self.count


@contextmanager
def step_loss(function: LossFunction, count: Tensor, output: Output | None) -> Iterator[StepLoss]:
    """``function`` for one step; where it asks for it, ``output`` gives the loss in the meantime.

    Raises ConfigError where it does and there is no ``output``.
    """
    if not (isinstance(function, CrossEntropy) and function.chunk):
        yield StepLoss(function, count, None)
        return
    if output is None:
        raise ConfigError("plan.output: names no projection, which a loss in chunks needs")
    output.loss = function
    try:
        yield StepLoss(function, count, output)
    finally:
        output.loss = output.targets = None
