"""The sigmoid loss of DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

For a pair with the log-probabilities p of its replies, each a sum over the reply's tokens,

    loss = -log sigmoid(beta ((p - p_reference of the chosen) - (p - p_reference of the rejected)))

It is no sum over tokens. So with cp the sums of a row are reduced over the ranks that share it, before
the sigmoid.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.composition import Composition
from compose.ops.batch import IGNORE
from compose.ops.cross_entropy import logits_of, token_losses
from compose.parallel.mesh import BATCH_AXES, axis_size, sum_over

Fill = Callable[[Composition, Mapping[str, Any], int | None], Tensor]
"""Takes a composition, its local batch and ``micro_batch``, and returns the targets with the
log-probabilities of a reference."""


def log_probabilities(output: Any, targets: Tensor) -> Tensor:
    """Return the log-probability of each target (B, L, 3) by logits (B, L, V); 0 where it is NaN."""
    ids = targets[..., 0].nan_to_num(IGNORE).long()
    logits = logits_of(output)
    return -token_losses(logits.flatten(0, 1), ids.flatten()).view_as(ids)


class PairLoss:
    """The loss of pairs, a LossFunction: the sum over rows (B, L) of ``compose.preference.pairs``."""

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.reference: Fill | None = None
        """The second forward; without it, the reference's part of the targets counts as it is."""
        self.mesh: DeviceMesh | None = None
        self.rewards: list[Tensor] = []

    def count(self, targets: Tensor) -> Tensor:
        """Return the number of pairs: of rows with a target."""
        return (~targets[..., 0].isnan()).any(1).count_nonzero()

    def begin(
        self, composition: Composition, batch: Mapping[str, Any], micro_batch: int | None
    ) -> tuple["PairLoss", Mapping[str, Any]]:
        """Return the loss for a rank's part of a batch, and the batch with its reference."""
        here = copy.copy(self)
        here.mesh = composition.mesh
        if self.reference:
            batch = {**batch, "targets": self.reference(composition, batch, micro_batch)}
        return here, batch

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        """Return the loss of whole logits (B, L, V), or of those of a part of each row."""
        ratios = log_probabilities(output, targets) - targets[..., 2].nan_to_num()
        side = targets[..., 1].nan_to_num()
        # (3, B): each row has the log-ratio of the chosen, that of the rejected, and its targets.
        sums = torch.stack([ratios * (side > 0), ratios * (side < 0), side.abs()]).sum(-1)
        part_of_row = False
        if self.mesh is not None and axis_size(self.mesh, "cp") > 1:
            # The other ranks' sums are constants: each finds the gradient of its own part.
            sums = sums + (sum_over(sums, self.mesh, ("cp",)) - sums.detach())
            part_of_row = self.mesh.get_local_rank("cp") > 0
        chosen, rejected, counted = sums
        losses = -F.logsigmoid(self.beta * (chosen - rejected))
        loss = losses.masked_fill(counted == 0, 0.0).sum()
        if torch.is_grad_enabled() and not part_of_row:
            self._tally(chosen.detach(), rejected.detach(), counted > 0)
        # All ranks of a row know its loss, and the first of them tells it.
        return loss - loss.detach() if part_of_row else loss

    def _tally(self, chosen: Tensor, rejected: Tensor, counts: Tensor) -> None:
        right = (chosen > rejected).to(chosen)
        rows = torch.stack([self.beta * chosen, self.beta * rejected, right, torch.ones_like(chosen)])
        self.rewards.append((rows * counts).sum(1).double())

    def take_rewards(self, mesh: DeviceMesh) -> Tensor:
        """Return sums over all ranks' pairs since the last call, (4,), float64; a collective.

        They are of the rewards of chosen and of rejected (beta times the log-ratio), of the pairs whose
        chosen one has the greater reward, and of the pairs.
        """
        zero = torch.zeros(4, dtype=torch.float64, device=mesh.device_type)
        total = torch.stack([zero, *self.rewards]).sum(0)
        self.rewards.clear()
        return sum_over(total, mesh, ("pp", *BATCH_AXES, "cp"))
