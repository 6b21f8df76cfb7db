"""Which queries attend to which keys, as rectangles that a kernel of attention can run.

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
from itertools import pairwise

import torch
from torch import Tensor

TILE = (64, 256)
"""The fewest and the most queries of a tile."""


@dataclass(frozen=True)
class Pieces:
    """Where queries and keys lie in the sequence, and which of them may attend."""

    q_starts: tuple[int, ...]
    """The first token of each piece of the queries. Pieces have one length."""
    k_starts: tuple[int, ...]
    """The same for the keys. A piece of queries lies within a piece of keys, or outside of it."""
    causal: bool = True
    window: int = 0
    """Keys that a query sees, the last of them its own; 0 is all."""


@dataclass(frozen=True)
class AttentionTask:
    """One attention without its tensors of queries, keys and values."""

    pieces: Pieces
    scale: float
    """Scores are products times this,"""
    softcap: float
    """and, unless this is 0, become softcap tanh(score / softcap)."""
    bounds: Tensor | None
    """Where the documents of the whole batch begin, as Documents has them; None: each row is one."""
    extents: Tensor | None
    """How many there are, and the longest."""


def task_of(
    documents: tuple[Tensor | None, Tensor | None],
    starts: tuple[Sequence[int], Sequence[int]],
    scores: tuple[bool, int, float, float],
) -> AttentionTask:
    """Return the task that an operator's arguments stand for; ``scores`` are causal to softcap."""
    causal, window, scale, softcap = scores
    pieces = Pieces(tuple(starts[0]), tuple(starts[1]), causal, window)
    return AttentionTask(pieces, scale, softcap, *documents)


@dataclass(frozen=True)
class Block:
    """A rectangle of queries and keys that attend to each other."""

    rows: slice
    q: slice
    k: slice
    causal: bool = False
    """Whether a query sees only the keys up to its own; such a block is square."""
    shift: int | None = None
    """In a band: how far the first query lies behind the first key. A band sees the keys up to its own
    and, of these, the window's."""


@lru_cache(maxsize=16)
def blocks(
    pieces: Pieces, lengths: tuple[int, int], starts: tuple[tuple[int, ...], ...]
) -> list[Block]:
    """Return the blocks of attention.

    ``lengths`` are those of the query and the key tensor, in which the blocks' slices are places.
    ``starts`` tells for each row of the batch where its documents begin in the whole sequence.
    """
    rows_of: dict[tuple[int, int, int, int, bool, int | None], list[int]] = {}
    q_size, k_size = lengths[0] // len(pieces.q_starts), lengths[1] // len(pieces.k_starts)
    for row, begins in enumerate(starts):
        for q_place, a in enumerate(pieces.q_starts):
            for k_place, c in enumerate(pieces.k_starts):
                q_shift, k_shift = q_place * q_size - a, k_place * k_size - c
                pairs = _pairs((a, a + q_size), (c, c + k_size), begins, pieces)
                for q0, q1, k0, k1, causal, band in pairs:
                    shift = q0 - k0 if band else None
                    key = (q0 + q_shift, q1 + q_shift, k0 + k_shift, k1 + k_shift, causal, shift)
                    rows_of.setdefault(key, []).append(row)
    return [
        Block(rows, slice(q0, q1), slice(k0, k1), causal, shift)
        for (q0, q1, k0, k1, causal, shift), result in rows_of.items()
        for rows in _runs(result)
    ]


_Pair = tuple[int, int, int, int, bool, bool]


