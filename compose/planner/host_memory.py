"""The host memory of a fake world: offloaded shards, optimizer state and activations.

Tensors on meta have no device, so a listener keeps which of them stand for host memory. Those do not
count as the device's. Copies to the device count.

On a CPU there is but one memory. What a GPU's run has in host memory is not counted there either, as in
benchmarks/allocations.py; but nothing is copied that is there already.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from compose.memory import activation_offload
from compose.memory.activation_offload import ActivationOffload
from compose.ops.tensors import local_tensor
from compose.optim import offload
from compose.optim.offload import MEANS, SLOTS, OffloadedAdamW
from compose.optim.offload_files import UNIT


class Listener(Protocol):
    """A value that is told what is in host memory, and what happens on streams."""

    stream: int
    """The number of the current stream; 0 is the one that computes."""

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        ...

    def record(self) -> int:
        """Return a number for all that the current stream was given so far."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """Note that what ``stream`` is given from now on waits for an event of :meth:`record`."""
        ...

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Note that tensors are in host memory from now on."""
        ...

    def made_outside(self, tensor: Tensor) -> None:
        """Note a tensor that no operator made."""
        ...


@contextmanager
def host_memory(listener: Listener, kernels: str) -> Iterator[None]:
    """Let offload run in a fake world."""
    copies = _Copies(listener, kernels)
    make = OffloadedAdamW.state_of
    real, state = FSDPParamGroup.post_backward, torch.get_rng_state

    def post_backward(group: Any, *args: Any) -> None:
        real(group, *args)
        if any(parameter.offload_to_cpu for parameter in group.fsdp_params):
            gradients = (parameter.sharded_param.grad for parameter in group.fsdp_params)
            listener.to_host(g for g in gradients if g is not None)

    def rng_state() -> Tensor:
        found = state()
        listener.made_outside(found)
        return found

    def state_of(optimizer: OffloadedAdamW, parameter: Any) -> dict[str, Any]:
        with torch.device("meta"):
            return make(optimizer, parameter)

    def nothing(*args: Any) -> None:
        pass

    with ExitStack() as stack:
        for owner, name, other in (
            (FSDPParamGroup, "_validate_cpu_offload_params", nothing),
            (FSDPParamGroup, "post_backward", post_backward),
            (OffloadedAdamW, "state_of", state_of),
            (activation_offload, "_address", _address),
            (ActivationOffload, "out_of", copies.out_of),
            (ActivationOffload, "back", copies.back),
            (ActivationOffload, "_wait", copies.wait),
        ):
            stack.enter_context(mock.patch.object(owner, name, other))
        if kernels == "cpu":  # recomputation keeps the state of the CPU's random numbers
            stack.enter_context(mock.patch.object(torch, "get_rng_state", rng_state))
        yield


def slots(optimizer: torch.optim.Optimizer, kernels: str, nvme: bool) -> list[Tensor]:
    """Return the memory through which an optimizer's offloaded state passes, on the device.

    Args:
        optimizer: The optimizer; others than OffloadedAdamW have none.
        kernels: The device that is played. On a CPU only what is in files has to be copied.
        nvme: Whether the state is in files.
    """
    parts = getattr(optimizer, "parts", [optimizer])
    if not any(isinstance(part, OffloadedAdamW) for part in parts):
        return []
    size = offload.CHUNK
    if kernels == "cpu":
        if not nvme:
            return []
        size += UNIT  # to begin at the start of a page
    return [torch.empty(size, device="meta") for _ in range(SLOTS * len(MEANS))]


def _address(tensor: Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local_tensor(local).untyped_storage()._cdata


class _Copies:
    """Activations that are copied out and back, each way on a stream of its own."""

    def __init__(self, listener: Listener, kernels: str) -> None:
        self.listener, self.on_gpu = listener, kernels == "cuda"
        self.streams: list[int] = []

    @property
    def out_of(self) -> Any:
        def out_of(offload: ActivationOffload, tensor: Tensor) -> tuple[Tensor, Any]:
            with _disable_current_modes():
                copy = torch.empty_like(tensor)
            self.listener.to_host([copy])
            if not self.on_gpu:
                return copy, None
            with self._on(0):
                stored = self.listener.record()
            offload.leaving[-1].append((tensor, stored))
            return copy, stored

        return out_of

    @property
    def back(self) -> Any:
        def back(offload: Any, host: Tensor, stored: Any, device: Any) -> tuple[Tensor, Any]:
            if not self.on_gpu:
                return host.clone(), None
            with self._on(1, stored):
                return host.clone(), self.listener.record()

        return back

    @property
    def wait(self) -> Any:
        def wait(offload: Any, tensor: Tensor, event: Any) -> None:
            self.listener.wait(self.listener.stream, event)

        return wait

    @contextmanager
    def _on(self, number: int, *events: int) -> Iterator[None]:
        """Be on a stream of copies, which waits for what was computed and for events."""
        listener = self.listener
        if not self.streams:
            self.streams = [listener.new_stream() for _ in range(2)]
        before, ready = listener.stream, listener.record()
        listener.stream = self.streams[number]
        for event in (ready, *events):
            listener.wait(listener.stream, event)
        try:
            yield
        finally:
            listener.stream = before
