"""The two passes over a chunk's logits: one finds their sums, and one turns them into their gradient.

PyTorch's own operators read and write the logits in float32 some ten times. On a GPU each pass is one
compiled kernel, which widens the logits only in registers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compose.ops.compiled import compiles, run_compiled


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
    wide = _wide(logits)
    top = wide.amax(1)
    target = wide.gather(1, at).masked_fill(~here, -torch.inf)[:, 0]
    return top, top + (wide - top[:, None]).exp().sum(1).log(), target


def fused_gradient(logits: Tensor, top: Tensor, factor: Tensor, at: Tensor, here: Tensor) -> None:
    """Do the work of ``Passes.gradient``, after ``fused_sums``."""
    found = (_wide(logits) - top[:, None]).exp() * factor[:, None]
    logits.copy_(torch.where(_chosen(logits, at, here), found - 1, found))


def fused_softmax(logits: Tensor, log_zs: Tensor, scale: Tensor, at: Tensor, here: Tensor) -> Tensor:
    """Return the gradient of ``scale`` times each token's loss, whose log Z is known, (C, V)."""
    found = (_wide(logits) - log_zs[:, None]).exp() * scale[:, None]
    return torch.where(_chosen(logits, at, here), found - scale[:, None], found).to(logits.dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _chosen(logits: Tensor, at: Tensor, here: Tensor) -> Tensor:
    """Return a mask (C, V) of the targets, which a kernel has in registers only."""
    return (torch.arange(logits.shape[1], device=logits.device) == at) & here


IN_PLACE = Passes(_sums, _gradient)
"""By PyTorch's operators, on logits of float32 or wider."""


COMPILED = Passes(
    functools.partial(run_compiled, fused_sums), functools.partial(run_compiled, fused_gradient)
)
"""By one kernel each, on logits of any type."""


def passes_for(logits: Tensor) -> Passes:
    """Return the passes for logits on their device."""
    return COMPILED if compiles(logits) else IN_PLACE
