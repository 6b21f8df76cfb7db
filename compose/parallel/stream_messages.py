"""The messages of tensor parallel about the residual stream (B, L, D), each with that of its gradient.

They are those of Shoeybi et al. 2019 (arXiv:1909.08053), and with a sequence-parallel stream those of
Korthikanti et al. 2022 (arXiv:2205.05198).

They may travel in a code of 8 bits. Ranks then exchange codes, and each sums its own part in float32.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor.parallel import ParallelStyle

from compose.compression.activations import Activations, Place, place_of
from compose.ops.operators import operator
from compose.ops.tensors import arrived
from compose.ops.torch_versions import async_tp_groups, functional_all_gather, functional_reduce_scatter

Kind = Literal["keep", "sum", "gather", "scatter"]


class SendsActivations:
    """A part of a style whose messages can travel in a code."""

    place: Place | None = None
    """The place of its messages; None sends them as they are."""


def with_codes(
    styles: Iterable[tuple[str, ParallelStyle]], activations: Activations, axis: str
) -> list[tuple[str, ParallelStyle]]:
    """Return ``styles`` with copies of those that can send in a code, which do so."""
    found = []
    for name, style in styles:
        if isinstance(style, SendsActivations):
            style = copy(style)
            style.place = activations.at(name, axis)
        found.append((name, style))
    return found


def send_stream(
    there: Kind, back: Kind, group: Any, tensor: Tensor, place: Place | None = None
) -> Tensor:
    """Send a tensor (B, L, D), cut or gathered along L.

    Args:
        there: The message forward. "sum" is an all-reduce, "gather" an all-gather, "scatter" a
            reduce-scatter; "keep" sends nothing.
        back: The message of the gradient.
        group: The name of the process group.
        tensor: The tensor.
        place: The place whose code the messages travel in; None: as they are.

    Returns:
        The result.
    """
    key = place.key if place else ""
    return _Message.apply(tensor, there, back, group, key)  # type: ignore[no-any-return]


class _Message(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Kind, back: Kind, group: Any, key: str) -> Tensor:
        ctx.back, ctx.group, ctx.key = back, group, key
        return _moved(tensor, there, group, key, gradient=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _moved(grads[0], ctx.back, ctx.group, ctx.key, gradient=True), None, None, None, None


def _moved(tensor: Tensor, kind: Kind, group: Any, key: str, gradient: bool) -> Tensor:
    if kind == "keep":
        return tensor.view_as(tensor)
    if not key:
        return _plain(tensor, kind, group)
    # A compiled graph has one operator for it, which encodes, sends and decodes.
    send = _send_coded if torch.compiler.is_compiling() else _coded
    return send(tensor, kind, group, key, gradient)


def _plain(tensor: Tensor, kind: str, group: Any) -> Tensor:
    if not torch.compiler.is_compiling():
        ranks: dist.ProcessGroup = _resolve_process_group(group)
        if dist.get_backend(ranks) == "gloo":
            if kind == "scatter":
                return _scattered(tensor, group)
            return (_summed if kind == "sum" else _gathered)(tensor, ranks)
    tensor = tensor.contiguous()
    if kind == "sum":
        return arrived(funcol.all_reduce(tensor, "sum", group))
    # Rows of a single sample follow each other: along dim 0 a message needs no copy.
    # Async TP knows a gather along dim 1 by the copy after it, and then makes none.
    known = torch.compiler.is_compiling() and group in async_tp_groups
    flat = len(tensor) == 1 and not known
    rows, dim = (tensor.flatten(0, 1), 0) if flat else (tensor, 1)
    if kind == "scatter":
        moved = arrived(functional_reduce_scatter(rows, "sum", dim, group))
    elif known:
        # For a single sample funcol has a view in place of the copy.
        moved = torch.cat(functional_all_gather(rows, 0, group).split(len(rows)), 1)
    else:
        moved = arrived(functional_all_gather(rows, dim, group))
    return moved.view(1, *moved.shape) if flat else moved


# Functional collectives of gloo cost the host more. Its reduce-scatter is a whole all-reduce, and its
# all-gather goes round the ranks one by one; direct messages take a half of the time.


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' tensors."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's (B, L, D) one after another, (B, ranks * L, D)."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    parts[group.rank()] = tensor
    _exchange([tensor] * group.size(), parts, group)
    return torch.cat(parts, 1)


@operator("compose::scatter_stream")
def _scattered(tensor: Tensor, group_name: str) -> Tensor:
    """Return the sum of all ranks' tensors (B, ranks * L, D), this rank's part (B, L, D)."""
    group: dist.ProcessGroup = _resolve_process_group(cast(Any, group_name))
    sent = [part.contiguous() for part in tensor.chunk(group.size(), 1)]
    parts = [torch.empty_like(part) for part in sent]
    parts[group.rank()] = sent[group.rank()]
    _exchange(sent, parts, group)
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _exchange(sent: list[Tensor], got: list[Tensor], group: dist.ProcessGroup) -> None:
    """Send to each other rank its tensor, and fill the tensors that come from them."""
    works = []
    for step in range(1, group.size()):
        to, source = (group.rank() + step) % group.size(), (group.rank() - step) % group.size()
        works.append(dist.isend(sent[to], group=group, group_dst=to))
        works.append(dist.irecv(got[source], group=group, group_src=source))
    for work in works:
        assert work is not None
        work.wait()


# In a code. What is said above of gloo holds for codes too.


def _coded(tensor: Tensor, kind: str, group: Any, key: str, gradient: bool) -> Tensor:
    """Return what a message brings whose rows (..., D) travel in a code."""
    place, ranks = place_of(key), _resolve_process_group(group).size()
    code, tensor = place.code, tensor.contiguous()
    parts: list[Tensor] = [tensor]
    if kind == "gather":
        found = _gather_coded(place, tensor, group)
    elif kind == "scatter":
        found = _sum_coded(place, tensor, group)
    else:
        rows = tensor.flatten(0, -2)
        own = _sum_coded(place, F.pad(rows, (0, 0, 0, -len(rows) % ranks))[None], group)
        parts.append(own)
        found = _gather_coded(place, own, group)[0, : len(rows)].view(tensor.shape)

    def expected() -> Tensor:
        # What one rank's codes lose reaches the others with each part that is gathered.
        times = 1 if kind == "scatter" else ranks
        return times * torch.stack([code.expected(part) for part in parts]).sum()

    return place.settled(
        found.to(tensor.dtype), gradient, lambda: _plain(tensor, kind, group), expected
    )


@operator("compose::send_coded")
def _send_coded(tensor: Tensor, kind: str, group: str, key: str, gradient: bool) -> Tensor:
    # A graph relies on the strides that the fake has, and decoded rows may be a slice of padded ones.
    return _coded(tensor, kind, group, key, gradient).contiguous()


@_send_coded.register_fake
def _(tensor: Tensor, kind: str, group: str, key: str, gradient: bool) -> Tensor:
    batch, length, *rest = tensor.shape
    over: Any = group
    ranks = _resolve_process_group(over).size()
    after = {"gather": length * ranks, "scatter": length // ranks, "sum": length}[kind]
    return tensor.new_empty(batch, after, *rest)


def _gather_coded(place: Place, tensor: Tensor, group: Any) -> Tensor:
    """Return every rank's (B, L, D) one after another, (B, ranks * L, D), float32."""
    codes, others = place.code.encode(tensor), _resolve_process_group(group).size() - 1
    place.count(codes.nbytes * others, tensor.nbytes * others)
    return place.code.decode(_plain(codes, "gather", group), tensor.shape[-1])


def _sum_coded(place: Place, tensor: Tensor, group: Any) -> Tensor:
    """Return the sum of all ranks' (B, ranks * L, D), this rank's part (B, L, D), float32."""
    ranks: dist.ProcessGroup = _resolve_process_group(group)
    count = ranks.size()
    codes = place.code.encode(tensor).unflatten(1, (count, -1)).movedim(1, 0).contiguous()
    place.count(codes.nbytes // count * (count - 1), tensor.nbytes // count * (count - 1))
    if dist.get_backend(ranks) == "gloo":
        got = [torch.empty_like(codes[0]) for _ in range(count)]
        got[ranks.rank()] = codes[ranks.rank()]
        _exchange(list(codes), got, ranks)
    else:
        arrived_codes = torch.empty_like(codes)
        dist.all_to_all_single(arrived_codes, codes, group=ranks)
        got = list(arrived_codes)
    total = place.code.decode(got[0], tensor.shape[-1])
    for part in got[1:]:
        total += place.code.decode(part, tensor.shape[-1])
    return total
