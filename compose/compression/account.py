"""An account of what messages lose, by which a proof makes results exact again."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.layout import Layout, Packing
from compose.ops.torch_versions import REDUCE_SCATTER

Rest = tuple[Tensor, Tensor]


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
    added: float = 0.0
    """With error feedback: the part of what was not sent yet that a message adds."""
    unsent: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(parts,): the expected square of the norm of what earlier messages have not sent."""
    strayed: Tensor = field(default_factory=lambda: torch.zeros(2, 0))
    """(2, parts): the square of the norm by which remainders are not what messages lost: as found, and
    as the rounding of remainders is expected to make it."""
    given: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    """The product of remainders with what messages added to gradients, and the remainders' square."""

    def clear(self) -> None:
        """Begin a step."""
        if self.added and len(self.squares):
            rest = (1 - self.added) ** 2 * self.unsent if len(self.unsent) else 0.0
            self.unsent = rest + self.squares
        self.missing, self.squares, self.strayed = None, torch.zeros(0), torch.zeros(2, 0)
        self.given = torch.zeros(2, dtype=torch.float64)

    @property
    def expected(self) -> list[Tensor]:
        """The expected squares of the norm of what this step's gradients lack, (parts,) each."""
        return [self.squares, self.added**2 * self.unsent]

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
        """Note what rounding is expected to lose of rows (R, S)."""
        blocks = packing.blocks_of(rows)
        lost = packing.code.expected(blocks.flatten(0, 1)).view(blocks.shape[:2])
        squares = _by_part(packing, lost)
        self.squares = squares if not len(self.squares) else self.squares + squares

    def kept(self, layout: Layout, before: Rest, lost: Tensor, after: Rest) -> None:
        """Note what messages of rows (R, S) have added to remainders.

        Args:
            layout: The rows.
            before: The remainders before, and the expected square of their rounding.
            lost: What the messages lost, without a loss scale.
            after: The same as ``before`` of the remainders that are kept.
        """
        squares = (after[0] - before[0] - lost).double().square(), after[1].double()
        parts = [[x.sum() for x in layout.pieces(some)] for some in squares]
        strayed = torch.stack([torch.stack(some) for some in parts]).cpu()
        self.strayed = strayed if not self.strayed.numel() else self.strayed + strayed
        rest = before[0].double()
        self.given += torch.stack([-(lost * rest).sum(), rest.square().sum()]).cpu()


def _by_part(packing: Packing, of_blocks: Tensor) -> Tensor:
    """Return the sums (parts,) of values of blocks (R, N)."""
    begin, found = 0, []
    for part in packing.layout.parts:
        count = -(-part.numel // packing.code.size) if part.coded else 0
        found.append(of_blocks[:, begin : begin + count].sum())
        begin += count
    return torch.stack(found).cpu()
