"""Mixtral: equal to transformers' implementation, and its plan equal to one process."""

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compose.config.rules import meshes
from compose.errors import ConfigError
from models.layers.attention import AttentionCore
from models.mixtral import PRESETS, Config, Model
from models.mixtral.hf import hf_config, hf_name
from tests.support.experts import AXES, MIXTRAL, keys_of
from tests.support.helpers import agreed, make_config, prove_case, tier
from tests.support.pool import Pool
from tests.support.transformers_models import MIXTRAL as ODD
from tests.support.transformers_models import RowByRow, compare, published, randomize


def drawn(seed: int) -> Config:
    """Odd sizes, windows longer and shorter than the text."""
    rng = random.Random(seed)
    kv_heads, experts = rng.choice([1, 2, 3]), rng.choice([1, 3, 5, 8])
    heads = kv_heads * rng.choice([1, 2, 3])
    return Config(
        vocab_size=rng.randint(40, 130),
        dim=heads * 2 * rng.randint(2, 7),
        n_layers=rng.randint(1, 3),
        n_heads=heads,
        n_kv_heads=kv_heads,
        n_experts=experts,
        top_k=rng.randint(1, min(3, experts)),
        expert_dim=rng.randint(5, 30),
        rope_theta=rng.choice([100.0, 1e6]),
        norm_eps=rng.choice([1e-5, 1e-3]),
        tie_embeddings=rng.random() < 0.3,
        window=rng.choice([0, 1, 4, 17, 60, 100]),
    )


CONFIGS = {"odd": ODD, **{f"drawn {seed}": drawn(seed) for seed in range(20)}}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=tier(slow=False, full=n not in ("odd", "drawn 1"))) for n in CONFIGS]
)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    model = Model(config)
    randomize(model)
    tensors = published(dict(model.named_parameters()), hf_name)
    compare(tmp_path, model, tensors, hf_config(config), batch=2)


def test_flops_equal_what_torch_counts() -> None:
    torch.manual_seed(0)
    batch, seq_len, config = 2, 37, dataclasses.replace(PRESETS["debug"], n_layers=2)
    model, tokens = Model(config), torch.randint(config.vocab_size, (batch, seq_len))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, AttentionCore):
                setattr(module, name, RowByRow())
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counted = counter.get_total_flops() / (batch * seq_len)
    assert config.flops_per_token(seq_len) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_experts": 0}, "n_experts: 0 should be at least 1, below 2^31"),
        ({"top_k": 9}, "top_k: 9 is more than the 8 experts to choose from"),
        ({"dim": 100}, "dim: 100 is not a multiple of 2 * n_heads = 16"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads: 3 does not divide n_heads 4"),
        ({"window": -1}, "window: -1 should be at least 1, or 0 for all keys"),
        ({"n_layers": 0}, "n_layers: 0 should be at least 1, below 2^12"),
    ],
)
def test_config_errors(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        Config(**keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        make_config(1, model__name="mixtral", **{f"model__{key}": value for key, value in keys.items()})
    assert caught.value.problems == [f"command line: model.{message}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring": "sigmoid"}, "scoring"),
        ({"normalize_weights": False}, "normalize_weights"),
        ({"route_scale": 2.0}, "route_scale"),
    ],
)
def test_what_theirs_cannot_be_is_not_written(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}: .* Mixtral's"):
        hf_config(dataclasses.replace(PRESETS["debug"], **change))


# A batch's documents are shorter and longer than the window.
CASES = {
    "ds 2 ep 2": "suite",
    "cp 2 tp 2 ep 2 train__seq_len 13": "slow",
    "tp 2 sequence false": "slow",
    "pp 2 ds 2 ep 2 pp_schedule ZBVZeroBubble model__n_layers 4 model__tie_embeddings true": "slow",
    "cp 2 ep 2 cp_method ulysses model__window 0": "slow",
    # The gate has no gradient.
    "ds 2 model__top_k 1 model__z_weight 0 model__balance_weight 0 optimizer__name muon model__dim 64"
    " train__seq_len 64": "slow",
    "dr 2 ds 2 ep 2 zero 1 activation_checkpoint__mode selective": "full",
    "ds 3 ep 3 model__capacity_factor 1.0": "full",
    "ds 2 tp 2 ep 2 precision__param bfloat16": "full",
    "ds 2 ep 2 compile__mode block": "full",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=tier(slow=t == "slow", full=t == "full")) for c, t in CASES.items()]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = keys_of(MIXTRAL, case)
    report = agreed(pool.run(prove_case, ranks, keys))
    assert report.ok, str(report)


@pytest.mark.full
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_mesh_of_eight_ranks(pool: Pool, pp: int) -> None:
    """With ep 2 where the other axes allow it; ZeRO stages and cp methods in turn."""
    proved = 0
    for degrees in meshes(8):
        if degrees["pp"] != pp:
            continue
        case = " ".join(f"{short} {degrees[axis]}" for short, axis in AXES.items())
        case += f" ep 2 zero {proved % 4} cp_method {('ring', 'allgather', 'ulysses')[proved % 3]}"
        count, keys = keys_of(MIXTRAL, f"{case} model__n_layers 4 model__n_heads 8 model__n_kv_heads 8")
        report = agreed(pool.run(prove_case, count, keys | {"model__dim": 64}))
        assert report.ok, f"{case}\n{report}"
        proved += 1
    assert proved == {1: 20, 2: 10, 4: 4}[pp]
