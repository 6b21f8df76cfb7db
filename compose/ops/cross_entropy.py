"""The loss: cross-entropy summed over target tokens, of whole logits or of a chunk's at a time.

The vocabulary may be cut over ranks. That costs an all-gather of 2 numbers for each token.

PyTorch's function keeps the logarithms of all probabilities for backward, in float32. Here the logits
themselves and one number for each token are kept. Forward and backward work on some tokens at a time.
So what is computed on the way stays small, and narrow logits are never widened as a whole.

:func:`chunked_cross_entropy` is fused with the projection onto the vocabulary. The logits (T, V) of T
tokens exist for one chunk only, in forward and in backward. A chunk's gradients follow from its logits
at once. So forward computes them too, and backward only scales them: no product is computed twice
(docs/memory.md has the bytes).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from compose.errors import ConfigError
from compose.ops import operators
from compose.ops.batch import IGNORE, count_targets
from compose.ops.operators import compiles, run_compiled
from compose.ops.tensors import at_least_float32, gathered

# Logits that are worked on at once: on a CPU they should stay in its caches, a GPU needs many.
AT_ONCE = {"cpu": 2**17}
MANY = 2**26

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Takes a model's output and its targets, and returns a sum over targets, a scalar.

It may have ``count(targets)``: over how many its mean is, if not over targets. It may have ``begin``
(compose/train/step.py), which prepares it for a batch."""


def count_for(function: LossFunction, targets: Tensor) -> Tensor:
    """Return by how many a sum of ``function`` is divided, a scalar; most often the targets."""
    return getattr(function, "count", count_targets)(targets)


def logits_of(output: Any) -> Any:
    """Return ``output`` of a model, or its ``logits``, as models of transformers name them."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of -log softmax(logits)[target] over targets other than IGNORE, in nats.

    Args:
        logits: (B, L, V), of any float type; or an object that holds them as ``.logits``. They are
            local or a DTensor sharded over V.
        targets: (B, L), int64.

    Returns:
        The sum, a scalar.

    Raises:
        ConfigError: ``logits`` is something else.
    """
    logits = logits_of(logits)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"loss_function: cross_entropy takes logits, and the model returned a"
            f" {type(logits).__name__}; give a loss_function that takes that"
        )
    return token_losses(logits.flatten(0, 1), targets.flatten()).sum()


