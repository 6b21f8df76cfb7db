"""The layout of a unit's flat tensor, and the bytes that are sent of it.

FSDP cuts each parameter of a unit over n ranks along one dim and pads the parts to one size. A rank's
parts follow one another in a flat tensor (S,), and all ranks' in (n, S). A :class:`Packing` turns rows
of such a tensor into messages: the blocks of all coded parameters, then the others as they are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.compression import kernels
from compose.compression.blocks import Blocks, numbers

FEWEST = 4096
"""Elements of a parameter from which it is coded. Smaller ones, and those of one dim, travel plain."""


@dataclass(frozen=True)
class Part:
    """A parameter's part on each rank."""

    shape: tuple[int, ...]
    """The shape of the padded part."""
    coded: bool
    """Whether it is sent in a code."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The parts of a unit, in order."""

    parts: tuple[Part, ...]
    ranks: int
    """The ranks that share the unit."""

    @staticmethod
    def of(shapes: Sequence[Sequence[int]], ranks: int, dims: Sequence[int] | None = None) -> "Layout":
        """Return the layout of parameters.

        Args:
            shapes: Their shapes, before they are cut.
            ranks: The ranks that share them.
            dims: The dim along which each is cut; None is the first.

        Returns:
            The layout.
        """
        parts = []
        for shape, dim in zip(shapes, dims or [0] * len(shapes), strict=True):
            whole = [*shape] or [1]
            coded = len(shape) > 1 and math.prod(shape) >= FEWEST
            whole[dim] = -(-whole[dim] // ranks)
            parts.append(Part(tuple(whole), coded))
        return Layout(tuple(parts), ranks)

    @property
    def numel(self) -> int:
        """Elements of one rank's row."""
        return sum(part.numel for part in self.parts)

    def pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return views of rows (..., S), one for each parameter, in order."""
        return rows.split([part.numel for part in self.parts], -1)

    def among(self, ranks: int) -> "Layout":
        """Return the layout of one row, cut once more over ``ranks``."""
        return Layout(tuple(Part((-(-part.numel // ranks),), part.coded) for part in self.parts), ranks)


@dataclass(frozen=True)
class Run:
    """Coded elements of a row that follow one another, and their blocks."""

    begin: int
    """The first element."""
    numel: int
    """How many elements."""
    first: int
    """The first block, of all blocks of a row."""
    blocks: int
    """How many blocks."""
    padding: int
    """Elements that the last block lacks."""

    @property
    def end(self) -> int:
        """The element behind the last."""
        return self.begin + self.numel

    @property
    def elements(self) -> slice:
        """The place of the elements in a row."""
        return slice(self.begin, self.end)

    def blocks_of(self, rows: Tensor, size: int) -> Tensor:
        """Return these elements of rows (R, S) as (R, blocks, size): a view if there is no padding."""
        elements = rows[:, self.elements]
        padded = F.pad(elements, (0, self.padding)) if self.padding else elements
        return padded.unflatten(1, (self.blocks, size))

    def put_back(self, rows: Tensor, blocks: Tensor) -> None:
        """Write blocks (R, blocks, size), which may end in padding, to their place in rows (R, S)."""
        rows[:, self.elements] = blocks.flatten(1)[:, : self.numel]

    def with_next(self, other: "Run") -> "Run":
        """Return this run and the one that follows, as one."""
        numel, blocks = self.numel + other.numel, self.blocks + other.blocks
        return Run(self.begin, numel, self.first, blocks, other.padding)


Encode = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Packing:
    """Rows (R, S) of a layout as messages (R, bytes), and back."""

    layout: Layout
    code: Blocks

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one row's message, for elements of this type."""
        plain = sum(part.numel for part in self.layout.parts if not part.coded)
        return self.blocks * self.code.width(dtype) + plain * dtype.itemsize

    def pack(self, rows: Tensor, encode: Encode | None = None) -> Tensor:
        """Return messages.

        Args:
            rows: (R, S).
            encode: Makes the codes (R, N, width) of blocks (R, N, size). Its second argument is the
                number of the first of these blocks within a row. None is ``code.encode``.

        Returns:
            (R, bytes), uint8.
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
        for part, piece in zip(self.layout.parts, self.layout.pieces(rows), strict=True):
            if not part.coded:
                found = piece.contiguous().view(torch.uint8)
                out[:, done : done + found.shape[1]] = found
                done += found.shape[1]
        return out

    def unpack(self, messages: Tensor, out: Tensor, base: bool = False) -> None:
        """Write what messages hold.

        Args:
            messages: (R, bytes), uint8.
            out: (R, S), in the type that was packed, or a wider one for ``base``.
            base: Whether codes are differences to what ``out`` holds.
        """
        self._write(messages[None], out, out.dtype, base)

    def sum(self, messages: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the sum of what messages hold, (1, S), in float32 or wider.

        Args:
            messages: (R, bytes), uint8.
            dtype: The type that was packed.
            out: Memory for the sum, (1, S); its type may be narrower.
        """
        wide = torch.promote_types(dtype, torch.float32)
        if out is not None and out.dtype == wide:
            self._write(messages[:, None], out, dtype, False)
            return out
        total = messages.new_empty(1, self.layout.numel, dtype=wide)
        self._write(messages[:, None], total, dtype, False)
        return total if out is None else out.copy_(total)

    def _write(self, messages: Tensor, out: Tensor, dtype: torch.dtype, base: bool) -> None:
        """Write the sum of T messages for each row.

        Args:
            messages: (T, R, bytes), uint8.
            out: (R, S).
            dtype: The type that was packed.
            base: Whether codes are differences to what ``out`` holds.
        """
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
        for part, piece in zip(self.layout.parts, self.layout.pieces(out), strict=True):
            if not part.coded:
                end = done + part.numel * dtype.itemsize
                terms = numbers(messages[..., done:end], dtype)
                piece.copy_(terms[0] if len(terms) == 1 else terms.sum(0, dtype=out.dtype))
                done = end

    @cached_property
    def runs(self) -> list["Run"]:
        """The coded parts, in order. Those that follow one another without padding are one run."""
        found: list[Run] = []
        begin, first = 0, 0
        for part in self.layout.parts:
            if part.coded:
                blocks = -(-part.numel // self.code.size)
                padding = blocks * self.code.size - part.numel
                run = Run(begin, part.numel, first, blocks, padding)
                if found and not found[-1].padding and found[-1].end == begin:
                    run = found.pop().with_next(run)
                found.append(run)
                first += blocks
            begin += part.numel
        return found

    def blocks_of(self, rows: Tensor) -> Tensor:
        """Return all blocks (R, N, size) of rows (R, S), padded with zeros."""
        blocks = [rows[:, :0].unflatten(1, (0, self.code.size))]
        return torch.cat([*blocks, *(run.blocks_of(rows, self.code.size) for run in self.runs)], 1)

    def rows_of(self, blocks: Tensor) -> Tensor:
        """Return rows (R, S) of all blocks (R, N, size), with zeros in place of what is not coded."""
        rows = blocks.new_zeros(len(blocks), self.layout.numel)
        for run in self.runs:
            run.put_back(rows, blocks[:, run.first : run.first + run.blocks])
        return rows

    def _at_once(self, rows: int) -> bool:
        """Whether one call for all runs costs less than a call for each, although it needs a copy."""
        return len(self.runs) > 1 and rows * self.blocks * self.code.size <= kernels.AT_ONCE

    def coded_only(self, rows: Tensor) -> Tensor:
        """Return a copy of rows (R, S) with zeros in place of what is not coded."""
        rows = rows.clone()
        for part, piece in zip(self.layout.parts, self.layout.pieces(rows), strict=True):
            if not part.coded:
                piece.zero_()
        return rows

    @cached_property
    def blocks(self) -> int:
        """Blocks of a row."""
        return sum(-(-part.numel // self.code.size) for part in self.layout.parts if part.coded)
