"""Hugging Face's weights and config.json (``DeepseekV3ForCausalLM``, and V2's); none needs reshaping.

V2 is the one with a softmax over its experts, without groups, normalization and selection bias.
"""

import re
from collections.abc import Mapping
from typing import Any

from models.layers.published import common, only, required, rope, unpublished

from .model import DeepSeekV3Config

MODEL_TYPES = ("deepseek_v3", "deepseek_v2")

_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.router.gate": "mlp.gate",
    "moe.experts.w1": "mlp.experts.{}.gate_proj",
    "moe.experts.w2": "mlp.experts.{}.down_proj",
    "moe.experts.w3": "mlp.experts.{}.up_proj",
    "moe.shared.w1": "mlp.shared_experts.gate_proj",
    "moe.shared.w2": "mlp.shared_experts.down_proj",
    "moe.shared.w3": "mlp.shared_experts.up_proj",
}


def hf_name(name: str, config: DeepSeekV3Config | None = None) -> str:
    """Hugging Face's name of our parameter ``name``: 'layers.3.ffn_norm.weight' and so on.

    Theirs are not stacked: '{}' in the name of our experts' weight stands for the index of the expert,
    whose part ``weight[index]`` is. The router's bias is a buffer here as there; with a ``config`` of
    V2, it has none. Raises KeyError for what they have not.
    """
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if not layer:
        return _MODULES[name.removesuffix(".weight")] + ".weight"
    prefix, part = f"model.layers.{layer[1]}.", layer[2]
    if part == "moe.router.bias" and (config is None or config.scoring == "sigmoid"):
        return prefix + "mlp.gate.e_score_correction_bias"
    return prefix + _MODULES[part.removesuffix(".weight")] + ".weight"


def hf_config(config: DeepSeekV3Config) -> dict[str, Any]:
    """config.json of a model of this shape, with the keys of the published ones, and under our own
    names what training alone needs. Raises ValueError for what theirs cannot be."""
    c, third = config, config.scoring == "sigmoid"
    # transformers takes the paper's magnitude where one of the two is 0.
    if c.rope_factor > 1 and not (c.rope_mscale and c.rope_mscale_all_dim) and c.rope_mscale != 1:
        raise ValueError(f"rope_mscale: {c.rope_mscale} beside {c.rope_mscale_all_dim} is not theirs")
    if not third:
        unpublished(c, "DeepSeek-V2's", n_groups=1, normalize_weights=False, bias_rate=0)
    rule = {
        "type": "yarn",
        "factor": c.rope_factor,
        "original_max_position_embeddings": c.rope_original_len,
        "beta_fast": c.rope_beta_fast,
        "beta_slow": c.rope_beta_slow,
        "mscale": c.rope_mscale,
        "mscale_all_dim": c.rope_mscale_all_dim,
    }
    return {
        "architectures": ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "intermediate_size": c.hidden_dim,
        "num_hidden_layers": c.n_layers,
        "first_k_dense_replace": c.n_dense_layers if c.n_experts else c.n_layers,
        "moe_layer_freq": 1,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_heads,
        "q_lora_rank": c.q_rank or None,
        "kv_lora_rank": c.kv_rank,
        "qk_nope_head_dim": c.nope_dim,
        "qk_rope_head_dim": c.rope_dim,
        "v_head_dim": c.v_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": rule if c.rope_factor > 1 else None,
        "max_position_embeddings": round(c.rope_original_len * c.rope_factor),
        "tie_word_embeddings": c.tie_embeddings,
        "n_routed_experts": c.n_experts,
        "n_shared_experts": c.n_shared_experts,
        "num_experts_per_tok": c.top_k,
        "moe_intermediate_size": c.expert_dim,
        "scoring_func": c.scoring,
        "norm_topk_prob": c.normalize_weights,
        "routed_scaling_factor": c.route_scale,
        "n_group": c.n_groups,
        "topk_group": c.top_groups,
        "topk_method": "noaux_tc" if third else "greedy",
        "num_nextn_predict_layers": 0,
        "aux_loss_alpha": c.balance_weight,
        "seq_aux": c.balance_loss == "sequence",
        "bias_rate": c.bias_rate,
        "z_weight": c.z_weight,
        "capacity_factor": c.capacity_factor,
    }


def config_from_hf(values: Mapping[str, Any]) -> DeepSeekV3Config:
    """The inverse. Raises ValueError, with key and value, for what a model here cannot have."""
    only(values, "model_type", *MODEL_TYPES)
    third = values.get("model_type") != "deepseek_v2"
    common(values)
    only(values, "moe_layer_freq", 1)
    only(values, "rope_interleave", True)
    only(values, "scoring_func", "sigmoid" if third else "softmax")
    only(values, "topk_method", "noaux_tc" if third else "greedy")
    if not third:
        only(values, "n_group", 1)
        only(values, "norm_topk_prob", False)
    theta, rule = rope(values, "yarn")
    scaling = {}
    if rule:
        scaling = {
            "rope_factor": float(required(rule, "factor")),
            "rope_original_len": required(rule, "original_max_position_embeddings"),
            "rope_beta_fast": float(rule.get("beta_fast") or 32),
            "rope_beta_slow": float(rule.get("beta_slow") or 1),
            "rope_mscale": float(rule.get("mscale", 1)),
            "rope_mscale_all_dim": float(rule.get("mscale_all_dim", 0)),
        }
    n_heads = required(values, "num_attention_heads")
    only(values, "num_key_value_heads", n_heads)
    return DeepSeekV3Config(
        vocab_size=required(values, "vocab_size"),
        dim=required(values, "hidden_size"),
        n_layers=required(values, "num_hidden_layers"),
        n_dense_layers=values.get("first_k_dense_replace") or 0,
        n_heads=n_heads,
        q_rank=values.get("q_lora_rank") or 0,
        kv_rank=required(values, "kv_lora_rank"),
        nope_dim=required(values, "qk_nope_head_dim"),
        rope_dim=required(values, "qk_rope_head_dim"),
        v_dim=required(values, "v_head_dim"),
        hidden_dim=required(values, "intermediate_size"),
        n_shared_experts=values.get("n_shared_experts") or 0,
        norm_eps=required(values, "rms_norm_eps"),
        rope_theta=theta,
        tie_embeddings=bool(values.get("tie_word_embeddings")),
        n_experts=values.get("n_routed_experts") or 0,
        top_k=required(values, "num_experts_per_tok"),
        expert_dim=required(values, "moe_intermediate_size"),
        scoring="sigmoid" if third else "softmax",
        normalize_weights=bool(values.get("norm_topk_prob", third)),
        route_scale=float(required(values, "routed_scaling_factor")),
        n_groups=values.get("n_group") or 1,
        top_groups=values.get("topk_group") or 1,
        balance_loss="sequence" if values.get("seq_aux", True) else "batch",
        # What V3's report says, whose config.json does not: sections 4.2 of arXiv:2412.19437.
        balance_weight=float(values.get("aux_loss_alpha", 1e-4 if third else 1e-3)),
        bias_rate=float(values.get("bias_rate", 1e-3 if third else 0)),
        z_weight=float(values.get("z_weight", 0)),
        capacity_factor=float(values.get("capacity_factor", 0)),
        **scaling,
    )
