"""The messages of tensor parallel about the residual stream (B, L, D), each with that of its gradient.

They are those of Shoeybi et al. 2019 (arXiv:1909.08053), and with a sequence-parallel stream those of
Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from compose.base.torch_versions import functional_all_gather, functional_reduce_scatter

Kind = Literal["keep", "sum", "gather", "scatter"]


def send_stream(there: Kind, back: Kind, group: Any, tensor: Tensor) -> Tensor:
    """Send a tensor (B, L, D), cut or gathered along L.

    Args:
        there: The message forward. "sum" is an all-reduce, "gather" an all-gather, "scatter" a
            reduce-scatter; "keep" sends nothing.
        back: The message of the gradient.
        group: The name of the process group.
        tensor: The tensor.

    Returns:
        The result.
    """
    return _Message.apply(tensor, there, back, group)  # type: ignore[no-any-return]


class _Message(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Kind, back: Kind, group: Any) -> Tensor:
        ctx.back, ctx.group = back, group
        return _moved(tensor, there, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _moved(gradient, ctx.back, ctx.group), None, None, None


def _moved(tensor: Tensor, kind: Kind, group: Any) -> Tensor:
    if kind == "keep":
        return tensor.view_as(tensor)
    if not torch.compiler.is_compiling():
        ranks: dist.ProcessGroup = _resolve_process_group(group)
        if dist.get_backend(ranks) == "gloo":
            return {"sum": _summed, "gather": _gathered, "scatter": _scattered}[kind](tensor, ranks)
    if kind == "sum":
        return funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), "sum", group))
    tensor = tensor.contiguous()
    if kind == "gather":
        moved = functional_all_gather(tensor, 1, group)
    else:
        moved = functional_reduce_scatter(tensor, "sum", 1, group)
    return funcol.wait_tensor(moved)


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


def _scattered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' tensors (B, ranks * L, D), this rank's part (B, L, D)."""
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
