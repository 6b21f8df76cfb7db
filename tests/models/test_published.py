"""config.json: each key of transformers' own classes is looked at, and none is taken for another.

That the models themselves equal transformers' is tested beside each.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compose.checkpoint.hf_folder import config_problems, find_hf
from models import deepseek_v3
from models.deepseek_v3.hf import hf_name as deepseek_name
from models.layers.published import Keys
from tests.support.hugging_face import FOLDERS
from tests.support.transformers_models import YARN, compare, deepseek_json, published, randomize

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
    ],
)
def test_a_wrong_value_has_this_line(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        imported(kind, **change)
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
