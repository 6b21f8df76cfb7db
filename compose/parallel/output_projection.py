"""The end of a model and the beginning of its loss: logits are handed on, or never made."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from compose.errors import ConfigError
from compose.ops.batch import IGNORE, count_targets
from compose.ops.cross_entropy import (
    LossFunction,
    chunked_cross_entropy,
    cross_entropy,
    log_z,
    logits_of,
)
from compose.ops.tensors import at_least_float32
from compose.parallel.mesh import BATCH_AXES, sum_over
from compose.parallel.vocabulary_parallel import placed_input


class CrossEntropy:
    """``cross_entropy`` as a LossFunction with options.

    With ``chunk``, ``forward_backward`` lets the projection that Plan.output names return the loss, by
    :meth:`of_hidden`. A direct call takes whole logits in any case. The z-loss, ``z_loss`` times
    (log Z)^2 for each target (Chowdhery et al. 2022, arXiv:2204.02311), is in the gradient and not in
    the value, which is the cross-entropy alone. :meth:`mean_square` returns the mean of (log Z)^2.
    """

    def __init__(self, chunk: int = 0, z_loss: float = 0.0) -> None:
        self.chunk, self.z_loss = chunk, z_loss
        self.tally: Tensor | None = None

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of whole logits (B, L, V), a sum over targets (B, L)."""
        loss = cross_entropy(logits, targets)
        if not self.z_loss:
            return loss
        log_zs = log_z(at_least_float32(logits_of(logits)))
        squares = log_zs.square().masked_fill(targets == IGNORE, 0.0).sum()
        self._count(squares, targets)
        z = self.z_loss * squares
        return loss + (z - z.detach())

    def of_hidden(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the same loss of the logits of ``hidden`` (B, L, D) and ``weight`` (V, D)."""
        loss, squares = chunked_cross_entropy(hidden, weight, targets, self.chunk, self.z_loss)
        self._count(squares, targets)
        return loss

    def _count(self, squares: Tensor, targets: Tensor) -> None:
        if self.z_loss and torch.is_grad_enabled():  # like a router, it counts nothing in evaluation
            result = torch.stack([squares.detach(), count_targets(targets)]).double()
            self.tally = result if self.tally is None else self.tally + result

    def mean_square(self, mesh: DeviceMesh) -> Tensor:
        """Return the mean of (log Z)^2 over all ranks' targets since the last call; a collective.

        Only forwards with gradients count. The mean is a scalar on the device.
        """
        result = self.tally
        if result is None:
            result = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
        self.tally = None
        squares, targets = sum_over(result, mesh, ("pp", *BATCH_AXES, "cp"))
        return squares / targets.clamp(min=1)


class Output:
    """The projection onto the vocabulary, which can return a loss in place of logits.

    The loss is computed inside the module's own forward, where a style has laid out its input and FSDP
    has gathered its weight. It is returned as (1, 1, 1). These are as many dims as logits have, so the
    layouts that a style gives the output are valid for it too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.logits = module, module.forward
        self.loss: CrossEntropy | None = None
        self.targets: Tensor | None = None
        self.value: Tensor | None = None
        """The last loss, until it was compared with what the model returned."""
        self.compared = False
        module.forward = self._forward

    def _forward(self, hidden: Tensor) -> Tensor:
        if self.loss is None:
            return self.logits(hidden)
        assert self.targets is not None
        hidden = placed_input(self.module, hidden)
        weight = self.module.get_parameter("weight")
        loss = self.loss.of_hidden(hidden, weight, self.targets).view(1, 1, 1)
        self.value = None if torch.compiler.is_compiling() else loss.detach()
        if isinstance(hidden, DTensor):
            loss = DTensor.from_local(loss, hidden.device_mesh, [Replicate()], run_check=False)
        return loss

    def compare(self, returned: Tensor) -> None:
        """Raise ConfigError if the model returned another number; it may have rounded this one."""
        # A simulation has no number to read, and a GPU is waited for once.
        value = self.value if returned.is_cpu or (returned.is_cuda and not self.compared) else None
        self.value, self.compared, same = None, True, returned.numel() == 1
        if same and value is not None and type(returned) is Tensor:
            one, other = float(returned), float(value)
            same = math.isclose(one, other, rel_tol=0.01) or (one != one and other != other)
        if not same:
            raise ConfigError(
                "plan.output: forward changes what that projection returns, and with a loss in chunks"
                " this is the loss; return it as it is, or use a loss without chunk (train.loss_chunk)"
            )


class StepLoss:
    """The loss of an optimizer step, micro-batch by micro-batch.

    It is a sum over targets, divided by ``count``, their number in the step. Call :meth:`expect` before
    a micro-batch's forward, and the object with its output.
    """

    def __init__(self, function: LossFunction, count: Tensor, output: Output | None) -> None:
        self.function, self.count, self.output = function, count, output

    def expect(self, targets: Tensor) -> None:
        """Note the targets of the next micro-batch, before its forward."""
        if self.output:
            self.output.targets = targets

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        if self.output is None:
            value = self.function(output, targets)
            if not isinstance(value, Tensor) or value.numel() != 1:
                is_tensor = isinstance(value, Tensor)
                form = f"a tensor {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
                raise ConfigError(
                    f"loss_function: it returned {form}; return one number, the sum over targets, and"
                    " keep others elsewhere"
                )
            return value / self.count
        output = logits_of(output)
        whole = output.full_tensor() if isinstance(output, DTensor) else output
        self.output.compare(whole.detach())
        return whole.sum() / self.count


@contextmanager
def step_loss(function: LossFunction, count: Tensor, output: Output | None) -> Iterator[StepLoss]:
    """Yield the loss for one step; ``output`` returns losses meanwhile if the function asks for it."""
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
