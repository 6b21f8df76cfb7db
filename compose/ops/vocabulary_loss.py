"""Cross-entropy of logits whose vocabulary may be cut over ranks, without a second copy of the logits.

PyTorch's function keeps the logarithms of all probabilities for backward, in float32. Here the logits
themselves and one number for each token are kept. Forward and backward work on some tokens at a time.
So what is computed on the way stays small, and narrow logits are never widened as a whole.

A vocabulary cut over ranks costs one all-gather of 2 numbers for each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from compose.errors import ConfigError
from compose.ops import devices
from compose.ops.batch import IGNORE
from compose.ops.compiled import compiles, run_compiled
from compose.ops.loss_passes import fused_softmax, fused_sums

# Logits that are worked on at once: on a CPU they should stay in its caches, a GPU needs many.
AT_ONCE = {"cpu": 2**17}
MANY = 2**26


@dataclass(frozen=True)
class Rows:
    """The rows of the vocabulary that this rank holds; ``group`` holds the others, if there are any."""

    start: int = 0
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(weight: DTensor) -> "Rows":
        """Return the rows of a weight (V, D)."""
        if weight.placements == (Replicate(),):
            return Rows()
        if weight.placements != (Shard(0),):
            raise ConfigError(
                f"plan.output: a weight placed {weight.placements} is neither whole nor sharded over"
                " the vocabulary"
            )
        return Rows._part(weight, 0)

    @staticmethod
    def of_logits(logits: DTensor) -> "Rows":
        """Return the rows of logits (..., V)."""
        (placement,) = logits.placements
        if placement.is_replicate():
            return Rows()
        if not placement.is_shard(logits.ndim - 1):
            raise ValueError(f"logits are sharded otherwise than over the vocabulary: {placement}")
        return Rows._part(logits, logits.ndim - 1)

    @staticmethod
    def _part(tensor: DTensor, dim: int) -> "Rows":
        mesh = tensor.device_mesh
        each = -(-tensor.shape[dim] // mesh.size())  # the rule of Tensor.chunk
        return Rows(each * mesh.get_local_rank(), mesh.get_group())

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, (ranks, ...)."""
        if self.group is None:
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.stack(parts)

    def places(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return each target's place in this rank's ``count`` rows, and whether it is there, (T, 1)."""
        at = (targets - self.start)[:, None]
        here = (at >= 0) & (at < count)
        return at.masked_fill(~here, 0), here


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of -log softmax(logits)[target] over targets (T,) other than IGNORE.

    Logits are (T, V), local or a DTensor on one axis that is whole or sharded over V. The result is
    local, the same on every rank of the axis, in float32 or wider. A target that is no row of the
    vocabulary raises RuntimeError; where ranks share the vocabulary the loss is infinite instead.
    """
    rows = Rows.of_logits(logits) if isinstance(logits, DTensor) else Rows()
    local = logits.to_local() if isinstance(logits, DTensor) else logits
    return cast(Tensor, _CrossEntropy.apply(local, targets, rows))


def log_z(logits: Tensor) -> Tensor:
    """Return log sum exp (...) of logits (..., V), local or a DTensor sharded over V on one axis.

    The result is local.
    """
    if not isinstance(logits, DTensor):
        return logits.logsumexp(-1)
    return cast(Tensor, _LogZ.apply(logits.to_local(), Rows.of_logits(logits)))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: Rows) -> Tensor:
        ignored = targets == IGNORE
        at, here = rows.places(targets, logits.shape[1])
        if rows.group is None:  # PyTorch refuses a target that is no row
            at = targets.masked_fill(ignored, 0)[:, None]
        ctx.compiled = compiles(logits)
        if ctx.compiled:
            _, own, target = run_compiled(fused_sums, logits, at, here)
            parts = torch.stack([own, target])
        else:
            parts = _sums_in_pieces(logits, at, here)
        found = rows.gathered(parts)
        log_zs, target = found[:, 0].logsumexp(0), found[:, 1].amax(0)
        # The part of each sum that is this rank's; a kernel needs the sum alone.
        share = log_zs if ctx.compiled else (parts[0] - log_zs).exp_()
        ctx.save_for_backward(logits, at, here, share, ignored)
        return (log_zs - target).masked_fill_(ignored, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, at, here, share, ignored = ctx.saved_tensors
        wide = share.dtype
        scale = grads[0].to(wide).expand(len(logits)).masked_fill(ignored, 0.0)
        if ctx.compiled:
            return run_compiled(fused_softmax, logits, share, scale, at, here), None, None
        gradient, scale = torch.empty_like(logits), scale[:, None]
        for part in _some(logits):
            d = logits[part].softmax(1, dtype=wide)
            d.mul_(scale[part] * share[part, None])
            # IGNORE is no row of the vocabulary, so only its scale needs to be zero.
            d.scatter_add_(1, at[part], -(scale[part] * here[part]))
            gradient[part] = d
            del d  # or it would stay beside the next one
        return gradient, None, None


class _LogZ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows) -> Tensor:
        found = rows.gathered(logits.logsumexp(-1)).logsumexp(0)
        ctx.save_for_backward(logits, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, found = ctx.saved_tensors
        return grads[0][..., None] * (logits - found[..., None]).exp(), None


def _sums_in_pieces(logits: Tensor, at: Tensor, here: Tensor) -> Tensor:
    """Return log Z and the target's logit of each token, (2, T); -inf for a target elsewhere."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    parts = torch.empty(2, len(logits), dtype=wide, device=logits.device)
    parts[1] = logits.gather(1, at).to(wide).masked_fill(~here, -torch.inf)[:, 0]
    for part in _some(logits):
        # PyTorch's fused function is several times as fast as a maximum, exponentials and a sum.
        top = logits[part].amax(1).to(wide)
        parts[0, part] = top - logits[part].log_softmax(1, dtype=wide).amax(1)
    return parts


def _some(logits: Tensor) -> Iterator[slice]:
    """Yield the tokens of logits (T, V), some at a time."""
    each = max(1, AT_ONCE.get(devices.device_of(logits), MANY) // max(1, logits.shape[1]))
    for start in range(0, len(logits), each):
        yield slice(start, start + each)
