"""Matrices are shared out so that each is worked on once, by a rank that holds a part, evenly."""

import math
from collections import Counter
from unittest import mock

import pytest

from compose.optim import muon as assignment
from compose.optim.muon import Layout, Slab, assigned, flops, in_flight
from compose.optim.rounding import lengths, size


def cut(shape: tuple[int, ...], shards: int, replicas: int = 1, dim: int = 1, ep: int = 1) -> Layout:
    """Ranks in the order (replica, shard, ep); ``dim`` is cut after experts are."""
    regions, replica = {}, {}
    for rank in range(replicas * shards * ep):
        copy, rest = divmod(rank, shards * ep)
        shard, owner = divmod(rest, ep)
        region = [range(n) for n in shape]
        for axis, count, place in ((0, ep, owner), (dim, shards, shard)):
            each = -(-len(region[axis]) // count)
            region[axis] = region[axis][place * each : (place + 1) * each]
        regions[rank] = tuple(slice(held.start, held.stop) for held in region)
        replica[rank] = copy
    return Layout(shape, regions, replica)


def loads(rounds: list[list[Slab]], layouts: dict[int, Layout]) -> Counter[int]:
    found: Counter[int] = Counter()
    for slab in (slab for some in rounds for slab in some):
        rows, columns = layouts[slab.parameter].shape[1:]
        found[slab.owner] += int(lengths(slab.region)[0] * flops(rows, columns))
    return found


CASES: dict[str, tuple[int, dict[int, Layout]]] = {
    # number of ranks that hold a part; 7 x 32 matrices as of a 32-layer model
    "a model over 8": (
        8,
        {
            7 * layer + i: cut((1, *shape), 8)
            for layer in range(32)
            for i, shape in enumerate([(64, 64)] * 2 + [(16, 64)] * 2 + [(96, 64)] * 2 + [(64, 96)])
        },
    ),
    "replicas share": (8, {i: cut((1, 30, 20), 2, replicas=4, dim=2) for i in range(16)}),
    "more shards than rows": (3, {i: cut((1, 3, 20), 8) for i in range(6)}),
    "experts": (8, {i: cut((12, 10, 6), 2, replicas=2, ep=2) for i in range(3)}),
    "uneven experts": (3, {0: cut((5, 4, 4), 4, dim=0)}),
    # Which costs as much as the eight before it.
    "a large one last": (2, {i: cut((1, *((16, 16) if i == 8 else (8, 8))), 2) for i in range(9)}),
    "nothing": (0, {0: cut((0, 4, 4), 2, dim=0)}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_once_and_evenly(case: str) -> None:
    holders, layouts = CASES[case]
    rounds = assigned(layouts)
    for slabs in rounds:
        assert len({slab.owner for slab in slabs}) == len(slabs)
        for slab in slabs:
            layout = layouts[slab.parameter]
            assert layout.part(slab.owner, slab.region)
            assert lengths(slab.region)[1:] == list(layout.shape[1:])
            copy = [
                region
                for rank, region in layout.parts(slab.region)
                if layout.replica[rank] == layout.replica[slab.owner]
            ]
            assert sum(map(size, copy)) == size(slab.region), "one copy of it, and no more, is gathered"
            assert slab.elements == max(map(size, copy))
    times = Counter(
        (slab.parameter, expert)
        for slabs in rounds
        for slab in slabs
        for expert in range(slab.region[0].start, slab.region[0].stop)
    )
    assert times == Counter((i, e) for i, layout in layouts.items() for e in range(layout.shape[0]))
    found = loads(rounds, layouts)
    assert len(found) == holders
    if holders:
        assert max(found.values()) <= 1.25 * sum(found.values()) / holders or case == "uneven experts"


def test_memory_is_bounded() -> None:
    layout = cut((64, 10, 6), 1)
    with mock.patch.object(assignment, "SLAB", 300):
        slabs = [slab for some in assigned({0: layout}) for slab in some]
    assert len(slabs) == 13
    assert {size(slab.region) for slab in slabs} == {240, 300}
    with mock.patch.object(assignment, "IN_FLIGHT", 600):
        assert [len(group) for group in in_flight(slabs)] == [2] * 6 + [1]
    with mock.patch.object(assignment, "IN_FLIGHT", 1):
        assert [len(group) for group in in_flight(slabs)] == [1] * 13


def test_cost() -> None:
    """Of the larger Gram matrix it would be more; counted by hand for a 2 x 3 matrix."""
    by_hand = 5 * (2 * 2 * 2 * 3 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3)
    assert flops(2, 3) == flops(3, 2) == by_hand
    assert math.isclose(flops(4096, 4096) / 4096**2, 30 * 4096)
