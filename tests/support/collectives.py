"""The collectives that a step calls, counted."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

# FSDP's collectives, under their names before and since torch 2.13.
NAMES = {
    "all_gather_into_tensor": "gather",
    "all_gather_single": "gather",
    "reduce_scatter_tensor": "scatter",
    "reduce_scatter_single": "scatter",
    "all_reduce": "reduce",
}


def _count(real: Callable[..., Any], kind: str, counts: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        # Three numbers or fewer are losses or counts, not gradients.
        if kind != "reduce" or args[0].numel() > 3:
            counts[kind] += 1
        return real(*args, **kwargs)

    return counted


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """How often each kind is called meanwhile."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        for name, kind in NAMES.items():
            if hasattr(dist, name):
                counted = _count(getattr(dist, name), kind, counts)
                stack.enter_context(mock.patch.object(dist, name, counted))
        yield counts
