"""Sums of gradients over ranks, in fewer bytes than they have.

A reduce-scatter takes rows (n, S), one for each of the n ranks of a group, and writes the sum of the
ranks' rows for this rank, (S,). An all-reduce makes a flat tensor (S,) the sum of all ranks'. Sums are
made in float32 or wider.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.codec import Blocks, numbers
from compose.compression.gather import Levels, Sender, Traffic, gathered
from compose.compression.packing import (
    BlockFeedback,
    Feedback,
    Packing,
    ParameterPart,
    ReusedMemory,
    UnitLayout,
)
from compose.ops.tensors import at_least_float32
from compose.ops.torch_versions import REDUCE_SCATTER
from compose.parallel.comm import Comm

ROTATED = True
"""Whether blocks of 4 bits are rotated. Only a benchmark turns it off, to show what it is worth."""


@dataclass(frozen=True)
class SumSettings:
    """The settings of all sums of a stage."""

    comm: Comm
    traffic: Traffic
    compiled: bool = False
    levels: Levels | None = None
    wanted: ReusedMemory = field(default_factory=ReusedMemory)
    """Memory for gradients with their residual, which units share."""

    def blocks(self, bits: int) -> Blocks:
        """Return the codec of so many bits."""
        return Blocks(bits, self.comm.block, rotate=ROTATED and bits == 4, compiled=self.compiled)

    def feedback(self, code: "GradientCode") -> "Feedback | None":
        """Return the residual of a code for messages of any form, if there is to be one."""
        numel = code.layout.ranks * code.layout.numel
        return Feedback(code, numel, self.wanted, self.compiled) if self.comm.error_feedback else None


class GradientCode(Sender):
    """A way to sum one unit's gradients: a class for each, and an entry in GRADIENT_CODES."""

    layout: UnitLayout
    feedback: Any = None  # the residual, if there is one

    def reduce_scatter(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum of rows (n, S) of a loss scale for this rank to ``out`` (S,).

        ``out`` may be a row of ``rows`` if n is 1; else rows are not changed.
        """
        raise NotImplementedError

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Make ``flat`` (S,), of a loss scale, the sum over the ranks of ``group``."""
        raise NotImplementedError


class PlainSum(GradientCode):
    """The sum in the gradients' own type."""

    def reduce_scatter(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum for this rank, as FSDP makes it."""
        getattr(dist, REDUCE_SCATTER)(out, rows.contiguous().view(-1), group=group)
        self.traffic.count("gradients", out.nbytes, group.size())

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Make ``flat`` (S,) the sum over the ranks."""
        dist.all_reduce(flat, group=group)
        self.traffic.count("gradients", 2 * -(-flat.nbytes // group.size()), group.size())


@dataclass
class StepProgress:
    """The optimizer steps since the run began, those that begin it uncompressed, and the loss scale."""

    start_step: int = 0
    step: int = 0
    scale: float = 1.0

    def chosen(self, code: GradientCode) -> GradientCode:
        """Return what sums gradients now."""
        return code if self.step >= self.start_step else PlainSum(code.traffic)


class BlockSum(GradientCode):
    """The sum of rows that travel in blocks of few bits: an all-to-all, and a sum in float32.

    With levels, neighbours sum first, in 8 bits or more. Then ranks with the same place on other nodes
    exchange the sums of their nodes in ``bits``. Error feedback is for blocks of 4 bits in these rows.
    An all-reduce is a sum for each rank, and a gather of the sums in 8 bits or more.
    """

    def __init__(
        self, settings: SumSettings, layout: UnitLayout, among: int = 0, bits: int = 8
    ) -> None:
        super().__init__(settings.traffic)
        self.whole, self.layout = layout, layout.among(among) if among else layout
        self.levels = settings.levels
        self.packing = Packing(self.layout, settings.blocks(bits))
        self.intra_packing = Packing(self.layout, settings.blocks(max(bits, 8)))
        if settings.comm.error_feedback and bits == 4:
            rows = self.levels.inter.size() if self.levels else self.layout.ranks
            self.feedback = BlockFeedback(self, self.packing, rows)

    def reduce_scatter(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum for this rank."""
        if self.levels is None:
            self._sum(rows, group, scale, None, out)
            return
        intra, inter = self.levels.intra, self.levels.inter
        # Rank k near + j is for place j on node k.
        placed = rows.view(inter.size(), intra.size(), -1).transpose(0, 1)
        messages = self.intra_packing.pack(placed.flatten(0, 1))
        if self.observer:
            self.observer.packed(self.intra_packing, placed, messages, [intra, inter])
        messages = messages.view(intra.size(), -1)
        self.traffic.count("gradients", messages.shape[1], intra.size(), intra.size())
        got = exchanged(messages, intra).view(intra.size(), inter.size(), -1)
        sums = [self.intra_packing.sum(got[:, k], rows.dtype) for k in range(inter.size())]
        self._sum(torch.cat(sums), inter, scale, 1, out)

    def _sum(
        self, rows: Tensor, group: dist.ProcessGroup, scale: float, near: int | None, out: Tensor
    ) -> None:
        if self.observer:
            self.observer.begins(self, rows)
        encode = partial(self.feedback.encode, scale) if self.feedback else None
        messages = self.packing.pack(rows, encode)
        if self.observer:
            self.observer.packed(self.packing, rows, messages, [group])
            self.observer.ends(self, scale)
        self.traffic.count("gradients", messages.shape[1], group.size(), near)
        self.packing.sum(exchanged(messages, group), rows.dtype, out[None])

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Make ``flat`` (S,) the sum over the ranks."""
        rows = self.whole.spread(flat, group.size())
        own = torch.empty_like(rows[0])
        self.reduce_scatter(rows, group, scale, own)
        packing = self.intra_packing
        message = packing.pack(own[None])
        self.traffic.count("gradients", message.numel(), group.size())
        packing.unpack(gathered(message[0], group), rows)
        if self.observer:
            self.observer.gathered_sums(self, own, rows, group)
        self.whole.collect(rows, flat)


class LowRankSum(GradientCode):
    """The sum of gradients as products of low rank: PowerSGD (Vogels et al. 2019, arXiv:1905.13727).

    A gradient M (m, c) is sent as P = M Q (m, r) and Q = M^T P (c, r), where P is made orthonormal
    between the two. Both are summed over ranks. Each step begins with the last step's Q. Error feedback
    keeps M - P Q^T, with this rank's own Q. M has the first dim over all ranks as rows, and all other
    dims as columns. A part whose factors have no fewer elements than itself travels plain.
    """

    def __init__(self, settings: SumSettings, layout: UnitLayout, among: int = 0) -> None:
        """Take a layout; all ranks get the whole sum, so it is not cut over ``among``."""
        super().__init__(settings.traffic)
        self.layout, self.rank = layout, settings.comm.rank
        self.feedback = settings.feedback(self)
        self.shapes = {i: shape for i, shape in enumerate(map(self._matrix, layout.parts)) if shape}
        for i, (_, columns) in self.shapes.items():
            self.forms[f"factor{i}"] = (columns, self.rank), torch.float32

    def _matrix(self, part: ParameterPart) -> tuple[int, int] | None:
        rows, columns = self.layout.ranks * part.shape[0], math.prod(part.shape[1:])
        worth = self.rank * (rows + columns) < rows * columns
        return (rows, columns) if part.compressed and worth else None

    def reduce_scatter(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum for this rank."""
        if self.observer:
            self.observer.begins(self, rows)
        wanted = self.feedback.added_to(rows, scale) if self.feedback else at_least_float32(rows)
        pieces = self.layout.pieces(wanted)
        # (R, m / R, c): a rank's rows are not contiguous, and a copy would cost as much as a product.
        matrices = {i: pieces[i].unflatten(1, (m // len(rows), c)) for i, (m, c) in self.shapes.items()}
        plain = torch.cat([rows[:, :0], *(p for i, p in enumerate(pieces) if i not in matrices)], 1)
        tall = [(m @ self._factor(i, m)).flatten(0, 1) for i, m in matrices.items()]
        first = self._summed([*tall, plain], group)
        left = {
            i: torch.linalg.qr(torch.nan_to_num(p, 0.0, 0.0, 0.0)).Q.view(len(rows), -1, self.rank)
            for i, p in zip(matrices, first, strict=False)
        }
        own = {i: (m.transpose(1, 2) @ left[i]).sum(0) for i, m in matrices.items()}
        right = dict(zip(matrices, self._summed(list(own.values()), group), strict=True))
        # An overflow must not stay in what the next step begins with, nor zeros, which find nothing.
        for i, q in right.items():
            q = torch.nan_to_num(q, 0.0, 0.0, 0.0)
            self.kept[f"factor{i}"] = torch.where(q.any(0), q, self.kept[f"factor{i}"])
        if self.observer:
            missing = rows - wanted + self._lost(wanted.clone(), left, own)
            self.observer.loses(missing, [group], whole=self.layout.ranks == 1)
        if self.feedback:
            self._lost(wanted, left, own)
            self.feedback.keep(scale)
        if self.observer:
            self.observer.ends(self, scale)
        # A layout of one rank is whole on each rank of the group.
        me = group.rank() if self.layout.ranks > 1 else 0
        results = self.layout.pieces(out[None])
        for i, q in right.items():
            results[i].copy_((left[i][me] @ q.T).view(1, -1))
        begin = 0
        for i, piece in enumerate(results):
            if i not in self.shapes:
                piece.copy_(first[-1][me : me + 1, begin : begin + piece.shape[1]])
                begin += piece.shape[1]

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Make ``flat`` (S,) the sum over the ranks."""
        self.reduce_scatter(flat[None], group, scale, flat)

    def _lost(self, wanted: Tensor, left: Mapping[int, Tensor], own: Mapping[int, Tensor]) -> Tensor:
        """Make rows (R, S) what is not sent of them."""
        for i, piece in enumerate(self.layout.pieces(wanted)):
            if i in self.shapes:
                matrix = piece.unflatten(1, (-1, own[i].shape[0]))
                matrix.baddbmm_(left[i], own[i].T.expand(len(wanted), -1, -1), alpha=-1)
            else:
                piece.zero_()
        return wanted

    def _factor(self, i: int, matrix: Tensor) -> Tensor:
        """Return the Q that a step begins with, (c, r), the same on every rank."""
        if f"factor{i}" not in self.kept:
            drawn = torch.randn(matrix.shape[-1], self.rank, generator=torch.Generator().manual_seed(i))
            self.kept[f"factor{i}"] = drawn.to(matrix)
        return self.kept[f"factor{i}"]

    def _summed(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        if not tensors:
            return []
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat, group=group)
        # An all-reduce sends each part twice: to the rank that sums it, and back.
        self.traffic.count("gradients", 2 * math.ceil(flat.nbytes / group.size()), group.size())
        parts = flat.split([t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


class TopKSum(GradientCode):
    """The sum of the largest elements (Aji and Heafield 2017, arXiv:1704.05021; Lin et al. 2018).

    The k elements of largest magnitude of each part for a rank are sent: values in bfloat16, and places
    in int32. Error feedback keeps all others.
    """

    def __init__(self, settings: SumSettings, layout: UnitLayout, among: int = 0) -> None:
        """Take a layout; rows are sent to every rank, so it is not cut over ``among``."""
        super().__init__(settings.traffic)
        self.layout, density = layout, settings.comm.density
        self.counts = [
            max(1, math.ceil(density * part.numel)) if part.compressed else 0 for part in layout.parts
        ]
        self.feedback = settings.feedback(self)

    def reduce_scatter(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum for this rank."""
        messages = self._messages(rows, group, scale, whole=False)
        out.copy_(self._sum(exchanged(messages, group), rows.dtype))

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Make ``flat`` (S,) the sum over the ranks."""
        messages = self._messages(flat[None], group, scale, whole=True)
        flat.copy_(self._sum(gathered(messages[0], group), flat.dtype))

    def _messages(self, rows: Tensor, group: dist.ProcessGroup, scale: float, whole: bool) -> Tensor:
        if self.observer:
            self.observer.begins(self, rows)
        wanted = self.feedback.added_to(rows, scale) if self.feedback else rows
        messages = self.pack(wanted, rows.dtype)
        if self.observer:
            self.observer.selected(self, rows, wanted, group, whole)
        if self.feedback:
            wanted.sub_(self.unpack(messages, rows.dtype))
            self.feedback.keep(scale)
        if self.observer:
            self.observer.ends(self, scale)
        self.traffic.count("gradients", messages.shape[1], group.size())
        return messages

    def _sum(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return self.unpack(messages, dtype).sum(0, dtype=wide)

    def pack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return messages (R, bytes) of rows (R, S): places, values, and plain parts in their type."""
        values, places, plain, begin = [], [], [rows[:, :0]], 0
        for piece, count in zip(self.layout.pieces(rows), self.counts, strict=True):
            if count:
                at = piece.abs().topk(count, 1, sorted=False).indices
                values.append(piece.gather(1, at).to(torch.bfloat16))
                places.append((at + begin).to(torch.int32))
            else:
                plain.append(piece)
            begin += piece.shape[1]
        sent = [torch.cat(places, 1), torch.cat(values, 1)] if values else []
        sent.append(torch.cat(plain, 1).to(dtype))
        return torch.cat([x.contiguous().view(torch.uint8).view(len(rows), -1) for x in sent], 1)

    def unpack(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows (R, S) of messages (R, bytes): zeros where nothing was sent."""
        count = sum(self.counts)
        sizes = [torch.int32.itemsize * count, torch.bfloat16.itemsize * count]
        at, values, plain = messages.split([*sizes, messages.shape[1] - sum(sizes)], 1)
        out = messages.new_zeros(len(messages), self.layout.numel, dtype=dtype)
        if count:
            places = numbers(at, torch.int32).long()
            out.scatter_(1, places, numbers(values, torch.bfloat16).to(dtype))
        rest, begin = numbers(plain, dtype), 0
        for piece in self.layout.plain(out):
            piece.copy_(rest[:, begin : begin + piece.shape[1]])
            begin += piece.shape[1]
        return out


GRADIENT_CODES: dict[str, Callable[[SumSettings, UnitLayout, int], GradientCode]] = {
    "bfloat16": partial(BlockSum, bits=16),
    "int8": partial(BlockSum, bits=8),
    "int4": partial(BlockSum, bits=4),
    "powersgd": LowRankSum,
    "top_k": TopKSum,
}
"""The sum of each value of comm.gradients: for a reduce-scatter, or an all-reduce among ranks."""
LOSSY = ("int4", "powersgd", "top_k")
"""Codes of gradients that are for slow links; between neighbours int8 takes their place."""


def exchanged(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row i of (ranks, bytes) to rank i; return what the ranks have sent here, (ranks, bytes)."""
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows.contiguous(), group=group)
    return out
