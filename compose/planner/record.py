"""A record of what a rank does in a step: operators, messages, waits and memory, in the order of issue.

PyTorch's own trackers count wrongly here: a fake process group has no work to wait for, and an operator
of a DTensor is seen once as a whole and once in its parts. This one sees the parts only.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from compose.ops.attention_layout import attention_pairs
from compose.ops.operators import BODIES
from compose.ops.tensors import local_tensor

FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER = "forward", "backward", "recomputed", "optimizer"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the step between two boundaries of units; nothing else runs within it."""

    action: tuple[int, str, int]
    """Stage, kind and micro-batch of the action: F, B, I, W; (-1, "step", 0) for what follows them."""
    phase: str
    """forward, backward, recomputed or optimizer."""
    unit: str
    """The layer, or the module of the model's ends; empty for what lies between."""


@dataclass(slots=True)
class Operator:
    """One operator on the device."""

    segment: int
    stream: int
    """The stream; 0 computes."""
    name: str
    kind: str
    """product, attention or memory; processor: the host computes it, in its own memory."""
    flops: float
    bytes: int
    dtype: str
    """The dtype of its first tensor."""
    shape: tuple[int, ...]
    """(batch or experts, m, n, k) of a product, the shape of attention's queries, else the result's."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    linked: int = 0
    """Bytes that pass between host and device, in the direction that has more."""


@dataclass(slots=True)
class Message:
    """One message to other ranks, as this rank issues it."""

    segment: int
    stream: int
    """The stream that waits for it."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or p2p."""
    group: str
    """The name of the process group."""
    ranks: tuple[int, ...]
    bytes: int
    """Bytes of the whole result of an all_gather, the whole input of others, the tensor of a p2p."""
    received: bool = False
    """Whether it is the receiving half of a p2p."""


@dataclass(slots=True)
class Wait:
    """A stream waits for what another was given before an event."""

    segment: int
    stream: int
    event: int


@dataclass(slots=True)
class Allocation:
    """Memory between two events of the record, which ended in the segment ``freed``."""

    bytes: int
    start: int
    """The place of its allocation among the memory's events."""
    segment: int
    within: str
    """Where it was allocated: gather, reduce, message, or empty for an operator."""
    category: str = ""
    """Its category, once it is known."""
    end: int | None = None
    """The place of its end; None if it outlives the record."""
    freed: int | None = None
    freed_within: str = ""
    """Where it ended, as in ``within``."""


@dataclass
class Record:
    """All that a rank did, in order; a ``segment`` is a place in ``segments``."""

    segments: list[Segment] = field(default_factory=list)
    work: list[Operator | Message | Wait] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)
    """The place in ``work`` of each event of a stream, by its number."""
    event_streams: dict[int, int] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    """Changes of memory in order: (segment, place in ``allocations``, bytes; below 0 if freed)."""
    host_allocations: list[Allocation] = field(default_factory=list)
    """Memory of the host, in place of a GPU's; its categories are known."""
    host_changes: list[tuple[int, int, int]] = field(default_factory=list)
    """Its changes, as in ``changes``."""

    @property
    def of_host(self) -> "Record":
        """Return the record of the host's memory."""
        return Record(self.segments, allocations=self.host_allocations, changes=self.host_changes)


class ElementwiseResults:
    """Runs operators on meta, and remembers shape, stride and dtype of elementwise results.

    On meta PyTorch runs many elementwise operators as Python programs, which take most of a record's
    time. A known result is a new tensor.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator."""
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key in self._known:
            shape, stride, dtype = self._known[key]
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.device.type == "meta" and not result.storage_offset():
            self._known[key] = result.shape, result.stride(), result.dtype
        return result


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what decides the result's shape; None for an operator whose result is not remembered."""
    schema = func._schema
    if torch.Tag.pointwise not in func.tags:
        return None
    if len(schema.returns) != 1 or schema.returns[0].alias_info is not None:
        return None
    results: list[Any] = [func, tuple(kwargs)]
    for given in (*args, *kwargs.values()):
        if not isinstance(given, Tensor):
            results.append((type(given), given))
        elif given.device.type == "meta":
            results.append((given.shape, given.stride(), given.dtype))
        else:
            return None
    try:
        key = tuple(results)
        hash(key)
    except TypeError:
        return None
    return key


