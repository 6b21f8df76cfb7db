"""Mixture-of-experts models: equal to transformers', which loads them by their published names.

And as large as they are published to be.
"""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from models import deepseek_v3, qwen3
from models.deepseek_v3.hf import hf_name as deepseek_name
from models.layers.router import Router
from models.qwen3.hf import hf_name as qwen3_name
from tests.support.transformers_models import (
    DEEPSEEK,
    QWEN3_MOE,
    YARN,
    compare,
    deepseek_json,
    published,
    randomize,
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


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        (QWEN3_MOE, 2),
        (dataclasses.replace(QWEN3_MOE, normalize_weights=False), 1),
        (dataclasses.replace(QWEN3_MOE, tie_embeddings=True), 2),
        (dataclasses.replace(QWEN3_MOE, top_k=1), 2),
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
