"""The outer loop: DiLoCo workers on meshes of every axis are one process that is all of them."""

from dataclasses import replace

import pytest

from compose.config import rules
from compose.config.toml import load
from tests.diloco.cases import EXPERTS, STREAMING, outer, proof, prove
from tests.support.helpers import ROOT, SMALL, Keys, tier
from tests.support.pool import Pool
from tests.support.small_models import lora

BIASED: Keys = {  # type: ignore[assignment]
    "model__name": "gpt_oss",
    "model__n_layers": 4,
    "model__dim": 32,
    "model__head_dim": 16,
} | {f"model__{key}": 2 for key in ("n_heads", "n_kv_heads", "n_experts", "top_k")}
CASES: dict[str, tuple[int, str, Keys]] = {
    "diloco": (2, "tp x zero 3", outer(every=3)),
    "mean of weights": (4, "one rank", outer(every=2, lr=1.0, momentum=0.0)),
    "fragments": (2, "pp x tp", outer(every=4, fragments=1)),
    "streaming": (2, "zero 3", STREAMING),
    "streaming, late": (2, "pp x tp", outer(every=8, fragments=1, delay=3, mix=0.25, lr=0.4)),
    "uneven fragments": (2, "tp x zero 3", outer(every=6, fragments=2) | {"model__n_layers": 3}),
    "bfloat16": (2, "tp x zero 3", outer(every=2, dtype="bfloat16")),
    "int8": (2, "pp x tp", STREAMING | outer(dtype="int8")),
    "e3m0": (2, "tp x zero 3", STREAMING | outer(dtype="e3m0")),
    "top_k": (2, "zero 3", STREAMING | outer(dtype="top_k")),
    "top_k, replicas": (2, "tp x zero 3", outer(every=2, dtype="top_k", density=0.0078125)),
    # A bias that begins at zero, and moves less than the others, is never sent.
    "a weight stays zero": (2, "one rank", outer(every=1, dtype="top_k", density=0.0625) | BIASED),
    "zero 0": (2, "replicas", outer(every=2, dtype="int8")),
    "context": (2, "cp", outer(every=2, dtype="e3m0")),
    "experts": (2, "experts", outer(every=2, dtype="int8")),
    "tied": (2, "pp x tp", STREAMING | {"model__tie_embeddings": True}),
    "four islands": (4, "zero 3", STREAMING),
    "adapters": (2, "tp x zero 3", outer(every=2) | lora(3)),
    # The last step ends an exchange that is not due yet.
    "frozen weights": (2, "one rank", STREAMING | outer(every=6, delay=2) | lora(3)),
    "routers' biases": (2, "one rank", STREAMING | EXPERTS | outer(dtype="bfloat16")),
    "late islands": (4, "one rank", STREAMING | outer(grace=1)),
}
QUICK = ("streaming", "top_k", "frozen weights", "routers' biases")


@pytest.mark.parametrize("name", [pytest.param(n, marks=tier(slow=n not in QUICK)) for n in CASES])
def test_is_one_process(pool: Pool, name: str) -> None:
    islands, inside, keys = CASES[name]
    prove(pool, islands, inside, keys)


@pytest.mark.parametrize("name", ["diloco", "streaming", "top_k", "four islands", "routers' biases"])
def test_an_island_that_misses_exchanges_joins_the_next(pool: Pool, name: str) -> None:
    islands, inside, keys = CASES[name]
    prove(pool, islands, inside, keys, missed=True)


@pytest.mark.parametrize(
    ("keys", "unused"),
    [
        (outer(every=2, offload=False), "outer.offload"),  # on a CPU the memory is the same
        pytest.param(outer(every=2, fragments=2), "outer.fragments", marks=pytest.mark.slow),
    ],
)
def test_keys_that_change_nothing_are_named(pool: Pool, keys: Keys, unused: str) -> None:
    prove(pool, 2, "one rank", keys, unused=unused)


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
    result = rules.survey(config, ranks)
    return [d for d, problems in result if not problems and d["dp_replicate"] == 1]


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
