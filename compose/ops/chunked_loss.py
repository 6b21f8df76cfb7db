"""Cross-entropy fused with the projection onto the vocabulary, a chunk of tokens at a time.

The logits (T, V) of T tokens exist for one chunk only, in forward and in backward. A chunk's gradients
follow from its logits at once. So forward computes them too, and backward only scales them: no product
is computed twice. With C tokens in a chunk, and V here the rows of the vocabulary that this rank holds:

    lives for a chunk        C V logits, and as many in float32 (on a GPU the logits alone)
    lives until backward     T D of the hidden states' gradient, V D of the weight's in float32

A vocabulary sharded over ranks costs one all-gather of 2 C numbers for each chunk.
"""

import functools
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from compose.ops.batch import IGNORE
from compose.ops.loss_passes import IN_PLACE, passes_for
from compose.ops.vocabulary_loss import Rows


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
    rows = Rows()
    if isinstance(weight, DTensor):
        rows = Rows.of(weight)
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
        # Each rank computes what its own rows add to the gradient.
        grad = Partial() if rows.group else Replicate()
        hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[grad])
        weight = weight.to_local()
    with_gradients = torch.is_grad_enabled()
    with torch.no_grad():
        loss, squares, d_hidden, d_weight = _in_chunks(
            hidden.flatten(0, -2),
            weight,
            targets.flatten(),
            chunk,
            z_loss,
            rows,
            with_gradients and hidden.requires_grad,
            with_gradients and weight.requires_grad,
        )
    # If a pipeline splits backward in two, PyTorch's own operation has to join the two paths: torch
    # 2.11 cannot begin at another one (torch/autograd/graph.py, _input_metadata).
    for tensor, gradient in ((hidden, d_hidden), (weight, d_weight)):
        if gradient is not None:
            loss = loss + cast(Tensor, _Known.apply(tensor, gradient.view_as(tensor)))
    return loss, squares


class _Known(torch.autograd.Function):
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
        return torch.mul(gradient, grads[0], out=scaled), None


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    z_loss: float,
    rows: Rows,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return loss, sum of squares and the gradients asked for, of hidden (T, D) and targets (T,)."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    d_hidden = torch.empty_like(hidden) if of_hidden else None
    d_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
    loss, squares = torch.zeros(2, dtype=wide, device=hidden.device)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        d_part = None if d_hidden is None else d_hidden[part]
        losses, log_zs = _one_chunk(hidden[part], weight, targets[part], z_loss, rows, d_part, d_weight)
        loss, squares = loss + losses.sum(), squares + log_zs.square().sum()
    return loss, squares, d_hidden, d_weight


def _one_chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    rows: Rows,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return each token's loss and log Z, (C,); fill ``d_hidden`` and add to ``d_weight``, if given."""
    # No tensor of a chunk's size may outlive this function, or it would stay beside the next chunk's.
    logits = hidden @ weight.T
    if passes_for(logits) is IN_PLACE:
        logits = logits.to(torch.promote_types(weight.dtype, torch.float32))
    losses, log_zs = _differentiate(logits, targets, z_loss, rows)
    d_logits = logits.to(hidden.dtype)
    if d_hidden is not None:
        torch.mm(d_logits, weight, out=d_hidden)
    if d_weight is not None:
        _add_product(d_weight, d_logits.T, hidden)
    return losses, log_zs


def _differentiate(logits: Tensor, targets: Tensor, z_loss: float, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return each token's loss and log Z, (C,), 0 at IGNORE; turn logits (C, V) into their gradient."""
    passes = passes_for(logits)
    at, here = rows.places(targets, logits.shape[1])
    top, log_zs, target = passes.sums(logits, at, here)
    parts = rows.gathered(torch.stack([log_zs, target]))
    log_zs, target = parts[:, 0].logsumexp(0), parts[:, 1].amax(0)
    # d/dlogits of log Z - target + z_loss (log Z)^2. IGNORE is no row of the vocabulary, so its
    # gradient only needs to be set to zero.
    ignored = targets == IGNORE
    factor = (top - log_zs).exp() * (1 + 2 * z_loss * log_zs)
    passes.gradient(logits, top, factor.masked_fill(ignored, 0.0), at, here)
    return (log_zs - target).masked_fill(ignored, 0.0), log_zs.masked_fill(ignored, 0.0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``total += a @ b`` in the type of ``total``, which may be wider."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _adds_to_float32(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


@functools.cache
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
