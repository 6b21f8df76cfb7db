"""The way in which codes are computed: pieces that stay in caches, and steps that are compiled."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 2**18
"""Elements that a CPU works on at once."""


def pieces(x: Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Yield places of blocks (N, size) or (R, N, size), as many as stay in the caches of a CPU."""
    *rows, count, size = x.shape
    many = max(1, AT_ONCE // max(1, size))
    if x.device.type != "cpu" or math.prod(rows) * count <= many:
        yield (0,) if rows == [1] else (slice(None),)
    elif not rows:
        for start in range(0, count, many):
            yield (slice(start, start + many),)
    elif count < many:
        together = many // max(1, count)
        for row in range(0, rows[0], together):
            yield (slice(row, row + together),)
    else:
        # A dim of one row would need kernels of its own.
        for row in range(rows[0]):
            for start in range(0, count, many):
                yield row, slice(start, start + many)


_COMPILED: dict[Any, Callable[..., Any]] = {}
_COMPILES = False


def compiles() -> bool:
    """Return whether :func:`compile_kernels` was called."""
    return _COMPILES


def compile_kernels() -> None:
    """Let torch.compile make one kernel of each step here, in this process."""
    global _COMPILES
    _COMPILES = True


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, compiled if :func:`compile_kernels` was called."""
    if not _COMPILES:
        return function
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    compiled = _COMPILED[function]

    def run(*given: Any) -> Any:
        return compiled(*(_of_any_length(x) if isinstance(x, Tensor) else x for x in given))

    return run


def _of_any_length(x: Tensor) -> Tensor:
    """Return ``x`` so that a kernel for it is one for any number of blocks of this size."""
    # Dynamo would also guard the base of a view, and compile again for each place in it.
    x = x.data
    torch._dynamo.maybe_mark_dynamic(x, list(range(x.ndim - 1)))
    return x
