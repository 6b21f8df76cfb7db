"""Activations in host memory between forward and backward, by the hooks that autograd has for it.

What a unit (a layer, say) saves for backward is copied out while later units are computed, and comes
back while the unit after it is in backward. On a GPU each way has a stream of its own, and host memory
is pinned; on a CPU copies are made at once, and only prove that the right ones come back.
"""

import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

LEAST = 2**16  # bytes; smaller tensors stay where they are, as a copy takes longer to begin than to do


class ActivationOffload:
    """Of one model: which unit ran when, the streams, and what was moved since this was asked last."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.last: weakref.ref[_Unit] | None = None
        self.streams: list[Any] = []
        self.bytes, self.seconds = 0, 0.0
        self.events: list[tuple[Any, Any]] = []  # before and after each wait of a GPU

    def wrap(self, module: nn.Module) -> None:
        """Have ``module`` save for backward in host memory; forward of it is replaced."""
        module.forward = partial(self._forward, weakref.ref(module), module.forward)

    def metrics(self) -> dict[str, float]:
        """As metrics.jsonl has it, since the last call. Waits for the GPU, if there is one."""
        if self.events:
            torch.cuda.current_stream().synchronize()
        waited = self.seconds + sum(begun.elapsed_time(ended) for begun, ended in self.events) / 1000
        found = {"activation_bytes": self.bytes, "activation_waited": waited}
        self.bytes, self.seconds, self.events = 0, 0.0, []
        return found

    def _forward(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        model = self.model()
        assert model is not None
        unit = _Unit(self, module(), {_address(buffer) for buffer in model.buffers()}, self.last)
        self.last = weakref.ref(unit)
        with saved_tensors_hooks(unit.pack, unit.unpack):
            output = forward(*args, **kwargs)
        unit.seen.clear()
        return output

    def out_of(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A copy in host memory, and the event after which it is there."""
        self.bytes += tensor.nbytes
        if tensor.device.type != "cuda":
            begun = time.perf_counter()
            copy = tensor.clone()
            self.seconds += time.perf_counter() - begun
            return copy, None
        if not self.streams:
            self.streams = [torch.cuda.Stream(tensor.device) for _ in range(2)]
        out = self.streams[0]
        out.wait_stream(torch.cuda.current_stream(tensor.device))
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.stream(out):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(out)  # or its memory is used anew before it is read
        return copy, out.record_event()

    def back(self, host: Tensor, stored: Any, device: torch.device) -> tuple[Tensor, Any]:
        """A copy on the device, and the event after which it is there."""
        self.bytes += host.nbytes
        if device.type != "cuda":
            begun = time.perf_counter()
            copy = host.clone()
            self.seconds += time.perf_counter() - begun
            return copy, None
        into = self.streams[1]
        into.wait_event(stored)
        with torch.cuda.stream(into):
            copy = torch.empty_like(host, device=device)
            copy.copy_(host, non_blocking=True)
        return copy, into.record_event()

    def wait(self, copy: Tensor, there: Any) -> None:
        """Have the device's own stream wait until ``copy`` is there."""
        if there is None:
            return
        own = torch.cuda.current_stream(copy.device)
        begun = own.record_event(torch.cuda.Event(enable_timing=True))
        own.wait_event(there)
        self.events.append((begun, own.record_event(torch.cuda.Event(enable_timing=True))))
        copy.record_stream(own)


class _Kept:
    """A tensor that backward will ask for, ``uses`` times."""

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self.offload, self.device = offload, tensor.device
        self.host, self.stored = offload.out_of(tensor)
        self.uses = self.left = 0
        self.here: tuple[Tensor, Any] | None = None

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self.here is None:
            self.here = self.offload.back(self.host, self.stored, self.device)
            self.left = self.uses

    def use(self) -> Tensor:
        self.fetch()
        assert self.here is not None
        copy, there = self.here
        self.offload.wait(copy, there)
        self.left -= 1
        if not self.left:
            self.here = None
        return copy


class _Unit:
    """One forward of a unit, and what it saved; ``before``: of the one before it."""

    def __init__(
        self,
        offload: ActivationOffload,
        module: nn.Module,
        buffers: set[int],
        before: "weakref.ref[_Unit] | None",
    ) -> None:
        self.offload, self.module, self.buffers, self.before = offload, module, buffers, before
        self.kept: list[weakref.ref[_Kept]] = []
        # The tensors too, or another one might take their place in memory and be taken for them.
        self.seen: dict[Any, tuple[Tensor, _Kept]] = {}

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of ``tensor``."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):  # on its way from other ranks, for the taking
            local = local.wait()
        if local.nbytes < LEAST or self._is_weight(local):
            return tensor
        key = (_address(local), local.storage_offset(), local.shape, local.stride(), local.dtype)
        key += (tensor._version,)
        if key not in self.seen:  # queries, keys and values save one input three times
            kept = _Kept(self.offload, local)
            self.kept.append(weakref.ref(kept))
            self.seen[key] = local, kept
        kept = self.seen[key][1]
        kept.uses += 1
        if isinstance(tensor, DTensor):
            placed = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
            return self, kept, placed
        return self, kept, None

    @torch.no_grad()
    def unpack(self, packed: Any) -> Tensor:
        """The tensor that :meth:`pack` was given."""
        if isinstance(packed, Tensor):
            return packed
        _, kept, placed = packed
        local = kept.use()
        before = self.before and self.before()
        if before:
            before.fetch()
            self.before = None
        return local if placed is None else _placed(local, *placed)

    def fetch(self) -> None:
        """Begin to copy all of it back."""
        for reference in self.kept:
            kept = reference()
            if kept:
                kept.fetch()

    def _is_weight(self, local: Tensor) -> bool:
        """Whether it is a parameter, a buffer or a view of one: those stay. FSDP frees what it gathered
        and gathers it again; so a unit's own are looked up as they are now."""
        address = _address(local)
        return address in self.buffers or any(
            address == _address(parameter) for parameter in self.module.parameters()
        )


def _address(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _placed(local: Tensor, mesh: Any, placements: Sequence[Any], shape: Any, stride: Any) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
