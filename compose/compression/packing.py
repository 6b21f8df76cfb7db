"""Packing: the bytes that are sent of a unit's flat tensor, and the residual of what they lose.

FSDP cuts each parameter of a unit over n ranks along one dim and pads the parts to one size. A rank's
parts are a row (S,), and all ranks' rows are (n, S). A message of a row has the blocks of all quantized
parameters, then the others as they are.

With error feedback the residual of a lossy message is added to the next ones (Seide et al. 2014,
"1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847). It is kept in 8 bits as
by LoCo (Xie et al. 2024, arXiv:2407.04480). With all of a residual R added, gradients have the noise of
two roundings, and AdamW takes smaller steps. So blocks of 4 bits add a part, as LoCo's moving average
does: they send g + R / 5, and keep R + g - sent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.compression import codec
from compose.compression.codec import ADDED, Blocks, encode_with_residual, keep_blocks, numbers

if TYPE_CHECKING:
    from compose.compression.gather import Sender

FEWEST = 4096
"""Elements from which a parameter is compressed. Smaller ones, and those of one dim, travel plain."""


@dataclass(frozen=True)
class ParameterPart:
    """A parameter's part on each rank."""

    shape: tuple[int, ...]  # padded
    compressed: bool

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitLayout:
    """The parts of a unit, in order."""

    parts: tuple[ParameterPart, ...]
    ranks: int  # that share the unit

    @staticmethod
    def of(
        shapes: Sequence[Sequence[int]], ranks: int, dims: Sequence[int] | None = None
    ) -> "UnitLayout":
        """Return the layout of whole parameters that are cut along ``dims``; None is the first dim."""
        parts = []
        for shape, dim in zip(shapes, dims or [0] * len(shapes), strict=True):
            whole = [*shape] or [1]
            compressed = len(shape) > 1 and math.prod(shape) >= FEWEST
            whole[dim] = -(-whole[dim] // ranks)
            parts.append(ParameterPart(tuple(whole), compressed))
        return UnitLayout(tuple(parts), ranks)

    @property
    def numel(self) -> int:
        """Elements of one rank's row."""
        return sum(part.numel for part in self.parts)

    def pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return views of rows (..., S), one for each parameter, in order."""
        return rows.split([part.numel for part in self.parts], -1)

    def plain(self, rows: Tensor) -> list[Tensor]:
        """Return those of :meth:`pieces` that travel as they are."""
        return [x for part, x in zip(self.parts, self.pieces(rows), strict=True) if not part.compressed]

    def among(self, ranks: int) -> "UnitLayout":
        """Return the layout of one row, cut once more over ``ranks``."""
        parts = (ParameterPart((-(-part.numel // ranks),), part.compressed) for part in self.parts)
        return UnitLayout(tuple(parts), ranks)

    def spread(self, flat: Tensor, ranks: int) -> Tensor:
        """Return rows (ranks, S') of ``among(ranks)``, each with a part of every parameter of (S,)."""
        rows = []
        for part, piece in zip(self.parts, self.pieces(flat), strict=True):
            rows.append(F.pad(piece, (0, -part.numel % ranks)).view(ranks, -1))
        return torch.cat(rows, 1)

    def collect(self, rows: Tensor, flat: Tensor) -> None:
        """Write rows that :meth:`spread` could have made to (S,)."""
        begin = 0
        for part, piece in zip(self.parts, self.pieces(flat), strict=True):
            each = -(-part.numel // len(rows))
            piece.copy_(rows[:, begin : begin + each].reshape(-1)[: part.numel])
            begin += each


@dataclass(frozen=True)
class _ElementRun:
    """Compressed elements of a row that follow one another, and their blocks."""

    begin: int
    end: int
    first: int  # its first block, of all blocks of a row
    blocks: int
    padding: int  # elements that the last block lacks

    def blocks_of(self, rows: Tensor, size: int) -> Tensor:
        """Return these elements of rows (R, S) as (R, blocks, size): a view if there is no padding."""
        elements = rows[:, self.begin : self.end]
        padded = F.pad(elements, (0, self.padding)) if self.padding else elements
        return padded.unflatten(1, (self.blocks, size))

    def put_back(self, rows: Tensor, blocks: Tensor) -> None:
        """Write blocks (R, blocks, size), which may end in padding, to their place in rows (R, S)."""
        rows[:, self.begin : self.end] = blocks.flatten(1)[:, : self.end - self.begin]


@dataclass(frozen=True)
class Packing:
    """Rows (R, S) of a layout as messages (R, bytes), and back."""

    layout: UnitLayout
    code: Blocks

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one row's message, for elements of this type."""
        plain = sum(part.numel for part in self.layout.parts if not part.compressed)
        return self.blocks * self.code.width(dtype) + plain * dtype.itemsize

    def pack(self, rows: Tensor, encode: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
        """Return messages (R, bytes), uint8, of rows (R, S).

        ``encode`` makes the codes (R, N, width) of blocks (R, N, size), and takes the number of the
        first of these blocks within a row. None is ``code.encode``.
        """
        out = rows.new_empty(len(rows), self.bytes(rows.dtype), dtype=torch.uint8)
        encode = encode or (lambda blocks, _: self.code.encode(blocks))
        width = self.code.width(rows.dtype)
        if self._at_once(len(rows)):
            out[:, : self.blocks * width] = encode(self.blocks_of(rows), 0).flatten(1)
        else:
            for run in self.runs:
                codes = encode(run.blocks_of(rows, self.code.size), run.first)
                out[:, run.first * width : (run.first + run.blocks) * width] = codes.flatten(1)
        done = self.blocks * width
        for piece in self.layout.plain(rows):
            result = piece.contiguous().view(torch.uint8)
            out[:, done : done + result.shape[1]] = result
            done += result.shape[1]
        return out

    def unpack(self, messages: Tensor, out: Tensor, base: bool = False) -> None:
        """Write what messages (R, bytes) hold to (R, S), in the type that was packed.

        With ``base``, codes are differences to what ``out`` holds, which may be wider.
        """
        self._write(messages[None], out, out.dtype, base)

    def sum(self, messages: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the sum (1, S) of messages (R, bytes) of a type, in float32, wider, or in ``out``."""
        wide = torch.promote_types(dtype, torch.float32)
        if out is not None and out.dtype == wide:
            self._write(messages[:, None], out, dtype, False)
            return out
        total = messages.new_empty(1, self.layout.numel, dtype=wide)
        self._write(messages[:, None], total, dtype, False)
        return total if out is None else out.copy_(total)

    def _write(self, messages: Tensor, out: Tensor, dtype: torch.dtype, base: bool) -> None:
        """Write the sum of T messages (T, R, bytes) for each row of (R, S)."""
        width, size = self.code.width(dtype), self.code.size
        codes = messages[..., : self.blocks * width].unflatten(-1, (self.blocks, width))
        if self._at_once(len(out)):
            blocks = self.blocks_of(out) if base else out.new_empty(len(out), self.blocks, size)
            self.code.sum_into(blocks, codes, dtype, base)
            for run in self.runs:
                run.put_back(out, blocks[:, run.first : run.first + run.blocks])
        else:
            for run in self.runs:
                blocks = run.blocks_of(out, size)
                part = codes[..., run.first : run.first + run.blocks, :]
                self.code.sum_into(blocks, part, dtype, base)
                if run.padding:
                    run.put_back(out, blocks)
        done = self.blocks * width
        for piece in self.layout.plain(out):
            end = done + piece.shape[1] * dtype.itemsize
            terms = numbers(messages[..., done:end], dtype)
            piece.copy_(terms[0] if len(terms) == 1 else terms.sum(0, dtype=out.dtype))
            done = end

    @cached_property
    def runs(self) -> list[_ElementRun]:
        """The compressed parts, in order. Those that follow one another without padding are one run."""
        results: list[_ElementRun] = []
        begin, first = 0, 0
        for part in self.layout.parts:
            end = begin + part.numel
            if part.compressed:
                blocks = -(-part.numel // self.code.size)
                run = _ElementRun(begin, end, first, blocks, blocks * self.code.size - part.numel)
                if results and not results[-1].padding and results[-1].end == begin:
                    last = results.pop()
                    run = _ElementRun(last.begin, end, last.first, last.blocks + blocks, run.padding)
                results.append(run)
                first += blocks
            begin = end
        return results

    def blocks_of(self, rows: Tensor) -> Tensor:
        """Return all blocks (R, N, size) of rows (R, S), padded with zeros."""
        blocks = [rows[:, :0].unflatten(1, (0, self.code.size))]
        return torch.cat([*blocks, *(run.blocks_of(rows, self.code.size) for run in self.runs)], 1)

    def rows_of(self, blocks: Tensor) -> Tensor:
        """Return rows (R, S) of all blocks (R, N, size), with zeros in place of what is plain."""
        rows = blocks.new_zeros(len(blocks), self.layout.numel)
        for run in self.runs:
            run.put_back(rows, blocks[:, run.first : run.first + run.blocks])
        return rows

    def _at_once(self, rows: int) -> bool:
        """Whether one call for all runs costs less than a call for each, although it needs a copy."""
        return len(self.runs) > 1 and rows * self.blocks * self.code.size <= codec.AT_ONCE

    def compressed_only(self, rows: Tensor) -> Tensor:
        """Return a copy of rows (R, S) with zeros in place of what is plain."""
        rows = rows.clone()
        for piece in self.layout.plain(rows):
            piece.zero_()
        return rows

    @cached_property
    def blocks(self) -> int:
        """Blocks of a row."""
        return sum(run.blocks for run in self.runs)


class ReusedMemory:
    """Memory that one message after another is written to, as a host is slow to give new memory.

    On a GPU, whose allocator keeps memory, each call returns its own: a stream may still read the last.
    """

    def __init__(self) -> None:
        self.kept: dict[torch.dtype, Tensor] = {}

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor (numel,), which is valid until the next call."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        if dtype not in self.kept or self.kept[dtype].numel() < numel:
            self.kept[dtype] = torch.empty(numel, dtype=dtype, device=device)
        return self.kept[dtype][:numel]


class Residual:
    """The residual of a sender's messages, in blocks of 8 bits."""

    added = 0.0  # the part of it that a message adds, if not all

    def __init__(self, sender: "Sender", code: Blocks, blocks: int) -> None:
        self.kept, self.code = sender.kept, code
        self.shape = blocks, code.width(torch.float32)
        sender.forms["feedback"] = self.shape, torch.uint8

    def codes(self, like: Tensor) -> Tensor:
        """Return its codes (N, width), on the device of ``like``."""
        if "feedback" not in self.kept:
            self.kept["feedback"] = like.new_zeros(*self.shape, dtype=torch.uint8)
        return self.kept["feedback"]

    def blocks(self) -> Tensor:
        """Return its blocks (N, size), float32; none before the first message."""
        codes = self.kept.get("feedback")
        return torch.zeros(0) if codes is None else self.code.decode(codes, torch.float32)

    def plain(self, blocks: Tensor) -> Tensor:
        """Return blocks of it without a rotation."""
        return blocks

    def rows(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Return blocks (N, size) of it in the shape of the sent tensor."""
        return blocks.reshape(-1)[: like.numel()].view(like.shape)


class BlockFeedback(Residual):
    """The residual of rows of blocks, as :func:`encode_with_residual` has it."""

    added = ADDED

    def __init__(self, sender: "Sender", packing: Packing, rows: int) -> None:
        code = Blocks(8, packing.code.size, compiled=packing.code.compiled)
        super().__init__(sender, code, rows * packing.blocks)
        self.packing = packing

    def encode(self, scale: float, x: Tensor, first: int = 0) -> Tensor:
        """Return the codes (R, N, width) of blocks (R, N, size), from number ``first`` in a row on."""
        code = self.packing.code
        kept = self.codes(x).view(len(x), self.packing.blocks, -1)[:, first : first + x.shape[1]]
        return encode_with_residual(x, kept, scale, code.bits, code.rotate, code.compiled)

    def plain(self, blocks: Tensor) -> Tensor:
        """Return blocks of it without a rotation."""
        return self.packing.code.rotated(blocks)

    def rows(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Return blocks (N, size) of it as rows like those that were sent."""
        return self.packing.rows_of(blocks.reshape(len(like), self.packing.blocks, -1))


class Feedback(Residual):
    """The residual of one unit's messages of any form, for gradients without a loss scale."""

    def __init__(
        self, sender: "Sender", numel: int, scratch: ReusedMemory, compiled: bool = False
    ) -> None:
        code = Blocks(8, 4096, compiled=compiled)
        super().__init__(sender, code, -(-numel // code.size))
        self.scratch = scratch
        self.memory: Tensor | None = None

    def added_to(self, x: Tensor, scale: float) -> Tensor:
        """Return ``x``, of a loss scale, with the residual, float32 or wider; :meth:`keep` reads it."""
        wide = torch.promote_types(x.dtype, torch.float32)
        self.memory = self.scratch.empty(self.shape[0] * self.code.size, wide, x.device)
        blocks = self.memory.view(-1, self.code.size)
        self.code.sum_into(blocks, self.codes(x)[None], wide)
        if scale != 1:
            blocks.mul_(scale)
        return self.memory[: x.numel()].view(x.shape).add_(x)

    def keep(self, scale: float) -> None:
        """Keep what the caller has left in the tensor of :meth:`added_to`: what was not sent."""
        assert self.memory is not None
        blocks = self.memory.view(-1, self.code.size)
        keep_blocks(blocks, self.codes(blocks), scale, self.code.compiled)
        self.memory = None
