"""The memory behind a tensor: what this rank holds of it, and when it is there."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or a plain tensor itself; the memory, not a copy.

    A weight that FSDP gathers in its own way (float8) is a subclass that wraps its memory: what copies,
    compares, saves or sums its bytes wants these.
    """
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held._tensor if hasattr(held, "fsdp_pre_all_gather") else held  # type: ignore[attr-defined]


def arrived(value: Any) -> Any:
    """``value``; a tensor whose collective is still on its way, waited for and plain.

    A graph or a message that is given it takes it for another type, and may lose its gradient without a
    word (torch 2.13).
    """
    return _Arrived.apply(value) if isinstance(value, AsyncCollectiveTensor) else value


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.trigger_wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
