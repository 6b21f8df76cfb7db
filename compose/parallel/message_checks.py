"""Checksums of messages: what a rank has received is compared with what others have sent.

torch.distributed hands every message of gloo to an operator of c10d. This module replaces these
operators, so it sees the messages of FSDP, DTensor, pipelines, rings and compiled layers.

A sum (all-reduce, reduce-scatter) of floats is rounded. With x the inputs of n ranks, u the unit
roundoff of their type and y the result, Higham (Accuracy and Stability of Numerical Algorithms, 2002,
section 4.2) gives for any order of the additions

    |y_i - sum_r x_ri| <= g sum_r |x_ri|,   g = (n - 1) u / (1 - (n - 1) u)

It is added up over a block of B elements. The sums of a block are computed in float64, which adds at
most 2 (B + n) 2^-52 to g, and underflow adds n B times the smallest normal number.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compose.ops.tensors import column_sums, gathered, mixed

BLOCK = 1024  # elements that share a checksum of their sum
_SLICE = 256 * BLOCK  # elements in float64 at a time

_Sent = tuple[Tensor, list[list[int]]]


class MessageChecks:
    """Checksums of the messages that this thread sends and receives until :meth:`close`.

    Other threads write checkpoints, at a time of their own.
    """

    def __init__(self) -> None:
        """Replace the operators; a process has one object of this kind at a time."""
        self.thread, self.paused = threading.get_ident(), False
        # Sums of words of parts, and the ranks of the job to which, or from which, each was sent.
        self.sent: list[_Sent] = []
        self.got: list[_Sent] = []
        self.wide = torch.empty(_SLICE, dtype=torch.float64)
        self.sums: dict[str, list[_Sum]] = {}  # by group
        self.waiting: dict[int, _CheckedWork] = {}
        self.library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*verrid")
            for name, method in (
                ("allreduce_", self._all_reduce),
                ("_reduce_scatter_base_", self._reduce_scatter),
                ("_allgather_base_", self._all_gather),
                ("allgather_", self._all_gather_lists),
                ("alltoall_base_", self._all_to_all),
                ("broadcast_", self._broadcast),
                ("send", self._send),
                ("recv_", self._receive),
            ):
                self.library.impl(name, method, "CPU", allow_override=True)

    def close(self) -> None:
        """Put the operators of torch.distributed back."""
        self.library._destroy()

    def problems(self) -> list[str]:
        """Compare the messages since the last call, and return this rank's lines; a collective."""
        for work in list(self.waiting.values()):
            work.wait()
        self.paused, me, world = True, dist.get_rank(), dist.group.WORLD
        assert world is not None
        everyone = torch.stack(gathered(_by_rank(self.sent), world))
        # Messages are added up, so the order in which they arrive does not matter.
        wrong = (everyone[:, me] != _by_rank(self.got)).nonzero().flatten().tolist()
        lines = [f"rank {me} has got other bytes than rank {source} sent" for source in wrong]
        for name in sorted(self.sums):  # one order for all ranks, whatever groups they are in
            messages = self.sums.pop(name)
            group, sizes = messages[0].group, [message.given.numel() for message in messages]
            total = torch.cat([message.given.flatten() for message in messages])
            dist.all_reduce(total, group=group)
            totals = list(zip(messages, total.split(sizes), strict=True))
            kinds = {message.dtype for message in messages}
            if any(_differ([each for each in totals if each[0].dtype == kind]) for kind in kinds):
                ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
                lines.append(f"rank {me} has got another sum than ranks {ranks} gave")
        self.paused = False
        return lines

    @property
    def _counts(self) -> bool:
        return not self.paused and threading.get_ident() == self.thread

    def _add(
        self,
        to: "list[_Sent]",
        group: dist.ProcessGroup,
        tensors: Sequence[Tensor],
        ranks: Sequence[int],
        equal: bool = False,
    ) -> None:
        """Add the words of a tensor for each of some ranks of a group, or of one for all.

        ``equal``: the one tensor has an equal part for each.
        """
        if self._counts and ranks:
            world = dist.get_process_group_ranks(group)
            of_job = [world[rank] for rank in ranks]
            if equal:
                to.append((column_sums(tensors[0], len(ranks)), [[rank] for rank in of_job]))
                return
            each = [of_job] if len(tensors) == 1 else [[rank] for rank in of_job]
            to += [(column_sums(one), [its]) for one, its in zip(tensors, each, strict=True)]

    def _given(self, group: dist.ProcessGroup, how: Any, tensor: Tensor, parts: int) -> "_Sum | None":
        """Return the checksums of what this rank gives to a sum; None if nothing is added up."""
        if not self._counts or how.op() != dist.ReduceOp.SUM.value or not tensor.numel():
            return None
        result = _Sum(group, tensor.detach(), parts, self.wide)
        self.sums.setdefault(group.group_name, []).append(result)
        return result

    def _watched(self, work: Any, arrived: Callable[[], None] | None) -> Any:
        """Return ``work`` as c10d has it; when it was waited for, ``arrived`` is called."""
        if arrived is None or not self._counts:
            return work.boxed()
        watched = self.waiting[id(work)] = _CheckedWork(work, self.waiting, arrived)
        return watched.boxed()

    # The operators of torch/csrc/distributed/c10d/Ops.cpp. The limits of time are the group's. What is
    # sent is added up while it is on its way, since the rank would only wait. An all-reduce overwrites
    # what it sends, so its words are added up before.

    def _all_reduce(self, tensors: list[Tensor], group: Any, how: Any, *_: Any) -> Any:
        ranks, backend = _opened(group)
        given = self._given(ranks, how, tensors[0], 1)
        work = backend.allreduce(tensors, _options(dist.AllreduceOptions(), how))
        return tensors, self._watched(work, given and partial(given.arrived, tensors[0], 0))

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, group: Any, how: Any, *_: Any) -> Any:
        ranks, backend = _opened(group)
        work = backend._reduce_scatter_base(out, tensor, _options(dist.ReduceScatterOptions(), how))
        given = self._given(ranks, how, tensor, ranks.size())
        return out, self._watched(work, given and partial(given.arrived, out, ranks.rank()))

    def _all_gather(self, out: Tensor, tensor: Tensor, group: Any, *_: Any) -> Any:
        ranks, backend = _opened(group)
        me, size = ranks.rank(), ranks.size()
        others = [range(me), range(me + 1, size)]  # a rank's own part is no message
        work = backend._allgather_base(out, tensor)
        self._add(self.sent, ranks, [tensor], [rank for part in others for rank in part])

        def arrived() -> None:
            parts = out.view(size, out.numel() // size)
            for some in others:
                if some:
                    self._add(self.got, ranks, [parts[some.start : some.stop]], some, equal=True)

        return out, self._watched(work, arrived)

    def _all_gather_lists(
        self, outs: list[list[Tensor]], tensors: list[Tensor], group: Any, *_: Any
    ) -> Any:
        ranks, backend = _opened(group)
        work = backend.allgather(outs, tensors)
        self._add(self.sent, ranks, tensors, range(ranks.size()))
        parts = outs[0]
        return outs, self._watched(work, partial(self._add, self.got, ranks, parts, range(len(parts))))

    def _all_to_all(
        self, out: Tensor, tensor: Tensor, group: Any, got: list[int], sent: list[int], *_: Any
    ) -> Any:
        ranks, backend = _opened(group)
        size = ranks.size()
        given = tensor.split(sent or [len(tensor) // size] * size)
        work = backend.alltoall_base(out, tensor, got, sent)
        self._add(self.sent, ranks, given, range(size))
        parts = out.split(got or [len(out) // size] * size)
        return self._watched(work, partial(self._add, self.got, ranks, parts, range(size)))

    def _broadcast(self, tensors: list[Tensor], group: Any, root: int, *_: Any) -> Any:
        ranks, backend = _opened(group)
        options = dist.BroadcastOptions()
        options.rootRank = root
        work = backend.broadcast(tensors, options)
        if ranks.rank() == root:
            self._add(self.sent, ranks, tensors, range(ranks.size()))
        return tensors, self._watched(work, partial(self._add, self.got, ranks, tensors, [root]))

    def _send(self, tensors: list[Tensor], group: Any, to: int, tag: int) -> Any:
        ranks, backend = _opened(group)
        work = backend.send(tensors, to, tag)
        self._add(self.sent, ranks, tensors, [to])
        return work.boxed()

    def _receive(self, tensors: list[Tensor], group: Any, source: int, tag: int) -> Any:
        ranks, backend = _opened(group)
        work = backend.recv(tensors, source, tag)
        return self._watched(work, partial(self._add, self.got, ranks, tensors, [source]))


class _Sum:
    """The checksums of a sum over ranks: the sums of its blocks, and of their absolutes."""

    def __init__(self, group: dist.ProcessGroup, tensor: Tensor, parts: int, wide: Tensor) -> None:
        self.group, self.dtype, self.own, self.wide = group, tensor.dtype, 0, wide
        self.given = _block_sums(tensor, parts, wide, absolutes=True)
        self.got = self.given[0, 0]

    def arrived(self, result: Tensor, own: int) -> None:
        """Take the result, which is part ``own`` of the sum."""
        self.own = own
        self.got = _block_sums(result.detach(), 1, self.wide)[0, 0]


def _differ(totals: Sequence[tuple[_Sum, Tensor]]) -> bool:
    """Return whether a result is not the sum of what all ranks have given, but for rounding.

    The messages are of one group and type, each with the sum of its checksums over the ranks.
    """
    messages = [message for message, _ in totals]
    own = [total.view_as(message.given)[message.own] for message, total in totals]
    wanted, absolutes = torch.cat(own, 1)
    dtype, ranks, added, smallest = messages[0].dtype, messages[0].group.size(), 0.0, 0.0
    if dtype.is_floating_point:
        number = torch.finfo(dtype)
        added, smallest = (ranks - 1) * number.eps / 2, number.tiny
    factor = added / (1 - added) if added < 1 else float("inf")
    factor += 2 * (BLOCK + ranks) * torch.finfo(torch.float64).eps
    most = factor * absolutes + ranks * BLOCK * smallest
    got = torch.cat([message.got for message in messages])
    # A sum that is not finite stops the run anyway, or its step is skipped.
    finite = absolutes.isfinite() & got.isfinite()
    return bool((finite & ~((got - wanted).abs() <= most)).any())


def _by_rank(messages: list[_Sent]) -> Tensor:
    """Return the checksums of messages, added up by the rank of the job; let the messages go."""
    result = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    if messages:
        sums = mixed([words for words, _ in messages])
        ranks = [of_part for _, parts in messages for of_part in parts]
        places = torch.tensor([rank for of_part in ranks for rank in of_part], dtype=torch.int64)
        result.index_add_(0, places, sums.repeat_interleave(torch.tensor([*map(len, ranks)])))
        messages.clear()
    return result


def _block_sums(tensor: Tensor, parts: int, wide: Tensor, absolutes: bool = False) -> Tensor:
    """Return the sums of the blocks of each part, and those of absolutes, (parts, 1 or 2, blocks).

    ``wide`` is memory for some blocks in float64: memory that is new for each message is slow.
    """
    rows = tensor.reshape(parts, -1)
    blocks = -(-rows.shape[1] // BLOCK)
    result = torch.empty(parts, 1 + absolutes, blocks, dtype=torch.float64)
    at_once = max(1, len(wide) // BLOCK // parts)
    wide = wide if parts <= len(wide) // BLOCK else torch.empty(parts * BLOCK, dtype=wide.dtype)
    for first in range(0, blocks, at_once):
        number = min(at_once, blocks - first)
        piece = rows[:, first * BLOCK : (first + number) * BLOCK]
        into = wide[: parts * number * BLOCK].view(parts, number * BLOCK)
        into[:, : piece.shape[1]].copy_(piece)
        into[:, piece.shape[1] :].zero_()
        into, sums = into.view(parts, number, BLOCK), result[:, :, first : first + number]
        sums[:, 0] = into.sum(-1)
        if absolutes:
            sums[:, 1] = into.abs_().sum(-1)
    return result


class _CheckedWork(dist.Work):
    """A message on its way, whose result is looked at as soon as it was waited for."""

    def __init__(
        self, work: Any, waiting: "dict[int, _CheckedWork]", arrived: Callable[[], None]
    ) -> None:
        super().__init__()
        self.work, self.others, self.arrived = work, waiting, arrived

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait, and look at the result; no ``timeout`` is the group's."""
        if self.others.pop(id(self.work), None):  # a receive of gloo cannot be waited for twice
            self.work.wait(timeout)
            self.arrived()
        return True


def _opened(group: Any) -> tuple[dist.ProcessGroup, Any]:
    """Return the process group behind c10d's own object, and its gloo."""
    ranks = dist.ProcessGroup.unbox(group)
    return ranks, ranks._get_backend(torch.device("cpu"))


def _options(options: Any, how: Any) -> Any:
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(how.op()))
    return options
