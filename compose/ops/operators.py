"""Registers operators with PyTorch, and says whose kernels compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> str:
    """Return the type of the device whose kernels compute with ``tensor``.

    The planner runs a step on meta tensors in place of another device's, and puts a function here that
    returns that device's type. So call it as ``operators.device_of``.
    """
    return tensor.device.type


BODIES: dict[Any, Callable[..., Any]] = {}
"""The function of each registered operator. Whoever records what an operator does runs it."""


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as an operator; a compiler does not look into it."""

    def register(function: Callable[..., Any]) -> Any:
        registered = torch.library.custom_op(name, function, mutates_args=mutates)
        namespace, _, short = name.partition("::")
        BODIES[getattr(getattr(torch.ops, namespace), short).default] = function
        return registered

    return register