@dataclass(frozen=True)
class VocabularyRows:
    """The rows of the vocabulary that this rank holds; ``group`` holds the others, if there are any."""

    start: int = 0
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(tensor: DTensor, dim: int) -> "VocabularyRows":
        """Return the rows of a tensor whose ``dim`` is the vocabulary."""
        (placement,), mesh = tensor.placements, tensor.device_mesh
        if placement.is_replicate():
            return VocabularyRows()
        if not placement.is_shard(dim):
            raise ConfigError(
                f"plan.output: a tensor placed {tensor.placements} is neither whole nor sharded over"
                " the vocabulary"
            )
        each = -(-tensor.shape[dim] // mesh.size())  # the rule of Tensor.chunk
        return VocabularyRows(each * mesh.get_local_rank(), mesh.get_group())

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, (ranks, ...)."""
        return tensor[None] if self.group is None else torch.stack(gathered(tensor, self.group))

    def places(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return each target's place in this rank's ``count`` rows, and whether it is there, (T, 1)."""
        at = (targets - self.start)[:, None]
        here = (at >= 0) & (at < count)
        return at.masked_fill(~here, 0), here


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log softmax(logits)[target] of targets (T,), and 0 for those of IGNORE.

    Logits are (T, V), local or a DTensor on one axis that is whole or sharded over V. The result (T,)
    is local, the same on every rank of the axis, in float32 or wider. A target that is no row of the
    vocabulary raises RuntimeError; where ranks share the vocabulary the loss is infinite instead.
    """
    if not isinstance(logits, DTensor):
        return cast(Tensor, _ChunkedCrossEntropy.apply(logits, targets, VocabularyRows()))
    rows = VocabularyRows.of(logits, logits.ndim - 1)
    return cast(Tensor, _ChunkedCrossEntropy.apply(logits.to_local(), targets, rows))


def log_z(logits: Tensor) -> Tensor:
    """Return log sum exp (...) of logits (..., V), local or a DTensor sharded over V on one axis.

    The result is local.
    """
    if not isinstance(logits, DTensor):
        return logits.logsumexp(-1)
    rows = VocabularyRows.of(logits, logits.ndim - 1)
    return cast(Tensor, _LogZ.apply(logits.to_local(), rows))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: VocabularyRows) -> Tensor:
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
        result = rows.gathered(parts)
        log_zs, target = result[:, 0].logsumexp(0), result[:, 1].amax(0)
        # The part of each sum that is this rank's; a kernel needs the sum alone.
        share = log_zs if ctx.compiled else (parts[0] - log_zs).exp_()
        ctx.save_for_backward(logits, at, here, share, ignored)
        return (log_zs - target).masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, at, here, share, ignored = ctx.saved_tensors
        wide = share.dtype
        scale = grads[0].to(wide).masked_fill(ignored, 0.0)
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
    def forward(ctx: Any, logits: Tensor, rows: VocabularyRows) -> Tensor:
        result = rows.gathered(logits.logsumexp(-1)).logsumexp(0)
        ctx.save_for_backward(logits, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, result = ctx.saved_tensors
        return grads[0][..., None] * (logits - result[..., None]).exp(), None


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
    each = max(1, AT_ONCE.get(operators.device_of(logits), MANY) // max(1, logits.shape[1]))
    for start in range(0, len(logits), each):
        yield slice(start, start + each)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return ``cross_entropy(hidden @ weight.T, targets)``, and the sum of (log Z)^2 over targets.

    The gradient is that of the first result plus ``z_loss`` times the second: the z-loss of Chowdhery
    et al. 2022, arXiv:2204.02311, section 5. The weight's gradient is a sum over chunks in float32;
    each chunk's part is rounded to the weight's type, except on a GPU. The hidden states' gradient is
    rounded once more than with whole logits. A target that is no row of the vocabulary makes the loss
    infinite.

    ``hidden`` is (..., D), whole on every rank, ``weight`` (V, D), whole or a DTensor sharded over V on
    one axis, ``targets`` (...), and ``chunk`` a number of tokens. Results are local scalars, in float32
    or wider, the same on every rank of the axis.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden {list(hidden.shape)} is not for targets {list(targets.shape)}")
    rows = VocabularyRows()
    if isinstance(weight, DTensor):
        rows = VocabularyRows.of(weight, 0)
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        # A rank computes what its own rows add to the gradient.
        grad = Partial() if rows.group else Replicate()
        hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[grad])
        weight = weight.to_local()
    with_gradients = torch.is_grad_enabled()
    wide = torch.promote_types(weight.dtype, torch.float32)
    with torch.no_grad():
        flat, targets = hidden.flatten(0, -2), targets.flatten()
        d_hidden = d_weight = None
        if with_gradients and hidden.requires_grad:
            d_hidden = torch.empty_like(flat)
        if with_gradients and weight.requires_grad:
            d_weight = torch.zeros_like(weight, dtype=wide)
        loss, squares = torch.zeros(2, dtype=wide, device=hidden.device)
        for start in range(0, len(flat), chunk):
            part = slice(start, start + chunk)
            d_part = None if d_hidden is None else d_hidden[part]
            losses, log_zs = _one_chunk(
                flat[part], weight, targets[part], z_loss, rows, d_part, d_weight
            )
            loss, squares = loss + losses.sum(), squares + log_zs.square().sum()
    # If a pipeline splits backward in two, PyTorch's own operation has to join the two paths: torch
    # 2.11 cannot begin at another one (torch/autograd/graph.py, _input_metadata).
    for tensor, gradient in ((hidden, d_hidden), (weight, d_weight)):
        if gradient is not None:
            loss = loss + cast(Tensor, _KnownGradient.apply(tensor, gradient.view_as(tensor)))
    return loss, squares


class _KnownGradient(torch.autograd.Function):
    """A zero, in float32 or wider, whose gradient with respect to a tensor is known."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = tensor.dtype
        return gradient.new_zeros((), dtype=torch.promote_types(gradient.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The product is not made in place, since backward may come twice. It is rounded only after it
        # is scaled: before, it may be more than float16 holds.
        (gradient,) = ctx.saved_tensors
        scaled = torch.empty_like(gradient, dtype=ctx.dtype)
        # A device would first round a factor without dims to the type of a narrow gradient.
        factor = grads[0] if gradient.is_cpu else grads[0].view(1)
        return torch.mul(gradient, factor, out=scaled), None


def _one_chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    rows: VocabularyRows,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return each token's loss and log Z, (C,); fill ``d_hidden`` and add to ``d_weight``, if given."""
    # No tensor of a chunk's size may outlive this function, or it would stay beside the next chunk's.
    logits = hidden @ weight.T
    passes = passes_for(logits)
    if passes is IN_PLACE:
        logits = at_least_float32(logits)
    at, here = rows.places(targets, logits.shape[1])
    top, log_zs, target = passes.sums(logits, at, here)
    parts = rows.gathered(torch.stack([log_zs, target]))
    log_zs, target = parts[:, 0].logsumexp(0), parts[:, 1].amax(0)
    # d/dlogits of log Z - target + z_loss (log Z)^2. IGNORE is no row of the vocabulary, so its
    # gradient only needs to be set to zero.
    ignored = targets == IGNORE
    factor = (top - log_zs).exp() * (1 + 2 * z_loss * log_zs)
    passes.gradient(logits, top, factor.masked_fill(ignored, 0.0), at, here)
    d_logits = logits.to(hidden.dtype)
    if d_hidden is not None:
        torch.mm(d_logits, weight, out=d_hidden)
    if d_weight is not None:
        _add_product(d_weight, d_logits.T, hidden)
    return (log_zs - target).masked_fill(ignored, 0.0), log_zs.masked_fill(ignored, 0.0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``total += a @ b`` in the type of ``total``, which may be wider."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _adds_to_float32(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


@cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a product of narrow matrices can be added to a float32 one at once.

    PyTorch has had the operator for CUDA since 2.8; at first it refused a sum of another type than its
    factors (aten/src/ATen/native/cuda/Blas.cpp, _addmm_dtype_out_cuda).
    """
    one, total = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return True


class Passes(NamedTuple):
    """Two passes over logits (C, V), of which this rank may hold a part of the vocabulary."""

    sums: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Takes logits, places (C, 1), and a mask (C, 1) of the places that are there. Returns the greatest
    logit, log Z and the target's logit of each token, (C,); -inf for a target that is not there."""
    gradient: Callable[..., None]
    """Takes the logits that the first pass leaves, its greatest logits, factors (C,), places and the
    mask. Turns the logits into softmax times factor, less 1 at the places that are there."""


def _sums(logits: Tensor, at: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    target = logits.gather(1, at).masked_fill(~here, -torch.inf)[:, 0]
    top = logits.amax(1)
    total = logits.sub_(top[:, None]).exp_().sum(1)
    return top, top + total.log(), target


def _gradient(logits: Tensor, top: Tensor, factor: Tensor, at: Tensor, here: Tensor) -> None:
    logits.mul_(factor[:, None])
    logits.scatter_add_(1, at, -here.to(logits.dtype))


def fused_sums(logits: Tensor, at: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do the work of ``Passes.sums``, and leave the logits as they are."""
    wide = at_least_float32(logits)
    top = wide.amax(1)
    target = wide.gather(1, at).masked_fill(~here, -torch.inf)[:, 0]
    return top, top + (wide - top[:, None]).exp().sum(1).log(), target


def fused_gradient(logits: Tensor, top: Tensor, factor: Tensor, at: Tensor, here: Tensor) -> None:
    """Do the work of ``Passes.gradient``, after ``fused_sums``."""
    result = (at_least_float32(logits) - top[:, None]).exp() * factor[:, None]
    logits.copy_(torch.where(_chosen(logits, at, here), result - 1, result))


def fused_softmax(logits: Tensor, log_zs: Tensor, scale: Tensor, at: Tensor, here: Tensor) -> Tensor:
    """Return the gradient of ``scale`` times each token's loss, whose log Z is known, (C, V)."""
    result = (at_least_float32(logits) - log_zs[:, None]).exp() * scale[:, None]
    return torch.where(_chosen(logits, at, here), result - scale[:, None], result).to(logits.dtype)


def _chosen(logits: Tensor, at: Tensor, here: Tensor) -> Tensor:
    """Return a mask (C, V) of the targets, which a kernel has in registers only."""
    return (torch.arange(logits.shape[1], device=logits.device) == at) & here


IN_PLACE = Passes(_sums, _gradient)
"""By PyTorch's operators, on logits of float32 or wider."""
COMPILED = Passes(partial(run_compiled, fused_sums), partial(run_compiled, fused_gradient))
"""By one kernel each, on logits of any type."""


def passes_for(logits: Tensor) -> Passes:
    """Return the passes for logits on their device."""
    return COMPILED if compiles(logits) else IN_PLACE
