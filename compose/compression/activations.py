"""Activations in 8 bits: the messages of tensor and expert parallel.

A message of the residual stream exchanges codes, and each rank sums its own part in float32.
"""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor.parallel import ParallelStyle

from compose.compression import codec
from compose.compression.gather import Traffic
from compose.ops.operators import kernel, operator
from compose.parallel.stream_messages import Kind, SendsActivations, exchange, send_plain

FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = torch.finfo(FLOAT8).max


@dataclass(frozen=True)
class RowCode:
    """The codec of rows of activations in 8 bits: equal blocks of at most ``block`` elements.

    float8 is e4m3 (Micikevicius et al. 2022, arXiv:2209.05433).
    """

    kind: Literal["int8", "float8"]
    block: int
    compiled: bool = False

    def bytes(self, width: int) -> int:
        """Return the bytes of a row of so many elements."""
        count, size = self._blocks(width)
        return count * (size + codec.SCALE_BYTES)

    def encode(self, rows: Tensor) -> Tensor:
        """Return the codes (..., bytes), uint8, of rows (..., D) of any float type."""
        flat = self.cut(rows).flatten(0, -2)
        if self.kind == "int8":
            codes = codec.encode_blocks(flat, 8, False, self.compiled)
        else:
            codes = encode_float8(flat, self.compiled)
        return codes.view(*rows.shape[:-1], self.bytes(rows.shape[-1]))

    def decode(self, codes: Tensor, width: int) -> Tensor:
        """Return the rows (..., width), float32, of codes (..., bytes)."""
        count, size = self._blocks(width)
        flat = codes.reshape(-1, size + codec.SCALE_BYTES)
        if self.kind == "int8":
            blocks = codec.Blocks(8, size, compiled=self.compiled).decode(flat, torch.float32)
        else:
            blocks = decode_float8(flat, self.compiled)
        return blocks.view(*codes.shape[:-1], count * size)[..., :width]

    def cut(self, rows: Tensor) -> Tensor:
        """Return the padded blocks (..., count, size) of rows (..., D)."""
        count, size = self._blocks(rows.shape[-1])
        return F.pad(rows, (0, count * size - rows.shape[-1])).unflatten(-1, (count, size))

    def _blocks(self, width: int) -> tuple[int, int]:
        count = -(-width // self.block)
        return count, -(-width // count)


@operator("compose::encode_float8")
def encode_float8(x: Tensor, compiled: bool = False) -> Tensor:
    """Return blocks (N, size) in float8, each with its scale behind it, (N, size + 2), uint8."""
    out = codec.empty_codes(x, 8)
    for at in codec.pieces(x):
        codes, scales = kernel(_encoded_float8, compiled)(x[at])
        codec.integers(out[at]).copy_(codes.view(torch.int8))
        codec.write_steps(out[at], scales)
    return out


encode_float8.register_fake(lambda x, *_: codec.empty_codes(x, 8))


@operator("compose::decode_float8")
def decode_float8(codes: Tensor, compiled: bool = False) -> Tensor:
    """Return the elements (N, size), float32, of blocks in float8."""
    out = codes.new_empty(len(codes), codes.shape[1] - codec.SCALE_BYTES, dtype=torch.float32)
    for at in codec.pieces(out):
        result = codec.integers(codes[at]).contiguous().view(FLOAT8)
        out[at] = kernel(_decoded_float8, compiled)(result, codec.read_steps(codes[at]))
    return out


@decode_float8.register_fake
def _(codes: Tensor, compiled: bool = False) -> Tensor:
    return codes.new_empty(len(codes), codes.shape[1] - codec.SCALE_BYTES, dtype=torch.float32)


def _encoded_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    scales = codec.block_scales(x, LARGEST_FLOAT8)
    # The scale is rounded, so the largest element may be a little above the largest code.
    return (x * codec.inverse_of(scales)).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8), scales


def _decoded_float8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales


class Activations:
    """The compressed activations of a composition."""

    def __init__(self, code: RowCode, traffic: Traffic) -> None:
        self.code, self.traffic = code, traffic
        self.observer: Callable[..., Tensor] | None = None
        """It is told of every message, and returns the result; see :meth:`ModuleMessages.brings`."""
        self.places: list[ModuleMessages] = []

    def styles(
        self, styles: Iterable[tuple[str, ParallelStyle]], axis: str
    ) -> list[tuple[str, ParallelStyle]]:
        """Return ``styles`` with copies of those that can send codes, which do so."""
        result = []
        for name, style in styles:
            if isinstance(style, SendsActivations):
                style = copy(style)
                place = ModuleMessages(self, name, axis)
                self.places.append(place)
                if axis == "ep":
                    style.send = partial(send_rows, place)
                else:
                    style.send = partial(send_stream, place.key)
            result.append((name, style))
        return result


Encoded = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Rows that this rank sent in a code, and what sends such rows plainly."""


class ModuleMessages:
    """The messages of one module."""

    def __init__(self, owner: Activations, name: str, axis: str) -> None:
        self.owner, self.name, self.axis = owner, name, axis
        self.key = f"{name} {id(self):x}"  # torch.compile passes it to an operator
        _BY_KEY[self.key] = self

    def count(self, sent: int, plain: int) -> None:
        """Count the bytes that this rank sends to others, and those of plain messages."""
        self.owner.traffic.add("activations", self.axis, sent)
        self.owner.traffic.add("activations", "plain", plain)

    def brings(
        self,
        result: Tensor,
        gradient: bool,
        encoded: list[Encoded],
        times: int = 1,
    ) -> Tensor:
        """Return ``result``, which compressed messages brought, or an observer's result in its place.

        ``encoded`` was sent by this rank to ``times`` ranks. The first of it is the whole message.
        """
        if self.owner.observer is None:
            return result
        return self.owner.observer(self, result, gradient, encoded, times)


# An operator takes strings and no objects. The composition holds the values.
_BY_KEY: WeakValueDictionary[str, ModuleMessages] = WeakValueDictionary()


def send_stream(key: str, forward: Kind, backward: Kind, group: Any, tensor: Tensor) -> Tensor:
    """Send as :func:`compose.parallel.stream_messages.send_stream`, in the code of a module."""
    return _StreamMessage.apply(tensor, forward, backward, group, key)  # type: ignore[no-any-return]


class _StreamMessage(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Kind, backward: Kind, group: Any, key: str
    ) -> Tensor:
        ctx.kind, ctx.group, ctx.key = backward, group, key
        return _moved(tensor, forward, group, key, gradient=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _moved(grads[0], ctx.kind, ctx.group, ctx.key, gradient=True), None, None, None, None


def _moved(tensor: Tensor, kind: Kind, group: Any, key: str, gradient: bool) -> Tensor:
    if kind == "keep":
        return tensor.view_as(tensor)
    # A compiled graph has one operator for it, which encodes, sends and decodes.
    send = _send_in_graph if torch.compiler.is_compiling() else _send
    return send(tensor, kind, group, key, gradient)


def _send(tensor: Tensor, kind: Any, group: Any, key: str, gradient: bool) -> Tensor:
    """Return the result of a message whose rows (..., D) travel in a code."""
    module, ranks = _BY_KEY[key], _resolve_process_group(group).size()
    tensor = tensor.contiguous()
    encoded: list[Encoded] = [(tensor, lambda x: send_plain(x, kind, group))]
    if kind == "gather":
        result = _gather(module, tensor, group)
    elif kind == "scatter":
        result = _sum(module, tensor, group)
    else:
        rows = tensor.flatten(0, -2)
        own = _sum(module, F.pad(rows, (0, 0, 0, -len(rows) % ranks))[None], group)

        def unpadded(every: Tensor) -> Tensor:
            return every[0, : len(rows)].view(tensor.shape)

        encoded.append((own, lambda x: unpadded(send_plain(x, "gather", group))))
        result = unpadded(_gather(module, own, group))
    # The loss of one rank's codes reaches the others with each part that is gathered.
    times = 1 if kind == "scatter" else ranks
    return module.brings(result.to(tensor.dtype), gradient, encoded, times)


@operator("compose::send_compressed")
def _send_in_graph(tensor: Tensor, kind: str, group: str, key: str, gradient: bool) -> Tensor:
    # A graph relies on the strides that the fake has, and decoded rows may be a slice of padded ones.
    return _send(tensor, kind, group, key, gradient).contiguous()


@_send_in_graph.register_fake
def _(tensor: Tensor, kind: str, group: str, key: str, gradient: bool) -> Tensor:
    batch, length, *rest = tensor.shape
    over: Any = group
    ranks = _resolve_process_group(over).size()
    after = {"gather": length * ranks, "scatter": length // ranks, "sum": length}[kind]
    return tensor.new_empty(batch, after, *rest)


def _gather(module: ModuleMessages, tensor: Tensor, group: Any) -> Tensor:
    """Return every rank's (B, L, D) one after another, (B, ranks * L, D), float32."""
    code = module.owner.code
    codes, others = code.encode(tensor), _resolve_process_group(group).size() - 1
    module.count(codes.nbytes * others, tensor.nbytes * others)
    return code.decode(send_plain(codes, "gather", group), tensor.shape[-1])


def _sum(module: ModuleMessages, tensor: Tensor, group: Any) -> Tensor:
    """Return the sum of all ranks' (B, ranks * L, D), this rank's part (B, L, D), float32."""
    ranks: dist.ProcessGroup = _resolve_process_group(group)
    count, code = ranks.size(), module.owner.code
    codes = code.encode(tensor).unflatten(1, (count, -1)).movedim(1, 0).contiguous()
    module.count(codes.nbytes // count * (count - 1), tensor.nbytes // count * (count - 1))
    if dist.get_backend(ranks) == "gloo":
        got = [torch.empty_like(codes[0]) for _ in range(count)]
        got[ranks.rank()] = codes[ranks.rank()]
        exchange(list(codes), got, ranks)
    else:
        arrived = torch.empty_like(codes)
        dist.all_to_all_single(arrived, codes, group=ranks)
        got = list(arrived)
    total = code.decode(got[0], tensor.shape[-1])
    for part in got[1:]:
        total += code.decode(part, tensor.shape[-1])
    return total


def send_rows(
    module: ModuleMessages, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows (N, D) to the ranks, and return the received ones."""
    return _RowsMessage.apply(rows, received, sent, group, module)  # type: ignore[no-any-return]


class _RowsMessage(torch.autograd.Function):
    """The exchange of rows; their gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], *over: Any) -> Tensor:
        ctx.back = sent, received, *over
        return _exchange_rows(rows, received, sent, *over, gradient=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange_rows(grads[0], *ctx.back, gradient=True), None, None, None, None


def _exchange_rows(
    rows: Tensor,
    received: list[int],
    sent: list[int],
    group: dist.ProcessGroup,
    module: ModuleMessages,
    gradient: bool,
) -> Tensor:
    def send(x: Tensor) -> Tensor:
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    code = module.owner.code
    codes, others = code.encode(rows), len(rows) - sent[group.rank()]
    module.count(others * codes.shape[1], others * rows.shape[1] * rows.itemsize)
    result = code.decode(send(codes), rows.shape[1]).to(rows.dtype)
    return module.brings(result, gradient, [(rows, send)])