def _pairs(
    q_piece: tuple[int, int], k_piece: tuple[int, int], begins: Sequence[int], pieces: Pieces
) -> Iterator[_Pair]:
    """Yield (first query, end, first key, end, causal, band) of a row, as places in the sequence."""
    (a, b), (c, d) = q_piece, k_piece
    if pieces.causal and c >= b:
        return
    # The last document begins before the end of every piece.
    for i in range(bisect_right(begins, a) - 1, len(begins)):
        start = begins[i]
        if start >= b:
            return
        end = begins[i + 1] if i + 1 < len(begins) else max(b, d)
        first, last = max(start, a), min(end, b)
        k_first, k_end = max(start, c), min(end, d)
        if not pieces.causal:
            if k_first < k_end:
                yield first, last, k_first, k_end, False, False
            continue
        k_end = min(k_end, last)
        if k_first >= k_end:
            continue
        if pieces.window and last - k_first > pieces.window:
            yield from _band(first, last, k_first, k_end, pieces.window)
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


def row_starts(task: AttentionTask, rows: int, device: torch.device) -> tuple[tuple[int, ...], ...]:
    """Return for each row where its documents begin, read from host memory.

    On meta there are none to read, and each row counts as one document.
    """
    if task.bounds is None or device.type == "meta" or task.bounds.is_meta:
        return ((0,),) * rows
    places = task.bounds.numpy().data
    length = (len(places) - 1) // rows
    results: list[list[int]] = [[] for _ in range(rows)]
    for place in places:
        if place == rows * length:
            break
        results[place // length].append(place % length)
    return tuple(map(tuple, results))


@dataclass(frozen=True)
class PiecePair:
    """A piece of queries with a piece of keys: places in the sequence, and in the tensors."""

    q: tuple[int, int]
    k: tuple[int, int]
    at_q: slice
    at_k: slice
    inside: bool
    """Whether the queries' own keys are among these; else all keys are earlier."""
    left: int
    """Keys that a query sees before the one that is aligned with it; -1 is all."""


def pairs_of_pieces(pieces: Pieces, lengths: tuple[int, int]) -> Iterator[PiecePair]:
    """Yield the pairs of pieces that attend."""
    q_size, k_size = lengths[0] // len(pieces.q_starts), lengths[1] // len(pieces.k_starts)
    window = pieces.window
    for i, a in enumerate(pieces.q_starts):
        for j, c in enumerate(pieces.k_starts):
            b, d = a + q_size, c + k_size
            left = window - 1 if window else -1
            if not pieces.causal:
                inside = True
            elif c >= b:
                continue
            elif inside := a < d:
                d = b  # later keys are not seen
                c = max(c, a - window + 1) if window else c
            elif window:
                b, c = min(b, d - 1 + window), max(c, a - window + 1)
                if b <= a:
                    continue
                left = d - b + window - 1
            q_shift, k_shift = i * q_size - pieces.q_starts[i], j * k_size - pieces.k_starts[j]
            at_q, at_k = slice(a + q_shift, b + q_shift), slice(c + k_shift, d + k_shift)
            yield PiecePair((a, b), (c, d), at_q, at_k, inside, left)


def disjoint(places: list[slice]) -> bool:
    """Return whether no two of the places overlap."""
    ordered = sorted((place.start, place.stop) for place in places)
    return all(one[1] <= other[0] for one, other in pairwise(ordered))


def attention_pairs(queries: int, keys: int, causal: bool = True, window: int = 0) -> float:
    """Return the number of pairs of a query and a key that attend in one document.

    The last query sees the last key. A window of 0 is all.
    """
    if not causal:
        return float(queries * keys)
    width = min(window or keys, keys)
    # The first queries see fewer keys than the window has.
    before = max(0, width - (keys - queries) - 1)
    short = min(before, queries)
    first = keys - queries + 1
    return short * (2 * first + short - 1) / 2 + (queries - short) * width


def pairs_of(
    q: Sequence[int], k: Sequence[int], starts: Sequence[int], causal: bool, window: int
) -> float:
    """Return the pairs of all heads, where each row is one document.

    ``q`` and ``k`` are shapes (B, L, H, K); the keys begin with the sequence's first. ``starts`` are
    the first tokens of the pieces of the queries.
    """
    size = q[1] // len(starts)
    keys = [start + size if causal else k[1] for start in starts]
    return q[0] * q[2] * sum(attention_pairs(size, n, causal, window) for n in keys)
