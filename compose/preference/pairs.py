"""Pairs of replies as a task: rows that hold a chosen and a rejected reply, and their loss.

The loss is the sigmoid loss of DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7). For a pair
with the log-probabilities p of its replies, each a sum over the reply's tokens,

    loss = -log sigmoid(beta ((p - p_reference of the chosen) - (p - p_reference of the rejected)))

It is no sum over tokens. So with cp the sums of a row are reduced over the ranks that share it, before
the sigmoid.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.composition import Composition
from compose.config.tables import Config
from compose.data.batches import stacked
from compose.data.datasets import LanguageModelling
from compose.data.samples import Conversations, Samples, open_samples
from compose.errors import ConfigError
from compose.ops.batch import IGNORE
from compose.ops.cross_entropy import logits_of, token_losses
from compose.parallel.mesh import BATCH_AXES, axis_size, sum_over


class Preference(LanguageModelling):
    """To prefer the chosen of two replies.

    A pair is two documents of one row. So no rank and no micro-batch has a half of it, but those of cp,
    which have a part of each sequence. ``targets`` are float32 (B, L, 3): a token, its side (1 in the
    chosen reply, -1 in the rejected one), and its log-probability by the reference, 0 in the data. All
    three are NaN where nothing is learnt.
    """

    def open(self, path: str, config: Config) -> Samples:
        """Open pairs; see ``compose.config.models.Task.open``."""
        seq_len, vocab_size = config.train.seq_len, config.model.config.vocab_size
        samples = open_samples(path, config.data, seq_len, vocab_size, Pairs)
        if not isinstance(samples, Pairs):
            raise ConfigError(
                f"{path} holds no pairs, which dpo.beta = {config.dpo.beta:g} learns from; make some by"
                " python -m compose tokenize --pairs, or use dpo.beta = 0"
            )
        return samples

    def random_batch(self, config: Config, samples: int, seed: int) -> dict[str, Tensor]:
        """Return random pairs of any lengths, with random log-probabilities of a reference."""
        length, vocab_size = config.train.seq_len, config.model.config.vocab_size
        draw = torch.Generator().manual_seed(seed)
        return stacked([_random_pair(length, vocab_size, draw) for _ in range(samples)])

    def loss(self, config: Config) -> Any:
        """Return the loss of pairs."""
        return PairLoss(config.dpo.beta)


def pair_targets(ids: Tensor, documents: Tensor, learnt: Tensor, reference: Tensor) -> Tensor:
    """Return the targets (L, 3) of tokens; document 0 is the chosen one, and 1 the rejected one."""
    values = torch.stack([ids, 1 - 2 * documents, reference], -1)
    return values.float().where(learnt[:, None], torch.nan)


def _random_pair(length: int, vocab_size: int, draw: torch.Generator) -> dict[str, Tensor]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, max(low, high) + 1, (), generator=draw))

    chosen = number(1, length - 1)
    rejected = number(1, length - chosen)
    positions, documents = torch.full((length,), -1), torch.full((length,), 2)
    learnt = torch.zeros(length, dtype=torch.bool)
    for document, (start, size) in enumerate([(0, chosen), (chosen, rejected)]):
        stop = min(start + size, length)
        positions[start:stop], documents[start:stop] = torch.arange(stop - start), document
        learnt[start + number(0, size - 1) : stop] = True
    # About what a model of random weights finds.
    reference = torch.randn(length, generator=draw) - math.log(vocab_size)
    tokens = torch.randint(vocab_size, (length,), generator=draw)
    targets = pair_targets(tokens.roll(-1), documents, learnt, reference)
    return {"tokens": tokens, "targets": targets, "positions": positions, "document_ids": documents}


class Pairs(Conversations):
    """The samples of a token set of pairs: its documents 2 i and 2 i + 1 are chosen and rejected.

    Of a pair that is longer than ``seq_len``, each is cut to a half of it, or to what the other leaves.
    A pair is dropped if one of the two has no target left.
    """

    what = "pair"

    def limits(self, sizes: np.ndarray) -> np.ndarray:
        """Return the most inputs of each document."""
        other = sizes.reshape(-1, 2)[:, ::-1].reshape(-1)
        return np.maximum(self.seq_len // 2, self.seq_len - other)

    def binned(self) -> list[list[int]]:
        """Return the documents of each sample."""
        pairs = self.lengths.reshape(-1, 2)
        whole = (pairs > 0).all(1)
        pairs[~whole] = 0
        return [[2 * int(i), 2 * int(i) + 1] for i in np.flatnonzero(whole)]

    def read(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        """Return one sample, as ``Samples.read``."""
        sample = super().read(index, epoch)
        targets = sample["targets"]
        made = pair_targets(targets, sample["document_ids"], targets >= 0, torch.zeros(len(targets)))
        return {**sample, "targets": made}


Fill = Callable[[Composition, Mapping[str, Any], int | None], Tensor]
"""Takes a composition, its local batch and ``micro_batch``, and returns the targets with the
log-probabilities of a reference."""


def log_probabilities(output: Any, targets: Tensor) -> Tensor:
    """Return the log-probability of each target (B, L, 3) by logits (B, L, V); 0 where it is NaN."""
    ids = targets[..., 0].nan_to_num(IGNORE).long()
    logits = logits_of(output)
    return -token_losses(logits.flatten(0, 1), ids.flatten()).view_as(ids)


class PairLoss:
    """The loss of pairs, a LossFunction: the sum over pairs, each a row (B, L)."""

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
