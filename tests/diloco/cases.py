"""Islands, and what is in them, for tests of the outer loop."""

from unittest import mock

import torch
import torch.distributed as dist

from compose.composition import Composition
from compose.config.job import Job
from compose.diloco import Outer
from compose.diloco.loop import OuterLoop
from compose.diloco.messages import WorkerExchange
from compose.diloco.proof import prove_outer_loop
from compose.proof.report import Report
from compose.train.workers import Worker
from tests.support.helpers import Keys, make_job, parallel, ranks_in
from tests.support.pool import Pool, make_mesh

BATCH: Keys = {"train__global_batch": 8, "train__micro_batch": 1}
EXPERTS: Keys = {"model__name": "deepseek_v3", "model__preset": "debug"}
INSIDE: dict[str, Keys] = {
    "one rank": {},
    "zero 3": parallel(dp_shard=2),
    "tp x zero 3": parallel(dp_shard=2, tp=2),
    "replicas": parallel(dp_shard=2, zero=0),
    "cp": parallel(cp=2),
    "experts": EXPERTS | parallel(dp_shard=2, tp=2, ep=2),
    "pp x tp": parallel(pp=2, tp=2),
}


def every_other(name: str, island: int) -> bool:
    """Every second exchange is missed by one island, and the others in turn."""
    step, fragment = map(int, name.split("."))
    return (step + fragment + island) % 3 == 0


def proof(islands: int, keys: Keys, missed: bool = False) -> Report:
    job = make_job(dist.get_world_size() * islands, parallel__dp_replicate=islands, **keys)
    mesh, device = make_mesh(job.degrees), torch.device("cpu")
    if not missed:
        return prove_outer_loop(job, mesh, device)

    def present(exchange: WorkerExchange, name: str, grace: float) -> set[int]:
        return {island for island in range(exchange.worker.count) if not every_other(name, island)}

    def late(worker: Worker, name: str, island: int) -> bool:
        return every_other(name, island)

    with (
        mock.patch.object(WorkerExchange, "_present", present),
        mock.patch("compose.diloco.proof._late", late),
    ):
        return prove_outer_loop(job, mesh, device)


def loop_of(job: Job, composition: Composition, options: Outer, worker: Worker, last: int) -> OuterLoop:
    """The outer loop of a composition up to step ``last``."""
    layers, timeout = list(job.resolved.checkpoint), job.config.comm.first_step_timeout
    return OuterLoop(options, composition, layers, worker, timeout, last)


def outer(**keys: object) -> Keys:
    return {f"outer__{key}": value for key, value in keys.items()}


def prove(
    pool: Pool, islands: int, inside: str, keys: Keys, missed: bool = False, unused: str = ""
) -> None:
    given = BATCH | INSIDE[inside] | keys
    ranks = ranks_in(INSIDE[inside]) * islands
    for report in pool.run(proof, ranks, islands, given, missed, islands=islands):
        assert not report.failed, str(report)
        assert report.unused == ([unused] if unused else [])


STREAMING = outer(every=4, fragments=1, delay=1, mix=0.5)
