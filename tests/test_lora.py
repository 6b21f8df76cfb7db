"""LoRA: a composition with adapters equals one process on every axis."""

import pytest

from tests.experts import keys_of
from tests.helpers import Keys, agreed, prove_case, tier
from tests.lora import lora
from tests.pool import Pool

# Odd sizes: a hidden width, a vocabulary and heads that ranks do not divide.
LLAMA: Keys = {"model__dim": 48, "model__n_heads": 6, "model__n_kv_heads": 2, "model__hidden_dim": 90}
CASES = {
    "ds 2 cp 2 zero 3": "suite",
    "ds 2 tp 2 zero 2": "suite",
    "tp 4 sequence false": "slow",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=tier(slow=t == "slow", full=t == "full")) for c, t in CASES.items()]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = keys_of(LLAMA | lora(), case)
    report = agreed(pool.run(prove_case, ranks, keys))
    assert report.ok, str(report)
