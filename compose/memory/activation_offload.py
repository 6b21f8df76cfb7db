"""Activations in host memory between forward and backward, by autograd's hooks for saved tensors.

What a unit (a layer, say) saves for backward is copied out while the next unit is computed. It is
copied back while the unit after it is in backward. On a GPU each direction has a stream of its own, and
host memory is pinned. On a CPU copies are made at once, and only prove that the right ones come back.

A GPU computes faster than it copies. So it has to wait, or the activations of all units would be on it
at once: a unit's forward begins when the activations of the last unit but one are out. Copies back
begin with the backward of the unit after. All memory belongs to the computing stream, which frees and
takes it in its own order.
"""

import time
import weakref
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from compose.ops.tensors import arrived

_EVENTS = 1024  # events that are kept until their times are asked for
LEAST = 2**16  # bytes; smaller tensors stay, as their copy takes longer to begin than to run


class ActivationOffload:
    """The offload of one model: its units in order, the streams, and what moved since last asked."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.last: weakref.ref[_UnitForward] | None = None
        self.streams: list[Any] = []
        self.bytes, self.seconds = 0, 0.0
        self.events = deque[tuple[Any, Any]]()  # recorded before and after each wait of a GPU
        # For each of the last units, the tensors being copied out, with the events that end the copies.
        self.leaving: deque[list[tuple[Tensor, Any]]] = deque()

    def wrap(self, module: nn.Module) -> None:
        """Replace the forward of ``module`` by one that saves for backward in host memory."""
        module.forward = partial(self._forward, weakref.ref(module), module.forward)

    def metrics(self) -> dict[str, float]:
        """Return what metrics.jsonl reports since the last call; waits for the GPU, if there is one."""
        if self.events:
            torch.cuda.current_stream().synchronize()
        waited = self.seconds + sum(begun.elapsed_time(ended) for begun, ended in self.events) / 1000
        results = {"activation_bytes": self.bytes, "activation_waited": waited}
        self.bytes, self.seconds = 0, 0.0
        self.events.clear()
        return results

    def _forward(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        model = self.model()
        assert model is not None
        self.let_go(but=1)
        self.leaving.append([])
        unit = _UnitForward(self, module(), {_address(buffer) for buffer in model.buffers()}, self.last)
        self.last = weakref.ref(unit)
        with saved_tensors_hooks(unit.pack, unit.unpack):
            output = forward(*args, **kwargs)
        unit.seen.clear()
        return output

    def out_of(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return a copy of ``tensor`` in host memory, and the event after which it is complete."""
        self.bytes += tensor.nbytes
        if tensor.device.type != "cuda":
            return self._copied(tensor), None
        if not self.streams:
            self.streams = [torch.cuda.Stream(tensor.device) for _ in range(2)]
        out = self.streams[0]
        out.wait_stream(torch.cuda.current_stream(tensor.device))
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.stream(out):
            copy.copy_(tensor, non_blocking=True)
        stored = out.record_event()
        self.leaving[-1].append((tensor, stored))
        return copy, stored

    def let_go(self, but: int = 0) -> None:
        """Let the device wait for copies of all units ``but`` the last, and free what was copied."""
        while len(self.leaving) > but:
            unit = self.leaving.popleft()
            if unit:  # one stream copies in order, so the last event is enough
                self._wait(*unit[-1])

    def back(self, host: Tensor, stored: Any, device: torch.device) -> tuple[Tensor, Any]:
        """Begin to copy ``host``, complete after ``stored``, to the device; return it and its event."""
        self.bytes += host.nbytes
        if device.type != "cuda":
            return self._copied(host), None
        into = self.streams[1]
        copy = torch.empty_like(host, device=device)
        into.wait_stream(torch.cuda.current_stream(device))  # the memory's former user may still run
        into.wait_event(stored)
        with torch.cuda.stream(into):
            copy.copy_(host, non_blocking=True)
        copy.record_stream(into)  # backward may never use it
        return copy, into.record_event()

    def _copied(self, tensor: Tensor) -> Tensor:
        begun = time.perf_counter()
        copy = tensor.clone()
        self.seconds += time.perf_counter() - begun
        return copy

    def wait(self, copy: Tensor, event: Any) -> None:
        """Let the device's computing stream wait for a copy, complete after ``event``."""
        self.let_go()
        if event is not None:
            self._wait(copy, event)

    def _wait(self, tensor: Tensor, event: Any) -> None:
        own = torch.cuda.current_stream(tensor.device)
        begun = own.record_event(torch.cuda.Event(enable_timing=True))
        own.wait_event(event)
        self.events.append((begun, own.record_event(torch.cuda.Event(enable_timing=True))))
        while len(self.events) > _EVENTS and self.events[0][1].query():
            begun, ended = self.events.popleft()
            self.seconds += begun.elapsed_time(ended) / 1000


class _SavedTensor:
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
        """Return the tensor on the device, once it is complete."""
        self.fetch()
        assert self.here is not None
        copy, event = self.here
        self.offload.wait(copy, event)
        self.left -= 1
        if not self.left:
            self.here = None
        return copy


class _UnitForward:
    """One forward of a unit, and what it saved; ``before`` is the unit that ran before it."""

    def __init__(
        self,
        offload: ActivationOffload,
        module: nn.Module,
        buffers: set[int],
        before: "weakref.ref[_UnitForward] | None",
    ) -> None:
        self.offload, self.module, self.buffers, self.before = offload, module, buffers, before
        self.kept: list[weakref.ref[_SavedTensor]] = []
        # The tensors are kept alive too: another one could take their address and be mistaken for them.
        self.seen: dict[Any, tuple[Tensor, _SavedTensor]] = {}

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps in place of ``tensor``."""
        local = arrived(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        if local.nbytes < LEAST or self._is_weight(local):
            return tensor
        key = (_address(local), local.storage_offset(), local.shape, local.stride(), local.dtype)
        key += (tensor._version,)
        if key not in self.seen:  # the projections of q, k and v all save the same input
            kept = _SavedTensor(self.offload, local)
            self.kept.append(weakref.ref(kept))
            self.seen[key] = local, kept
        kept = self.seen[key][1]
        kept.uses += 1
        if not isinstance(tensor, DTensor):
            return self, kept, None
        whole = {"shape": tensor.shape, "stride": tensor.stride()}
        return self, kept, {"device_mesh": tensor.device_mesh, "placements": tensor.placements, **whole}

    @torch.no_grad()
    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that :meth:`pack` was given."""
        if isinstance(packed, Tensor):
            return packed
        _, kept, placed = packed
        local = kept.use()
        before = self.before and self.before()
        if before:
            before.fetch()
            self.before = None
        return local if placed is None else DTensor.from_local(local, run_check=False, **placed)

    def fetch(self) -> None:
        """Begin to copy all of it back."""
        for reference in self.kept:
            kept = reference()
            if kept:
                kept.fetch()

    def _is_weight(self, local: Tensor) -> bool:
        """Tell whether a tensor is a parameter, a buffer or a view of one; those are not moved.

        FSDP frees the parameters that it gathered, and gathers them again. So the unit's own parameters
        are looked up as they are now.
        """
        address = _address(local)
        return address in self.buffers or any(
            address == _address(parameter) for parameter in self.module.parameters()
        )


def _address(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
