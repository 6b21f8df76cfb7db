"""Mixture-of-experts models: equal to transformers', which loads them by their published names.

And as large as they are published to be.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models import deepseek_v3, qwen3
from models.deepseek_v3.hf import hf_name as deepseek_name
from models.layers.router import Router
from models.qwen3.hf import hf_name as qwen3_name

QWEN3 = qwen3.Config(
    vocab_size=91,
    dim=45,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    head_dim=14,
    n_experts=7,
    top_k=3,
    expert_dim=19,
)
DEEPSEEK = deepseek_v3.Config(
    vocab_size=91,
    dim=45,
    n_layers=3,
    n_heads=3,
    q_rank=13,
    kv_rank=17,
    nope_dim=14,
    rope_dim=10,
    v_dim=11,
    hidden_dim=71,
    n_experts=6,
    top_k=2,
    expert_dim=19,
    n_groups=3,
    top_groups=2,
)
# Of five pairs two are kept, one is between and two are slowed down.
YARN = dataclasses.replace(
    DEEPSEEK,
    rope_theta=100.0,
    rope_factor=8.0,
    rope_original_len=64,
    rope_beta_fast=4.0,
    rope_mscale=0.7,
)


def qwen3_json(config: qwen3.Config) -> dict[str, Any]:
    """config.json, with the keys that are published."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_dim,
        "norm_topk_prob": config.normalize_weights,
    }


def deepseek_json(config: deepseek_v3.Config) -> dict[str, Any]:
    """The same; V2 is the one with a softmax."""
    yarn = {
        "type": "yarn",
        "factor": config.rope_factor,
        "original_max_position_embeddings": config.rope_original_len,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "mscale": config.rope_mscale,
        "mscale_all_dim": config.rope_mscale_all_dim,
    }
    return {
        "model_type": "deepseek_v3" if config.scoring == "sigmoid" else "deepseek_v2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "first_k_dense_replace": config.n_dense_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_heads,
        "q_lora_rank": config.q_rank or None,
        "kv_lora_rank": config.kv_rank,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.v_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": yarn if config.rope_factor > 1 else None,
        "max_position_embeddings": round(config.rope_original_len * config.rope_factor),
        "tie_word_embeddings": config.tie_embeddings,
        "n_routed_experts": config.n_experts,
        "n_shared_experts": config.n_shared_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_dim,
        "norm_topk_prob": config.normalize_weights,
        "routed_scaling_factor": config.route_scale,
        "n_group": config.n_groups,
        "topk_group": config.top_groups,
        "topk_method": "noaux_tc" if config.scoring == "sigmoid" else "greedy",
        "num_nextn_predict_layers": 0,
    }


def published(tensors: dict[str, Tensor], hf_name: Callable[[str], str]) -> dict[str, Tensor]:
    """``tensors`` by Hugging Face's names, each expert by itself."""
    files: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        theirs = hf_name(name)
        stacked = enumerate(tensor) if "{}" in theirs else [(0, tensor)]
        files |= {theirs.format(index): part.detach().contiguous() for index, part in stacked}
    return files


def randomize(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)


def compare(
    folder: Path, model: nn.Module, tensors: dict[str, Tensor], keys: dict[str, Any], batch: int
) -> None:
    """transformers' model of ``tensors`` and ``keys`` gives the logits of ``model``."""
    from transformers import AutoModelForCausalLM

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(keys))
    # Its other ways to run experts want aligned rows.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    other, info = loaded
    # A network without width has nothing to save.
    empty = {name for name, parameter in other.named_parameters() if not parameter.numel()}
    assert set(info["missing_keys"]) == empty
    assert not any(problem for key, problem in info.items() if key != "missing_keys"), info

    tokens = torch.randint(keys["vocab_size"], (batch, 61))
    with torch.no_grad():
        expected, found = other.eval()(tokens).logits, model.eval()(tokens)
    assert expected.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        (QWEN3, 2),
        (dataclasses.replace(QWEN3, normalize_weights=False), 1),
        (dataclasses.replace(QWEN3, tie_embeddings=True), 2),
        (dataclasses.replace(QWEN3, top_k=1), 2),
    ],
    ids=["normalized", "not normalized, batch 1", "tied", "top 1"],
)
def test_qwen3(tmp_path: Path, config: qwen3.Config, batch: int) -> None:
    torch.manual_seed(0)
    model = qwen3.Model(config)
    randomize(model)
    tensors = published(dict(model.named_parameters()), qwen3_name)
    compare(tmp_path, model, tensors, qwen3_json(config), batch)


