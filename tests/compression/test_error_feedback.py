"""Runs with coded messages go on bitwise; on another mesh what they kept is dropped, and it is said."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import SAVING, goes_on_bitwise, resume, train_on
from tests.support.helpers import Keys, tiered
from tests.support.pool import Pool
from tests.support.training import keys_for, lines

WIDE: Keys = {"model__dim": 64, "model__hidden_dim": 192}
INT4: Keys = {"comm__gradients": "int4", "comm__weights": "int4_diff"}
RUNS: dict[str, tuple[Keys, Keys]] = {
    "zero 3": (INT4, {"parallel__dp_shard": 2}),
    "hsdp": (INT4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2}),
    "ddp": ({"comm__gradients": "powersgd"}, {"parallel__dp_replicate": 2, "parallel__zero": 0}),
    "two levels": (INT4 | {"comm__near": 2}, {"parallel__dp_shard": 4}),
    "low rank": ({"comm__gradients": "powersgd", "comm__rank": 2}, {"parallel__dp_shard": 2}),
    "warm-up": (
        {"comm__gradients": "top_k", "comm__start_step": 3},
        {"parallel__dp_shard": 2, "parallel__zero": 1},
    ),
}


@pytest.mark.parametrize("name", tiered(RUNS, RUNS.keys() - {"zero 3"}))
def test_goes_on_bitwise(pool: Pool, tmp_path: Path, name: str) -> None:
    keys, mesh = RUNS[name]
    goes_on_bitwise(pool, tmp_path, WIDE | keys, mesh)
    one, other = (lines(tmp_path / run)[-1]["comm"] for run in ("whole", "parts"))
    assert one == other


@pytest.mark.slow
def test_another_mesh_drops_it_and_says_so(pool: Pool, tmp_path: Path) -> None:
    train_on(pool, tmp_path, WIDE | INT4, {"parallel__dp_shard": 2}, 2)
    mesh: Keys = {"parallel__dp_shard": 2, "parallel__tp": 2}
    keys: dict[str, Any] = keys_for(tmp_path, **(SAVING | WIDE | INT4 | mesh))
    progress, said = pool.run(resume, 4, keys)[0]
    assert progress is not None
    assert progress.step == 2
    folder = tmp_path / "checkpoints" / "step-00000002"
    assert said[1] == (
        f"{folder}: what messages kept is of another mesh, of other codes, or of an earlier version,"
        " and is dropped"
    )
    train_on(pool, tmp_path, WIDE | INT4, mesh, 4)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
