"""The memory behind a tensor: this rank's part, and when it is ready."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself; it is the memory, not a copy.

    A weight that FSDP gathers in its own way (float8) is a subclass that wraps its memory. Code that
    copies, compares, saves or sums bytes needs the wrapped memory.
    """
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held._tensor if hasattr(held, "fsdp_pre_all_gather") else held  # type: ignore[attr-defined]


def arrived(value: Any) -> Any:
    """Return ``value``; a tensor whose collective is still running is waited for and made plain.

    If a graph or a message got the waiting tensor, it would see another type, and might lose its
    gradient without an error (torch 2.13).
    """
    return _Arrived.apply(value) if isinstance(value, AsyncCollectiveTensor) else value


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.trigger_wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
