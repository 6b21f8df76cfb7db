"""Islands, and what is in them, for tests of the outer loop."""

from typing import Any

import torch
import torch.distributed as dist

from compose.diloco.proof import prove_outer_loop
from compose.proof.report import Report
from tests.support.helpers import Keys, make_job
from tests.support.pool import Pool, make_mesh

INSIDE: dict[str, tuple[int, Keys]] = {
    "one rank": (1, {}),
    "zero 3": (2, {"parallel__dp_shard": 2}),
    "tp x zero 3": (4, {"parallel__dp_shard": 2, "parallel__tp": 2}),
    "replicas": (2, {"parallel__dp_shard": 2, "parallel__zero": 0}),
    "cp": (2, {"parallel__cp": 2}),
    "experts": (
        4,
        {
            "model__name": "deepseek_v3",
            "model__preset": "debug",
            "parallel__dp_shard": 2,
            "parallel__tp": 2,
            "parallel__ep": 2,
        },
    ),
    "pp x tp": (4, {"parallel__pp": 2, "parallel__tp": 2}),
}


def every_other(name: str, island: int) -> bool:
    """Every second exchange is missed by one island, and the others in turn."""
    step, fragment = map(int, name.split("."))
    return (step + fragment + island) % 3 == 0


def proof(islands: int, keys: Keys, missed: bool = False) -> Report:
    job = make_job(dist.get_world_size() * islands, parallel__dp_replicate=islands, **keys)
    misses: Any = every_other if missed else (lambda *_: False)
    return prove_outer_loop(job, make_mesh(job.degrees), torch.device("cpu"), misses)


def outer(**keys: object) -> Keys:
    return {f"outer__{key}": value for key, value in keys.items()}


def prove(
    pool: Pool, islands: int, inside: str, keys: Keys, missed: bool = False, unused: str = ""
) -> None:
    ranks, mesh = INSIDE[inside]
    given: Keys = {"train__global_batch": 8, "train__micro_batch": 1, **mesh, **keys}
    for report in pool.run(proof, ranks * islands, islands, given, missed, islands=islands):
        assert not report.failed, str(report)
        assert report.unused == ([unused] if unused else [])


EXPERTS: Keys = {"model__name": "deepseek_v3", "model__preset": "debug"}
STREAMING = outer(every=4, fragments=1, delay=1, mix=0.5)
