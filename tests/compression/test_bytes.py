"""The bytes that a dry run foretells are those that a run counts."""

import pytest
import torch
import torch.distributed as dist

from compose.build import build
from compose.data.samples import random_batch
from compose.parallel.mesh import batch_share
from compose.planner.trace import sent_bytes
from compose.train.step import forward_backward
from tests.compression.cases import EXPERTS, Keys, comm, given
from tests.support.helpers import make_job, tier
from tests.support.pool import Pool, make_mesh

RUNS: dict[str, tuple[int, Keys]] = {
    "zero 3, differences": (2, {"parallel__dp_shard": 2, **comm("int4", "int4_diff")}),
    "zero 1, powersgd": (2, {"parallel__dp_shard": 2, "parallel__zero": 1, **comm("powersgd", "int8")}),
    "ddp, top_k": (2, {"parallel__dp_replicate": 2, "parallel__zero": 0, **comm("top_k")}),
    "hsdp near": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, **comm("int4", "int8")}),
    "two levels": (4, {"parallel__dp_shard": 4, **comm("int4", "int4_diff", near=2)}),
    "hpz": (4, {"parallel__dp_shard": 4, "parallel__zero3_reshard": 2, **comm("int8", "int8")}),
    "pipeline": (4, {"parallel__dp_shard": 2, "parallel__pp": 2, **comm("int8", "int8")}),
    "experts": (
        4,
        {"parallel__dp_shard": 4, "parallel__ep": 2, **EXPERTS, **comm("int8", "int8")},
    ),
}


LARGE = ("experts", "two levels")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=tier(slow=True, full=n in LARGE)) for n in RUNS]
)
def test_are_foretold(pool: Pool, name: str) -> None:
    ranks, keys = RUNS[name]
    # Six micro-batches: more than the dry run runs.
    whole = given(keys) | {"train__global_batch": 24, "train__micro_batch": 24 // 6 // ranks or 1}
    counted = pool.run(_counted, ranks, whole)
    assert [sent_bytes(make_job(ranks, **whole), rank) for rank in range(ranks)] == counted


def _counted(keys: Keys) -> dict[tuple[str, str], int]:
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    index, count = batch_share(composition.mesh)
    assert composition.compression
    for step in range(2):
        composition.compression.traffic.take()
        batch = random_batch(24, 32, job.config.model.config.vocab_size, seed=step)
        share = {k: v[index * 24 // count : (index + 1) * 24 // count] for k, v in batch.items()}
        forward_backward(composition, share, micro_batch=job.config.train.micro_batch)
    return composition.compression.traffic.take()
