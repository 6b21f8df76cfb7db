"""Fragments: each element of a model is sent once, and messages are of like size."""

import itertools

import pytest
import torch
import torch.distributed as dist

from compose.build import build
from compose.outer.fragments import shares
from compose.outer.loop import OuterLoop
from compose.outer.options import Outer
from compose.proof.outer_loop import messages_of
from compose.runtime.islands import Islands
from compose.runtime.processes import start_timeout
from tests.helpers import Keys, make_job, tier
from tests.outer.cases import INSIDE
from tests.pool import Pool, make_mesh


def sizes_of(parts: list[dict[str, tuple[int, int]]]) -> list[int]:
    return [sum(end - begin for begin, end in part.values()) for part in parts]


@pytest.mark.parametrize(("layers", "each"), [(32, 3), (7, 2), (5, 1), (3, 5), (4, 0)])
@pytest.mark.parametrize("rest", [1, 999, 52_000])
def test_are_of_like_size(layers: int, each: int, rest: int) -> None:
    names = [f"layers.{i}" for i in range(layers)]
    sizes = {f"{name}.w": 10_007 for name in names} | {"norm": 13, "output": rest, "tok": rest}
    found = shares(sizes, names, each)
    filled = sizes_of(found)
    assert sum(filled) == sum(sizes.values())
    of_layers = [sum(10_007 for name in part if name.startswith("layers")) for part in found]
    # What is outside of layers goes where there is least; a layer is not cut.
    assert max(filled) <= max(*of_layers, sum(filled) // len(filled) + len(filled))
    for name, size in sizes.items():
        cuts = sorted(part[name] for part in found if name in part)
        assert cuts[0][0] == 0
        assert cuts[-1][1] == size
        assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts))


def test_have_every_nth_layer() -> None:
    names = [f"layers.{i}" for i in range(10)]
    found = shares({f"{name}.w": 4 for name in names}, names, 3)
    assert [[int(name.split(".")[1]) for name in part] for part in found] == [
        [0, 4, 8],
        [1, 5, 9],
        [2, 6],
        [3, 7],
    ]


def _messages(keys: Keys) -> tuple[list[list[list[tuple[str, torch.Tensor]]]], dict[str, int]]:
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    options = Outer(every=4, fragments=1)
    layers = list(job.resolved.checkpoint)
    loop = OuterLoop(options, composition, layers, Islands(), start_timeout(job.config.comm))
    found = [[list(message) for message in fragment] for fragment in messages_of(loop)]
    return found, {name: p.numel() for name, p in job.model.named_parameters()}


@pytest.mark.parametrize(
    "inside", [pytest.param(n, marks=tier(slow=n != "tp x zero 3")) for n in INSIDE]
)
def test_each_element_is_sent_by_one_rank_of_an_island(pool: Pool, inside: str) -> None:
    ranks, mesh = INSIDE[inside]
    keys: Keys = {"model__dim": 64, "model__hidden_dim": 190, **mesh}
    if "model__name" in mesh:
        keys = mesh
    messages, sizes = pool.run(_messages, ranks, {"train__global_batch": 8, **keys})[0]
    times = {name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()}
    for fragment in messages:
        for message in fragment:
            for name, places in message:
                times[name][places] += 1
    assert [name for name, count in times.items() if not (count == 1).all()] == []
