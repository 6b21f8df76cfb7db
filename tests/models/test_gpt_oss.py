"""gpt-oss: equal to transformers' implementation, and its plan equal to one process."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compose.checkpoint.hf_folder import find_hf, name_of
from compose.config.rules import meshes
from compose.errors import ConfigError
from models.gpt_oss import PRESETS, Config, Model
from models.gpt_oss.hf import config_from_hf, hf_config, hf_name
from models.layers.attention import AttentionCore
from tests.support.experts import AXES, GPT_OSS, keys_of
from tests.support.helpers import agreed, make_config, prove_case, tier
from tests.support.pool import Pool
from tests.support.transformers_models import GPT_OSS as ODD
from tests.support.transformers_models import RowByRow, compare, published, randomize


def drawn(seed: int) -> Config:
    """Odd sizes, windows longer and shorter than the text, and layers with them in any order."""
    rng = random.Random(seed)
    kv_heads, experts = rng.choice([1, 2, 3]), rng.choice([1, 3, 5, 8])
    n_layers = rng.randint(1, 4)
    return Config(
        vocab_size=rng.randint(40, 130),
        dim=rng.randint(10, 70),
        n_layers=n_layers,
        n_heads=kv_heads * rng.choice([1, 2, 3]),
        n_kv_heads=kv_heads,
        head_dim=2 * rng.randint(2, 9),
        window=rng.choice([1, 4, 17, 60, 100]),
        layer_pattern=rng.choice(["wf", "w", "fw", "wwf", "f", "fwwf"])[:n_layers],
        n_experts=experts,
        top_k=rng.randint(1, min(3, experts)),
        expert_dim=rng.randint(5, 30),
        swiglu_alpha=rng.choice([1.702, 0.5]),
        swiglu_limit=rng.choice([0.1, 1.0, 7.0]),
        rope_theta=rng.choice([100.0, 150_000.0]),
        rope_factor=rng.choice([1.0, 2.0, 32.0]),
        rope_original_len=rng.choice([64, 4096]),
        rope_beta_fast=rng.choice([4.0, 32.0]),
        rope_truncate=rng.random() < 0.3,
        norm_eps=rng.choice([1e-5, 1e-3]),
        tie_embeddings=rng.random() < 0.3,
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
    tensors = published(dict(model.named_parameters()), name_of("gpt_oss", config))
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
    # A window leaves out what those before it would see.
    narrow = dataclasses.replace(config, window=5)
    pairs = (37 + 1) / 2 - (5 * 37 - 5 * 4 / 2) / 37
    left_out = 3 * 2 * 2 * config.n_heads * config.head_dim * pairs
    assert config.flops_per_token(seq_len) - narrow.flops_per_token(seq_len) == pytest.approx(left_out)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_experts": 0}, "n_experts: 0 should be at least 1, below 2^31"),
        ({"top_k": 9}, "top_k: 9 is more than the 8 experts to choose from"),
        ({"head_dim": 7}, "head_dim: 7 is not even, and RoPE rotates pairs"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads: 3 does not divide n_heads 4"),
        ({"window": 0}, "window: 0 should be at least 1, below 2^31"),
        ({"layer_pattern": "ws"}, 'layer_pattern: "ws" should be letters w and f'),
        ({"layer_pattern": ""}, 'layer_pattern: "" should be letters w and f'),
        ({"swiglu_limit": 0.0}, "swiglu_limit: 0.0 should be above 0"),
        ({"swiglu_alpha": -1.0}, "swiglu_alpha: -1.0 should be above 0"),
        ({"rope_theta": 1.0}, "rope_theta: 1.0 should be above 1"),
        ({"rope_factor": 0.5}, "rope_factor: 0.5 should be at least 1"),
        ({"rope_beta_slow": 40.0}, "rope_beta_fast: 32.0 is less than rope_beta_slow 40.0"),
        ({"n_layers": 0}, "n_layers: 0 should be at least 1, below 2^12"),
    ],
)
def test_config_errors(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        Config(**keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        make_config(1, model__name="gpt_oss", **{f"model__{key}": value for key, value in keys.items()})
    assert caught.value.problems == [f"command line: model.{message}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring": "sigmoid"}, "scoring"),
        ({"normalize_weights": False}, "normalize_weights"),
        ({"route_scale": 2.0}, "route_scale"),
        ({"bias_rate": 0.1}, "bias_rate"),
    ],
)
def test_what_theirs_cannot_be_is_not_written(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}: .* gpt-oss'"):
        hf_config(dataclasses.replace(PRESETS["debug"], **change))


def test_names() -> None:
    assert hf_name("layers.3.attention.sinks.weight") == "model.layers.3.self_attn.sinks"
    assert hf_name("layers.3.moe.router.gate.bias") == "model.layers.3.mlp.router.bias"
    with pytest.raises(KeyError):
        hf_name("layers.3.moe.router.bias")  # the selection's, which theirs has not


YARN = hf_config(PRESETS["20b"])["rope_scaling"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": YARN | {"rope_type": "linear"}},
            f"rope_scaling: {json.dumps(YARN | {'rope_type': 'linear'})[:60]}... cannot be expressed"
            " here",
        ),
        (
            {"rope_scaling": YARN | {"mscale": 0.7}},
            "rope_scaling.mscale: 0.7 cannot be expressed here",
        ),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.5}},
            "rope_scaling.attention_factor: 1.5 cannot be expressed here, only 1.3465735902799727",
        ),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor: 0.5 should be at least 1"),
        ({"hidden_act": "gelu"}, 'hidden_act: "gelu" cannot be expressed here, only "silu"'),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1 cannot be expressed here, only 0"),
        ({"attention_bias": False}, "attention_bias: false cannot be expressed here, only true"),
        ({"experts_per_token": 3}, "experts_per_token: 3 cannot be expressed here, only 4"),
        (
            {"layer_types": ["full_attention", "chunked_attention"] * 12},
            'layer_types: "chunked_attention" cannot be expressed here, only "sliding_attention" or'
            ' "full_attention"',
        ),
        (
            {"layer_types": ["full_attention"]},
            'layer_types: expected a list of 24 names, got ["full_attention"]',
        ),
        ({"sliding_window": None}, "sliding_window: is missing"),
        ({"sliding_window": 0}, "sliding_window: 0 should be at least 1, below 2^31"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            'quantization_config: {"quant_method": "fp8"} cannot be expressed here, only quant_method'
            ' "mxfp4"',
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        config_from_hf(hf_config(PRESETS["20b"]) | change)
    assert str(caught.value) == message


def test_layers_may_have_windows_in_any_order() -> None:
    values = hf_config(dataclasses.replace(PRESETS["debug"], n_layers=5))
    kinds = {"w": "sliding_attention", "f": "full_attention"}
    for every, pattern in (("wfwfw", "wf"), ("wffwf", "wff"), ("wwwww", "w"), ("wwwwf", "wwwwf")):
        read = config_from_hf(values | {"layer_types": [kinds[one] for one in every]})
        assert read.layer_pattern == pattern
        assert hf_config(read)["layer_types"] == [kinds[one] for one in every]
    full = values | {"layer_types": ["full_attention"] * 5, "sliding_window": None}
    assert config_from_hf(full).layer_pattern == "f"
    assert config_from_hf(values | {"layer_types": None}).layer_pattern == "wf"


def test_what_config_json_leaves_out_is_as_in_transformers() -> None:
    from transformers import AutoConfig

    values = {
        key: value
        for key, value in hf_config(PRESETS["120b"]).items()
        if key not in ("rope_scaling", "rope_theta", "layer_types", "swiglu_alpha", "swiglu_limit")
    }
    read = config_from_hf(values)
    assert read == PRESETS["120b"]
    theirs: Any = AutoConfig.for_model(**values)
    again = hf_config(read)
    rule = again["rope_scaling"] | {"rope_theta": again["rope_theta"]}
    assert theirs.rope_parameters == rule
    assert theirs.layer_types == again["layer_types"]
    assert (theirs.swiglu_alpha, theirs.swiglu_limit) == (1.702, 7.0)
    assert find_hf("gpt_oss").MODEL_TYPES == ("gpt_oss",)


# A batch's documents are shorter and longer than the window, and the limit bounds many values.
CASES = {
    "ds 2 ep 2": "suite",
    "cp 2 tp 2 ep 2 train__seq_len 13": "slow",
    "tp 2 sequence false": "slow",
    "pp 2 ds 2 ep 2 pp_schedule ZBVZeroBubble model__n_layers 4 model__tie_embeddings true": "slow",
    "cp 2 tp 2 ep 2 cp_method ulysses model__layer_pattern f": "slow",
    "tp 4 ep 2": "full",
    "dr 2 ds 2 ep 2 zero 1 activation_checkpoint__mode selective": "full",
    "ds 3 ep 3 model__capacity_factor 1.0": "full",
    "ds 2 tp 2 ep 2 precision__param bfloat16": "full",
    "ds 2 ep 2 compile__mode block": "full",
    "tp 2 precision__float8 tensorwise model__head_dim 16 model__n_layers 4": "full",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=tier(slow=t == "slow", full=t == "full")) for c, t in CASES.items()]
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    ranks, keys = keys_of(GPT_OSS, case)
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
        method = ("ring", "allgather", "ulysses")[proved % 3]
        case += f" ep 2 zero {proved % 4} cp_method {method} sequence {str(proved % 2 == 0).lower()}"
        count, keys = keys_of(GPT_OSS, f"{case} model__n_layers 4 model__n_heads 8 model__n_kv_heads 8")
        report = agreed(pool.run(prove_case, count, keys))
        assert report.ok, f"{case}\n{report}"
        proved += 1
    assert proved == {1: 20, 2: 10, 4: 4}[pp]
