"""Keys of small models of odd sizes, of adapters, and of a mesh in a few words."""

import math
from dataclasses import replace

from torch import Tensor, nn

from models.layers.moe import MoE
from models.layers.router import MoEConfig
from tests.support.helpers import Keys


def _model(name: str, **fields: object) -> Keys:
    return {"model__name": name} | {f"model__{field}": value for field, value in fields.items()}


_EXPERTS: Keys = {"dim": 32, "n_heads": 4, "expert_dim": 24}
_WINDOW: Keys = {"n_experts": 6, "z_weight": 1e-3, "window": 5}
QWEN = _model("qwen3", preset="debug_moe", **_EXPERTS, head_dim=8, z_weight=1e-3)
DEEPSEEK = _model(
    "deepseek_v3",
    preset="debug",
    **_EXPERTS,
    hidden_dim=48,
    balance_loss="sequence",
    balance_weight=0.05,
)
MIXTRAL = _model("mixtral", preset="debug", **_EXPERTS, **_WINDOW)
GPT_OSS = _model("gpt_oss", preset="debug", **_EXPERTS, **_WINDOW, head_dim=12, swiglu_limit=0.1)
# Odd sizes: tp divides neither the vocabulary nor the hidden width.
GPT2 = _model("gpt2", max_seq_len=16, dim=36, n_heads=4, hidden_dim=51)
_SIZES: Keys = {"dim": 36, "n_heads": 4, "head_dim": 10, "hidden_dim": 50, "query_pre_attn_scalar": 7}
_ROPE: Keys = {"rope_theta": 500.0, "rope_scaling": 2.0, "rope_local_theta": 50.0}
GEMMA3 = _model("gemma3", **_SIZES, **_ROPE, global_every=2, window=5)
GEMMA2 = GEMMA3 | _model("gemma3", qk_norm=False, attention_softcap=2.0, final_softcap=1.5)
GEMMA1 = GEMMA2 | _model("gemma3", post_norms=False, global_every=1, attention_softcap=0.0)
# Every option of a mixture of experts: a gated shared expert, biases; norms over the whole width after
# the layers; constant factors; a selection by sigmoids, part of a head rotated, dense layers.
_SHARED: Keys = {"qkv_bias": True, "shared_dim": 21, "shared_gate": True}
QWEN2_MOE = QWEN | _model("qwen3", qk_norm="none", normalize_weights=False, **_SHARED)
OLMOE = QWEN | _model("qwen3", qk_norm="width", normalize_weights=False, norm_after=True)
_SCALES: Keys = {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 0.3}
GRANITE_MOE = QWEN | _model("qwen3", qk_norm="none", attention_scale=0.2, shared_dim=21, **_SCALES)
_SIGMOID: Keys = {"scoring": "sigmoid", "bias_rate": 0.05, "route_scale": 2.5, "n_dense_layers": 1}
GLM4_MOE = QWEN | _model("qwen3", qk_norm="none", qkv_bias=True, rotary_dim=6, **_SIGMOID)
GLM4_MOE |= _model("qwen3", n_shared_experts=1, hidden_dim=50)
# 9 patches: an odd number, which no two ranks can share evenly.
DIT = _model("dit", image_size=6, dim=24, n_heads=2, hidden_dim=36, n_layers=2)
DIT |= {"train__seq_len": 9, "train__micro_batch": 1}
# Patterns of weights that get adapters.
ATTENTION = "['layers.*.attention.w*']"
ALL = "['layers.*.attention.w*','layers.*.feed_forward.w*']"
AXES = {"dr": "dp_replicate", "ds": "dp_shard", "cp": "cp", "tp": "tp", "pp": "pp"}


def keys_of(model: Keys, case: str) -> tuple[int, Keys]:
    """The number of ranks and the config's keys of, say, 'ds 2 tp 2 ep 4'. Other words are keys."""
    words = case.split()
    degrees = dict(zip(words[::2], words[1::2], strict=True))
    keys: Keys = {
        "train__seq_len": 16,
        "model__n_layers": 2,
        "parallel__dp_shard": 1,
    } | model
    ranks = 1
    for word, value in degrees.items():
        if word in AXES:
            keys[f"parallel__{AXES[word]}"] = value
            ranks *= int(value)
        else:
            keys[word if "__" in word else f"parallel__{word}"] = value
    data = math.prod(int(degrees.get(axis, 1)) for axis in ("dr", "ds"))
    micro_batches = 4 if "pp" in degrees else 2
    return ranks, {"train__global_batch": 2 * data * micro_batches} | keys


def lora(rank: int = 3, targets: str = ALL, **more: object) -> Keys:
    """Keys of [model.lora]; the rank divides nothing."""
    keys = {"rank": rank, "targets": targets, **more}
    return {f"model__lora__{key}": value for key, value in keys.items()}


class Tiny(nn.Module):
    """A model of the user's own, whose experts are on another mesh than the rest."""

    def __init__(self, capacity_factor: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        config = MoEConfig(n_experts=4, top_k=2, expert_dim=3, balance_weight=0.1)
        self.moe = MoE(6, replace(config, capacity_factor=capacity_factor))
        self.last = nn.Linear(6, 7)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.moe(self.first(input)))
