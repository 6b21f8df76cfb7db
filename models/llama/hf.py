"""Hugging Face's weights and config.json (``LlamaForCausalLM``); no tensor needs reshaping."""

import re
from collections.abc import Mapping
from typing import Any

from models.layers.published import keys, number, only, rope, size, truth

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
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
}
_RULE = {
    "rope_scaling": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_max_position_embeddings",
}
KEYS = {
    "llama": keys(
        {
            **_SIZES,
            "n_kv_heads": "num_key_value_heads",
            "norm_eps": "rms_norm_eps",
            "tie_embeddings": "tie_word_embeddings",
        },
        read=("head_dim",),
        only={"rope_interleaved": (False,)},  # a key of older files: pairs in Meta's layout
    )
}


def hf_name(name: str, config: LlamaConfig | None = None) -> str:
    """Return Hugging Face's name of our parameter: 'layers.3.ffn_norm.weight' and so on.

    Args:
        name: Our name.
        config: Not used, since no name depends on it.

    Returns:
        Their name.

    Raises:
        KeyError: They have no such parameter.
    """
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if layer:
        return f"model.layers.{layer[1]}.{_MODULES[layer[2]]}.weight"
    return _MODULES[name.removesuffix(".weight")] + ".weight"


def hf_config(config: LlamaConfig) -> dict[str, Any]:
    """Return the config.json of a model of this shape, with the keys of the published ones.

    Raises ValueError for what theirs cannot have.
    """
    if config.window or config.sinks:
        key = "window" if config.window else "sinks"
        raise ValueError(f"{key}: LlamaForCausalLM has none, so no file of theirs can hold this model")
    scaled = config.rope_scaling != 1.0
    rule = {theirs: getattr(config, ours) for ours, theirs in _RULE.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **rule} if scaled else None,
        # All published models with scaling were trained to this length, whatever their factor.
        "max_position_embeddings": 131_072 if scaled else config.rope_original_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
    }


def config_from_hf(values: Mapping[str, Any]) -> LlamaConfig:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a Llama here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    known = KEYS["llama"]
    known.check(values)
    sizes = {ours: size(values, theirs) for ours, theirs in _SIZES.items()}
    theta, rule = rope(values, "llama3")
    scaling = {ours: rule[theirs] for ours, theirs in _RULE.items() if rule}
    if scaling.get("rope_scaling") == 1:  # a factor of 1 stretches nothing, whatever the length
        scaling = {}
    config = known.build(
        LlamaConfig,
        **sizes,
        n_kv_heads=size(values, "num_key_value_heads", sizes["n_heads"]),
        norm_eps=number(values, "rms_norm_eps"),
        rope_theta=theta,
        tie_embeddings=truth(values, "tie_word_embeddings", False),
        **scaling,
    )
    only(values, "head_dim", config.head_dim)
    return config
