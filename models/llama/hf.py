"""Hugging Face's weights and config.json (``LlamaForCausalLM``); no tensor needs reshaping."""

import re
from collections.abc import Mapping
from typing import Any

from models.layers.published import common, only, required, rope

from .model import LlamaConfig

MODEL_TYPES = ("llama",)

_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def hf_name(name: str, config: LlamaConfig | None = None) -> str:
    """Hugging Face's name of our parameter ``name``: 'layers.3.ffn_norm.weight' and so on.

    Raises KeyError where it has none. ``config``: not needed here, for no name depends on it.
    """
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if layer:
        return f"model.layers.{layer[1]}.{_MODULES[layer[2]]}.weight"
    return _MODULES[name.removesuffix(".weight")] + ".weight"


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """config.json of a model of this shape, with the keys of the published ones."""
    rule = {
        "rope_type": "llama3",
        "factor": config.rope_scaling,
        "low_freq_factor": config.rope_low_freq_factor,
        "high_freq_factor": config.rope_high_freq_factor,
        "original_max_position_embeddings": config.rope_original_seq_len,
    }
    scaled = config.rope_scaling != 1.0
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rule if scaled else None,
        # All published ones that are scaled were trained to this length, whatever their factor.
        "max_position_embeddings": 131_072 if scaled else config.rope_original_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
    }


def config_from_hf(values: Mapping[str, Any]) -> LlamaConfig:
    """The inverse. Raises ValueError, with key and value, for what a Llama here cannot have."""
    only(values, "model_type", *MODEL_TYPES)
    common(values)
    dim, n_heads = required(values, "hidden_size"), required(values, "num_attention_heads")
    only(values, "head_dim", dim // n_heads)
    theta, rule = rope(values, "llama3")
    scaling = {}
    if rule:
        scaling = {
            "rope_scaling": float(required(rule, "factor")),
            "rope_low_freq_factor": float(required(rule, "low_freq_factor")),
            "rope_high_freq_factor": float(required(rule, "high_freq_factor")),
            "rope_original_seq_len": required(rule, "original_max_position_embeddings"),
        }
    return LlamaConfig(
        vocab_size=required(values, "vocab_size"),
        dim=dim,
        n_layers=required(values, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=values.get("num_key_value_heads") or n_heads,
        hidden_dim=required(values, "intermediate_size"),
        norm_eps=required(values, "rms_norm_eps"),
        rope_theta=theta,
        tie_embeddings=bool(values.get("tie_word_embeddings")),
        **scaling,
    )