# Elementwise operators of tensors whose types may differ.
_MIXED = ["add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "where"]


def casts(
    operator: str, given: Sequence[Tensor], changed: Sequence[Tensor], made: Sequence[Any]
) -> int:
    """Return the bytes of copies in a common type, which an elementwise kernel makes on a CPU.

    Kernels of a GPU cast what they load and store.
    """
    if operator.removesuffix("_") not in _MIXED or len({t.dtype for t in given}) < 2:
        return 0
    if not operator.endswith("_"):  # an out= is written and not read
        given = [t for t in given if not any(t is c for c in changed)]
    common = torch.result_type(given[0], given[1]) if len(given) > 1 else given[0].dtype
    for one in given[2:]:
        common = torch.promote_types(common, one.dtype)
    size = common.itemsize
    written = changed or [t for t in made if isinstance(t, Tensor)]
    inputs = sum(size * t.numel() for t in given if t.ndim and t.dtype not in (common, torch.bool))
    return inputs + sum(size * t.numel() for t in written[:1] if t.ndim and t.dtype != common)


def chunk_copies(given: Sequence[Tensor], chunks: int, out: Tensor) -> int:
    """Return the bytes of copies of FSDP's chunk_cat on a CPU: padded ones, and in one piece."""
    size = 0
    for each in given:
        rows = each.shape[0]
        if rows % chunks:
            size += each.numel() // max(1, rows) * -(-rows // chunks) * chunks * each.element_size()
    return size + (out.numel() * given[0].element_size() if given[0].dtype != out.dtype else 0)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
# The names of messages, by the end of their operators' names.
_MESSAGES = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "p2p",
    "recv": "p2p",
}


