"""The layout of a unit's flat tensor, and the bytes that are sent of it.

FSDP cuts each parameter of a unit over n ranks along one dim and pads the parts to one size. A rank's
parts follow one another in a flat tensor (S,), and all ranks' in (n, S). A :class:`Packing` turns rows
of such a tensor into messages: the blocks of all coded parameters, then the others as they are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compose.comm.blocks import Blocks, numbers

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

    def among(self, ranks: int) -> "Layout":
        """Return the layout of one row, cut once more over ``ranks``."""
        return Layout(tuple(Part((-(-part.numel // ranks),), part.coded) for part in self.parts), ranks)


@dataclass(frozen=True)
class Packing:
    """Rows (R, S) of a layout as messages (R, bytes), and back."""

    layout: Layout
    code: Blocks

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one row's message, for elements of this type."""
        plain = sum(part.numel for part in self.layout.parts if not part.coded)
        return self._blocks * self.code.width(dtype) + plain * dtype.itemsize

    def pack(self, rows: Tensor, encode: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return messages.

        Args:
            rows: (R, S).
            encode: Makes the codes (N, width) of blocks (N, size); None: ``code.encode``.

        Returns:
            (R, bytes), uint8.
        """
        blocks, plain = self.cut(rows)
        codes = (encode or self.code.encode)(blocks.flatten(0, 1)).view(len(rows), -1)
        return torch.cat([codes, plain.contiguous().view(torch.uint8).view(len(rows), -1)], 1)

    def unpack(self, messages: Tensor, out: Tensor) -> None:
        """Write what messages hold.

        Args:
            messages: (R, bytes), uint8.
            out: (R, S), in the type that was packed; it is filled.
        """
        codes, plain = self._split(messages, out.dtype)
        blocks = self.code.decode(codes.flatten(0, 1), out.dtype)
        self.join(blocks.unflatten(0, (len(messages), -1)), plain, out)

    def sum(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of what messages hold, (1, S), in float32 or wider.

        Args:
            messages: (R, bytes), uint8.
            dtype: The type that was packed.
        """
        codes, plain = self._split(messages, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        total = self.code.decode_rotated(codes[0], dtype)
        for row in codes[1:]:
            total += self.code.decode_rotated(row, dtype)
        out = messages.new_empty(1, self.layout.numel, dtype=wide)
        self.join(self.code.unrotate(total, wide)[None], plain.sum(0, keepdim=True, dtype=wide), out)
        return out

    def cut(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cut rows (R, S) into padded blocks (R, N, size) and what is not coded (R, plain)."""
        size, coded, plain = self.code.size, [], [rows[:, :0]]
        for part, piece in zip(self.layout.parts, self._pieces(rows), strict=True):
            if part.coded:
                coded.append(F.pad(piece, (0, -part.numel % size)))
            else:
                plain.append(piece)
        blocks = torch.cat([rows[:, :0], *coded], 1)
        blocks = blocks.unflatten(1, (-1, size)) if coded else rows.new_empty(len(rows), 0, size)
        return blocks, torch.cat(plain, 1)

    def join(self, blocks: Tensor, plain: Tensor, out: Tensor) -> None:
        """Undo :meth:`cut`.

        Args:
            blocks: (R, N, size).
            plain: (R, plain).
            out: (R, S); it is filled.
        """
        flat, at, done = blocks.flatten(1), 0, 0
        for part, piece in zip(self.layout.parts, self._pieces(out), strict=True):
            if part.coded:
                piece.copy_(flat[:, at : at + part.numel])
                at += part.numel + -part.numel % self.code.size
            else:
                piece.copy_(plain[:, done : done + part.numel])
                done += part.numel

    def coded_only(self, rows: Tensor) -> Tensor:
        """Return a copy of rows (R, S) with zeros in place of what is not coded."""
        rows = rows.clone()
        for part, piece in zip(self.layout.parts, self._pieces(rows), strict=True):
            if not part.coded:
                piece.zero_()
        return rows

    @property
    def _blocks(self) -> int:
        return sum(-(-part.numel // self.code.size) for part in self.layout.parts if part.coded)

    def _pieces(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.split([part.numel for part in self.layout.parts], 1)

    def _split(self, messages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return codes (R, N, width) and what is not coded (R, plain)."""
        width = self.code.width(dtype)
        end = self._blocks * width
        blocks = messages[:, :end].unflatten(1, (self._blocks, width))
        return blocks, numbers(messages[:, end:], dtype)
