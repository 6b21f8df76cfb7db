"""config.json: each key of transformers' own classes is looked at, and none is taken for another.

That the models themselves equal transformers' is tested beside each.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compose.checkpoint.hf_folder import config_problems, find_hf
from models import deepseek_v3, gemma3, gpt_oss
from models.deepseek_v3.hf import hf_name as deepseek_name
from models.gpt_oss.hf import hf_name as gpt_oss_name
from models.layers.published import Keys
from tests.support.hugging_face import FOLDERS
from tests.support.transformers_models import YARN, compare, deepseek_json, published, randomize

GEMMA3, OSS = find_hf("gemma3"), find_hf("gpt_oss")
KINDS = {
    "gpt2": "gpt2",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "gpt_oss": "gpt_oss",
    "mixtral": "mixtral",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v2": "deepseek_v3",
}
WITHOUT_ROPE = ("gpt2",)
PRESETS = {
    "gpt2": "124m",
    "gemma3_text": "4b",
    "llama": "1b",
    "qwen3_moe": "30b_a3b",
    "gpt_oss": "20b",
    "mixtral": "8x7b",
    "deepseek_v3": "671b",
    "deepseek_v2": "16b",
}


def known(kind: str) -> Keys:
    keys: dict[str, Keys] = find_hf(KINDS[kind]).KEYS  # type: ignore[attr-defined]
    return keys[kind]


def values_of(kind: str) -> dict[str, Any]:
    """A published model's config.json."""
    hf, presets = find_hf(KINDS[kind]), FOLDERS[KINDS[kind]].PRESETS
    values = hf.hf_config(presets[PRESETS.get(kind, "8b")])
    assert values["model_type"] == kind
    return values


def imported(kind: str, **change: Any) -> Any:
    return find_hf(KINDS[kind]).config_from_hf(values_of(kind) | change)


