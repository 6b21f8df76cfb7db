"""Sums of gradients over ranks, in fewer bytes than they have.

Each takes rows (n, S), what this rank has for each of the n ranks of a group, and writes the sum of
the ranks' rows for this rank, (S,). Sums are made in float32 or wider; nothing is summed in a code.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.account import Account
from compose.compression.blocks import Blocks
from compose.compression.codecs import ADDED
from compose.compression.exchange import Traffic, exchanged
from compose.compression.feedback import BlockFeedback
from compose.compression.layout import Layout, Packing
from compose.ops.torch_versions import REDUCE_SCATTER


@dataclass(frozen=True)
class Levels:
    """The groups of a two-level exchange among n ranks, ``near`` of which are neighbours."""

    near: dist.ProcessGroup
    """This rank and its neighbours, which are consecutive ranks."""
    far: dist.ProcessGroup
    """The ranks with the same place among their neighbours."""


class Reduction(Protocol):
    """A way to sum rows over ranks."""

    account: Account
    """What its messages lose, for a proof."""

    def __call__(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum for this rank.

        Args:
            rows: (n, S); it is not changed.
            group: The n ranks.
            scale: The loss scale of the gradients.
            out: (S,), of any float type. It may be a row of ``rows`` if n is 1.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """Return what the next call depends on, by name."""
        ...

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` returned."""
        ...


class Plain:
    """The sum in the gradients' own type, as FSDP makes it."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def __call__(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum, as :class:`Reduction` says."""
        getattr(dist, REDUCE_SCATTER)(out, rows.contiguous().view(-1), group=group)
        self.traffic.count("gradients", out.nbytes, group.size())

    def state(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take nothing."""


class InBlocks:
    """The sum of rows that travel in blocks of few bits: an all-to-all, and a sum in float32.

    With ``levels``, neighbours sum first, in ``near_code``. Then each rank has what its whole node adds
    to the rows of those ranks that have its place on other nodes. These rows travel in ``code``. Error
    feedback is for what travels in ``code``.
    """

    def __init__(
        self,
        layout: Layout,
        code: Blocks,
        traffic: Traffic,
        feedback: bool = False,
        levels: Levels | None = None,
        near_code: Blocks | None = None,
    ) -> None:
        self.account = Account(added=ADDED if feedback else 0.0)
        self.packing = Packing(layout, code)
        self.near_packing = Packing(layout, near_code or code)
        self.traffic, self.levels = traffic, levels
        self.feedback = BlockFeedback() if feedback else None

    def __call__(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum, as :class:`Reduction` says."""
        if self.levels is None:
            self._sum(rows, group, scale, 0, out)
            return
        near, far = self.levels.near, self.levels.far
        # Rank k near + j is for place j on node k.
        placed = rows.view(far.size(), near.size(), -1).transpose(0, 1)
        messages = self.near_packing.pack(placed.flatten(0, 1))
        if self.account.open:
            sent = _sent(self.near_packing, messages, rows.dtype)
            self.account.lost(placed - sent.view(placed.shape), [near, far])
            self.account.expect(self.near_packing, placed.flatten(0, 1))
        messages = messages.view(near.size(), -1)
        self.traffic.count("gradients", messages.shape[1], near.size(), near.size())
        got = exchanged(messages, near).view(near.size(), far.size(), -1)
        sums = [self.near_packing.sum(got[:, k], rows.dtype) for k in range(far.size())]
        self._sum(torch.cat(sums), far, scale, 1, out)

    def _sum(
        self, rows: Tensor, group: dist.ProcessGroup, scale: float, near: int, out: Tensor
    ) -> None:
        encode, rest = None, None
        if self.feedback:
            code, count = self.packing.code, self.packing.blocks
            encode = partial(self.feedback.encode, code, count, scale)
            rest = self.feedback.rest(self.packing, rows) if self.account.open else None
        messages = self.packing.pack(rows, encode)
        if self.account.open:
            sent = _sent(self.packing, messages, rows.dtype)
            self.account.lost(rows - sent, [group])
            self.account.expect(self.packing, rows)
            if self.feedback and rest:
                after = self.feedback.rest(self.packing, rows)
                self.account.kept(self.packing.layout, rest, (rows - sent) / scale, after)
        self.traffic.count("gradients", messages.shape[1], group.size(), near or None)
        self.packing.sum(exchanged(messages, group), rows.dtype, out[None])

    def state(self) -> dict[str, Tensor]:
        """Return the remainder."""
        return self.feedback.state() if self.feedback else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take the remainder."""
        if self.feedback:
            self.feedback.restore(state)


def _sent(packing: Packing, messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows (R, S) that messages hold, as sums take them: not rounded to 16 bits."""
    return torch.cat([packing.sum(each[None], dtype) for each in messages])
