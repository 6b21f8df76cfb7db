"""The architectures that a Llama of options can be: each beside transformers, with drawn options."""

import random
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from compose.checkpoint.hf_folder import name_of
from models import llama
from models.llama.architectures import ARCHITECTURES, Architecture
from models.llama.hf import config_from_hf, hf_config
from tests.support.helpers import tier
from tests.support.transformers_models import compare, published, randomize


def draw(name: str, rng: random.Random) -> llama.Config:
    """Odd sizes, and a value for each field that the row leaves free."""
    row = ARCHITECTURES[name]
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 3])
    width = 2 * rng.choice([3, 4, 6, 7])
    dim = heads * width
    if row.own_head_dim and rng.random() < 0.5:
        dim = heads * rng.randint(4, 9) if row.whole_heads else rng.randint(30, 60)
    n_layers = rng.randint(1, 5)
    free: dict[str, Any] = {} if "norm_eps" in row.fixed else {"norm_eps": rng.choice([1e-6, 1e-3])}
    for fields in row.flags.values():
        free |= dict.fromkeys(fields, rng.random() < 0.6)
    for field in row.keys.fields:
        if field.endswith("_scale"):
            free[field] = rng.choice([0.5, 0.7, 3.0])
    if "rotary_dim" not in row.fixed:
        free["rotary_dim"] = rng.choice([0, *range(4, width, 2)])
    config = llama.Config(
        **dict(row.fixed)
        | free
        | _drawn_layers(row, n_layers, rng)
        | _drawn_rope(name, free.get("rotary_dim") or width, rng),
        vocab_size=rng.randint(40, 130),
        dim=dim,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=0 if dim == heads * width else width,
        hidden_dim=rng.randint(20, 90),
        tie_embeddings=rng.random() < 0.5,
        activation=rng.choice(["silu", "gelu", "gelu_tanh", "relu2"]),
        architecture=name,
    )
    # In the form in which a config.json is read: the shortest pattern, and no unused field.
    return config_from_hf(hf_config(config))


def _drawn_layers(row: Architecture, n_layers: int, rng: random.Random) -> dict[str, Any]:
    patterns = {
        "": ["w"],
        "all": ["w"],
        "each": ["w", "wf", "fwww"],
        "last": ["f" * first + "w" * (n_layers - first) for first in range(n_layers)],
        "some": ["w", "wf", "wwf", "f"],
        "rotated": ["wF", "wwwF", "w", "F"],
        "rotated if any": ["wF", "wwwF", "w", "F"],
        "free": ["fF", "fWwF", "wwF"],
    }
    pattern = rng.choice(patterns[row.layers])
    if row.layers and rng.random() < 0.2:
        without = {"rotated": "F", "free": "ffF"}.get(row.layers, "f")
        return {"window": 0, "layer_pattern": without}
    if not row.layers:
        return {}
    return {"window": rng.choice([1, 4, 17, 100]), "layer_pattern": pattern}


