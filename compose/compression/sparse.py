"""Sums of gradients of which only the largest elements travel.

Aji and Heafield 2017 (arXiv:1704.05021) and Lin et al. 2018 (arXiv:1712.01887) train so. Of each
parameter's part for a rank, the k elements of largest magnitude are sent: their values in bfloat16 and
their places in int32. Error feedback keeps all others.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.account import Account
from compose.compression.blocks import numbers
from compose.compression.exchange import Traffic, exchanged, gathered
from compose.compression.feedback import Feedback
from compose.compression.layout import Layout

PLACE = 4
VALUE = 2


class Largest:
    """The sum of rows of which the largest elements travel; see :class:`reductions.Reduction`."""

    def __init__(
        self, layout: Layout, density: float, traffic: Traffic, feedback: Feedback | None
    ) -> None:
        self.layout, self.traffic = layout, traffic
        self.counts = [
            max(1, math.ceil(density * part.numel)) if part.coded else 0 for part in layout.parts
        ]
        self.feedback, self.account = feedback, Account()

    def __call__(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum, as :class:`reductions.Reduction` says."""
        messages, lost = self._messages(rows, group, scale)
        if self.account.open:
            self.account.lost(lost, [group])
        out.copy_(self._sum(exchanged(messages, group), rows.dtype))

    def everywhere(self, row: Tensor, group: dist.ProcessGroup, scale: float) -> Tensor:
        """Return the sum of all ranks' rows (S,) on each rank.

        Args:
            row: (S,).
            group: The ranks.
            scale: The loss scale of the gradients.

        Returns:
            (S,).
        """
        messages, lost = self._messages(row[None], group, scale)
        if self.account.open:
            missing = lost[0].double()
            dist.all_reduce(missing, group=group)
            self.account.add(missing)
        return self._sum(gathered(messages[0], group), row.dtype)

    def _messages(self, rows: Tensor, group: dist.ProcessGroup, scale: float) -> tuple[Tensor, Tensor]:
        """Return messages (R, bytes) and, for an open account, what they should lose of rows."""
        wanted = self.feedback.added(rows, scale) if self.feedback else rows
        messages, lost = self.pack(wanted, rows.dtype), rows
        rest = self.feedback.rest(rows) if self.feedback and self.account.open else None
        if self.account.open:
            lost = rows - self._largest(wanted).to(rows.dtype)
        if self.feedback:
            wanted.sub_(self.unpack(messages, rows.dtype))
            self.feedback.keep(scale)
        if self.feedback and rest:
            self.account.kept(self.layout, rest, lost / scale, self.feedback.rest(rows))
        self.traffic.count("gradients", messages.shape[1], group.size())
        return messages, lost

    def _largest(self, rows: Tensor) -> Tensor:
        """Return what messages should hold of rows, by the definition."""
        found = rows.clone()
        for piece, count in zip(self.layout.pieces(found), self.counts, strict=True):
            if count:
                sent = torch.zeros_like(piece, dtype=torch.bool)
                sent.scatter_(1, piece.abs().topk(count, 1, sorted=False).indices, True)
                piece.copy_(torch.where(sent, piece.bfloat16(), 0))
        return found

    def _sum(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return self.unpack(messages, dtype).sum(0, dtype=wide)

    def pack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return messages (R, bytes) of rows (R, S): values, places, and what is not coded as it is.

        Args:
            rows: (R, S).
            dtype: The type of what is not coded.
        """
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
        """Return rows (R, S): zeros where nothing was sent.

        Args:
            messages: (R, bytes), uint8.
            dtype: The type of the rows, and of what is not coded.
        """
        count, rows = sum(self.counts), len(messages)
        at, values, plain = messages.split(
            [PLACE * count, VALUE * count, messages.shape[1] - (PLACE + VALUE) * count], 1
        )
        out = messages.new_zeros(rows, self.layout.numel, dtype=dtype)
        if count:
            places = numbers(at, torch.int32).long()
            out.scatter_(1, places, numbers(values, torch.bfloat16).to(dtype))
        rest, begin = numbers(plain, dtype), 0
        for part, piece in zip(self.layout.parts, self.layout.pieces(out), strict=True):
            if not part.coded:
                piece.copy_(rest[:, begin : begin + part.numel])
                begin += part.numel
        return out

    def state(self) -> dict[str, Tensor]:
        """Return the remainder."""
        return self.feedback.state() if self.feedback else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take the remainder."""
        if self.feedback:
            self.feedback.restore(state)
