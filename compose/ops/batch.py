"""The meaning of the tensors of a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compose.errors import ConfigError

IGNORE = -100
"""The target of a token from which nothing is learnt, as in ``torch.nn.functional.cross_entropy``."""

Sample = int | Callable[[], Mapping[str, Tensor]]
"""The tokens of a sample, of a model of token ids; or a function that returns a model's inputs of one
sample, on meta, by name."""


def ignored(targets: Tensor) -> Tensor:
    """Tell from which targets nothing is learnt: IGNORE among integers, NaN among floats."""
    return targets.isnan() if targets.is_floating_point() else targets == IGNORE


def ignore_all(targets: Tensor) -> Tensor:
    """Fill ``targets`` in place so that nothing is learnt from them, and return them."""
    return targets.fill_(float("nan") if targets.is_floating_point() else IGNORE)


def targets_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the targets of a batch; raise ConfigError if it has none."""
    if "targets" not in batch:
        names = ", ".join(batch) or "nothing"
        raise ConfigError(f'batch: has no targets, only {names}; give what the loss takes as "targets"')
    return batch["targets"]


def on_meta(sample: Sample) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the inputs of one sample on meta, as a model is called with them."""
    if isinstance(sample, int):
        return (torch.empty((1, sample), dtype=torch.int64, device="meta"),), {}
    return (), dict(sample())
