"""An account of what messages lose, by which a proof makes results exact again."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from compose.base.torch_versions import REDUCE_SCATTER
from compose.comm.layout import Packing


@dataclass
class Account:
    """What the messages of one unit have lost since :meth:`clear`. It is kept only while ``open``."""

    open: bool = False
    missing: Tensor | None = None
    """(S,): with it, this rank's sums are those of plain messages. Float64."""
    received: Tensor | None = None
    """(S,): this rank's shard of the weights, as all ranks received it last."""
    squares: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(parts,): the expected square of the norm of what this rank's messages lost."""
    before: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The same of the step before, which error feedback adds again."""

    def clear(self) -> None:
        """Begin a step."""
        self.missing, self.before, self.squares = None, self.squares, torch.zeros(0)

    def lost(self, rows: Tensor, groups: list[dist.ProcessGroup]) -> None:
        """Note what messages lost; a collective.

        Args:
            rows: (n, ..., S): what each rank should have had, less what it got, one dim for each group.
            groups: Groups over which rows are summed, one after another.
        """
        rows = rows.double()
        for group in groups:
            own = torch.empty_like(rows[0])
            getattr(dist, REDUCE_SCATTER)(own.view(-1), rows.contiguous().view(-1), group=group)
            rows = own
        self.add(rows)

    def add(self, own: Tensor) -> None:
        """Note what is missing in this rank's result, (S,)."""
        own = own.double()
        self.missing = own.clone() if self.missing is None else self.missing + own

    def expect(self, packing: Packing, rows: Tensor) -> None:
        """Note what rounding to the nearest code loses of rows (R, S): step^2 / 12 for each element."""
        blocks = packing.blocks_of(rows)
        steps = packing.code.step(blocks.flatten(0, 1)).view(blocks.shape[:2]).double()
        size, begin, found = packing.code.size, 0, []
        for part in packing.layout.parts:
            count = -(-part.numel // size) if part.coded else 0
            found.append(steps[:, begin : begin + count].square().sum() * size / 12)
            begin += count
        squares = torch.stack(found).cpu()
        self.squares = squares if not len(self.squares) else self.squares + squares
