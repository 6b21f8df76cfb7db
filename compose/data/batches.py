"""Batches whose samples are a function of (seed, step) alone.

Each epoch of a set visits its samples in an order drawn from the seed. Several sets are mixed by
weight, and each has its own epochs. A rank reads its slice of the global batch, so the mesh does not
change what is trained on. The whole state is a count of samples.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction

import torch
from torch import Tensor

from compose.data.samples import Samples
from compose.data.token_files import READERS
from compose.object_storage import Remote, as_path
from compose.ops.batch import empty


def shuffled(place: int, size: int, key: int) -> int:
    """Return the place of ``place`` in a permutation of range(size) drawn by ``key``, without a table.

    Feistel rounds over the fewest bits, an even number, are repeated until the value is in range
    ("cycle walking", Black and Rogaway 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    rounds = 8 if half < 3 else 4  # four over two bits prefer some orders
    while True:
        left, right = place >> half, place & mask
        for step in range(rounds):
            left, right = right, left ^ (_mix(right, key + step * 0x9E3779B97F4A7C15) & mask)
        place = left << half | right
        if place < size:
            return place


def _mix(value: int, key: int) -> int:
    """Return a 64-bit hash of (value, key): SplitMix64's finalizer (Steele et al. 2014), twice."""
    for word in (key, value):
        value = (value ^ word) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value


class Interleaving:
    """The numbers 0, 1, 2, ... dealt out to several sets by weight, in any stretch of the numbers.

    The first set takes number n if floor((n + 1) p) > floor(n p), where p is its share of all numbers.
    The other numbers are counted anew and dealt to the other sets in the same way.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self.shares = [weight / sum(weights[i:]) for i, weight in enumerate(weights)]

    def place(self, number: int) -> tuple[int, int]:
        """Return (set, n): the set that gets ``number``, and how many numbers it got before."""
        for index, share in enumerate(self.shares):
            before = int(number * share)
            if int((number + 1) * share) > before:
                return index, before
            number -= before
        raise AssertionError("the last share is 1")

    def taken(self, numbers: int) -> list[int]:
        """Return how many of the first ``numbers`` numbers each set gets."""
        counts = []
        for share in self.shares:
            counts.append(int(numbers * share))
            numbers -= counts[-1]
        return counts


class Batches:
    """The global batch of any step, cut for one rank."""

    def __init__(
        self,
        sets: Sequence[Samples],
        *,
        global_batch: int,
        seed: int,
        weights: Sequence[Fraction] | None = None,
        share: tuple[int, int] = (0, 1),
        device: torch.device | None = None,
    ) -> None:
        """Prepare the batches; for a GPU a thread reads ahead, which on a CPU would cost time."""
        self.sets, self.global_batch, self.seed = sets, global_batch, seed
        self.interleaving = Interleaving(weights or [Fraction(len(each)) for each in sets])
        self.rows = rows_of(share, global_batch)
        # A store answers slowly, so that all samples of a batch are asked for at once.
        remote = any(isinstance(as_path(each.name), Remote) for each in sets)
        self.asked = ThreadPoolExecutor(READERS, "samples") if remote else None
        self.reader: ThreadPoolExecutor | None = None
        self.ahead: dict[int, Future[dict[str, Tensor]]] = {}
        if device and device.type == "cuda":
            # Pinning makes a CUDA context on a thread's current device.
            self.reader = ThreadPoolExecutor(1, "data", torch.cuda.set_device, (device,))

    def deal(self, rows: range) -> None:
        """Read these rows of each global batch from now on."""
        self.rows = rows
        self.ahead.clear()

    def batch(self, first: int) -> dict[str, Tensor]:
        """Return this rank's part, tensors (samples, L), of the global batch from ``first`` on."""
        if self.reader is None:
            return self._read(first)
        mine = self.ahead.pop(first, None) or self.reader.submit(self._pinned, first)
        following = first + self.global_batch
        self.ahead = {following: self.reader.submit(self._pinned, following)}
        return mine.result()

    def _read(self, first: int) -> dict[str, Tensor]:
        # A rank without samples has tensors without rows.
        numbers = [first + row for row in self.rows or [0]]
        batch = stacked([*(self.asked.map if self.asked else map)(self._sample, numbers)])
        return batch if self.rows else {name: value[:0] for name, value in batch.items()}

    def _pinned(self, first: int) -> dict[str, Tensor]:
        return {name: value.pin_memory() for name, value in self._read(first).items()}

    def _sample(self, number: int) -> dict[str, Tensor]:
        index, number = self.interleaving.place(number)
        chosen = self.sets[index]
        epoch, place = divmod(number, len(chosen))
        key = self.seed * 1_000_003 + epoch + index * 0x9E3779B97F4A7C15
        return chosen.read(shuffled(place, len(chosen), key), epoch)

    def epochs(self, samples: int) -> dict[str, float]:
        """Return how often each set has been used after ``samples`` samples of the run, by name."""
        taken = self.interleaving.taken(samples)
        return {each.name: n / len(each) for each, n in zip(self.sets, taken, strict=True)}


def rows_of(share: tuple[int, int], global_batch: int) -> range:
    """Return the rows of a global batch that data rank ``index`` of ``count`` has."""
    index, count = share
    return range(index * global_batch // count, (index + 1) * global_batch // count)


def in_order(
    samples: Samples, global_batch: int, share: tuple[int, int]
) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's parts of the global batches that hold each sample once, then empty rows."""
    for first in range(0, len(samples), global_batch):
        numbers = [first + row for row in rows_of(share, global_batch)]
        yield stacked(
            [samples.read(n) if n < len(samples) else empty(samples.read(0)) for n in numbers]
        )


def stacked(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack samples with tensors (L, ...) into a batch with tensors (samples, L, ...)."""
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