def in_parameters(kind: str, rule: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` with a rule; Gemma 3's have one for each kind of layer."""
    return {"full_attention": rule} if kind == "gemma3_text" else rule


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_transformers_is_looked_at(kind: str) -> None:
    """A new version's new field is refused until somebody has said here what it is."""
    from transformers import AutoConfig

    theirs: Any = AutoConfig.for_model(kind)
    fields = {field.name for field in dataclasses.fields(theirs)} | set(theirs.to_dict())
    keys = known(kind)
    listed = {*keys.fields.values(), *keys.read, *keys.only, *keys.besides}
    assert not fields - listed
    assert not {*keys.fields.values()} & {*keys.only, *keys.besides}
    assert not keys.only.keys() & keys.besides


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_means_what_the_list_says(kind: str) -> None:
    """What is read changes the config or is refused, what has one value is refused, and the rest does
    nothing."""
    values, keys = values_of(kind), known(kind)
    as_it_is = imported(kind)
    for ours, theirs in keys.fields.items():
        value = values.get(theirs, getattr(as_it_is, ours))
        if isinstance(value, bool):
            other: Any = not value
        elif isinstance(value, str):
            other = "sequence" if value == "batch" else "batch"
        else:
            other = 2 * value if value else 1
        try:
            changed = imported(kind, **{theirs: other})
        except ValueError:
            continue
        assert getattr(changed, ours) != getattr(as_it_is, ours), theirs
    for theirs in keys.only:
        assert imported(kind, **{theirs: None}) == as_it_is
        with pytest.raises(ValueError, match=rf"^{theirs}: 17 cannot be expressed here"):
            imported(kind, **{theirs: 17})
    for theirs in keys.besides:
        for other in (17, "else", [3], {"a": 1}):
            assert imported(kind, **{theirs: other}) == as_it_is, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_other_peoples_files_change_nothing(kind: str) -> None:
    """They are in published files, and in no class of transformers."""
    others = {"_num_labels": 2, "max_sequence_length": 2048, "moe_frequency": 1}
    assert imported(kind, **others) == imported(kind)
    with pytest.raises(ValueError, match=r"^moe_frequency: 2 cannot be expressed here, only 1$"):
        imported(kind, moe_frequency=2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_refused_by_name(kind: str) -> None:
    for key, value in (
        ("attention_gate", True),
        ("attention_gate", 0),
        ("original_max_position_embeddings", 4),
    ):
        with pytest.raises(ValueError, match=rf"^{key}: \S+ is of a key that is not known here"):
            imported(kind, **{key: value})
    assert imported(kind, attention_gate=None) == imported(kind)
    for key in ("rope_scaling", "rope_parameters") if kind not in WITHOUT_ROPE else ():
        rule = {"rope_type": "default", "spin": 2}
        given = in_parameters(kind, rule) if key == "rope_parameters" else rule
        with pytest.raises(ValueError, match=rf"^{key}\S*.spin: 2 is of a key that is not known here"):
            imported(kind, **{"rope_scaling": None, key: given})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT_ROPE])
def test_two_words_on_one_thing_are_refused(kind: str) -> None:
    values = values_of(kind)
    theta = values["rope_theta"]
    rule = values.get("rope_scaling") or {"rope_type": "default"}
    same: dict[str, Any] = {"rope_scaling": rule, "rope_parameters": in_parameters(kind, rule)}
    assert imported(kind, **same) == imported(kind)
    with pytest.raises(ValueError, match=r"^rope_scaling: says something else than rope_parameters"):
        imported(kind, **same | {"rope_parameters": in_parameters(kind, rule | {"factor": 3})})
    within = {"rope_scaling": rule | {"rope_theta": 2 * theta}}
    with pytest.raises(ValueError, match=r"^rope_theta: .* is another than rope_scaling.rope_theta"):
        imported(kind, **within)
    assert imported(kind, **within, rope_theta=None).rope_theta == 2 * theta
    with pytest.raises(ValueError, match=r"^rope_scaling.type: "):
        imported(kind, rope_scaling=rule | {"rope_type": "default", "type": "linear"})


DIFFER = ": transformers and DeepSeek's own code differ in what it means; add attention_factor"
# YaRN's parameters as transformers reads them; the others stay as YARN has them.
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "attention_factor": ({"attention_factor": 1.3}, ""),
    "attention_factor, as the others": (
        {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
        "",
    ),
    "attention_factor, alone": (
        {"mscale": None, "mscale_all_dim": None, "attention_factor": 1.1},
        "",
    ),
    "attention_factor, mscale without mscale_all_dim": (
        {"mscale_all_dim": None, "attention_factor": 1.4},
        "",
    ),
    "neither": ({"mscale": None, "mscale_all_dim": None}, ""),
    "the paper's": ({"mscale": 1.0, "mscale_all_dim": 0}, ""),
    "small attention_factor": (
        {"mscale": None, "mscale_all_dim": None, "attention_factor": 0.9},
        "rope_scaling.attention_factor: 0.9 cannot be expressed here",
    ),
    "not truncated": (
        {"truncate": False},
        "rope_scaling.truncate: false cannot be expressed here, only true",
    ),
    "mscale without mscale_all_dim": (
        {"mscale": 0.7, "mscale_all_dim": None},
        f"rope_scaling.mscale: 0.7 with mscale_all_dim null{DIFFER}",
    ),
    "mscale_all_dim without mscale": (
        {"mscale": None, "mscale_all_dim": 0.7},
        f"rope_scaling.mscale: null with mscale_all_dim 0.7{DIFFER}",
    ),
    "mscale_all_dim beside 0": (
        {"mscale": 0, "mscale_all_dim": 0.7},
        f"rope_scaling.mscale: 0.0 with mscale_all_dim 0.7{DIFFER}",
    ),
    "shrinking": ({"factor": 0.5}, "rope_scaling.factor: 0.5 should be at least 1"),
}


@pytest.mark.parametrize("rule", RULES)
def test_yarn_is_as_transformers_reads_it_or_refused(tmp_path: Path, rule: str) -> None:
    change, message = RULES[rule]
    values = deepseek_json(YARN)
    given = {key: one for key, one in {**values["rope_scaling"], **change}.items() if one is not None}
    values["rope_scaling"] = given
    hf = find_hf("deepseek_v3")
    if message:
        with pytest.raises(ValueError, match=r".") as caught:
            hf.config_from_hf(values)
        assert str(caught.value) == message
        return
    _equals_transformers(tmp_path, values)
    # And what is written of it again is the same model.
    config = hf.config_from_hf(values)
    again = hf.config_from_hf(json.loads(json.dumps(hf.hf_config(config))))
    assert dataclasses.replace(again, rope_mscale=0.0) == dataclasses.replace(config, rope_mscale=0.0)
    assert again.rope_mscale == pytest.approx(config.rope_mscale, rel=1e-12)


@pytest.mark.parametrize("eps", [1e-2])
def test_latents_have_their_own_eps(tmp_path: Path, eps: float) -> None:
    """transformers' norms of latents have 1e-6, whatever rms_norm_eps says."""
    values = deepseek_json(YARN) | {"rms_norm_eps": eps}
    _equals_transformers(tmp_path, values, std=0.05)
    hf = find_hf("deepseek_v3")
    with pytest.raises(
        ValueError, match=r"^norm_eps: 0.01 of latents is not theirs; set latent_norm_eps"
    ):
        hf.hf_config(dataclasses.replace(YARN, norm_eps=eps))


def _equals_transformers(folder: Path, values: dict[str, Any], std: float = 0.3) -> None:
    torch.manual_seed(0)
    config = find_hf("deepseek_v3").config_from_hf(values)
    model = deepseek_v3.Model(config)
    randomize(model)
    for parameter in model.parameters():
        parameter.data.mul_(std / 0.3)
    biases = {name: b for name, b in model.named_buffers() if name.endswith("router.bias")}
    tensors = published(dict(model.named_parameters()) | biases, deepseek_name)
    compare(folder, model, tensors, values, 2)


def test_a_rule_that_stretches_nothing_is_none(tmp_path: Path) -> None:
    """A factor of 1 leaves its other parameters without a meaning, in both places."""
    hf, values = find_hf("llama"), values_of("llama")
    values["rope_scaling"] = values["rope_scaling"] | {
        "factor": 1.0,
        "original_max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = hf.config_from_hf(values)
    assert config.rope_scaling == 1.0
    for length in (64, 8192):
        same = dataclasses.replace(config, rope_original_seq_len=length)
        assert config_problems(tmp_path, "llama", same) == []
    other = dataclasses.replace(config, rope_scaling=2.0, rope_original_seq_len=64)
    assert config_problems(tmp_path, "llama", other) == [
        f"{tmp_path}: is a model with rope_scaling = 1.0, not 2.0",
        f"{tmp_path}: is a model with rope_original_seq_len = 8192, not 64",
    ]


LOCAL, GLOBAL = "sliding_attention", "full_attention"
# What 4b's text_config says besides its sizes, and the same in the words of newer files.
OLDER: dict[str, Any] = {
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
}
NEWER: dict[str, Any] = {
    "rope_parameters": {
        GLOBAL: {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
        LOCAL: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "layer_types": 5 * (5 * [LOCAL] + [GLOBAL]) + 4 * [LOCAL],
    "_sliding_window_pattern": 6,
    "use_bidirectional_attention": False,
}


def sizes() -> dict[str, Any]:
    """The keys of 4b's config.json that both forms have."""
    values = GEMMA3.hf_config(gemma3.PRESETS["4b"])
    return {k: v for k, v in values.items() if k not in {*OLDER, *NEWER}}


@pytest.mark.parametrize("form", [OLDER, NEWER, {}], ids=["older", "newer", "neither"])
def test_both_forms_of_config_json_are_read(form: dict[str, Any]) -> None:
    """As transformers reads them: both give the same, and what is left out has its defaults."""
    found = GEMMA3.config_from_hf(sizes() | form)
    expected = (
        gemma3.PRESETS["4b"] if form else dataclasses.replace(gemma3.PRESETS["4b"], rope_scaling=1.0)
    )
    assert found == expected
    from transformers import AutoConfig

    read: Any = AutoConfig.for_model(**sizes(), **form)
    assert read.layer_types == NEWER["layer_types"]
    assert GEMMA3.config_from_hf(read.to_dict()) == GEMMA3.config_from_hf(read.to_diff_dict()) == found


def test_a_model_without_global_layers_is_read() -> None:
    for layers in (3, 9):
        types = {"layer_types": layers * [LOCAL], "num_hidden_layers": layers}
        config = GEMMA3.config_from_hf(sizes() | types)
        assert not any(config.is_global(i) for i in range(layers))
        assert GEMMA3.config_from_hf(GEMMA3.hf_config(config)) == config


RULE = find_hf("gpt_oss").hf_config(FOLDERS["gpt_oss"].PRESETS["20b"])["rope_scaling"]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "llama",
            {"hidden_size": 2047},
            "hidden_size: 2047 is not a multiple of 2 * num_attention_heads = 64",
        ),
        (
            "qwen3",
            {"num_hidden_layers": 10**6},
            "num_hidden_layers: 1000000 should be at least 1, below 2^12",
        ),
        ("qwen3_moe", {"num_experts": 2**20}, "num_experts: 1048576 should be at least 0, below 2^16"),
        (
            "llama",
            {"rms_norm_eps": 1e-50},
            "rms_norm_eps: 1e-50 is 0 in float32, which has nothing below 1.2e-38",
        ),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps: 0.0 should be above 0"),
        (
            "llama",
            {"num_attention_heads": "32"},
            'num_attention_heads: expected a whole number, got "32"',
        ),
        (
            "llama",
            {"num_attention_heads": True},
            "num_attention_heads: expected a whole number, got true",
        ),
        ("llama", {"rope_scaling": "llama3"}, 'rope_scaling: expected an object, got "llama3"'),
        ("llama", {"rope_theta": [1]}, "rope_theta: expected a number, got [1]"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps: Infinity is out of range"),
        (
            "llama",
            {"tie_word_embeddings": "no"},
            'tie_word_embeddings: expected true or false, got "no"',
        ),
        ("deepseek_v3", {"n_group": None}, "n_group: is missing"),
        ("deepseek_v3", {"head_dim": 128}, "head_dim: 128 cannot be expressed here, only 64"),
        (
            "gemma3_text",
            {"layer_types": 2 * [GLOBAL] + 32 * [LOCAL]},
            'layer_types: ["full_attention", "full_attention", "sliding_attention", "s... cannot be'
            " expressed here, only full_attention in every so many layers, here 1, and"
            " sliding_attention in the others",
        ),
        (
            "gemma3_text",
            {"layer_types": 34 * [LOCAL], "sliding_window_pattern": 6},
            'layer_types: ["sliding_attention", "sliding_attention", "sliding_attentio... cannot be'
            " expressed here, only full_attention in every so many layers, here 6, and"
            " sliding_attention in the others",
        ),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
            'rope_scaling: {"rope_type": "yarn", "factor": 8.0} cannot be expressed here',
        ),
        (
            "gemma3_text",
            {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 8.0}}},
            'rope_parameters.sliding_attention: {"rope_type": "linear", "factor": 8.0} cannot be'
            " expressed here",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            'rope_parameters: "rope_type" is no kind of layer here (known: sliding_attention,'
            " full_attention)",
        ),
        (
            "gemma3_text",
            {"rope_local_base_freq": 5.0, "rope_parameters": {LOCAL: {"rope_theta": 7.0}}},
            "rope_local_base_freq: 5.0 is another than rope_parameters.sliding_attention.rope_theta,"
            " 7.0",
        ),
        (
            "gemma3_text",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping: 50.0 is not applied by transformers' Gemma 3; set it to null,"
            " which gives the same model",
        ),
        (
            "gemma3_text",
            {"final_logit_softcapping": 0},
            "final_logit_softcapping: 0.0 should be above 0, or null for none",
        ),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention: true cannot be expressed here, only false",
        ),
        (
            "gemma3_text",
            {"hidden_act": "silu"},
            'hidden_act: "silu" cannot be expressed here, only "gelu_pytorch_tanh"',
        ),
        ("gemma3_text", {"sliding_window": None}, "sliding_window: is missing"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0 should be at least 1"),
        (
            "gemma3_text",
            {"model_type": "gemma3", "text_config": {}},
            'model_type: "gemma3" is the model that reads images too, and cannot be expressed here;'
            ' save its text model ("gemma3_text") by itself',
        ),
        (
            "gpt_oss",
            {"rope_scaling": RULE | {"rope_type": "linear"}},
            f"rope_scaling: {json.dumps(RULE | {'rope_type': 'linear'})[:60]}... cannot be expressed"
            " here",
        ),
        (
            "gpt_oss",
            {"rope_scaling": RULE | {"mscale": 0.7}},
            "rope_scaling.mscale: 0.7 cannot be expressed here",
        ),
        (
            "gpt_oss",
            {"rope_scaling": RULE | {"attention_factor": 1.5}},
            "rope_scaling.attention_factor: 1.5 cannot be expressed here, only 1.3465735902799727",
        ),
        (
            "gpt_oss",
            {"rope_scaling": RULE | {"factor": 0.5}},
            "rope_scaling.factor: 0.5 should be at least 1",
        ),
        ("gpt_oss", {"hidden_act": "gelu"}, 'hidden_act: "gelu" cannot be expressed here, only "silu"'),
        (
            "gpt_oss",
            {"attention_dropout": 0.1},
            "attention_dropout: 0.1 cannot be expressed here, only 0",
        ),
        (
            "gpt_oss",
            {"attention_bias": False},
            "attention_bias: false cannot be expressed here, only true",
        ),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token: 3 cannot be expressed here, only 4"),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "chunked_attention"] * 12},
            'layer_types: "chunked_attention" cannot be expressed here, only "sliding_attention" or'
            ' "full_attention"',
        ),
        (
            "gpt_oss",
            {"layer_types": ["full_attention"]},
            'layer_types: expected a list of 24 names, got ["full_attention"]',
        ),
        ("gpt_oss", {"sliding_window": None}, "sliding_window: is missing"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window: 0 should be at least 1, below 2^31"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8"}},
            'quantization_config: {"quant_method": "fp8"} cannot be expressed here, only quant_method'
            ' "mxfp4"',
        ),
    ],
)
def test_a_wrong_value_has_this_line(kind: str, change: dict[str, Any], message: str) -> None:
    values = sizes() if kind == "gemma3_text" else values_of(kind)
    with pytest.raises(ValueError, match=r".") as caught:
        find_hf(KINDS[kind]).config_from_hf(values | change)
    assert str(caught.value) == message


ODD: list[Any] = [
    None, True, False, "2", "", -1, 0, 1, 2.5, -0.5, 1e400, float("nan"), 1e-50, 2**31, 2**63, 10**400,
    [], [1], {}, {"a": 1}, [[]], "\x1b[2J",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_type_or_size_is_one_line(kind: str) -> None:
    """Of every key that is read, and within a rule."""
    keys, values = known(kind), values_of(kind)
    rule = values.get("rope_scaling") or {"rope_type": "default"}
    refused = 0
    for value in ODD:
        for key in ("model_type", *keys.fields.values(), *keys.read, *keys.only):
            refused += _refused(kind, **{key: value})
        for key in (
            *rule,
            "rope_type",
            "type",
            "rope_theta",
            "attention_factor",
            "truncate",
            "\x1b[1m",
        ):
            refused += _refused(kind, rope_scaling=rule | {key: value})
    assert refused > 200


def _refused(kind: str, **change: Any) -> bool:
    try:
        imported(kind, **change)
    except ValueError as error:
        line = str(error)
        assert line.isprintable()
        assert len(line) < 300
        assert ": " in line
        return True
    return False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, 'activation_function: "relu" cannot be expressed here, only'),
        ({"activation_function": "gelu"}, 'activation_function: "gelu" cannot be expressed here, only'),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: true cannot be"),
        ({"scale_attn_weights": False}, "scale_attn_weights: false cannot be"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: true cannot be"),
        ({"add_cross_attention": True}, "add_cross_attention: true cannot be"),
        ({"n_ctx": 512}, "n_ctx: 512 cannot be expressed here, only 1024"),
        ({"max_position_embeddings": 2048}, "max_position_embeddings: 2048 cannot be expressed here"),
        ({"n_embd": 770}, "n_embd: 770 is not a multiple of n_head = 12"),
        ({"rope_theta": 1e4}, "rope_theta: 10000.0 is of a key that is not known here"),
    ],
)
def test_what_gpt2_cannot_be_here_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}"):
        imported("gpt2", **change)
    same = {"activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.1, "n_inner": 3072}
    assert imported("gpt2", **same) == FOLDERS["gpt2"].PRESETS["124m"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *(
            ("gpt_oss", change, rf"{next(iter(change))}: .* gpt-oss'")
            for change in (
                {"scoring": "sigmoid"},
                {"normalize_weights": False},
                {"route_scale": 2.0},
                {"bias_rate": 0.1},
            )
        ),
        *(
            ("mixtral", change, rf"{next(iter(change))}: .* Mixtral's")
            for change in ({"scoring": "sigmoid"}, {"normalize_weights": False}, {"route_scale": 2.0})
        ),
        (
            "gemma3",
            {"attention_softcap": 5.0},
            "attention_softcap: 5.0 is lost in Gemma3ForCausalLM, which does not apply"
            " attn_logit_softcapping$",
        ),
        ("gemma3", {"dim": 100}, "dim: 100 is no multiple of n_heads = 8, which theirs needs$"),
    ],
)
def test_what_theirs_cannot_be_is_not_written(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}"):
        find_hf(name).hf_config(dataclasses.replace(FOLDERS[name].PRESETS["debug"], **change))


def test_names_of_weights() -> None:
    assert gpt_oss_name("layers.3.attention.sinks.weight") == "model.layers.3.self_attn.sinks"
    assert gpt_oss_name("layers.3.moe.router.gate.bias") == "model.layers.3.mlp.router.bias"
    with pytest.raises(KeyError):
        gpt_oss_name("layers.3.moe.router.bias")  # the selection's, which theirs has not
    assert deepseek_name("layers.3.moe.experts.w1").format(5) == (
        "model.layers.3.mlp.experts.5.gate_proj.weight"
    )
    assert (
        deepseek_name("layers.3.moe.router.bias") == "model.layers.3.mlp.gate.e_score_correction_bias"
    )
    with pytest.raises(KeyError):
        deepseek_name("layers.3.moe.router.load")


def test_layers_may_have_windows_in_any_order() -> None:
    values = OSS.hf_config(dataclasses.replace(gpt_oss.PRESETS["debug"], n_layers=5))
    kinds = {"w": "sliding_attention", "f": "full_attention"}
    for every, pattern in (("wfwfw", "wf"), ("wffwf", "wff"), ("wwwww", "w"), ("wwwwf", "wwwwf")):
        read = OSS.config_from_hf(values | {"layer_types": [kinds[one] for one in every]})
        assert read.layer_pattern == pattern
        assert OSS.hf_config(read)["layer_types"] == [kinds[one] for one in every]
    full = values | {"layer_types": ["full_attention"] * 5, "sliding_window": None}
    assert OSS.config_from_hf(full).layer_pattern == "f"
    assert OSS.config_from_hf(values | {"layer_types": None}).layer_pattern == "wf"


def test_what_config_json_leaves_out_is_as_in_transformers() -> None:
    from transformers import AutoConfig

    values = {
        key: value
        for key, value in OSS.hf_config(gpt_oss.PRESETS["120b"]).items()
        if key not in ("rope_scaling", "rope_theta", "layer_types", "swiglu_alpha", "swiglu_limit")
    }
    read = OSS.config_from_hf(values)
    assert read == gpt_oss.PRESETS["120b"]
    theirs: Any = AutoConfig.for_model(**values)
    again = OSS.hf_config(read)
    rule = again["rope_scaling"] | {"rope_theta": again["rope_theta"]}
    assert theirs.rope_parameters == rule
    assert theirs.layer_types == again["layer_types"]
    assert (theirs.swiglu_alpha, theirs.swiglu_limit) == (1.702, 7.0)
    assert OSS.MODEL_TYPES == ("gpt_oss",)


def test_every_field_of_gemma3_has_a_key() -> None:
    """But rope_theta and rope_scaling, which are read by their rules."""
    fields = {field.name for field in dataclasses.fields(gemma3.Config)}
    assert fields - known("gemma3_text").fields.keys() == {"rope_theta", "rope_scaling"}
