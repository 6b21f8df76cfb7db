"""Fragments: each element of a model is sent once, and messages are of like size."""

import math

import pytest
import torch

from compose.diloco import Outer
from compose.diloco.fragments import Part, rows_of, shares
from compose.diloco.proof import messages_of
from compose.train.workers import Worker
from tests.diloco.cases import INSIDE, loop_of
from tests.support.helpers import Keys, built, ranks_in, tiered
from tests.support.pool import Pool

FEW = 4
"""Rows by which a fragment's part of a parameter may be off its share."""


def rows(part: Part, begin: int, end: int) -> list[int]:
    """The rows of a part among those from ``begin`` to ``end`` of a parameter."""
    result, size = rows_of(part, ((begin, end), (0, 3)))
    here = torch.arange(begin, end)[result].tolist()
    assert size == 3 * len(here)
    return here


@pytest.mark.parametrize(("layers", "each"), [(32, 3), (7, 2), (5, 1), (3, 5), (4, 0)])
@pytest.mark.parametrize("rest", [1, 999, 52_000])
def test_are_of_like_size(layers: int, each: int, rest: int) -> None:
    names = [f"layers.{i}" for i in range(layers)]
    shapes = {f"{name}.w": (10_007,) for name in names}
    others = {"norm": (13,), "output": (rest, 4), "tok": (rest, 4), "scale": ()}
    result = shares(shapes | others, names, each)
    sizes = {name: math.prod(shape) for name, shape in (shapes | others).items()}
    filled = [
        sum(
            rows_of(part, tuple((0, size) for size in (shapes | others)[name]))[1]
            for name, part in one.items()
        )
        for one in result
    ]
    assert sum(filled) == sum(sizes.values())
    of_layers = [10_007 * sum(name.startswith("layers") for name in one) for one in result]
    # Rows outside of layers go where there is least; a layer is not cut.
    off = FEW * (1 + 4 + 4 + 1)
    assert max(filled) <= max(*of_layers, sum(filled) // len(filled) + len(filled)) + off


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("count", [96, 1000, 100_000])
def test_each_rank_has_its_share_of_each_fragment(count: int, ranks: int) -> None:
    """A row is in one fragment, and the rows of a fragment are spread over the parameter."""
    names = [f"layers.{i}" for i in range(5)]
    results = [
        one["tok"] for one in shares({f"{n}.w": (8,) for n in names} | {"tok": (count, 3)}, names, 1)
    ]
    assert sorted(row for part in results for row in rows(part, 0, count)) == list(range(count))
    for part in results:
        share = len(rows(part, 0, count)) / ranks
        for rank in range(ranks):
            here = rows(part, rank * count // ranks, (rank + 1) * count // ranks)
            assert len(here) == pytest.approx(share, abs=FEW)


def test_a_parameter_of_no_dims_is_in_one_fragment() -> None:
    names = ["layers.0", "layers.1"]
    result = shares({"layers.0.w": (9,), "layers.1.w": (1,), "a": (), "b": ()}, names, 1)
    assert [[rows_of(one[name], ()) for name in "ab" if name in one] for one in result] == [
        [],
        [(..., 1), (..., 1)],
    ]


def test_have_every_nth_layer() -> None:
    names = [f"layers.{i}" for i in range(10)]
    result = shares({f"{name}.w": (4,) for name in names}, names, 3)
    assert [[int(name.split(".")[1]) for name in part] for part in result] == [
        [0, 4, 8],
        [1, 5, 9],
        [2, 6],
        [3, 7],
    ]


def _messages(keys: Keys) -> tuple[list[list[list[tuple[str, torch.Tensor]]]], dict[str, int]]:
    job, composition = built(keys)
    loop = loop_of(job, composition, Outer(every=4, fragments=1), Worker(), 1)
    results = [[list(message) for message in fragment] for fragment in messages_of(loop)]
    return results, {name: p.numel() for name, p in job.model.named_parameters()}


@pytest.mark.parametrize("inside", tiered(INSIDE, INSIDE.keys() - {"tp x zero 3"}))
def test_each_element_is_sent_by_one_rank_of_an_island(pool: Pool, inside: str) -> None:
    mesh = INSIDE[inside]
    keys: Keys = {"model__dim": 64, "model__hidden_dim": 190, **mesh}
    if "model__name" in mesh:
        keys = mesh
    messages, sizes = pool.run(_messages, ranks_in(mesh), {"train__global_batch": 8, **keys})[0]
    times = {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}
    for fragment in messages:
        for message in fragment:
            for name, places in message:
                times[name][places] += 1
    assert [name for name, count in times.items() if not (count == 1).all()] == []
