"""Observers of what compressed messages lose, and the loss that is expected of their codes.

A run attaches them to the steps that ``comm.measure_every`` measures, and a proof to all of its steps.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.activations import LARGEST_FLOAT8, Encoded, ModuleMessages, RowCode
from compose.compression.codec import Blocks, block_scales, block_steps, top_code
from compose.compression.gather import QuantizedGather, Sender, gathered
from compose.compression.packing import Packing
from compose.compression.reduce import BlockSum, GradientCode, TopKSum
from compose.ops.tensors import local_tensor
from compose.ops.torch_versions import REDUCE_SCATTER

if TYPE_CHECKING:
    from compose.compression.compressor import CompressedUnit

_FLOAT8_MANTISSA, _FLOAT8_EXPONENT = 3, -6
"""The bits of a number in e4m3 behind the leading one, and the exponent of its least normal number."""
_NOTHING = 2 * LARGEST_FLOAT8 * torch.finfo(torch.float32).tiny
"""Smaller elements may be sent as zeros, since the inverse of their scale may be infinite."""


def expected_of_blocks(code: Blocks, x: Tensor) -> Tensor:
    """Return the expected square of the norm of what each block (N, size) loses, (N,), float64.

    The mean square of a rounding error is step^2 / 12. Values beyond the largest code lose the rest.
    """
    if code.bits == 0:
        return torch.zeros(len(x), dtype=torch.float64, device=x.device)
    wide = x.float()
    if code.bits == 16:
        return (wide.abs().amax(1).double() * 2.0**-8).square() * code.size / 12
    wide = code.rotated(wide)
    steps, top = block_steps(wide, code.bits).double(), top_code(code.bits)
    beyond = wide.double().abs() - top * steps
    return torch.where(beyond > steps / 2, beyond.square(), steps.square() / 12).sum(1)


def expected_of_rows(code: RowCode, rows: Tensor) -> Tensor:
    """Return the expected square of the norm of what rows (..., D) lose, a float64 scalar."""
    x = code.cut(rows).flatten(0, -2).float()
    scales = block_scales(x, 127 if code.kind == "int8" else LARGEST_FLOAT8)
    steps = scales.expand_as(x)
    if code.kind == "float8":
        _, exponents = torch.frexp(x / scales.clamp(min=torch.finfo(torch.float32).tiny))
        exponents = (exponents - 1).clamp(min=_FLOAT8_EXPONENT)
        steps = torch.exp2(exponents - float(_FLOAT8_MANTISSA)) * scales
    return steps.double().square().sum() / 12


def most_of_rows(code: RowCode, rows: Tensor) -> Tensor:
    """Return the most that each element of rows (..., D) may lose, half of its step, float64.

    The code rounds scales by up to 2^-9, which may move an element to the next power of two.
    """
    x, more = code.cut(rows).double().abs(), 1 + 2.0**-8
    scales = x.amax(-1, keepdim=True) / (127 if code.kind == "int8" else LARGEST_FLOAT8) * more
    steps = scales.expand_as(x)
    if code.kind == "float8":
        _, exponents = torch.frexp(more**2 * x / scales.clamp(min=_NOTHING))
        steps = torch.exp2((exponents - 1).clamp(min=_FLOAT8_EXPONENT) - _FLOAT8_MANTISSA) * scales
    return steps.flatten(-2)[..., : rows.shape[-1]] / 2 + _NOTHING


class Losses:
    """Observes one sum of gradients: what its results lack."""

    def __init__(self) -> None:
        self.missing: Tensor | None = None
        """The difference (S,), float64, of this rank's sums to those of plain messages."""

    def begins(self, code: GradientCode, rows: Tensor) -> None:
        """Note that rows (R, S) are to be sent."""

    def packed(
        self, packing: Packing, rows: Tensor, messages: Tensor, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """Note that rows (n, ..., S) are sent as messages, whose sums go over groups; a collective."""
        # Sums take what messages hold in float32 or wider: not rounded to 16 bits.
        sent = torch.cat([packing.sum(each[None], rows.dtype) for each in messages])
        self.loses(rows - sent.view(rows.shape), groups)

    def loses(self, rows: Tensor, groups: Sequence[dist.ProcessGroup], whole: bool = False) -> None:
        """Note what messages lost; a collective.

        Rows (n, ..., S) are the losses of each rank, with a dim for each of the groups over which they
        are summed. If it is ``whole``, all ranks get the sum of one row.
        """
        if whole:
            rows = rows[0].to(torch.float64, copy=True)
            dist.all_reduce(rows, group=groups[0])
        else:
            rows = rows.double()
            for group in groups:
                own = torch.empty_like(rows[0])
                getattr(dist, REDUCE_SCATTER)(own.view(-1), rows.contiguous().view(-1), group=group)
                rows = own
        self.missing = rows.clone() if self.missing is None else self.missing + rows

    def selected(
        self, code: TopKSum, rows: Tensor, wanted: Tensor, group: dist.ProcessGroup, whole: bool
    ) -> None:
        """Note that of rows (R, S) with their residual the largest elements are sent; a collective."""
        sent = wanted.clone()
        for piece, count in zip(code.layout.pieces(sent), code.counts, strict=True):
            if count:
                largest = torch.zeros_like(piece, dtype=torch.bool)
                largest.scatter_(1, piece.abs().topk(count, 1, sorted=False).indices, True)
                piece.copy_(torch.where(largest, piece.bfloat16(), 0))
        self.loses(rows - sent.to(rows.dtype), [group], whole)

    def ends(self, code: GradientCode, scale: float) -> None:
        """Note that residuals have been kept."""

    def gathered_sums(
        self, code: BlockSum, own: Tensor, rows: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Note that all ranks' sums, ``own`` (S',), were gathered as rows (n, S'); a collective.

        The loss was noted for this rank's part, and is then that of the whole tensor.
        """
        assert self.missing is not None
        missing = self.missing + own.double() - rows[group.rank()].double()
        self.missing = missing.new_empty(code.whole.numel)
        code.whole.collect(gathered(missing, group), self.missing)


def missing_of(unit: "CompressedUnit") -> Tensor | None:
    """Return what this rank's gradients of a unit lack, (S,), if they are observed; a collective."""
    missing = {kind: s.observer.missing for kind, s in unit.senders.items() if s.observer}
    shards, total = missing.get("shards"), missing.get("replicas")
    if shards is None:
        return total
    if unit.replicas is not None:
        shards = shards.clone()
        dist.all_reduce(shards, group=unit.replicas)
    return shards if total is None else total + shards


def cosine(units: "Sequence[CompressedUnit]", device: str) -> float:
    """Return the cosine between the gradients and those of plain messages; a collective."""
    sums = torch.zeros(3, dtype=torch.float64)
    for unit in units:
        missing = missing_of(unit)
        for parameter, piece in unit.pieces(missing, True) if missing is not None else ():
            assert parameter.grad is not None
            sent = local_tensor(parameter.grad).double()
            true = sent + piece.to(sent.device)
            pairs = ((sent, true), (sent, sent), (true, true))
            sums += torch.stack([(a * b).sum() for a, b in pairs]).cpu()
    sums = sums.to(device)
    dist.all_reduce(sums)
    both, sent_square, true_square = sums.tolist()
    return both / max((sent_square * true_square) ** 0.5, 1e-300)


class Account(Losses):
    """Observes the messages of one unit's weights or gradients, in one step after another."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        feedback = sender.feedback if isinstance(sender, GradientCode) else None
        self.added: float = feedback.added if feedback else 0.0
        """The part of a residual in blocks that a message adds."""
        self.received: Tensor | None = None
        """This rank's shard of the weights (S,), as all ranks received it last."""
        self.squares = self.unsent = torch.zeros(0)
        """(parts,): the expected square of the norm of what this rank's messages lost; of what earlier
        messages have not sent."""
        self.before: Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        if self.added and len(self.squares):
            rest = (1 - self.added) ** 2 * self.unsent if len(self.unsent) else 0.0
            self.unsent = rest + self.squares
        self.missing, self.squares = None, torch.zeros(0)
        self.strayed = torch.zeros(2, 0)
        """(2, parts): the square of the norm by which residuals are not what messages lost: as
        measured, and as the rounding of residuals is expected to make it."""
        self.given = torch.zeros(2, dtype=torch.float64)
        """The product of residuals with what messages added to gradients; the residuals' square."""

    @property
    def expected(self) -> list[Tensor]:
        """The expected squares of the norm of what this step's gradients lack, (parts,) each."""
        return [self.squares, self.added**2 * self.unsent]

    def gathers(self, gather: QuantizedGather, own: Tensor, rank: int) -> None:
        """Note what a step's first gather is expected to lose."""
        if not gather.sent:
            self.squares = torch.zeros(0)
        sent = gather.to_send(own, rank)
        if sent is not None:
            self._rounds(gather.packing, sent[None])

    def gathered(self, own: Tensor) -> None:
        """Note this rank's shard as it was received."""
        self.received = own.clone()

    def begins(self, code: GradientCode, rows: Tensor) -> None:
        """Note the residual before rows (R, S) are sent."""
        self.before = _residual(code, rows)[0] if code.feedback else None

    def packed(
        self, packing: Packing, rows: Tensor, messages: Tensor, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """Note what messages lost, and what they are expected to lose."""
        super().packed(packing, rows, messages, groups)
        self._rounds(packing, rows.flatten(0, -2))

    def gathered_sums(
        self, code: BlockSum, own: Tensor, rows: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Note what the gather of sums lost, and what it is expected to lose."""
        super().gathered_sums(code, own, rows, group)
        self._rounds(code.intra_packing, own[None])

    def _rounds(self, packing: Packing, rows: Tensor) -> None:
        """Add what rounding is expected to lose of rows (R, S)."""
        blocks = packing.blocks_of(rows)
        loss = expected_of_blocks(packing.code, blocks.flatten(0, 1)).view(blocks.shape[:2])
        begin, result = 0, []
        for part in packing.layout.parts:
            count = -(-part.numel // packing.code.size) if part.compressed else 0
            result.append(loss[:, begin : begin + count].sum())
            begin += count
        squares = torch.stack(result).cpu()
        self.squares = squares if not len(self.squares) else self.squares + squares

    def loses(self, rows: Tensor, groups: Sequence[dist.ProcessGroup], whole: bool = False) -> None:
        """Note what messages lost."""
        super().loses(rows, groups, whole)
        self.loss = rows

    def ends(self, code: GradientCode, scale: float) -> None:
        """Note what messages have added to the residual."""
        if self.before is None:
            return
        loss, before = self.loss / scale, self.before
        after, rounded = _residual(code, before)
        squares = (after - before - loss).double().square(), rounded.double()
        parts = [[x.sum() for x in code.layout.pieces(some)] for some in squares]
        strayed = torch.stack([torch.stack(some) for some in parts]).cpu()
        self.strayed = strayed if not self.strayed.numel() else self.strayed + strayed
        rest = before.double()
        self.given += torch.stack([-(loss * rest).sum(), rest.square().sum()]).cpu()


def _residual(code: GradientCode, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual of rows as ``like``, and the expected square of its rounding."""
    feedback = code.feedback
    blocks = feedback.blocks()
    if not blocks.numel():
        return torch.zeros_like(like), torch.zeros_like(like)
    square = expected_of_blocks(feedback.code, blocks)[:, None] / feedback.code.size
    return feedback.rows(feedback.plain(blocks), like), feedback.rows(square.expand_as(blocks), like)


@dataclass
class ActivationLoss:
    """The loss of the messages of a module's activations, as squares of norms."""

    loss: float = 0.0
    expected: float = 0.0
    whole: float = 0.0  # the square of the norm of what plain messages bring
    elements: int = 0
    worst: float = 0.0
    """The largest loss of an element, as a part of the most that it may lose."""

    def plus(self, other: "ActivationLoss") -> "ActivationLoss":
        """Return the loss of both."""
        both = ActivationLoss(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        return replace(both, worst=max(self.worst, other.worst))


class ActivationAccount:
    """Observes activations: what was lost by module, and whether it was a gradient.

    If it is ``exact``, messages bring what plain messages bring. Else results are those of training.
    """

    def __init__(self, exact: bool = True) -> None:
        self.exact = exact
        self.by_module: dict[tuple[str, bool], ActivationLoss] = {}

    def __call__(
        self,
        module: ModuleMessages,
        result: Tensor,
        gradient: bool,
        encoded: Sequence[Encoded],
        times: int,
    ) -> Tensor:
        """Note what a message lost, and return what it brings."""
        code, (first, plain) = module.owner.code, encoded[0]
        right = plain(first)
        expected = torch.stack([expected_of_rows(code, part) for part, _ in encoded]).sum()
        own = self.by_module.setdefault((module.name, gradient), ActivationLoss())
        own.loss += float((result.double() - right.double()).square().sum())
        own.expected += float(times * expected)
        own.whole += float(right.double().square().sum())
        own.elements += right.numel()
        if result.numel():
            # A result is rounded to its type.
            wide, kind = result.double(), torch.finfo(result.dtype)
            most = torch.stack([send(most_of_rows(code, part)) for part, send in encoded]).sum(0)
            most += kind.eps * wide.abs().clamp(min=kind.tiny)
            parts = ((wide - plain(first.double())).abs() / most).nan_to_num(nan=torch.inf)
            own.worst = max(own.worst, float(parts.max()))
        return right if self.exact else result
