"""config.json of Gemma 3: both forms that transformers has written, and what is refused by name."""

import dataclasses
import re
from typing import Any

import pytest

from models.gemma3 import PRESETS, Config
from models.gemma3.hf import KEYS, config_from_hf, hf_config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"attention_softcap": 5.0},
            "attention_softcap: 5.0 is lost in Gemma3ForCausalLM, which does not apply"
            " attn_logit_softcapping",
        ),
        ({"dim": 100}, "dim: 100 is no multiple of n_heads = 8, which theirs needs"),
    ],
)
def test_what_theirs_cannot_be_is_not_written(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        hf_config(dataclasses.replace(PRESETS["debug"], **change))


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
    values = hf_config(PRESETS["4b"])
    return {k: v for k, v in values.items() if k not in {*OLDER, *NEWER}}


@pytest.mark.parametrize("form", [OLDER, NEWER, {}], ids=["older", "newer", "neither"])
def test_both_forms_of_config_json_are_read(form: dict[str, Any]) -> None:
    """As transformers reads them: both give the same, and what is left out has its defaults."""
    found = config_from_hf(sizes() | form)
    expected = PRESETS["4b"] if form else dataclasses.replace(PRESETS["4b"], rope_scaling=1.0)
    assert found == expected
    from transformers import AutoConfig

    read: Any = AutoConfig.for_model(**sizes(), **form)
    assert read.layer_types == NEWER["layer_types"]
    assert config_from_hf(read.to_dict()) == config_from_hf(read.to_diff_dict()) == found


def test_a_model_without_global_layers_is_read() -> None:
    for layers in (3, 9):
        types = {"layer_types": layers * [LOCAL], "num_hidden_layers": layers}
        config = config_from_hf(sizes() | types)
        assert not any(config.is_global(i) for i in range(layers))
        assert config_from_hf(hf_config(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": 2 * [GLOBAL] + 32 * [LOCAL]},
            'layer_types: ["full_attention", "full_attention", "sliding_attention", "s... cannot be'
            " expressed here, only full_attention in every so many layers, here 1, and"
            " sliding_attention in the others",
        ),
        (
            {"layer_types": 34 * [LOCAL], "sliding_window_pattern": 6},
            'layer_types: ["sliding_attention", "sliding_attention", "sliding_attentio... cannot be'
            " expressed here, only full_attention in every so many layers, here 6, and"
            " sliding_attention in the others",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
            'rope_scaling: {"rope_type": "yarn", "factor": 8.0} cannot be expressed here',
        ),
        (
            {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 8.0}}},
            'rope_parameters.sliding_attention: {"rope_type": "linear", "factor": 8.0} cannot be'
            " expressed here",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            'rope_parameters: "rope_type" is no kind of layer here (known: sliding_attention,'
            " full_attention)",
        ),
        (
            {"rope_local_base_freq": 5.0, "rope_parameters": {LOCAL: {"rope_theta": 7.0}}},
            "rope_local_base_freq: 5.0 is another than rope_parameters.sliding_attention.rope_theta,"
            " 7.0",
        ),
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping: 50.0 is not applied by transformers' Gemma 3; set it to null,"
            " which gives the same model",
        ),
        (
            {"final_logit_softcapping": 0},
            "final_logit_softcapping: 0.0 should be above 0, or null for none",
        ),
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention: true cannot be expressed here, only false",
        ),
        (
            {"hidden_act": "silu"},
            'hidden_act: "silu" cannot be expressed here, only "gelu_pytorch_tanh"',
        ),
        ({"sliding_window": None}, "sliding_window: is missing"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0 should be at least 1"),
        (
            {"model_type": "gemma3", "text_config": {}},
            'model_type: "gemma3" is the model that reads images too, and cannot be expressed here;'
            ' save its text model ("gemma3_text") by itself',
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        config_from_hf(sizes() | change)
    assert str(caught.value) == message


def test_every_field_has_a_key() -> None:
    """But rope_theta and rope_scaling, which are read by their rules."""
    fields = {field.name for field in dataclasses.fields(Config)}
    assert fields - KEYS["gemma3_text"].fields.keys() == {"rope_theta", "rope_scaling"}
