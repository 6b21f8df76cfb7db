"""The loss: cross-entropy summed over target tokens, of whole or vocabulary-sharded logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compose.errors import ConfigError
from compose.ops.batch import IGNORE, ignored
from compose.ops.vocabulary_loss import token_losses

__all__ = ["IGNORE", "LossFunction", "at_least_float32", "count_targets", "cross_entropy", "logits_of"]

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Takes a model's output and its targets, and returns a sum over targets, a scalar."""


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
    return token_losses(logits.flatten(0, 1), targets.flatten())


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32, or as it is if its type is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def count_targets(targets: Tensor) -> Tensor:
    """Return how many targets are trained on; a scalar, int64."""
    return torch.count_nonzero(~ignored(targets))
