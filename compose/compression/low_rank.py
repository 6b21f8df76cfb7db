"""Sums of gradients of which an approximation of low rank travels.

It is PowerSGD (Vogels et al. 2019, arXiv:1905.13727). A gradient M (m, c) is sent as P = M Q (m, r) and
Q = M^T P (c, r), where P is made orthonormal between the two. Both are summed over ranks. Each step
begins with the last step's Q, so that the product comes closer to the best one of this rank. Error
feedback keeps M - P Q^T, with this rank's own Q.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.account import Account
from compose.compression.exchange import Traffic
from compose.compression.feedback import Feedback
from compose.compression.layout import Layout, Part


class LowRank:
    """The sum of rows of which factors travel; see :class:`reductions.Reduction`.

    A part is the matrix of its first dim, over all ranks, and all others. A part whose factors have no
    fewer elements than itself travels plain.
    """

    def __init__(self, layout: Layout, rank: int, traffic: Traffic, feedback: Feedback | None) -> None:
        self.layout, self.rank, self.traffic = layout, rank, traffic
        self.feedback, self.account = feedback, Account()
        self.factors: dict[int, Tensor] = {}
        self.shapes = {i: shape for i, shape in enumerate(map(self._matrix, layout.parts)) if shape}

    def _matrix(self, part: Part) -> tuple[int, int] | None:
        rows, columns = self.layout.ranks * part.shape[0], math.prod(part.shape[1:])
        worth = self.rank * (rows + columns) < rows * columns
        return (rows, columns) if part.coded and worth else None

    def __call__(self, rows: Tensor, group: dist.ProcessGroup, scale: float, out: Tensor) -> None:
        """Write the sum, as :class:`reductions.Reduction` says."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        wanted = self.feedback.added(rows, scale) if self.feedback else rows.to(wide)
        pieces = self.layout.pieces(wanted)
        # (R, m / R, c): a rank's rows lie apart, and a copy would cost as much as a product.
        matrices = {i: pieces[i].unflatten(1, (m // len(rows), c)) for i, (m, c) in self.shapes.items()}
        plain = torch.cat([rows[:, :0], *(p for i, p in enumerate(pieces) if i not in matrices)], 1)
        tall = [(m @ self._factor(i, m)).flatten(0, 1) for i, m in matrices.items()]
        first = self._summed([*tall, plain], group)
        left = {
            i: _orthonormal(p).view(len(rows), -1, self.rank)
            for i, p in zip(matrices, first, strict=False)
        }
        own = {i: (m.transpose(1, 2) @ left[i]).sum(0) for i, m in matrices.items()}
        right = dict(zip(matrices, self._summed(list(own.values()), group), strict=True))
        # An overflow must not stay in what the next step begins with.
        self.factors |= {i: torch.nan_to_num(q, 0.0, 0.0, 0.0) for i, q in right.items()}
        rest = self.feedback.rest(rows) if self.feedback and self.account.open else None
        missing = rows
        if self.account.open:
            missing = rows - wanted + self._lost(wanted.clone(), left, own)
            self._note(missing, group)
        if self.feedback:
            self._lost(wanted, left, own)
            self.feedback.keep(scale)
            if rest:
                self.account.kept(self.layout, rest, missing / scale, self.feedback.rest(rows))
        # A layout of one rank is whole on each rank of the group.
        me = group.rank() if self.layout.ranks > 1 else 0
        results = self.layout.pieces(out[None])
        for i, q in right.items():
            results[i].copy_((left[i][me] @ q.T).view(1, -1))
        begin = 0
        for i, piece in enumerate(results):
            if i not in self.shapes:
                piece.copy_(first[-1][me : me + 1, begin : begin + piece.shape[1]])
                begin += piece.shape[1]

    def _lost(self, wanted: Tensor, left: Mapping[int, Tensor], own: Mapping[int, Tensor]) -> Tensor:
        """Make rows (R, S) what is not sent of them."""
        for i, piece in enumerate(self.layout.pieces(wanted)):
            if i in self.shapes:
                matrix = piece.unflatten(1, (-1, own[i].shape[0]))
                matrix.baddbmm_(left[i], own[i].T.expand(len(wanted), -1, -1), alpha=-1)
            else:
                piece.zero_()
        return wanted

    def _note(self, missing: Tensor, group: dist.ProcessGroup) -> None:
        if self.layout.ranks > 1:
            self.account.lost(missing, [group])
            return
        whole = missing[0].to(torch.float64, copy=True)  # the remainder is compared with ``missing``
        dist.all_reduce(whole, group=group)
        self.account.add(whole)

    def _factor(self, i: int, matrix: Tensor) -> Tensor:
        """Return the Q that a step begins with, (c, r), the same on every rank."""
        if i not in self.factors:
            drawn = torch.randn(matrix.shape[-1], self.rank, generator=torch.Generator().manual_seed(i))
            self.factors[i] = drawn.to(matrix)
        return self.factors[i]

    def _summed(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        if not tensors:
            return []
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat, group=group)
        # An all-reduce sends each part of its sum twice: to the rank that sums it, and back.
        self.traffic.count("gradients", 2 * math.ceil(flat.nbytes / group.size()), group.size())
        parts = flat.split([t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def state(self) -> dict[str, Tensor]:
        """Return the remainder and the factors."""
        found = {f"factor{i}": q for i, q in self.factors.items()}
        return found | (self.feedback.state() if self.feedback else {})

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take the remainder and the factors."""
        if self.feedback:
            self.feedback.restore(state)
        self.factors = {
            int(name.removeprefix("factor")): q for name, q in state.items() if name != "feedback"
        }


def _orthonormal(p: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of (m, r)."""
    return torch.linalg.qr(torch.nan_to_num(p, 0.0, 0.0, 0.0)).Q
