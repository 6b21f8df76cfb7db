"""Registers an operator with PyTorch, and remembers the function that computes it."""

from collections.abc import Callable
from typing import Any

import torch

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
