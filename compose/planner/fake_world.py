"""One rank of a world that is not there: a composition runs on meta tensors, and messages do nothing.

Every change of PyTorch that this takes is in this file and in fake_host.py. The names are private in
torch 2.11 to 2.15.

FSDP gets streams that only tell the recorder what happens on them, all tensors are made on meta, and
the objects that the rank of the first stage broadcast are handed in.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.autograd
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import schedules
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from compose.ops import operators
from compose.planner.fake_host import host_memory, nothing
from compose.planner.memory import GRADIENTS
from compose.planner.recorder import Recorder

_FSDP = "torch.distributed.fsdp._fully_shard"
_TRIES = "_propagate_tensor_meta_non_cached"
_GATHERS = ("unshard", "wait_for_unshard")
_FILES = ("_fsdp_collectives", "_fsdp_init", "_fsdp_param_group", "_fsdp_state")


class _Streams:
    """A device's module, such as torch.cuda, as far as FSDP uses it."""

    def __init__(self, recorder: Recorder) -> None:
        streams = self

        class Event:
            """An event of a stream; ``number`` is None until it is recorded."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.number: int | None = None

            def record(self, stream: Any = None) -> "Event":
                self.number = recorder.record()
                return self

            def wait(self, stream: Any = None) -> None:
                streams.current_stream().wait_event(self)

            def synchronize(self) -> None:
                self.wait()

        class Stream:
            """A stream; work of one stream runs in order."""

            def __init__(self, *args: Any, number: int | None = None, **kwargs: Any) -> None:
                self.number = recorder.new_stream() if number is None else number
                # Since 2.15 FSDP records streams by these numbers.
                self.stream_id, self.device_index, self.device_type = self.number, 0, 0

            def record_event(self, event: Any = None) -> Event:
                return (event or Event()).record()

            def wait_event(self, event: Event) -> None:
                if event.number is not None:
                    recorder.wait(self.number, event.number)

            def wait_stream(self, other: "Stream") -> None:
                with recorder.on_stream(other.number):
                    done = Event().record()
                self.wait_event(done)

        self.Event, self.Stream, self._recorder = Event, Stream, recorder

    def current_stream(self, device: Any = None) -> Any:
        return self.Stream(number=self._recorder.stream)

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return self._recorder.on_stream(stream.number)

    @staticmethod
    def current_device() -> int:
        return 0


class OnMeta(TorchFunctionMode):
    """A mode in which tensors are made on meta, in place of ``devices``.

    The kernels of attention and norms are those of the device ``kernels``: on meta PyTorch would hold
    all scores. ``recorder`` knows which tensors stand for host memory; these are copied to a GPU, and
    FSDP's reduced gradients from it.
    """

    def __init__(
        self,
        devices: Sequence[str] = ("cpu", "cuda"),
        kernels: str = "cuda",
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self.devices, self.kernels = devices, kernels
        self.recorder = recorder if kernels == "cuda" else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property, as a tensor's shape
            return func(*args, **kwargs)
        given = tuple(kwargs.values())
        # A number stays on the host: AdamW counts its steps there.
        value: Any = args[0] if args else None
        number = func is torch.tensor and not isinstance(value, (list, tuple))
        if self._replaces(kwargs.get("device")) and not (number and kwargs["device"] == "cpu"):
            kwargs["device"] = torch.device("meta")
        if name == "scaled_dot_product_attention":
            return _attention(self.kernels, *args, **kwargs)
        if name == "rms_norm" and self.kernels == "cuda":
            return _rms_norm(*args, **kwargs)
        if name in self.devices and args:
            return args[0]
        if name == "to":
            if self.recorder and args[0].ndim:
                to, there = (*args[1:], *given), self.recorder.on_host(args[0])
                if there and any(_kind(each) in ("cuda", "meta") for each in to):
                    return self.recorder.copied_in(args[0])
                if not there and self.recorder.within == "reduce" and "cpu" in map(_kind, to):
                    return self.recorder.copied_out(args[0], GRADIENTS)
            args = tuple(torch.device("meta") if self._replaces(a) else a for a in args)
        if name == "item" and args[0].is_meta:
            return 1  # the stages of a pipeline ask each other whether all are there
        if name == "pin_memory":
            return args[0]
        return func(*args, **kwargs)

    def _replaces(self, device: Any) -> bool:
        return _kind(device) in self.devices


def _kind(device: Any) -> str:
    """Return the kind of a device or of its name, as "cuda"; "" for another argument."""
    kind = device.type if isinstance(device, torch.device) else device
    return kind.partition(":")[0] if isinstance(kind, str) else ""


def _attention(
    device: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return scaled_dot_product_attention by the kernel that ``device`` would choose."""
    ops = torch.ops.aten
    if device == "cpu" and q.shape[-1] != v.shape[-1]:  # the flash kernel does not take it
        return ops._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if device == "cpu":
        mask: Any = attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            mask = torch.zeros_like(attn_mask, dtype=q.dtype)  # the CPU's kernel adds it to the scores
        return ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
        return ops._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:  # the other kernels take grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return ops._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return rms_norm by one kernel, as CUDA has it; on meta PyTorch has several.

    The kernel of layer_norm stands for it. Its bytes are the same, but for the means.
    """
    return torch.layer_norm(x, shape, weight, None, 1e-6 if eps is None else eps)


class _SentWork:
    """The work of a message; whoever waits for it waits on the stream of messages.

    It keeps the tensor until then, as NCCL's and gloo's do.
    """

    def __init__(self, recorder: Recorder, event: int, tensor: Tensor) -> None:
        self.recorder, self.event = recorder, event
        self.tensor: Tensor | None = tensor

    def wait(self, timeout: Any = None) -> bool:
        self.recorder.wait(self.recorder.stream, self.event)
        self.tensor = None
        return True


def _batch(recorder: Recorder) -> Any:
    """Return dist.batch_isend_irecv, on a stream of its own for each group as NCCL has it."""
    streams: dict[str, int] = {}

    def send(operations: Sequence[dist.P2POp], desc: str | None = None) -> list[Any]:
        works = []
        for each in operations:
            name = each.group.group_name if each.group else ""
            if name not in streams:
                streams[name] = recorder.new_stream()
            ready = recorder.record()
            with recorder.on_stream(streams[name]):
                recorder.wait(recorder.stream, ready)
                to = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
                each.op(each.tensor, group=each.group, tag=each.tag, **to)
                works.append(_SentWork(recorder, recorder.record(), each.tensor))
        return works

    return send


def _marked(recorder: Recorder, mark: str, method: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        before, recorder.within = recorder.within, mark
        try:
            return method(*args, **kwargs)
        finally:
            recorder.within = before

    return call


def _unseen(method: Any) -> Any:
    """Return a method that modes do not see: DTensor tries an operator on whole tensors first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return call


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a default process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_world(
    rank: int,
    world_size: int,
    recorder: Recorder,
    kernels: str = "cuda",
    objects: list[Any] | None = None,
    float8: bool = True,
) -> Iterator[list[Any]]:
    """Start a fake process group, in which a composition runs on meta tensors.

    ``float8`` tells whether the devices have products of 8 bits.
    """
    send = _batch(recorder)
    streams, sent, left = _Streams(recorder), [], list(objects or ())

    def broadcast(result: list[Any], *args: Any, **kwargs: Any) -> None:
        if objects is None:
            sent.extend(result)
        else:
            result[:] = [left.pop(0) for _ in result]

    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def backward(*args: Any, **kwargs: Any) -> Any:
        # The function mode is off while Tensor.backward runs.
        with OnMeta(kernels=kernels, recorder=recorder):
            recorder.backward()
            return engine(*args, **kwargs)

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    with ExitStack() as stack:
        for name in _FILES:
            file = importlib.import_module(f"{_FSDP}.{name}")
            stack.enter_context(mock.patch.object(file, "_get_device_handle", return_value=streams))
        for owner, name, other in (
            (FSDPParamGroup, "_validate_no_meta_params", nothing),
            (importlib.import_module("torch.optim.adam"), "_device_dtype_check_for_fused", nothing),
            (torch.cuda, "get_device_capability", lambda *args: (9, 0) if float8 else (8, 0)),
            (torch.autograd, "_engine_run_backward", backward),
            (torch.accelerator, "current_stream", streams.current_stream),
            # Optimizers ask a machine's GPU whether its current stream captures a graph.
            (torch.accelerator, "current_accelerator", nothing),
            (dist, "broadcast_object_list", broadcast),
            (dist, "batch_isend_irecv", send),
            (schedules, "_batch_p2p", send),
            (torch.UntypedStorage, "resize_", resized),
            (operators, "device_of", lambda tensor: kernels),
            *(
                (FSDPParamGroup, name, _marked(recorder, "gather", getattr(FSDPParamGroup, name)))
                for name in _GATHERS
            ),
            (_fsdp_param_group, "foreach_reduce", _marked(recorder, "reduce", foreach_reduce)),
            (ShardingPropagator, _TRIES, _unseen(getattr(ShardingPropagator, _TRIES))),
        ):
            stack.enter_context(mock.patch.object(owner, name, other))
        stack.enter_context(host_memory(recorder, kernels))
        stack.enter_context(fake_group(rank, world_size))
        # DTensor's cache of an operator holds a mesh, and this one's groups end here.
        stack.callback(_clear_sharding_prop_cache)
        yield sent
