"""One optimizer step's forward, backward and clipping, the same on every mesh."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from compose.applied import applied_to
from compose.context_parallel import shard_sequence
from compose.data_parallel import prepare_micro_batch
from compose.float8 import shared_scales
from compose.local import local_tensor
from compose.loss import LossFunction, count_targets, cross_entropy
from compose.mesh import AXES, BATCH_AXES, axis_size, batch_share, sum_over
from compose.near_shards import near_shards
from compose.output import StepLoss, step_loss
from compose.pipeline_parallel import copies_of
from compose.routing import begin_step, finish_step


def forward_backward(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    micro_batch: int | None = None,
    loss_function: LossFunction = cross_entropy,
    loss_scale: float = 1.0,
) -> Tensor:
    """Accumulate the gradient of the global batch's mean loss; return that loss, float64.

    batch: this rank's share of the global batch, each tensor (samples, ...). ``targets`` goes to
    ``loss_function(output, targets)``, which returns a sum over targets; all else is passed to the
    model by name. The sum is divided by the number of targets in the *global* batch, so it does not
    matter how samples, or masked targets, fall on ranks and micro-batches. With cp, each tensor is cut
    along its second dim.

    A CrossEntropy with ``chunk`` (compose/output.py) has the model's last projection find the loss, and
    needs Plan.output. Routers (compose/routing.py) act on what the whole batch counted.

    micro_batch: samples in one forward; None is the whole share. Raises ValueError below 1.
    loss_scale: of the gradients, not of what is returned; ``clip_grad_norm_`` takes it away again.
    """
    targets = batch["targets"]
    micro_batch = samples_at_once(batch, micro_batch)
    applied = applied_to(model)
    count = sum_over(count_targets(targets), mesh, BATCH_AXES).clamp(min=1)
    begin_step(model, targets.numel() * batch_share(mesh)[1], loss_scale)

    batch = own_part(model, batch, mesh)
    # loss_parallel only changes what cross-entropy does with DTensors.
    losses, near = step_loss(loss_function, count / loss_scale, applied.output), applied.gathers
    with shared_scales(model, applied.float8), loss_parallel(), near_shards(near), losses as loss:
        if applied.pipeline:
            total = applied.pipeline.run(batch, micro_batch, loss)
        else:
            total = _run(model, batch, micro_batch, loss, applied.zero)
    finish_step(model, mesh)
    return sum_over(total.double(), mesh, ("pp", *BATCH_AXES, "cp")) / loss_scale


def samples_at_once(batch: Mapping[str, Tensor], micro_batch: int | None) -> int:
    """``micro_batch``; None is all samples of ``batch``. Raises ValueError below 1."""
    size = len(next(iter(batch.values()))) if micro_batch is None else micro_batch
    if size < 1:
        raise ValueError(f"micro_batch: {size} should be at least 1")
    return size


def own_part(model: nn.Module, batch: Mapping[str, Tensor], mesh: DeviceMesh) -> Mapping[str, Tensor]:
    """Of this rank's share of a batch, what it runs itself: with cp, its part of each sequence."""
    if axis_size(mesh, "cp") == 1:
        return batch
    return shard_sequence(batch, mesh["cp"], applied_to(model).balance, multiple=axis_size(mesh, "tp"))


def micro_batches(batch: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """``batch`` in parts of ``size`` samples; the last may have fewer."""
    for start in range(0, len(next(iter(batch.values()))), size):
        yield {name: value[start : start + size] for name, value in batch.items()}


def _run(
    model: nn.Module, batch: Mapping[str, Tensor], micro_batch: int, loss: StepLoss, zero: int
) -> Tensor:
    """Forward and backward of one micro-batch after another; the sum of their losses."""
    total = torch.zeros((), device=batch["targets"].device)
    parts = list(micro_batches(batch, micro_batch))
    for number, part in enumerate(parts):
        prepare_micro_batch(model, zero, last=number == len(parts) - 1)
        targets = part.pop("targets")
        loss.expect(targets)
        value = loss(model(**part), targets)
        value.backward()
        total = total + value.detach()  # which may be wider than float32
    return total


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, mesh: DeviceMesh, loss_scale: float = 1.0
) -> Tensor:
    """Divide all gradients by ``loss_scale``, and scale them so that their global 2-norm is at most
    ``max_norm`` (0: never).

    The norm counts every element of every parameter once, wherever it is sharded or replicated.
    Returns it as it was before clipping and without the scale, float64. Same formula as
    ``torch.nn.utils``.
    """
    found = [(p.grad, copies_of(p)) for p in parameters if p.grad is not None]
    stage = mesh.size() // axis_size(mesh, "pp")
    norms: dict[int, list[Tensor]] = {}
    for gradient, holders in found:
        # A stage's parameters are on one rank of the pp axis; tied ones on one for each holder.
        local, copies = gradient, stage * holders
        if isinstance(gradient, DTensor):
            local = gradient.to_local()
            for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                if placement.is_partial():
                    raise ValueError(f"a gradient is still to be summed: {gradient.placements}")
                copies //= 1 if placement.is_replicate() else size
        wide = torch.promote_types(local.dtype, torch.float32)
        norms.setdefault(copies, []).append(torch.linalg.vector_norm(local, dtype=wide))
    # An element that n ranks hold adds n times an nth of its square to the sum over all ranks.
    squares = [torch.stack(some).double().square().sum() / copies for copies, some in norms.items()]
    total = (
        torch.stack(squares).sum().to(mesh.device_type)  # gradients may be in host memory
        if squares
        else torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    )
    norm = sum_over(total, mesh, AXES).sqrt() / loss_scale
    if max_norm > 0 or loss_scale != 1:
        clipped = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
        scale = clipped / loss_scale
        for gradient, _ in found:
            local = local_tensor(gradient)
            local.mul_(scale.to(local))
    return norm
