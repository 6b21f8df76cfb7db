"""The diffusion transformer: its plan equals one process, and its task gives data, loss and samples."""

import pytest

from compose.legality import meshes
from tests.experts import AXES, keys_of
from tests.helpers import Keys, agreed, prove_case, tier
from tests.pool import Pool

# 9 patches: an odd number, which no two ranks can share evenly.
DIT: Keys = {
    "model__name": "dit",
    "model__image_size": 6,
    "model__dim": 24,
    "model__n_heads": 2,
    "model__hidden_dim": 36,
    "train__seq_len": 9,
    "train__micro_batch": 1,
}
CASES = {
    "cp 2 tp 2 cp_balance headtail": "suite",
    "pp 2 ds 2 zero 2 pp_schedule Interleaved1F1B model__n_layers 4": "suite",
    "tp 2 sequence false": "slow",
    "cp 2 cp_method ulysses cp_balance none": "slow",
    "cp 4 cp_method allgather": "slow",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=tier(slow=t == "slow", full=t == "full")) for c, t in CASES.items()]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = keys_of(DIT, case)
    report = agreed(pool.run(prove_case, ranks, keys))
    assert report.ok, str(report)
