"""Where islands must be what they are said to be: data parallel, one run, the mean of weights."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.build import build
from compose.composition import Composition
from compose.diloco.loop import OuterLoop
from compose.diloco.options import Outer
from compose.parallel.islands import current
from compose.parallel.mesh import batch_share
from compose.proof.comparison import whole
from compose.train.step import forward_backward
from tests.diloco.cases import INSIDE
from tests.support.helpers import Keys, make_job, tier
from tests.support.pool import Pool, make_mesh

SAMPLES, STEPS = 8, 4
BATCH: Keys = {"train__global_batch": SAMPLES, "train__micro_batch": 1}
AVERAGE = {"lr": 1.0, "momentum": 0.0}


def trained(keys: Keys, outer: dict[str, Any] | None, same_samples: bool = False) -> dict[str, Tensor]:
    """The weights after some steps of plain SGD, and the loss of each, on this rank's island."""
    islands = current()
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    optimizer = torch.optim.SGD(composition.model.parameters(), lr=0.1, foreach=False)
    loop = _loop(composition, list(job.resolved.checkpoint), outer) if outer else None
    index, count = batch_share(composition.mesh)
    if not same_samples:
        index, count = islands.index * count + index, islands.count * count
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(256, (SAMPLES, 33), generator=torch.Generator().manual_seed(step))
        mine = tokens[index * SAMPLES // count : (index + 1) * SAMPLES // count]
        share = {"tokens": mine[:, :-1], "targets": mine[:, 1:]}
        losses.append(forward_backward(composition, share, micro_batch=1).detach())
        optimizer.step()
        optimizer.zero_grad()
        if loop:
            loop.after_step(step + 1, STEPS)
    if loop:
        loop.close()
    weights = {name: whole(parameter) for name, parameter in composition.named_parameters()}
    return weights | {"losses": torch.stack(losses)}


def _loop(composition: Composition, layers: list[str], outer: dict[str, Any]) -> OuterLoop:
    loop = OuterLoop(Outer(**outer), composition, layers, current(), timedelta(minutes=1))
    loop.start()
    return loop


# Routers count the samples of their island alone.
DENSE = [name for name, (_, mesh) in INSIDE.items() if "model__name" not in mesh]


@pytest.mark.parametrize("inside", [pytest.param(n, marks=tier(slow=n != "zero 3")) for n in DENSE])
def test_each_step_with_sgd_is_data_parallel(pool: Pool, inside: str) -> None:
    ranks, mesh = INSIDE[inside]
    keys: Keys = {**BATCH, **mesh}
    found = pool.run(trained, 2 * ranks, keys, {"every": 1, **AVERAGE}, islands=2)
    right = pool.run(trained, ranks, keys, None)
    for rank, weights in enumerate(found):
        del weights["losses"]  # of this island's samples
        for name, value in weights.items():
            torch.testing.assert_close(value, right[rank % ranks][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fragments", [0, 1])
def test_one_island_that_takes_the_mean_is_bitwise_no_islands(pool: Pool, fragments: int) -> None:
    keys: Keys = {**BATCH, "parallel__dp_shard": 2}
    outer = {"every": 2, "fragments": fragments, **AVERAGE}
    found, right = pool.run(trained, 2, keys, outer)[0], pool.run(trained, 2, keys, None)[0]
    for name, value in right.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("islands", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_islands_with_the_same_samples_are_bitwise_one(pool: Pool, islands: int) -> None:
    keys: Keys = {**BATCH, "parallel__dp_shard": 2}
    outer = {"every": 2, "lr": 0.7, "momentum": 0.9}
    found = pool.run(trained, 2 * islands, keys, outer, True, islands=islands)
    right = pool.run(trained, 2, keys, outer)[0]
    for weights in found:
        for name, value in right.items():
            assert torch.equal(weights[name], value), name


TENSOR: Keys = {"parallel__tp": 2, "parallel__dp_shard": 1}


@pytest.mark.parametrize("fragments", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "inside",
    [
        INSIDE["zero 3"][1],
        pytest.param(TENSOR, marks=pytest.mark.slow),
        pytest.param(INSIDE["pp x tp"][1], marks=pytest.mark.slow),
    ],
    ids=["zero 3", "tp", "pp x tp"],
)
def test_the_mesh_inside_islands_changes_nothing(pool: Pool, inside: Keys, fragments: int) -> None:
    """With fragments as without: these are parts of the whole model, not of what a rank holds."""
    outer = {"every": 2, "fragments": fragments, "mix": 0.5, "momentum": 0.9, "lr": 0.7}
    right = pool.run(trained, 2, BATCH, outer, islands=2)
    ranks = 8 if "parallel__pp" in inside else 4
    found = pool.run(trained, ranks, {**BATCH, **inside}, outer, islands=2)
    for rank, values in enumerate(found):
        for name, value in values.items():
            torch.testing.assert_close(value, right[rank * 2 // ranks][name], rtol=1e-6, atol=1e-6)
