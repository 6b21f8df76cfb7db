"""Batches whose samples are a function of (seed, step) alone.

Each epoch of a set visits its samples in an order drawn from the seed; of several sets each gets its
weight's share of every stretch of the run, and goes through epochs of its own. What a rank reads is its
slice of the global batch, so the mesh cannot change what is trained on, and the whole state is a count
of samples.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from compose.base.batch import IGNORE
from compose.data.order import Interleaving, shuffled
from compose.data.sources import Samples


class Batches:
    """The global batch of any step, cut for one rank.

    weights: of each of ``sets``, of samples; None is by their sizes. ``share`` is (index, count), as
    ``compose.parallel.mesh.batch_share`` gives it: of ``count`` equal slices of the global batch this
    reads the ``index``-th.
    """

    def __init__(
        self,
        sets: Sequence[Samples],
        *,
        global_batch: int,
        seed: int,
        weights: Sequence[Fraction] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.sets, self.global_batch, self.seed = sets, global_batch, seed
        self.interleaving = Interleaving(weights or [Fraction(len(each)) for each in sets])
        index, count = share
        self.rows = range(index * global_batch // count, (index + 1) * global_batch // count)

    def batch(self, first: int) -> dict[str, Tensor]:
        """This rank's part of the global batch that begins at sample ``first`` of the run: tensors
        (samples, L), as ``Samples.read`` has them."""
        return stacked([self._sample(first + row) for row in self.rows])

    def _sample(self, number: int) -> dict[str, Tensor]:
        index, number = self.interleaving.place(number)
        chosen = self.sets[index]
        epoch, place = divmod(number, len(chosen))
        key = self.seed * 1_000_003 + epoch + index * 0x9E3779B97F4A7C15
        return chosen.read(shuffled(place, len(chosen), key))

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each set has been gone through after so many samples of the run, by name."""
        taken = self.interleaving.taken(samples)
        return {each.name: n / len(each) for each, n in zip(self.sets, taken, strict=True)}


def in_order(
    samples: Samples, global_batch: int, share: tuple[int, int]
) -> Iterator[dict[str, Tensor]]:
    """This rank's parts of the global batches that hold each sample once, in order; the last one is
    filled up with rows that hold nothing (targets IGNORE, positions -1)."""
    index, count = share
    rows = range(index * global_batch // count, (index + 1) * global_batch // count)
    for first in range(0, len(samples), global_batch):
        yield stacked(
            [
                samples.read(first + row) if first + row < len(samples) else empty(samples.read(0))
                for row in rows
            ]
        )


def stacked(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Samples (L,) as a batch (samples, L)."""
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}


def empty(like: dict[str, Tensor]) -> dict[str, Tensor]:
    """A sample of the same length in which nothing is learnt, and nothing is a token."""
    filling = {"targets": IGNORE, "positions": -1}
    return {name: torch.full_like(v, filling.get(name, 0)) for name, v in like.items()}
