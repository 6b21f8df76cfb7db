"""The tensors of a batch: targets, samples, and the documents that its rows hold."""

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


def empty(like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a sample, or rows, of the same shapes without targets to learn; its positions are -1."""
    blank = {n: torch.full_like(v, -1 if n == "positions" else 0) for n, v in like.items()}
    return blank | {"targets": ignore_all(torch.empty_like(like["targets"]))}


def targets_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the targets of a batch; raise ConfigError if it has none."""
    if "targets" not in batch:
        names = ", ".join(batch) or "nothing"
        raise ConfigError(f'batch: has no targets, only {names}; give what the loss takes as "targets"')
    return batch["targets"]


def check_rows(batch: Mapping[str, Any], micro_batch: int | None) -> None:
    """Raise ConfigError unless each forward, of ``micro_batch`` or all samples, can take its rows."""
    for name, value in batch.items():
        if not hasattr(value, "__getitem__") or isinstance(value, (str, Mapping)):
            raise ConfigError(
                f"batch: {name} is of the type {type(value).__name__}, and a forward takes some rows of"
                " all; leave it out, or give a tensor with one row for each sample"
            )
    names = {len(value) if getattr(value, "ndim", 1) else 0: name for name, value in batch.items()}
    few, most = min(names), max(names)
    if few < most > (len(next(iter(batch.values()))) if micro_batch is None else micro_batch):
        raise ConfigError(
            f"batch: {names[few]} has {few} rows and {names[most]} has {most}, and a forward takes the"
            " same rows of all; give each tensor one row for each sample"
        )


def on_meta(sample: Sample) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the inputs of one sample on meta, as a model is called with them."""
    if isinstance(sample, int):
        return (torch.empty((1, sample), dtype=torch.int64, device="meta"),), {}
    return (), dict(sample())


def count_targets(targets: Tensor) -> Tensor:
    """Return how many targets are trained on; a scalar, int64."""
    return torch.count_nonzero(~ignored(targets))


def count_places(batch: Mapping[str, Tensor]) -> Tensor:
    """Return how many places of a batch are no padding, whose positions are -1; a scalar, int64."""
    if "positions" in batch:
        return torch.count_nonzero(batch["positions"] >= 0)
    targets = batch["targets"]
    return torch.full((), targets.shape[:2].numel(), device=targets.device)


class Documents:
    """Where the documents of a batch begin and end.

    Rows are laid end to end, so that a place in the batch is one number from 0 to B S. A document never
    reaches over the end of its row. The tensors have sizes that depend on the batch's shape alone, so a
    compiled layer serves any number of documents, and no number is waited for.
    """

    def __init__(self, ids: Tensor, device: torch.device | None = None) -> None:
        """Take integers (B, S), of which each run of equal ones in a row is one document.

        If they are in host memory, a GPU is not waited for. Attention runs on ``device``; None is where
        ``ids`` is.
        """
        self.ids, self.shape = ids, tuple(ids.shape)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        begins = begins.flatten()
        total = begins.numel()
        places = torch.arange(total, device=ids.device, dtype=torch.int32)
        # Every place that begins no document is written to the end, where its value is the right one.
        number = torch.where(begins, begins.cumsum(0) - 1, total)
        bounds = torch.full((total + 1,), total, device=ids.device, dtype=torch.int32)
        bounds.index_put_((number,), torch.where(begins, places, total))
        longest = bounds.diff().amax()
        pinned = device is not None and device.type == "cuda" and not ids.is_cuda
        bounds = bounds.pin_memory() if pinned else bounds
        self.bounds = bounds.to(device or ids.device, non_blocking=True)
        """(B S + 1,), int32: the first place of each document; B S follows, to the end."""
        self.extents = torch.stack([begins.sum(), longest]).to("cpu" if not ids.is_meta else "meta")
        """(2,), int64, in host memory: the number of documents, and the tokens of the longest."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    def __getitem__(self, rows: slice) -> "Documents":
        """Return the documents of some rows."""
        return Documents(self.ids[rows], self.bounds.device)
