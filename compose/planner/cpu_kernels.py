"""Memory that kernels of a CPU take while they run, and those of a GPU do not."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Elementwise operators of tensors whose types may differ.
_MIXED = {
    name + suffix
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "lerp",
        "addcmul",
        "addcdiv",
        "maximum",
        "minimum",
        "where",
    )
    for suffix in ("", "_")
}


def casts(
    operator: str, given: Sequence[Tensor], changed: Sequence[Tensor], made: Sequence[Any]
) -> int:
    """Return the bytes of copies in a common type, which an elementwise kernel makes on a CPU.

    Kernels of a GPU cast what they load and store.
    """
    if operator not in _MIXED or len({t.dtype for t in given}) < 2:
        return 0
    if not operator.endswith("_"):  # an out= is written and not read
        given = [t for t in given if not any(t is c for c in changed)]
    common = given[0].dtype
    for place, one in enumerate(given[1:]):
        common = (
            torch.result_type(given[place], one)
            if place == 0
            else torch.promote_types(common, one.dtype)
        )
    size = common.itemsize
    written = changed or [t for t in made if isinstance(t, Tensor)]
    inputs = sum(size * t.numel() for t in given if t.ndim and t.dtype not in (common, torch.bool))
    return inputs + sum(size * t.numel() for t in written[:1] if t.ndim and t.dtype != common)


def chunk_copies(given: Sequence[Tensor], chunks: int, out: Tensor) -> int:
    """Return the bytes of copies of FSDP's chunk_cat on a CPU: padded ones, and in one piece."""
    size = 0
    for each in given:
        rows = each.shape[0]
        if rows % chunks:
            size += each.numel() // max(1, rows) * -(-rows // chunks) * chunks * each.element_size()
    return size + (out.numel() * given[0].element_size() if given[0].dtype != out.dtype else 0)
