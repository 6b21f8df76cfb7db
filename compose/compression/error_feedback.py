"""Error feedback: the residual of a lossy message is added to the next ones.

It is that of Seide et al. 2014 ("1-bit stochastic gradient descent") and Karimireddy et al. 2019
(arXiv:1901.09847), kept in 8 bits as by LoCo (Xie et al. 2024, arXiv:2407.04480). With all of a
residual R added, gradients have the noise of two roundings, and AdamW takes smaller steps. So blocks of
4 bits add a part, as LoCo's moving average does: they send g + R / 5, and keep R + g - sent.
"""

import torch
from torch import Tensor

from compose.compression.codec import ADDED, Blocks, encode_with_residual, keep_blocks
from compose.compression.gather import Sender
from compose.compression.packing import Packing


class Scratch:
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

    def __init__(self, sender: Sender, code: Blocks, blocks: int) -> None:
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

    def __init__(self, sender: Sender, packing: Packing, rows: int) -> None:
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

    def __init__(self, sender: Sender, numel: int, scratch: Scratch, compiled: bool = False) -> None:
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