# transformers' shared expert, where there is none, has no width.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("config", "batch"),
    [
        (DEEPSEEK, 2),
        (dataclasses.replace(DEEPSEEK, q_rank=0, n_shared_experts=2, top_k=4), 2),
        (dataclasses.replace(DEEPSEEK, normalize_weights=False, n_groups=1, top_groups=1), 1),
        (dataclasses.replace(DEEPSEEK, n_shared_experts=0, tie_embeddings=True, n_groups=2), 2),
        (dataclasses.replace(DEEPSEEK, n_dense_layers=0, n_layers=1), 2),
        (dataclasses.replace(DEEPSEEK, n_dense_layers=3), 2),
        (YARN, 2),
        (dataclasses.replace(YARN, rope_mscale=0.707, rope_mscale_all_dim=0.707, q_rank=0), 2),
        (dataclasses.replace(YARN, rope_mscale=1.0, rope_mscale_all_dim=0.0), 2),
    ],
    ids=[
        "grouped",
        "queries projected directly, two shared",
        "not normalized, one group, batch 1",
        "none shared, tied",
        "no dense layer",
        "dense layers alone",
        "YaRN",
        "YaRN, both alike",
        "YaRN of the paper",
    ],
)
def test_deepseek_v3(tmp_path: Path, config: deepseek_v3.Config, batch: int) -> None:
    torch.manual_seed(0)
    model = deepseek_v3.Model(config)
    randomize(model)
    routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
    for router in routers.values():
        router.bias.normal_(std=0.3)
    biases = {f"{name}.bias": router.bias for name, router in routers.items()}
    tensors = published(dict(model.named_parameters()) | biases, deepseek_name)
    compare(tmp_path, model, tensors, deepseek_json(config), batch)


@pytest.mark.parametrize("q_rank", [0, 13])
def test_deepseek_v2(tmp_path: Path, q_rank: int) -> None:
    """A softmax over all experts, without groups, normalization or bias: V2-Lite's."""
    torch.manual_seed(0)
    config = dataclasses.replace(
        YARN,
        q_rank=q_rank,
        kv_rank=18,  # transformers views a row as complex numbers
        scoring="softmax",
        normalize_weights=False,
        n_groups=1,
        top_groups=1,
        n_shared_experts=2,
        rope_mscale=0.707,
        rope_mscale_all_dim=0.707,
    )
    model = deepseek_v3.Model(config)
    randomize(model)
    tensors = published(dict(model.named_parameters()), deepseek_name)
    compare(tmp_path, model, tensors, deepseek_json(config), 2)


@pytest.mark.parametrize(
    ("folder", "preset", "billions", "activated", "embedding"),
    [
        # As the model cards say. DeepSeek's count of what a token activates has no input embedding.
        (qwen3, "30b_a3b", 30.5, 3.3, True),
        (qwen3, "235b_a22b", 235, 22, True),
        (deepseek_v3, "16b", 15.7, 2.4, False),
        (deepseek_v3, "671b", 671, 36.7, False),
    ],
)
def test_published_sizes(
    folder: ModuleType, preset: str, billions: float, activated: float, embedding: bool
) -> None:
    config = folder.PRESETS[preset]
    with torch.device("meta"):
        model = folder.Model(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    whole = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    used = whole - experts // config.n_experts * (config.n_experts - config.top_k)
    if not embedding:
        used -= sizes["tok_embeddings.weight"]
    # Half a unit of the last digit given; some counts of activated parameters are cut off, not rounded.
    digit = {int: 1.0, float: 0.1}
    assert whole / 1e9 == pytest.approx(billions, abs=digit[type(billions)] / 2)
    assert used / 1e9 == pytest.approx(activated, abs=digit[type(activated)])
