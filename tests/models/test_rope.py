"""The frequencies of rotary embeddings: Llama 3's rule and YaRN's."""

import math
from typing import Any

import pytest
import torch

from models.layers.rope import inverse_frequencies, yarn_frequencies


@pytest.mark.parametrize("turns", [(1.0, 4.0), (1.5, 3.0)])
def test_frequencies_between_the_bands_are_interpolated(turns: tuple[float, float]) -> None:
    """llama3's rule, pair by pair: what turns seldom is slowed, what turns often is kept, and between
    them the part that is kept grows with the turns within the first length."""
    low, high = turns
    plain, scaled = (
        inverse_frequencies(64, 500_000.0, factor, low, high, 8192).tolist() for factor in (1.0, 8.0)
    )
    between = 0
    for before, after in zip(plain, scaled, strict=True):
        turned = before * 8192 / (2 * math.pi)
        if turned <= low or turned >= high:
            expected = before if turned >= high else before / 8
        else:
            between += 1
            kept = (turned - low) / (high - low)
            expected = kept * before + (1 - kept) * before / 8
            assert before / 8 < after < before
        assert after == pytest.approx(expected, rel=1e-5)
    assert between >= 2


def test_yarn_keeps_what_turns_fast_and_slows_what_turns_slowly() -> None:
    plain, scaled = (yarn_frequencies(64, 1e4, factor, 4096, 32.0, 1.0) for factor in (1.0, 40.0))
    turns = plain * 4096 / (2 * torch.pi)
    ratio = plain / scaled
    torch.testing.assert_close(ratio[turns > 32], torch.ones(11))
    torch.testing.assert_close(ratio[turns < 1], torch.full((9,), 40.0))
    between = ratio[(turns < 15) & (turns > 1.1)]
    assert ((between > 1.01) & (between < 39)).all()
    assert (between.diff() > 0).all()
    # Turns that no pair has leave the whole range between them.
    odd = yarn_frequencies(64, 1e4, 40.0, 4096, 8e307, 1e-320)
    assert ((plain / odd)[1:] < 40).all()
    assert odd.diff().max() < 0


def test_yarn_of_a_small_base_is_that_of_transformers() -> None:
    """Its bounds cross: the pair that turns fast lies behind the last one."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule: Any = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    config = LlamaConfig(head_dim=8, rope_parameters=rule | {"rope_theta": 4.0, "truncate": False})
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config)
    torch.testing.assert_close(yarn_frequencies(8, 4.0, 32.0, 4096, 32.0, 1.0, truncate=False), theirs)
