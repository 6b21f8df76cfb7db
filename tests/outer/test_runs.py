"""Runs on islands: what they leave, and how they go on."""

import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compose.proof.verify import whole
from compose.runtime.islands import current
from compose.train.metrics import StepMetrics
from compose.train.trainer import Trainer
from tests.checkpoints import shards
from tests.helpers import Keys, make_job, tier
from tests.pool import Pool, make_mesh
from tests.training import keys_for, lines

RUN: Keys = {
    "train__seq_len": 16,
    "train__global_batch": 8,
    "train__micro_batch": 1,
    "train__steps": 10,
    "checkpoint__interval": 5,
    "outer__every": 4,
}
MESHES: dict[str, tuple[int, Keys]] = {
    "zero 3": (2, {"parallel__dp_shard": 2}),
    "tp": (2, {"parallel__tp": 2, "parallel__dp_shard": 1}),
}
# Each is saved in the middle of a round, the first three while messages are on their way.
OUTER: dict[str, Keys] = {
    "streaming": {"outer__fragments": 1, "outer__delay": 1, "outer__mix": 0.5},
    "top_k": {"outer__dtype": "top_k", "outer__delay": 2},
    "int8, late": {"outer__dtype": "int8", "outer__delay": 3},
    "diloco": {},
}


def run(keys: Keys, islands: int) -> list[str]:
    """Train; what is said on the first rank."""
    job = make_job(dist.get_world_size() * islands, **{"parallel__dp_replicate": islands, **keys})
    assert job.islands == current().count == islands
    said: list[str] = []
    with mock.patch("builtins.print", lambda text, **_: said.append(text)):
        Trainer(job, make_mesh(job.degrees), torch.device("cpu")).run()
    return said


def train(pool: Pool, folder: Path, keys: Keys, mesh: str = "zero 3", islands: int = 2) -> list[str]:
    ranks, degrees = MESHES[mesh]
    whole = keys_for(folder, **RUN, **degrees) | keys
    return pool.run(run, ranks * islands, whole, islands, islands=islands)[0]


def folders(run_dir: Path, islands: int = 2) -> list[Path]:
    return [run_dir, *(run_dir / "islands" / str(i) for i in range(1, islands))]


def state(run_dir: Path, step: int) -> list[dict[str, int]]:
    return [shards(one / "checkpoints" / f"step-{step:08d}") for one in folders(run_dir)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=tier(slow=n != "streaming")) for n in OUTER])
def test_goes_on_bitwise_in_the_middle_of_a_round(pool: Pool, tmp_path: Path, name: str) -> None:
    train(pool, tmp_path / "whole", OUTER[name])
    train(pool, tmp_path / "parts", OUTER[name] | {"train__stop_after": 5})
    said = train(pool, tmp_path / "parts", OUTER[name])
    assert said[0] == f"{tmp_path / 'parts'}/checkpoints/step-00000005: resumed after step 5"
    assert state(tmp_path / "parts", 10) == state(tmp_path / "whole", 10)
    for one, other in zip(folders(tmp_path / "whole"), folders(tmp_path / "parts"), strict=True):
        right = [line["loss"] for line in lines(one)]
        assert [line["loss"] for line in lines(other)] == right
        assert len(right) == 10
    losses = [[line["loss"] for line in lines(one)] for one in folders(tmp_path / "whole")]
    assert losses[0] != losses[1]  # they do not train on the same samples


def test_all_islands_end_with_the_same_weights(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(_ends, 4, keys_for(tmp_path, **RUN, **OUTER["streaming"]), islands=2)
    for weights in found[2:]:
        for name, value in found[0].items():
            assert torch.equal(weights[name], value), name


def _ends(keys: Keys) -> dict[str, torch.Tensor]:
    job = make_job(4, **{"parallel__dp_replicate": 2, "parallel__dp_shard": 2, **keys})
    trainer = Trainer(job, make_mesh(job.degrees), torch.device("cpu"))
    trainer.run()
    return {name: whole(p) for name, p in trainer.composition.named_parameters()}


def _stopped(keys: Keys, at: int) -> int:
    """Train on; the second island gets SIGTERM in step ``at``. The step after which this one stops."""
    job = make_job(2, **{"parallel__dp_replicate": 2, **keys})
    trainer = Trainer(job, make_mesh(job.degrees), torch.device("cpu"))
    step = trainer.step

    def stepped() -> StepMetrics:
        if current().index == 1 and trainer.progress.step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        if current().index == 0:
            time.sleep(0.05)  # the islands are not at the same step
        return step()

    with mock.patch.object(trainer, "step", stepped):
        trainer.run()
    return trainer.progress.step


@pytest.mark.parametrize("at", [2, 3, 5])
def test_all_islands_stop_after_the_same_step(pool: Pool, tmp_path: Path, at: int) -> None:
    keys = keys_for(tmp_path, **RUN, **OUTER["streaming"])
    stopped = pool.run(_stopped, 2, keys, at, islands=2)
    assert stopped[0] == stopped[1] <= 10
    assert stopped[0] > at
    name = f"step-{stopped[0]:08d}"
    assert all((one / "checkpoints" / name).exists() for one in folders(tmp_path))
    assert len(state(tmp_path, stopped[0])) == 2
