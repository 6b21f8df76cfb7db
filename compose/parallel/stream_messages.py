"""The messages of tensor parallel for the residual stream (B, L, D) and for its gradient.

Shoeybi et al. 2019 (arXiv:1909.08053) describe them, and Korthikanti et al. 2022 (arXiv:2205.05198)
those of a sequence-parallel stream.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor.parallel import ParallelStyle

from compose.ops.operators import operator
from compose.ops.tensors import arrived
from compose.ops.torch_versions import async_tp_groups, functional_all_gather, functional_reduce_scatter

_NOT_GIVEN = ("src_data_rank", "send")  # set on a style later
Kind = Literal["keep", "sum", "gather", "scatter"]


def send_stream(forward: Kind, backward: Kind, group: Any, tensor: Tensor) -> Tensor:
    """Send a tensor (B, L, D), cut or gathered along L, over the process group with this name.

    ``forward`` is its message, and ``backward`` the message of its gradient. "sum" is an all-reduce,
    "gather" an all-gather, "scatter" a reduce-scatter; "keep" sends nothing.
    """
    return _PlainMessage.apply(tensor, forward, backward, group)  # type: ignore[no-any-return]


class Style(ParallelStyle):
    """A style that shows what it was made with."""

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name not in _NOT_GIVEN}
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
        )


class SendsActivations:
    """A part of a style whose messages an add-on may send in another way."""

    send: Callable[..., Tensor] = staticmethod(send_stream)
    """Sends them; it takes what its default takes."""


class _PlainMessage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Kind, backward: Kind, group: Any) -> Tensor:
        ctx.kind, ctx.group = backward, group
        return send_plain(tensor, forward, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return send_plain(grads[0], ctx.kind, ctx.group), None, None, None


def send_plain(tensor: Tensor, kind: Kind, group: Any) -> Tensor:
    """Return what one message of a tensor brings."""
    if kind == "keep":
        return tensor.view_as(tensor)
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
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's (B, L, D) one after another, (B, ranks * L, D)."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    parts[group.rank()] = tensor
    exchange([tensor] * group.size(), parts, group)
    return torch.cat(parts, 1)


@operator("compose::scatter_stream")
def _scattered(tensor: Tensor, group_name: str) -> Tensor:
    """Return the sum of all ranks' tensors (B, ranks * L, D), this rank's part (B, L, D)."""
    group: dist.ProcessGroup = _resolve_process_group(cast(Any, group_name))
    sent = [part.contiguous() for part in tensor.chunk(group.size(), 1)]
    parts = [torch.empty_like(part) for part in sent]
    parts[group.rank()] = sent[group.rank()]
    exchange(sent, parts, group)
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def exchange(sent: list[Tensor], got: list[Tensor], group: dist.ProcessGroup) -> None:
    """Send to each other rank its tensor, and fill the tensors that come from them."""
    works = []
    for step in range(1, group.size()):
        to, source = (group.rank() + step) % group.size(), (group.rank() - step) % group.size()
        works.append(dist.isend(sent[to], group=group, group_dst=to))
        works.append(dist.irecv(got[source], group=group, group_src=source))
    for work in works:
        assert work is not None
        work.wait()
