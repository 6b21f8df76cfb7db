"""Checkpoints of every optimizer: bitwise on the same mesh, and on another."""

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import MESHES, SAVING, refusal, train_on
from tests.support.helpers import Keys
from tests.support.pool import Pool
from tests.support.training import keys_for, lines

HALF: Keys = {
    "precision__param": "bfloat16",
    "precision__master": "bfloat16",
    "precision__optimizer_state": "bfloat16",
    "optimizer__name": "muon",
    "model__n_layers": 3,
}


MESH: Keys = {"parallel__dp_shard": 2, "parallel__tp": 2}


@pytest.mark.slow
def test_goes_on_bitwise(pool: Pool, tmp_path: Path) -> None:
    """With weights and state that are rounded at random."""
    expected = train_on(pool, tmp_path / "whole", HALF, MESH, 4)
    train_on(pool, tmp_path / "parts", HALF, MESH, 2)
    found = train_on(pool, tmp_path / "parts", HALF, MESH, 4)
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    kinds = {key.rpartition(".")[2] for key in found if key.startswith("optimizer.")}
    assert kinds == {"step", "momentum_buffer", "exp_avg", "exp_avg_sq"}


def test_goes_on_in_fewer_bits(pool: Pool, tmp_path: Path) -> None:
    """What was float32 is rounded once, when it is read."""
    train_on(pool, tmp_path, {}, MESHES["one"], 2)
    keys: Keys = {"precision__optimizer_state": "bfloat16", "optimizer__implementation": "foreach"}
    found = train_on(pool, tmp_path, keys, MESHES["data"], 4)
    kinds = {value.dtype for key, value in found.items() if key.endswith("exp_avg")}
    assert kinds == {torch.bfloat16}
    assert {float(value) for key, value in found.items() if key.endswith(".step")} == {4.0}
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_another_optimizer_is_refused(pool: Pool, tmp_path: Path) -> None:
    train_on(pool, tmp_path, {}, MESHES["one"], 2)
    keys = keys_for(tmp_path, **SAVING, optimizer__name="muon")
    (refused,) = pool.run(refusal, 1, keys)[0]
    assert refused == (
        f"{tmp_path}/checkpoints/step-00000002: has no"
        " optimizer.layers.0.attention.wq.weight.momentum_buffer and 13 more; go on with the"
        " optimizer.name that it was made with"
    )


@pytest.mark.slow
def test_goes_on_on_another_mesh(pool: Pool, tmp_path: Path) -> None:
    keys: Keys = {"optimizer__name": "muon", "model__n_layers": 3}
    expected = train_on(pool, tmp_path / "whole", keys, MESHES["one"], 4)
    train_on(pool, tmp_path / "parts", keys, MESHES["v-schedule"], 2)
    found = train_on(pool, tmp_path / "parts", keys, MESHES["one"], 4)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)
    for a, b in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
