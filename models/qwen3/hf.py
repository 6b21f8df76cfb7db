"""Hugging Face's weights and config.json (``Qwen3ForCausalLM``, ``Qwen3MoeForCausalLM``); no tensor
needs reshaping."""

import re
from collections.abc import Mapping
from typing import Any

from models.layers.published import common, only, required, rope, unpublished

from .model import Qwen3Config

MODEL_TYPES = ("qwen3", "qwen3_moe")

_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.router.gate": "mlp.gate",
    "moe.experts.w1": "mlp.experts.{}.gate_proj",
    "moe.experts.w2": "mlp.experts.{}.down_proj",
    "moe.experts.w3": "mlp.experts.{}.up_proj",
}


def hf_name(name: str, config: Qwen3Config | None = None) -> str:
    """Hugging Face's name of our parameter ``name``: 'layers.3.ffn_norm.weight' and so on.

    Theirs are not stacked: '{}' in the name of our experts' weight stands for the index of the expert,
    whose part ``weight[index]`` is. Raises KeyError for what they have not, as a router's buffers.
    ``config``: not needed here, for no name depends on it.
    """
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    prefix, part = (f"model.layers.{layer[1]}.", layer[2]) if layer else ("", name)
    return prefix + _MODULES[part.removesuffix(".weight")] + ".weight"


def hf_config(config: Qwen3Config) -> dict[str, Any]:
    """config.json of a model of this shape, with the keys of the published ones, and under our own
    names what training alone needs. Raises ValueError for a router that theirs cannot be."""
    c = config
    values: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if c.n_experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if c.n_experts else "qwen3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "intermediate_size": c.hidden_dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": c.tie_embeddings,
    }
    if not c.n_experts:
        return values
    unpublished(c, "Qwen3's", scoring="softmax", n_groups=1, route_scale=1.0, bias_rate=0)
    return values | {
        "num_experts": c.n_experts,
        "num_experts_per_tok": c.top_k,
        "moe_intermediate_size": c.expert_dim,
        "norm_topk_prob": c.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": c.balance_weight,
        "balance_loss": c.balance_loss,
        "z_weight": c.z_weight,
        "capacity_factor": c.capacity_factor,
    }


def config_from_hf(values: Mapping[str, Any]) -> Qwen3Config:
    """The inverse. Raises ValueError, with key and value, for what a Qwen3 here cannot have."""
    only(values, "model_type", *MODEL_TYPES)
    common(values)
    only(values, "use_sliding_window", False)
    for kind in values.get("layer_types") or ():
        only({"layer_types": kind}, "layer_types", "full_attention")
    theta, _ = rope(values)
    n_heads = required(values, "num_attention_heads")
    kinds: dict[str, Any] = {}
    if values.get("model_type") == "qwen3_moe":
        only(values, "decoder_sparse_step", 1)
        only(values, "mlp_only_layers", [])
        experts = values.get("num_experts") or values.get("num_local_experts")
        kinds = {
            "n_experts": required({"num_experts": experts}, "num_experts"),
            "top_k": required(values, "num_experts_per_tok"),
            "expert_dim": required(values, "moe_intermediate_size"),
            "normalize_weights": bool(values.get("norm_topk_prob")),
            "balance_weight": float(values.get("router_aux_loss_coef") or 0),
            **{k: values[k] for k in ("balance_loss", "z_weight", "capacity_factor") if k in values},
        }
    else:  # of the others the published size is of no use, as there is no such layer
        kinds = {"hidden_dim": required(values, "intermediate_size")}
    return Qwen3Config(
        vocab_size=required(values, "vocab_size"),
        dim=required(values, "hidden_size"),
        n_layers=required(values, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=values.get("num_key_value_heads") or n_heads,
        head_dim=required(values, "head_dim"),
        norm_eps=required(values, "rms_norm_eps"),
        rope_theta=theta,
        tie_embeddings=bool(values.get("tie_word_embeddings")),
        **kinds,
    )
