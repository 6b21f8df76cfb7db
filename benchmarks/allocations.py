"""The most bytes that a rank allocates, on a GPU or on a CPU, for benchmarks/memory.py.

On a GPU it is the allocator's own figure. On a CPU it is found from the profiler's list of everything
that PyTorch allocates and releases, which is exact, temporaries of kernels included.

All memory of a CPU is host memory. What a technique keeps there, where there is a GPU, is taken off:
shards and optimizer state that are offloaded, as they are when the measurement begins, and copies of
activations, each from when it is made until it is let go. Files that are mapped are no memory either.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from compose.memory.activation_offload import ActivationOffload

# FSDP's collectives, under their names before and since torch 2.13.
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
)


class Allocations:
    """Within :meth:`watched` all is seen that this thread allocates; on a CPU that has to be everything
    from the first parameter on, or what was there before would not count."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        cpu = [torch.profiler.ProfilerActivity.CPU]
        self.trace = torch.profiler.profile(profile_memory=True, activities=cpu)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """On a CPU: the profiler is on."""
        with ExitStack() as stack:
            if not self.cuda:
                out_of = partialmethod(_marked, ActivationOffload.out_of)
                stack.enter_context(mock.patch.object(ActivationOffload, "out_of", out_of))
                apart = stack.enter_context(Apart())
                for name in filter(partial(hasattr, dist), COLLECTIVES):
                    run = partial(apart.run, getattr(dist, name))
                    stack.enter_context(mock.patch.object(dist, name, run))
                gc.collect()  # garbage from before would be released within, and count as negative
                stack.enter_context(self.trace)
            yield

    def begin(self, host: Iterable[Tensor]) -> None:
        """Look for the peak from here on. ``host``: what is in host memory throughout."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in host}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            mark("begin", sum(storages.values()))

    def peak(self) -> int:
        """The most bytes at a time since :meth:`begin`, now that all is done."""
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        live = host = peak = 0
        leaving: list[int] = []  # let go by Python, but not yet by the allocator
        events: Any = self.trace.profiler.kineto_results.events()  # type: ignore[union-attr]
        for event in sorted(events, key=lambda event: event.start_ns()):
            name = event.name()
            if name == "[memory]":
                size = event.nbytes()
                live += size
                if -size in leaving:
                    leaving.remove(-size)
                    host += size
            elif name.startswith("mark"):
                what, size = name.split()[1], int(name.split()[2])
                if what == "gone":
                    leaving.append(size)
                else:
                    host += size
                if what == "begin":
                    peak = 0
            peak = max(peak, live - host)
        return peak


def mark(what: str, size: int) -> None:
    """Mark in the trace that so many bytes of the host's begin, "out", or end, "gone"."""
    with torch.profiler.record_function(f"mark {what} {size}"):
        pass


def _marked(offload: ActivationOffload, real: Any, tensor: Tensor) -> tuple[Tensor, Any]:
    """ActivationOffload.out_of, with a mark before the copy is made and before it is let go."""
    mark("out", tensor.nbytes)
    copy, stored = real(offload, tensor)
    weakref.finalize(copy, mark, "gone", tensor.nbytes)
    return copy, stored


class Apart(TorchDispatchMode):
    """Runs messages between CPUs in a thread of its own, on copies.

    The profiler sees what its own thread allocates and releases, and gloo's threads would release some
    of that: they get tensors that nobody counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = ThreadPoolExecutor(1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # its operations are seen again in their parts
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops._c10d_functional.wait_tensor:
            return args[0]
        return self.run(func, *args, **(kwargs or {}))

    def run(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | None:
        """``collective`` of copies, which come back; and the tensor that it gives, if it does."""
        held: list[Tensor] = []

        @torch.no_grad()
        def there() -> torch.Size | None:
            copies = tree_map_only(Tensor, torch.clone, (args, kwargs))
            result = collective(*copies[0], **copies[1])
            for tensor, copy in zip(tree_leaves((args, kwargs)), tree_leaves(copies), strict=True):
                if isinstance(tensor, Tensor):
                    tensor.copy_(copy)
            if not isinstance(result, Tensor):
                return None
            held.append(torch.ops._c10d_functional.wait_tensor(result))
            return result.shape

        shape = self.thread.submit(there).result()
        if shape is None:
            return None
        made = torch.empty(shape, dtype=args[0].dtype)
        self.thread.submit(lambda: made.copy_(held.pop())).result()
        return made
