"""Every mesh of islands: 8 ranks, divided into 2, 4 and 8 islands of every mesh that is legal."""

from dataclasses import replace

import pytest

from compose.config import rules
from compose.config.toml import load
from tests.diloco.cases import STREAMING, proof
from tests.support.helpers import ROOT, SMALL, Keys
from tests.support.pool import Pool

RANKS = 8
KEYS: Keys = {
    "model__n_layers": 4,
    "model__tie_embeddings": True,
    "train__micro_batch": 1,
    "train__global_batch": 8,
}


def inside(ranks: int) -> list[dict[str, int]]:
    """Every legal mesh of so many ranks without replicas."""
    overrides = SMALL | {name.replace("__", "."): value for name, value in KEYS.items()}
    config = load(str(ROOT / "train.toml"), [(k, str(v).lower()) for k, v in overrides.items()])
    config = replace(config, train=replace(config.train, global_batch=8 // (RANKS // ranks)))
    found = rules.survey(config, ranks)
    return [d for d, problems in found if not problems and d["dp_replicate"] == 1]


@pytest.mark.full
@pytest.mark.parametrize("islands", [2, 4, 8])
def test_every_mesh_of_8_ranks(pool: Pool, islands: int) -> None:
    meshes = inside(RANKS // islands)
    assert len(meshes) == {2: 10, 4: 4, 8: 1}[islands]
    for degrees in meshes:
        for zero in (0, 1, 2, 3) if degrees["dp_shard"] * degrees["cp"] > 1 else (3,):
            axes = {f"parallel__{axis}": d for axis, d in degrees.items() if axis != "dp_replicate"}
            keys = {**KEYS, **STREAMING, "outer__every": 8, **axes, "parallel__zero": zero}
            for report in pool.run(proof, RANKS, islands, keys, islands=islands):
                assert report.ok, f"{degrees} zero {zero}\n{report}"
