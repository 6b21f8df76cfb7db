"""The host memory of a fake world: what stands in it, and its copies on streams of their own.

Tensors on meta have no device, so the recorder keeps which of them stand for host memory. Those do not
count as the device's. Copies to the device count. On a CPU there is but one memory. What a GPU's run
has in host memory is not counted there either, as in benchmarks/allocations.py; but nothing is copied
that is there already.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import _disable_current_modes

from compose.memory import activation_offload
from compose.memory.activation_offload import ActivationOffload
from compose.optim import offload
from compose.optim.offload import MEANS, SLOTS, OffloadedAdamW
from compose.optim.offload_files import UNIT
from compose.planner.memory import ACTIVATIONS, GRADIENTS
from compose.planner.recorder import Recorder, local_of


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a check that a fake world fails."""


@contextmanager
def host_memory(recorder: Recorder, kernels: str) -> Iterator[None]:
    """Let offload run in a fake world; activations are copied out and back each on their own stream."""
    state_of, post_backward = OffloadedAdamW.state_of, FSDPParamGroup.post_backward
    get_rng_state, streams = torch.get_rng_state, list[int]()

    @contextmanager
    def on_stream(number: int, *events: int) -> Iterator[None]:
        """Be on a stream of copies, which waits for what was computed and for events."""
        if not streams:
            streams.extend(recorder.new_stream() for _ in range(2))
        ready = recorder.record()
        with recorder.on_stream(streams[number]):
            for event in (ready, *events):
                recorder.wait(recorder.stream, event)
            yield

    def out_of(offload: ActivationOffload, tensor: Tensor) -> tuple[Tensor, Any]:
        if kernels != "cuda":
            with _disable_current_modes():
                copy = torch.empty_like(tensor)
            recorder.to_host([copy], ACTIVATIONS, pinned=False)
            return copy, None
        with on_stream(0):
            copy = recorder.copied_out(tensor, ACTIVATIONS)
            stored = recorder.record()
        offload.leaving[-1].append((tensor, stored))
        return copy, stored

    def back(offload: Any, host: Tensor, stored: Any, device: Any) -> tuple[Tensor, Any]:
        if kernels != "cuda":
            return host.clone(), None
        with on_stream(1, stored):
            return recorder.copied_in(host), recorder.record()

    def wait(offload: Any, tensor: Tensor, event: Any) -> None:
        recorder.wait(recorder.stream, event)

    def reduced(group: Any, *args: Any) -> None:
        post_backward(group, *args)
        if any(parameter.offload_to_cpu for parameter in group.fsdp_params):
            gradients = (parameter.sharded_param.grad for parameter in group.fsdp_params)
            recorder.to_host((g for g in gradients if g is not None), GRADIENTS, kernels == "cuda")

    def rng_state() -> Tensor:
        state = get_rng_state()
        recorder.hold(state.untyped_storage())  # no operator made it
        return state

    def state_on_meta(optimizer: OffloadedAdamW, parameter: Any) -> dict[str, Any]:
        with torch.device("meta"):
            return state_of(optimizer, parameter)

    with ExitStack() as stack:
        for owner, name, other in (
            (FSDPParamGroup, "_validate_cpu_offload_params", nothing),
            (FSDPParamGroup, "post_backward", reduced),
            (OffloadedAdamW, "state_of", state_on_meta),
            (activation_offload, "_address", lambda x: local_of(x).untyped_storage()._cdata),
            (ActivationOffload, "out_of", out_of),
            (ActivationOffload, "back", back),
            (ActivationOffload, "_wait", wait),
        ):
            stack.enter_context(mock.patch.object(owner, name, other))
        if kernels == "cpu":  # recomputation keeps the state of the CPU's random numbers
            stack.enter_context(mock.patch.object(torch, "get_rng_state", rng_state))
        yield


def slots(optimizer: torch.optim.Optimizer, kernels: str, nvme: bool) -> list[Tensor]:
    """Return the memory through which an optimizer's offloaded state passes, on the device."""
    parts = getattr(optimizer, "parts", [optimizer])
    if not any(isinstance(part, OffloadedAdamW) for part in parts):
        return []
    size = offload.CHUNK
    if kernels == "cpu":
        if not nvme:
            return []
        size += UNIT  # to begin at the start of a page
    return [torch.empty(size, device="meta") for _ in range(SLOTS * len(MEANS))]
