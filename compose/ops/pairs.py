"""The number of pairs of a query and a key that attend, from which FLOPs are counted."""

from collections.abc import Sequence


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
