"""The order of samples as a pure function of numbers: no table, and no state but a count."""

from collections.abc import Sequence
from fractions import Fraction


def shuffled(place: int, size: int, key: int) -> int:
    """Return where ``place`` goes in a permutation of range(size) drawn by ``key``, without a table.

    Four Feistel rounds run over the smallest even number of bits that holds ``size``. They are repeated
    until the value is in range ("cycle walking", Black and Rogaway 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for step in range(4):
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
    """The numbers 0, 1, 2, ... dealt out to several sets by weight.

    In any stretch of the numbers each set gets its weight's share, to within one for each other set.

    The first set takes number n if floor((n + 1) p) > floor(n p), where p is its share of all numbers.
    The numbers that it leaves are counted anew and dealt to the other sets in the same way.
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
