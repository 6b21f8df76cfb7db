"""Every mesh of 8 ranks with coded messages: it is one process, or a rule refuses it."""

from dataclasses import replace

import pytest

from compose.config import rules
from compose.config.toml import load
from tests.support.helpers import ROOT, SMALL, Keys, parallel, prove_on, prove_step
from tests.support.pool import Pool

RANKS = 8
KEYS: Keys = {
    "model__n_layers": 5,
    "model__tie_embeddings": True,
    "train__micro_batch": 1,
    "train__global_batch": 8,
}


def meshes(comm: Keys) -> tuple[list[dict[str, int]], list[str]]:
    """Those that are legal, and the problems of the others that plain messages do not have."""
    overrides = SMALL | {name.replace("__", "."): value for name, value in KEYS.items()}
    config = load(str(ROOT / "train.toml"), [(k, str(v).lower()) for k, v in overrides.items()])
    coded = {name.removeprefix("comm__"): value for name, value in comm.items()}
    plain = {tuple(d.values()): problems for d, problems in rules.survey(config, RANKS)}
    config = replace(config, comm=replace(config.comm, **coded))
    legal, refused = [], []
    for degrees, problems in rules.survey(config, RANKS):
        if not problems:
            legal.append(degrees)
        elif not plain[tuple(degrees.values())]:
            refused += problems
    return legal, refused


INT8: Keys = {"comm__weights": "int8", "comm__gradients": "int8"}
GRADIENTS: Keys = {"comm__gradients": "int8"}
NO_WEIGHTS = 'comm.weights: "int8", and dp_shard x cp is 1, and no weights are sent'
NO_GRADIENTS = 'comm.gradients: "int8", and dp_replicate x dp_shard x cp is 1, so that no gradients'


def coded() -> list[tuple[dict[str, int], Keys]]:
    """List meshes with such messages, and the most that they can quantize."""
    both, alone = meshes(INT8)[0], meshes(GRADIENTS)[0]
    return [(d, INT8) for d in both] + [(d, GRADIENTS) for d in alone if d not in both]


def test_only_meshes_without_such_messages_are_refused() -> None:
    legal, refused = meshes(INT8)
    assert len(legal) == 25
    assert all(problem.startswith((NO_WEIGHTS, NO_GRADIENTS)) for problem in refused), refused
    assert len(coded()) == 31
    assert [p for p in meshes(GRADIENTS)[1] if not p.startswith(NO_GRADIENTS)] == []


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_mesh_of_8_ranks(pool: Pool, ranks: int) -> None:
    """``ranks`` are those of data and context parallel together."""
    proved = 0
    for degrees, comm in coded():
        if degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] == ranks:
            prove_on(pool, KEYS | comm | parallel(**degrees), prove_step)
            proved += 1
    assert proved == {2: 9, 4: 12, 8: 10}[ranks]