class Recorder(TorchDispatchMode):
    """Records every operator and every storage of one rank on meta, and what a fake world tells it.

    ``kernels`` is the device that is played, "cpu" or "cuda". ``stream`` is the current stream; 0
    computes. ``within`` is "gather" or "reduce" while FSDP does so, "message" in a message, else empty.
    """

    def __init__(self, kernels: str = "cuda") -> None:
        super().__init__()
        self.kernels = kernels
        self.record_of = Record([Segment((-1, "setup", 0), FORWARD, "")])
        self.stream = 0
        self.within = ""
        self._streams = 0
        self._place_of: dict[int, int] = {}
        self._host: dict[int, int] = {}
        self._copies_in = False
        self._shapes = ElementwiseResults()
        self._ended = False

    def end(self) -> None:
        """End the record: what is freed later, when no one needs it, does not belong to it."""
        self._ended = True

    def begin(self, action: tuple[int, str, int] | None = None, unit: str | None = None) -> None:
        """Begin a segment, if action, unit or phase are others than before."""
        segments = self.record_of.segments
        last = segments[-1]
        action = action or last.action
        now = Segment(action, self._phase(action), last.unit if unit is None else unit)
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
            place = self.hold(_local(tensor).untyped_storage())
            if place is not None:
                self.record_of.allocations[place].category = category

    def to_host(self, tensors: Iterable[Tensor], category: str, pinned: bool = True) -> None:
        """Note that tensors are in host memory from now on; with an empty category, in files.

        PyTorch rounds pinned memory up to a power of two (ATen/core/CachingHostAllocator.h).
        """
        record = self.record_of
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            self._free(key)
            if key in self._host:
                continue
            size = 1 << (size - 1).bit_length() if pinned and size else size
            place, now = len(record.host_allocations), len(record.host_changes)
            record.host_allocations.append(
                Allocation(size if category else 0, now, self._segment(), self.within, category)
            )
            record.host_changes.append((self._segment(), place, size if category else 0))
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
        size, dtype = _bytes(tensor), str(tensor.dtype).removeprefix("torch.")
        shape, place = tuple(tensor.shape), self._places([tensor])
        self.record_of.work.append(
            Operator(
                self._segment(),
                self.stream,
                "aten.copy_",
                "memory",
                0.0,
                size,
                dtype,
                shape,
                place,
                linked=size,
            )
        )
        return copy

    def on_host(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in host memory."""
        return bool(self._host) and _local(tensor).untyped_storage()._cdata in self._host

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
        """Note memory that an operator has taken and left."""
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
        """Run an operator, and record it with the storages that it makes."""
        if any(kind not in (Tensor, Parameter) for kind in types):
            return NotImplemented  # a tensor of several, such as a DTensor: its parts come here again
        kwargs = kwargs or {}
        if func in BODIES:
            with self:  # an operator of ours: what it does is recorded
                return BODIES[func](*args, **kwargs)
        self.begin()
        result = self._shapes.run(func, args, kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        name = str(func.name()).partition("::")[0] + "." + func.overloadpacket.__name__
        message = self._message(name, args, kwargs, given, made)
        self.within = "message" if message and not self.within else self.within
        before = len(self.record_of.allocations)
        if self._of_host(given):
            self.to_host(made, "temporaries", pinned=False)
        for tensor in made:
            self.hold(tensor.untyped_storage())
        self.within = "" if self.within == "message" else self.within
        if self.kernels == "cpu":
            self._take(casts(func.overloadpacket.__name__, given, _changed(func, args, kwargs), made))
            if name == "fsdp.chunk_cat":
                self._take(chunk_copies(args[0], args[2], kwargs["out"]))
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
                _argument(func, name, args, kwargs) for name in ("is_causal", "window_size_left")
            )
            flops = _attention_flops(given, short, bool(causal), -1 if left is None else left)
        elif short in _GROUPED:
            kind, shape = "product", _grouped_shape(given[0], given[1], first)
            flops = 2.0 * math.prod(shape)
        elif packet in flop_registry:
            kind, flops = "product", float(flop_registry[packet](*args, **kwargs, out_val=result))
            if short in _PRODUCTS:
                # The scales of a product in 8 bits come after its factors.
                shape = _product_shape(given[:2] if short == "_scaled_mm" else given, flops)
        changed = _changed(func, args, kwargs)
        written = [*made, *changed] if not changed or made[:1] != changed[:1] else changed
        # A fill or a copy does not read what it writes over, and a new empty tensor is not written.
        over = short in ("copy_", "zero_", "fill_", "_foreach_copy_", "split_with_sizes_copy")
        read = [t for t in given if not (over and any(t is c for c in changed))]
        if short.startswith(("empty", "new_empty")):
            written = []
        dtype = str((given or made)[0].dtype).removeprefix("torch.")
        dtype = "float8" if dtype.startswith("float8") else dtype
        size = sum(map(_bytes, read)) + sum(map(_bytes, written))
        linked = 0
        if self._of_host(given):
            kind = "processor"
        elif self._host and self.kernels == "cuda":
            ways = ([t for t in side if self.on_host(t)] for side in (read, written))
            linked = max(sum(map(_bytes, way)) for way in ways)
        return Operator(
            self._segment(),
            self.stream,
            name,
            kind,
            flops,
            size,
            dtype,
            shape,
            self._places(read),
            self._places(written),
            linked,
        )

    def _places(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        places = (self._place_of.get(t.untyped_storage()._cdata) for t in tensors)
        return tuple(place for place in places if place is not None)

    def _message(
        self, name: str, args: Any, kwargs: Mapping[str, Any], given: list[Tensor], made: list[Tensor]
    ) -> Message | None:
        space, _, short = name.partition(".")
        if space not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            return None
        plain = short.strip("_")
        kind = next((kind for word, kind in _MESSAGES.items() if plain.startswith(word)), None)
        if kind is None:
            return None
        group = _group(args, kwargs)
        sizes = [_bytes(t) for t in given] + [_bytes(t) for t in made]
        if kind not in ("p2p", "all_to_all"):
            sizes.append(_bytes_of_lists(args))
        size = max(sizes, default=0)
        ranks = tuple(dist.get_process_group_ranks(group))
        received = plain.startswith("recv")
        return Message(self._segment(), self.stream, kind, group.group_name, ranks, size, received)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def _changed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to, of those that it was given."""
    results: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            results += [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    return results


def _argument(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of an operator by its name; None if it was not given."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name)
    return None


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; what expand repeats is there once."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not n)
    return math.prod(sizes) * tensor.element_size()


def _bytes_of_lists(args: Any) -> int:
    """Return the bytes of the largest list of tensors, as all_gather and reduce_scatter may take."""
    lists = [leaf for leaf in args if isinstance(leaf, (list, tuple))]
    sizes = [sum(_bytes(t) for t in tree_leaves(x) if isinstance(t, Tensor)) for x in lists]
    return max(sizes, default=0)


def _attention_flops(given: Sequence[Tensor], name: str, causal: bool, left: int) -> float:
    """Return the FLOPs of a kernel of attention for the pairs of tokens that attend.

    Backward computes the scores again, and has four products besides (Dao 2023, arXiv:2307.08691).
    Queries are (B, H, L, K), or (B, L, H, K) for the kernel that takes windows; ``left`` is its window.
    """
    backward = name.endswith("backward")
    q, k, v = given[1:4] if backward else given[:3]
    tokens = 1 if name.startswith("_flash_attention") else 2
    length, keys = q.shape[tokens], k.shape[tokens]
    pairs = attention_pairs(length, keys, causal, left + 1)
    if not causal and left >= 0:
        pairs /= 2  # of earlier keys, the first query sees all and the last one none
    pairs *= q.shape[0] * q.shape[3 - tokens]
    scores, values = 2.0 * pairs * q.shape[3], 2.0 * pairs * v.shape[3]
    return 3 * scores + 2 * values if backward else scores + values


def _product_shape(given: list[Tensor], flops: float) -> tuple[int, ...]:
    """Return (batch, m, n, k) of a product, from its FLOPs and its factors."""
    left, right = given[-2], given[-1]
    if left.ndim == 1 or right.ndim == 1:
        left, right = given[0], given[1]
    batch = left.shape[0] if left.ndim == 3 else 1
    m, k = left.shape[-2], left.shape[-1]
    n = round(flops / (2 * batch * m * k)) if batch * m * k else 0
    return batch, m, n, k


def _grouped_shape(left: Tensor, right: Tensor, made: Tensor) -> tuple[int, int, int, int]:
    """Return (experts, m, n, k) of a grouped product whose groups are equally long.

    One of the three has a matrix for each expert. Its dim that the others lack is split: rows of the
    left factor (m), columns of the right one (n), or the dim that is summed (k), in gradients of
    weights.
    """
    (m, k), n = left.shape[-2:], right.shape[-1]
    experts = next((x.shape[0] for x in (left, right, made) if x.ndim == 3), 1)
    if left.ndim == right.ndim:
        return experts, m, n, k if left.ndim == 3 else k // experts
    return (experts, m // experts, n, k) if right.ndim == 3 else (experts, m, n // experts, k)


def _group(args: Any, kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    # The group comes last; other words, such as "sum", may name no group.
    for leaf in reversed((*args, *kwargs.values())):
        if isinstance(leaf, str):
            try:
                return dist.distributed_c10d._resolve_process_group(leaf)  # type: ignore[arg-type]
            except (ValueError, RuntimeError):
                continue
        if isinstance(leaf, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(leaf)
            except (RuntimeError, TypeError):
                continue
        if isinstance(leaf, dist.ProcessGroup):
            return leaf
    raise ValueError("a message without a process group")
