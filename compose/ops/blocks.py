"""Which queries attend to which keys, as rectangles that a flash kernel can run.

A document is a run of tokens. Of two pieces of the sequence, at most one document reaches from the
earlier into the later. The pairs that attend between them are one full rectangle: the first queries of
the later piece by the last keys of the earlier one. Within a piece each document is a causal square. So
documents need no mask, and what holds no pair is not computed.

A window leaves a band along the diagonal. It is cut into tiles of queries, each with the keys that the
tile reaches. Inside a tile a small mask is left, the same for all tiles of one shape.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

TILE = (64, 256)
"""The fewest and the most queries of a tile."""


@dataclass(frozen=True)
class Layout:
    """Where queries and keys lie in the sequence, and which of them may attend."""

    q_starts: tuple[int, ...]
    """The first token of each piece of the queries. Pieces have one length."""
    k_starts: tuple[int, ...]
    """The same for the keys. A piece of queries lies within a piece of keys, or outside of it."""
    causal: bool = True
    """Whether a query sees only the keys up to its own."""
    window: int = 0
    """Keys that a query sees, the last of them its own; 0 is all."""


@dataclass(frozen=True)
class Block:
    """A rectangle of queries and keys that attend to each other."""

    rows: slice
    """The rows of the batch."""
    q: slice
    """The queries, as places in the query tensor."""
    k: slice
    """The keys, as places in the key tensor."""
    causal: bool = False
    """Whether a query sees only the keys up to its own; such a block is square."""
    shift: int | None = None
    """In a band: how far the first query lies behind the first key. A band sees the keys up to its own
    and, of these, the window's."""


@lru_cache(maxsize=16)
def blocks(
    layout: Layout, lengths: tuple[int, int], starts: tuple[tuple[int, ...], ...]
) -> list[Block]:
    """Return the blocks of attention.

    ``lengths`` are those of the query and the key tensor, in which the blocks' slices are places.
    ``starts`` tells for each row of the batch where its documents begin in the whole sequence.
    """
    rows_of: dict[tuple[int, int, int, int, bool, int | None], list[int]] = {}
    q_size, k_size = lengths[0] // len(layout.q_starts), lengths[1] // len(layout.k_starts)
    for row, begins in enumerate(starts):
        for q_place, a in enumerate(layout.q_starts):
            for k_place, c in enumerate(layout.k_starts):
                q_shift, k_shift = q_place * q_size - a, k_place * k_size - c
                pairs = _pairs((a, a + q_size), (c, c + k_size), begins, layout)
                for q0, q1, k0, k1, causal, band in pairs:
                    shift = q0 - k0 if band else None
                    key = (q0 + q_shift, q1 + q_shift, k0 + k_shift, k1 + k_shift, causal, shift)
                    rows_of.setdefault(key, []).append(row)
    return [
        Block(rows, slice(q0, q1), slice(k0, k1), causal, shift)
        for (q0, q1, k0, k1, causal, shift), found in rows_of.items()
        for rows in _runs(found)
    ]


_Pair = tuple[int, int, int, int, bool, bool]


def _pairs(
    q_piece: tuple[int, int], k_piece: tuple[int, int], begins: Sequence[int], layout: Layout
) -> Iterator[_Pair]:
    """Yield (first query, end, first key, end, causal, band) of a row, as places in the sequence."""
    (a, b), (c, d) = q_piece, k_piece
    if layout.causal and c >= b:
        return
    # The last document begins before the end of every piece.
    for i in range(bisect_right(begins, a) - 1, len(begins)):
        start = begins[i]
        if start >= b:
            return
        end = begins[i + 1] if i + 1 < len(begins) else max(b, d)
        first, last = max(start, a), min(end, b)
        k_first, k_end = max(start, c), min(end, d)
        if not layout.causal:
            if k_first < k_end:
                yield first, last, k_first, k_end, False, False
            continue
        k_end = min(k_end, last)
        if k_first >= k_end:
            continue
        if layout.window and last - k_first > layout.window:
            yield from _band(first, last, k_first, k_end, layout.window)
            continue
        if k_first < first:
            yield first, last, k_first, min(k_end, first), False, False
        if k_end > first:
            yield first, last, first, k_end, True, False


def _band(first: int, last: int, k_first: int, k_end: int, window: int) -> Iterator[_Pair]:
    """Yield the tiles of one document's band."""
    if k_first == first:  # up to here a query sees everything
        yield first, first + window, first, first + window, True, False
        first += window
    # Behind an earlier piece only the first queries still see a key.
    last = min(last, k_end - 1 + window)
    tile = min(max(window, TILE[0]), TILE[1])
    for q0 in range(first, last, tile):
        q1 = min(q0 + tile, last)
        k0, k1 = max(k_first, q0 - window + 1), min(k_end, q1)
        band = k1 > q0 + 1 or k0 < q1 - window
        yield q0, q1, k0, k1, False, band


def _runs(rows: Sequence[int]) -> Iterable[slice]:
    """Yield slices that cover the ascending ``rows``."""
    first = rows[0]
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        if after != row + 1:
            yield slice(first, row + 1)
            first = after if after is not None else first
