"""The number of pairs of a query and a key that attend, from which FLOPs are counted."""

from collections.abc import Sequence


def attention_pairs(queries: int, keys: int, causal: bool = True, window: int = 0) -> float:
    """Return the number of pairs of a query and a key that attend in one document.

    Args:
        queries: Number of queries, the last of which sees the last key.
        keys: Number of keys.
        causal: Whether a query sees only the keys up to its own.
        window: Keys that a query sees at most; 0 is all.

    Returns:
        The number.
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

    Args:
        q: The shape of the queries, (B, L, H, K).
        k: The shape of the keys, (B, S, G, K), from the sequence's first.
        starts: The first token of each piece of the queries.
        causal: Whether a query sees only the keys up to its own.
        window: Keys that a query sees at most; 0 is all.

    Returns:
        The number.
    """
    size = q[1] // len(starts)
    keys = [start + size if causal else k[1] for start in starts]
    return q[0] * q[2] * sum(attention_pairs(size, n, causal, window) for n in keys)
