"""Error feedback: what a lossy message left out is added to the next ones.

It is that of Seide et al. 2014 ("1-bit stochastic gradient descent") and Karimireddy et al. 2019
(arXiv:1901.09847). The remainder is kept in 8 bits, as LoCo does (Xie et al. 2024, arXiv:2407.04480).

If all of a remainder R is added to the next message, gradients get noise twice: that of this rounding,
and that of the last one. AdamW divides by the root of their mean square, and so takes smaller steps.
Blocks of 4 bits add a part of R, as LoCo's moving average does. They send g + R / 5, and keep what was
not sent, R + g - sent. In the end everything is sent too.
"""

import torch
from torch import Tensor

from compose.compression.blocks import Blocks
from compose.compression.codecs import SCALE_BYTES, decode_blocks, encode_with_remainder, keep_blocks
from compose.compression.exchange import Scratch
from compose.compression.layout import Packing

KEPT = Blocks(8, 4096)
"""The code in which remainders are kept: 1 byte for an element."""


class Remainder:
    """What messages have left out, as codes."""

    def __init__(self) -> None:
        self.codes: Tensor | None = None

    def state(self) -> dict[str, Tensor]:
        """Return it, for a checkpoint."""
        return {} if self.codes is None else {"feedback": self.codes}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned."""
        self.codes = state.get("feedback")


class BlockFeedback(Remainder):
    """The remainder of rows of blocks, as :func:`encode_with_remainder` has it."""

    def encode(self, code: Blocks, count: int, scale: float, x: Tensor, first: int = 0) -> Tensor:
        """Return the codes of blocks with the remainder, and keep the new one.

        Args:
            code: The form of the codes, of 8 or 4 bits.
            count: Blocks of a row.
            scale: The loss scale of ``x``.
            x: (R, N, size), N blocks of each row.
            first: The first of these blocks.

        Returns:
            (R, N, width).
        """
        if self.codes is None:
            self.codes = x.new_zeros(len(x) * count, code.size + SCALE_BYTES, dtype=torch.uint8)
        kept = self.codes.view(len(x), count, -1)[:, first : first + x.shape[1]]
        return encode_with_remainder(x, kept, scale, code.bits, code.rotate)

    def rest(self, packing: Packing, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the remainder of rows as ``like``, and the expected square of its rounding."""
        if self.codes is None:
            return torch.zeros_like(like), torch.zeros_like(like)
        blocks = decode_blocks(self.codes, 8)
        square = Blocks(8, packing.code.size).expected(blocks) / packing.code.size
        both = packing.code.turned(blocks), square[:, None].expand_as(blocks)
        rest, rounded = (packing.rows_of(x.reshape(len(like), packing.blocks, -1)) for x in both)
        return rest, rounded

    def norm(self) -> Tensor:
        """Return the 2-norm of the remainder, a scalar."""
        if self.codes is None:
            return torch.zeros(())
        return torch.linalg.vector_norm(decode_blocks(self.codes, 8))


class Feedback(Remainder):
    """The remainder of one unit's messages, for gradients without a loss scale."""

    def __init__(self, scratch: Scratch) -> None:
        """Take the memory of what is to be sent. Other units may share it."""
        super().__init__()
        self.scratch = scratch
        self.memory: Tensor | None = None

    def added(self, x: Tensor, scale: float) -> Tensor:
        """Return ``x`` with the remainder, in memory that :meth:`keep` reads.

        Args:
            x: What is to be sent, of any shape and float type.
            scale: The loss scale of ``x``.

        Returns:
            A tensor of ``x``'s shape, float32 or wider. It is valid until the next call for any unit.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        size = KEPT.size
        self.memory = self.scratch.empty(-(-x.numel() // size) * size, wide, x.device)
        blocks = self.memory.view(-1, size)
        if self.codes is None:
            self.codes = x.new_zeros(len(blocks), KEPT.width(wide), dtype=torch.uint8)
        KEPT.sum_into(blocks, self.codes[None], wide)
        if scale != 1:
            blocks.mul_(scale)
        return self.memory[: x.numel()].view(x.shape).add_(x)

    def keep(self, scale: float) -> None:
        """Keep what the caller has left in the tensor that :meth:`added` returned: what was not sent.

        If a value is not finite, its block's remainder stays what it was. Such a step is skipped, and
        it must not spoil those that follow.
        """
        assert self.memory is not None
        assert self.codes is not None
        keep_blocks(self.memory.view(-1, KEPT.size), self.codes, scale)
        self.memory = None

    def rest(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the remainder in ``like``'s shape, and the expected square of its rounding."""
        if self.codes is None:
            return torch.zeros_like(like), torch.zeros_like(like)
        blocks = KEPT.decode(self.codes, torch.float32)
        rounded = (KEPT.expected(blocks)[:, None] / KEPT.size).expand_as(blocks)
        rest, square = (x.reshape(-1)[: like.numel()].view(like.shape) for x in (blocks, rounded))
        return rest, square

    def norm(self) -> Tensor:
        """Return the 2-norm of the remainder, a scalar."""
        if self.codes is None:
            return torch.zeros(())
        return torch.linalg.vector_norm(KEPT.decode(self.codes, torch.float32))
