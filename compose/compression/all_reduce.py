"""All-reduces of a flat tensor in fewer bytes: a sum for each rank, and a gather of the sums."""

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.blocks import Blocks
from compose.compression.exchange import Traffic, gathered
from compose.compression.layout import Layout, Packing
from compose.compression.low_rank import LowRank
from compose.compression.reductions import Reduction
from compose.compression.sparse import Largest


class PlainSum:
    """The all-reduce in the tensor's own type."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def __call__(self, flat: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Make ``flat`` the sum over ranks, as :class:`CodedSum` does."""
        dist.all_reduce(flat, group=group)
        self.traffic.count("gradients", 2 * -(-flat.nbytes // group.size()), group.size())


class CodedSum:
    """The all-reduce of a flat tensor (S,) by a reduction, and a gather of its results.

    PowerSGD gives every rank the whole sum, and sparse rows are sent to every rank. Other sums are
    gathered, in ``back``.
    """

    def __init__(
        self, layout: Layout, ranks: int, reduction: Reduction, back: Blocks, traffic: Traffic
    ) -> None:
        """Take the layout of the flat tensor, and the reduction, which is for ``layout.among(ranks)``.

        LowRank and Largest are for ``layout`` itself.
        """
        self.layout, self.ranks, self.reduction, self.traffic = layout, ranks, reduction, traffic
        self.packing = Packing(layout.among(ranks), back)

    def __call__(self, flat: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Make ``flat`` the sum over ranks.

        Args:
            flat: (S,).
            group: The ranks.
            scale: The loss scale of the gradients.
        """
        if isinstance(self.reduction, LowRank):
            self.reduction(flat[None], group, scale, flat)
        elif isinstance(self.reduction, Largest):
            flat.copy_(self.reduction.everywhere(flat, group, scale))
        else:
            rows = self._spread(flat)
            own = torch.empty_like(rows[0])
            self.reduction(rows, group, scale, own)
            message = self.packing.pack(own[None])
            self.traffic.count("gradients", message.numel(), group.size())
            self.packing.unpack(gathered(message[0], group), rows)
            if self.reduction.account.open:
                self._note(own, rows, group)
            self._collect(rows, flat)

    def _note(self, own: Tensor, got: Tensor, group: dist.ProcessGroup) -> None:
        """Make the reduction's account, which is of this rank's part, one of the whole tensor."""
        account = self.reduction.account
        assert account.missing is not None
        account.expect(self.packing, own[None])
        missing = account.missing + own.double() - got[group.rank()].double()
        rows, whole = gathered(missing, group), missing.new_empty(self.layout.numel)
        self._collect(rows, whole)
        account.missing = None
        account.add(whole)

    def _spread(self, flat: Tensor) -> Tensor:
        """Return rows (ranks, S'), each with a part of every parameter."""
        rows = []
        for part, piece in zip(self.layout.parts, self.layout.pieces(flat), strict=True):
            padded = torch.nn.functional.pad(piece, (0, -part.numel % self.ranks))
            rows.append(padded.view(self.ranks, -1))
        return torch.cat(rows, 1)

    def _collect(self, rows: Tensor, flat: Tensor) -> None:
        begin = 0
        for part, piece in zip(self.layout.parts, self.layout.pieces(flat), strict=True):
            each = -(-part.numel // self.ranks)
            piece.copy_(rows[:, begin : begin + each].reshape(-1)[: part.numel])
            begin += each