def _drawn_rope(name: str, width: int, rng: random.Random) -> dict[str, Any]:
    theta = {"rope_theta": rng.choice([100.0, 300.0, 1e6])}
    rules = ["none", "longrope"] if name == "phi3" else ["none", *RULES]
    rule = rng.choice(rules)
    if rule == "none":
        return theta
    scaled = {"rope_rule": rule, "rope_scaling": rng.choice([2.0, 8.0]), "rope_original_seq_len": 64}
    factors = [tuple(rng.choice([1.0, 1.5, 4.0]) for _ in range(width // 2)) for _ in range(2)]
    own: dict[str, dict[str, Any]] = {
        "yarn": {"rope_beta_fast": 4.0, "rope_magnitude": rng.choice([0.0, 1.3])},
        "longrope": {"rope_short_factors": factors[0], "rope_long_factors": factors[1]},
    }
    return theta | scaled | own.get(rule, {})


RULES = ("linear", "dynamic", "llama3", "yarn", "longrope")


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=tier(slow=seed == 1, full=seed > 1))
        for name in ARCHITECTURES
        for seed in range(20)
    ],
)
def test_logits_equal_transformers(tmp_path: Path, name: str, seed: int) -> None:
    config = draw(name, random.Random(f"{name} {seed}"))
    torch.manual_seed(0)
    model = llama.Model(config)
    randomize(model)
    files = published(dict(model.named_parameters()), name_of("llama", config))
    compare(tmp_path, model, files, hf_config(config), batch=2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_config_json_leaves_out_is_as_in_transformers(name: str) -> None:
    """Without any one key a file is read as transformers reads it, or refused."""
    from transformers import AutoConfig

    whole = hf_config(draw(name, random.Random(f"{name} 0")))
    # HunYuan's class asks for head_dim where it has a rule.
    keys = whole.keys() - {"model_type", "architectures", *(["head_dim"] * ("hunyuan" in name))}
    refused = []
    for key in keys:
        values = {one: value for one, value in whole.items() if one != key}
        try:
            ours = config_from_hf(values)
        except ValueError:
            refused.append(key)
            continue
        theirs: Any = AutoConfig.for_model(**deepcopy(values))  # it writes into tables
        if name == "hyperclovax" and key == "attention_multiplier":
            theirs.attention_multiplier = None  # it is resolved to what ours takes without one
        assert config_from_hf(theirs.to_dict()) == ours, key
    assert 2 * len(refused) <= len(keys), refused


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"head_dim": 15}, "head_dim: 15 is not even, and RoPE rotates pairs"),
        ({"rotary_dim": 18}, "rotary_dim: 18 is more than a head's 16"),
        ({"layer_pattern": "wx"}, 'layer_pattern: "wx" should be letters w, f, W and F'),
        ({"activation": "tanh"}, 'activation: "tanh" is none of silu, gelu, gelu_tanh, relu2'),
        ({"norm_before": False}, "norm_before: False leaves no norm; set norm_after"),
        ({"parallel_block": True, "norm_after": True}, "parallel_block: True needs norm_before alone"),
        ({"residual_scale": 0.0}, "residual_scale: 0.0 should be above 0"),
        (
            {"rope_rule": "longrope", "rope_short_factors": (1.0,)},
            "rope_short_factors: should be 8 numbers above 0, one for each pair",
        ),
        (
            {"rope_rule": "yarn", "rope_scaling": 2.0, "rope_beta_slow": 40.0},
            "rope_beta_slow: 40.0 should be above 0, at most 32.0",
        ),
        (
            {"rope_theta": 1.0, "rope_rule": "yarn", "rope_scaling": 2.0},
            "rope_theta: 1.0 should be above 1 with the rule yarn",
        ),
        (
            {"rope_original_seq_len": 1, "rope_rule": "longrope", "rope_scaling": 2.0},
            "rope_original_seq_len: 1 should be at least 2, below 2^31",
        ),
    ],
)
def test_config_errors(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        llama.Config(**fields)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"qkv_bias": True}, "qkv_bias: LlamaForCausalLM has the same value for qkv_bias, wo_bias"),
        ({"architecture": "qwen2"}, "qkv_bias: Qwen2ForCausalLM has True alone"),
        ({"qk_norm": "head"}, "qk_norm: LlamaForCausalLM has none"),
        (
            {"architecture": "phi3", "rope_rule": "linear", "rope_scaling": 2.0},
            "rope_rule: Phi3ForCausalLM has longrope alone",
        ),
        (
            dict(ARCHITECTURES["olmo3"].fixed)
            | {"architecture": "olmo3", "rope_rule": "yarn", "rope_scaling": 2.0}
            | {"rope_original_seq_len": 64, "rope_truncate": False},
            "rope_truncate: Olmo3ForCausalLM has True alone",
        ),
    ],
)
def test_what_an_architecture_cannot_have_is_not_written(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}, so no file of theirs can hold this"):
        hf_config(llama.Config(**fields))


def test_where_frequencies_follow_the_length_it_has_a_bound() -> None:
    scaled: dict[str, Any] = {"rope_scaling": 2.0, "rope_original_seq_len": 64}
    assert llama.Config(**scaled, rope_rule="dynamic").max_seq_len == 64
    assert llama.Config(**scaled, rope_rule="yarn").max_seq_len is None
