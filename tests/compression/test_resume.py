"""Runs with coded messages go on bitwise; on another mesh what they kept is dropped, and it is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.compression.exchange import Traffic
from compose.compression.layout import Layout
from compose.compression.units import Cut, Unit, Units
from compose.parallel.comm import Comm
from tests.support.checkpoints import SAVING, resume, train_on
from tests.support.helpers import Keys, tier
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


@pytest.mark.parametrize("name", [pytest.param(n, marks=tier(slow=n != "zero 3")) for n in RUNS])
def test_goes_on_bitwise(pool: Pool, tmp_path: Path, name: str) -> None:
    keys, mesh = RUNS[name]
    expected = train_on(pool, tmp_path / "whole", WIDE | keys, mesh, 4)
    train_on(pool, tmp_path / "parts", WIDE | keys, mesh, 2)
    found = train_on(pool, tmp_path / "parts", WIDE | keys, mesh, 4)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    one, other = (lines(tmp_path / run)[-1]["comm"] for run in ("whole", "parts"))
    assert one == other


def _third_sum(kind: Any) -> list[Tensor]:
    """The third sum of gradients: without a break, after a restore, and with nothing restored."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    layout = Layout.of([(96, 64), (64,)], ranks)
    cut = Cut(("w", "b"), [(96, 64), (64,)], [True, True])

    def sums(units: Units, steps: range) -> Tensor:
        out = torch.empty(layout.numel)
        for step in steps:
            generator = torch.Generator().manual_seed(ranks * step + dist.get_rank())
            rows = torch.randn(ranks, layout.numel, generator=generator)
            units.units[0].reductions["shards"](rows, group, 1.0, out)
        return out

    def fresh() -> Units:
        units = Units(Comm(gradients=kind, density=0.1), Traffic())
        reduction = units._reduction(layout, None, units.traffic)
        units.units.append(Unit(cut, reductions={"shards": reduction}, ranks=ranks))
        return units

    whole, begun, restored, empty = (fresh() for _ in range(4))
    sums(begun, range(2))
    restored.restore({name: value.clone() for name, value in begun.state().items()})
    return [sums(whole, range(3)), sums(restored, range(2, 3)), sums(empty, range(2, 3))]


@pytest.mark.parametrize("kind", ["int4", "powersgd", "top_k"])
def test_remainders_are_restored(pool: Pool, kind: str) -> None:
    for expected, found, without in pool.run(_third_sum, 2, kind):
        assert torch.equal(expected, found)
        assert not torch.equal(expected, without)


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
