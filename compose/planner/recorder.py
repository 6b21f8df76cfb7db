"""Records a rank's step on meta, operator by operator.

PyTorch's own trackers count wrongly here: a fake process group has no work to wait for, and an operator
of a DTensor is seen once as a whole and once in its parts. This one sees the parts only.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from compose.ops.operators import BODIES
from compose.ops.tensors import local_tensor
from compose.planner import operator_figures as figures
from compose.planner.record import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTED,
    Allocation,
    Operator,
    Record,
    RecordedMessage,
    StepSegment,
    Wait,
)

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_OVER = ("copy_", "zero_", "fill_", "_foreach_copy_", "split_with_sizes_copy", "chunk_cat")
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
_MESSAGES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class Recorder(TorchDispatchMode):
    """Records every operator and every storage of one rank on meta, and what a fake world tells it.

    ``kernels`` is the device that is played, "cpu" or "cuda". ``stream`` is the current stream; 0
    computes. ``within`` is "gather" or "reduce" while FSDP does so, "message" in a message, else empty.
    """

    def __init__(self, kernels: str = "cuda") -> None:
        super().__init__()
        self.kernels = kernels
        self.record_of = Record([StepSegment((-1, "setup", 0), FORWARD, "")])
        self.stream = 0
        self.within = ""
        self._streams = 0
        self._place_of: dict[int, int] = {}
        self._host: dict[int, int] = {}
        self._copies_in = False
        self._shapes = figures.RememberedResults()
        self._ended = False

    def end(self) -> None:
        """End the record: what is freed later, when no one needs it, does not belong to it."""
        self._ended = True

    def begin(self, action: tuple[int, str, int] | None = None, unit: str | None = None) -> None:
        """Begin a segment, if action, unit or phase are others than before."""
        segments = self.record_of.segments
        last = segments[-1]
        action = action or last.action
        now = StepSegment(action, self._phase(action), last.unit if unit is None else unit)
        if now != last:
            segments.append(now)

    def _phase(self, action: tuple[int, str, int]) -> str:
        if action[1] == "step":
            return OPTIMIZER
        if torch._C._current_graph_task_id() == -1:
            return FORWARD if action[1] in ("F", "setup") else BACKWARD
        return RECOMPUTED if torch.is_grad_enabled() else BACKWARD

    def backward(self) -> None:
        """Begin the backward of the last forward, outside of a pipeline."""
        if self.record_of.segments[-1].action[1] == "F":
            stage, _, micro_batch = self.record_of.segments[-1].action
            self.begin((stage, "B", micro_batch))

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._streams += 1
        return self._streams

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Make a stream the current one meanwhile."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def record(self) -> int:
        """Return the number of an event of the current stream."""
        number = len(self.record_of.events)
        self.record_of.events[number] = len(self.record_of.work)
        self.record_of.event_streams[number] = self.stream
        return number

    def wait(self, stream: int, event: int) -> None:
        """Note that a stream waits for an event."""
        if self.record_of.event_streams[event] != stream:
            self.record_of.work.append(Wait(self._segment(), stream, event))

    def _segment(self) -> int:
        return len(self.record_of.segments) - 1

    def note(self, tensors: Iterable[Tensor], category: str) -> None:
        """Give the storages of tensors a category, and count those that were not seen yet."""
        for tensor in tensors:
            place = self.hold(local_of(tensor).untyped_storage())
            if place is not None:
                self.record_of.allocations[place].category = category

    def to_host(self, tensors: Iterable[Tensor], category: str, pinned: bool = True) -> None:
        """Note that tensors are in host memory from now on; with an empty category, in files.

        PyTorch rounds pinned memory up to a power of two (ATen/core/CachingHostAllocator.h).
        """
        record = self.record_of
        for tensor in tensors:
            storage = local_of(tensor).untyped_storage()
            key, size, segment = storage._cdata, storage.nbytes() if category else 0, self._segment()
            self._free(key)
            if key in self._host:
                continue
            size = 1 << (size - 1).bit_length() if pinned and size else size
            place, now = len(record.host_allocations), len(record.host_changes)
            record.host_allocations.append(Allocation(size, now, segment, self.within, category))
            record.host_changes.append((segment, place, size))
            self._host[key] = place
            weakref.finalize(storage, self._leave_host, key)

    def _leave_host(self, key: int) -> None:
        record, place = self.record_of, self._host.pop(key, None)
        if place is not None and not self._ended:
            size = record.host_allocations[place].bytes
            record.host_changes.append((self._segment(), place, -size))

    def copied_in(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device of a tensor in host memory, which the current stream makes."""
        self._copies_in = True
        try:
            return tensor.clone()
        finally:
            self._copies_in = False

    def _of_host(self, given: Sequence[Tensor]) -> bool:
        """Tell whether the host computes with tensors, in its own memory beside a GPU."""
        if not self._host or self.kernels == "cpu" or self._copies_in:
            return False
        # Numbers may be anywhere: AdamW counts its steps on the host.
        tensors = [tensor for tensor in given if tensor.ndim]
        return bool(tensors) and all(map(self.on_host, tensors))

    def copied_out(self, tensor: Tensor, category: str) -> Tensor:
        """Return a copy of a tensor in host memory, which the current stream makes."""
        with _disable_current_modes():
            copy = torch.empty_like(tensor)
        self.to_host([copy], category)
        size, dtype = figures.tensor_bytes(tensor), str(tensor.dtype).removeprefix("torch.")
        where, place = (self._segment(), self.stream), self._places([tensor])
        what = ("aten.copy_", "memory", 0.0, size, dtype, tuple(tensor.shape), place)
        self.record_of.work.append(Operator(*where, *what, linked=size))
        return copy

    def on_host(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in host memory."""
        return bool(self._host) and local_of(tensor).untyped_storage()._cdata in self._host

    def hold(self, storage: torch.UntypedStorage) -> int | None:
        """Count a storage that was not seen yet, and return the place of its allocation."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._place_of:
            if not size or key in self._host:
                return None
            self._place_of[key] = self._allocate(size)
            weakref.finalize(storage, self._free, key)
        return self._place_of[key]

    def _allocate(self, size: int) -> int:
        record = self.record_of
        place, segment = len(record.allocations), self._segment()
        record.allocations.append(Allocation(size, len(record.changes), segment, self.within))
        record.changes.append((segment, place, size))
        return place

    def _free(self, key: int) -> None:
        record, place = self.record_of, self._place_of.pop(key, None)
        if place is not None and not self._ended:
            allocation = record.allocations[place]
            allocation.end, allocation.freed = len(record.changes), self._segment()
            allocation.freed_within = self.within
            record.changes.append((self._segment(), place, -allocation.bytes))

    def _take(self, size: int) -> None:
        """Note memory that an operator has allocated and freed again."""
        if size:
            key = -1 - len(self.record_of.allocations)  # no address
            self._place_of[key] = self._allocate(size)
            self._free(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size than before: FSDP frees and refills its buffers so."""
        key, size = storage._cdata, storage.nbytes()
        place = self._place_of.get(key)
        if key in self._host or (place is not None and self.record_of.allocations[place].bytes == size):
            return
        self._free(key)
        if size:
            self._place_of[key] = self._allocate(size)
            if place is None:
                weakref.finalize(storage, self._free, key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind not in (Tensor, Parameter) for kind in types):
            return NotImplemented  # a tensor of several, such as a DTensor: its parts come here again
        kwargs = kwargs or {}
        if func in BODIES:
            with self:  # an operator of ours: what it does is recorded
                return BODIES[func](*args, **kwargs)
        self.begin()
        result = self._shapes.run(func, args, kwargs)
        given = figures.tensors_in((args, kwargs))
        made = figures.tensors_in(result)
        short = func.overloadpacket.__name__
        name = f"{str(func.name()).partition('::')[0]}.{short}"
        message = self._message(name, args, kwargs, given, made)
        self.within = "message" if message and not self.within else self.within
        before = len(self.record_of.allocations)
        if self._of_host(given):
            self.to_host(made, "temporaries", pinned=False)
        for tensor in made:
            self.hold(tensor.untyped_storage())
        self.within = "" if self.within == "message" else self.within
        if self.kernels == "cpu":
            self._take(figures.casts(short, given, figures.changed(func, args, kwargs), made))
            if name == "fsdp.chunk_cat":
                self._take(figures.chunk_copies(args[0], args[2], kwargs["out"]))
        new = len(self.record_of.allocations) > before
        if message:
            self.record_of.work.append(message)
        elif name.partition(".")[0] not in ("c10d", "_c10d_functional", "profiler") and (
            new or func._schema.is_mutable
        ):
            self.record_of.work.append(self._operator(func, name, args, kwargs, given, made, result))
        return result

    def _operator(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Mapping[str, Any],
        given: list[Tensor],
        made: list[Tensor],
        result: Any,
    ) -> Operator:
        packet, short = func.overloadpacket, func.overloadpacket.__name__
        flops, kind = 0.0, "memory"
        first = made[0] if made else given[0]
        shape = tuple(first.shape)
        if "attention" in short:
            kind, shape = "attention", tuple(given[0].shape)
            causal, left = (
                figures.argument(func, name, args, kwargs) for name in ("is_causal", "window_size_left")
            )
            flops = figures.attention_flops(given, short, bool(causal), -1 if left is None else left)
        elif short in _GROUPED:
            kind, shape = "product", figures.grouped_shape(given[0], given[1], first)
            name += figures.WEIGHTS * (first.ndim == 3)
            flops = 2.0 * math.prod(shape)
        elif packet in flop_registry:
            kind, flops = "product", float(flop_registry[packet](*args, **kwargs, out_val=result))
            if short in _PRODUCTS:
                # The scales of a product in 8 bits come after its factors.
                shape = figures.product_shape(given[:2] if short == "_scaled_mm" else given, flops)
        written_to = figures.changed(func, args, kwargs)
        written = [*made, *written_to] if not written_to or made[:1] != written_to[:1] else written_to
        # A fill or a copy does not read what it writes over, and a new empty tensor is not written.
        over = short in _OVER
        read = [t for t in given if not (over and any(t is c for c in written_to))]
        if short.startswith(("empty", "new_empty")):
            written = []
        dtype = str((given or made)[0].dtype).removeprefix("torch.")
        dtype = "float8" if dtype.startswith("float8") else dtype
        size = sum(map(figures.tensor_bytes, read)) + sum(map(figures.tensor_bytes, written))
        if short == "embedding":  # it reads the rows that it returns
            size = figures.tensor_bytes(given[1]) + 2 * figures.tensor_bytes(first)
        linked = 0
        if self._of_host(given):
            kind = "processor"
        elif self._host and self.kernels == "cuda":
            ways = ([t for t in side if self.on_host(t)] for side in (read, written))
            linked = max(sum(map(figures.tensor_bytes, way)) for way in ways)
        where, places = (self._segment(), self.stream), (self._places(read), self._places(written))
        return Operator(*where, name, kind, flops, size, dtype, shape, *places, linked)

    def _places(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        places = (self._place_of.get(t.untyped_storage()._cdata) for t in tensors)
        return tuple(place for place in places if place is not None)

    def _message(
        self, name: str, args: Any, kwargs: Mapping[str, Any], given: list[Tensor], made: list[Tensor]
    ) -> RecordedMessage | None:
        space, _, short = name.partition(".")
        if space not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            return None
        plain = short.replace("_", "")  # allgather and all_gather are one
        kind = next((kind for kind in _MESSAGES if plain.startswith(kind.replace("_", ""))), "p2p")
        if kind == "p2p" and not plain.startswith(("send", "recv")):
            return None
        group = figures.group_of(args, kwargs)
        sizes = [figures.tensor_bytes(t) for t in given] + [figures.tensor_bytes(t) for t in made]
        if kind not in ("p2p", "all_to_all"):
            sizes.append(figures.bytes_of_lists(args))
        size = max(sizes, default=0)
        ranks = tuple(dist.get_process_group_ranks(group))
        received = plain.startswith("recv")
        return RecordedMessage(
            self._segment(), self.stream, kind, group.group_name, ranks, size, received
        )


def local_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a rank holds."""
    return local_tensor(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
