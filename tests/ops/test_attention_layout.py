"""Blocks cover exactly what may attend."""

import itertools

import pytest
import torch
from torch import Tensor

from compose.ops.attention_kernels import band
from compose.ops.attention_layout import Block, Pieces, blocks
from compose.parallel.context_parallel import Balance, chunk_count, chunks_of
from tests.support.plain_attention import random_ids


def row_starts(ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """Where the documents of each row begin."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return tuple(tuple(row.nonzero().flatten().tolist()) for row in begins)


def drawn(block: Block, window: int) -> Tensor:
    """The pairs of a block, (Lq, Lk)."""
    lengths = (block.q.stop - block.q.start, block.k.stop - block.k.start)
    assert min(lengths) > 0
    if block.shift is not None:
        return (band(lengths, block.shift, window, torch.float32) == 0).long()
    pairs = torch.ones(lengths, dtype=torch.long)
    return pairs.tril() if block.causal else pairs


@pytest.mark.parametrize("window", [0, 1, 3, 7, 1000])
@pytest.mark.parametrize("balance", ["headtail", "none"])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_blocks_cover_each_pair_once(cp: int, balance: Balance, window: int) -> None:
    """The blocks of all pairs of ranks, drawn into a mask, are the documents' mask."""
    size = 5
    for seed in range(8):
        ids = random_ids(3, size * chunk_count(cp, balance), seed)
        length = ids.shape[1]
        seen = torch.zeros(3, length, length, dtype=torch.long)
        held = {rank: chunks_of(rank, cp, balance) for rank in range(cp)}
        assert sorted(itertools.chain(*held.values())) == list(range(chunk_count(cp, balance)))
        starts = {rank: tuple(c * size for c in chunks) for rank, chunks in held.items()}
        for q_rank, k_rank in itertools.product(range(cp), repeat=2):
            places = [
                torch.cat([torch.arange(c * size, (c + 1) * size) for c in held[r]])
                for r in (q_rank, k_rank)
            ]
            layout = Pieces(starts[q_rank], starts[k_rank], True, window)
            for b in blocks(layout, (len(places[0]), len(places[1])), row_starts(ids)):
                rows = torch.arange(3)[b.rows]
                q, k = places[0][b.q], places[1][b.k]
                seen[rows[:, None, None], q[None, :, None], k[None, None, :]] += drawn(b, window)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        together = (ids[:, :, None] == ids[:, None, :]).tril()
        expected = together & (distance < (window or length))
        assert torch.equal(seen, expected.long())


@pytest.mark.parametrize("window", [3, 64, 100])
def test_a_windows_blocks_are_linear_in_the_length(window: int) -> None:
    """Twice the length has twice the work; each tile computes at most three windows' keys."""

    def area(length: int) -> int:
        result = blocks(Pieces((0,), (0,), True, window), (length, length), ((0,),))
        return sum((b.q.stop - b.q.start) * (b.k.stop - b.k.start) for b in result)

    assert area(4096) / area(2048) < 2.05
    assert area(4096) <= 4096 * (window + max(window, 64))


def test_excluded_blocks_are_not_computed() -> None:
    """Documents that end with their chunk leave squares alone: none of the 6 rectangles is run."""
    layout = Pieces((0, 4, 8, 12), (0, 4, 8, 12))

    def sizes(*starts: tuple[int, ...]) -> list[tuple[int, int, bool]]:
        result = blocks(layout, (16, 16), starts)
        return sorted((b.q.stop - b.q.start, b.k.stop - b.k.start, b.causal) for b in result)

    assert sizes(*[(0, 4, 8, 12)] * 2) == [(4, 4, True)] * 4
    assert sizes(*[(0,)] * 2) == sorted([(4, 4, True)] * 4 + [(4, 4, False)] * 6)
    # Documents of 3, 3 and 10: the second spans two chunks, the third the last three.
    calls = sizes((0, 3, 6))
    assert (2, 1, False) in calls
    assert len([c for c in calls if not c[2]]) == 4
