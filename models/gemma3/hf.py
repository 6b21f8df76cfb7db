"""Hugging Face's weights and config.json (``Gemma3ForCausalLM``); no tensor needs reshaping.

A file of the model that reads images too (``Gemma3ForConditionalGeneration``) is refused: its weights
have other names, and no model here has the part for images.
"""

import re
from collections.abc import Mapping
from typing import Any

from models.layers.published import keys, number, only, rope, shown, size, truth

from .model import Gemma3Config

_TEXT, _IMAGES = "gemma3_text", "gemma3"
MODEL_TYPES = (_TEXT, _IMAGES)  # the second one to be refused with its reason

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
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "window": "sliding_window",
}
_GELU = "gelu_pytorch_tanh"
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_EVERY = 6  # what transformers takes if a file does not say which layers are global
KEYS = {
    _TEXT: keys(
        {
            **_SIZES,
            "norm_eps": "rms_norm_eps",
            "tie_embeddings": "tie_word_embeddings",
            "rope_local_theta": "rope_local_base_freq",
            "global_every": "sliding_window_pattern",
            "query_pre_attn_scalar": "query_pre_attn_scalar",
            "attention_softcap": "attn_logit_softcapping",
            "final_softcap": "final_logit_softcapping",
        },
        read=("layer_types",),
        only={
            "hidden_act": (_GELU,),
            "hidden_activation": (_GELU,),
            "use_bidirectional_attention": (False,),
        },
        # transformers writes _sliding_window_pattern, and reads layer_types in its place.
        besides=("_sliding_window_pattern", "cache_implementation"),
    )
}


def hf_name(name: str, config: Gemma3Config | None = None) -> str:
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


def hf_config(config: Gemma3Config) -> dict[str, Any]:
    """Return the config.json of a model of this shape, with the keys of the published ones.

    Raises ValueError for what theirs cannot have.
    """
    c = config
    if c.attention_softcap:
        raise ValueError(
            f"attention_softcap: {c.attention_softcap} is lost in Gemma3ForCausalLM, which does not"
            " apply attn_logit_softcapping"
        )
    if c.dim % c.n_heads:
        raise ValueError(f"dim: {c.dim} is no multiple of n_heads = {c.n_heads}, which theirs needs")
    scaled = c.rope_scaling != 1.0
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": _TEXT,
        **{theirs: getattr(c, ours) for ours, theirs in _SIZES.items()},
        "layer_types": _layer_types(c),
        "sliding_window_pattern": c.global_every,
        "query_pre_attn_scalar": c.query_pre_attn_scalar or c.head_dim,
        "hidden_activation": _GELU,
        "attention_bias": False,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_local_base_freq": c.rope_local_theta,
        "rope_scaling": {"rope_type": "linear", "factor": c.rope_scaling} if scaled else None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": c.final_softcap or None,
        # All published models with scaling were trained to the first length.
        "max_position_embeddings": 131_072 if scaled else 32_768,
        "tie_word_embeddings": c.tie_embeddings,
    }


def config_from_hf(values: Mapping[str, Any]) -> Gemma3Config:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a Gemma 3 here cannot have.
    """
    if values.get("model_type") == _IMAGES:
        raise ValueError(
            f'model_type: "{_IMAGES}" is the model that reads images too, and cannot be expressed here;'
            f' save its text model ("{_TEXT}") by itself'
        )
    only(values, "model_type", _TEXT)
    known = KEYS[_TEXT]
    known.check(values)
    sizes = {ours: size(values, theirs) for ours, theirs in _SIZES.items()}
    rules = _rope_rules(values)
    theta, rule = rope(
        rules, "linear", ("rope_scaling", f"rope_parameters.{_GLOBAL}"), default=1_000_000.0
    )
    local_theta, _ = rope(rules, places=(f"rope_parameters.{_LOCAL}",), base="rope_local_base_freq")
    if values.get("attn_logit_softcapping") is not None:
        raise ValueError(
            f"attn_logit_softcapping: {shown(values['attn_logit_softcapping'])} is not applied by"
            " transformers' Gemma 3; set it to null, which gives the same model"
        )
    final_softcap = 0.0
    if values.get("final_logit_softcapping") is not None:
        final_softcap = number(values, "final_logit_softcapping")
        if not final_softcap > 0:
            raise ValueError(
                f"final_logit_softcapping: {final_softcap} should be above 0, or null for none"
            )
    scalar = size(values, "query_pre_attn_scalar", 256)
    if scalar < 1:
        raise ValueError(f"query_pre_attn_scalar: {scalar} should be at least 1")
    config = known.build(
        Gemma3Config,
        **sizes,
        norm_eps=number(values, "rms_norm_eps"),
        global_every=_global_every(values),
        rope_theta=theta,
        rope_scaling=rule.get("factor", 1.0),
        rope_local_theta=local_theta,
        query_pre_attn_scalar=0 if scalar == sizes["head_dim"] else scalar,
        final_softcap=final_softcap,
        tie_embeddings=truth(values, "tie_word_embeddings", True),
    )
    if values.get("layer_types") not in (None, _layer_types(config)):
        raise ValueError(
            f"layer_types: {shown(values['layer_types'])} cannot be expressed here, only {_GLOBAL} in"
            f" every so many layers, here {config.global_every}, and {_LOCAL} in the others"
        )
    return config


def _rope_rules(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of RoPE with those inside ``rope_parameters`` by their path.

    Older files have ``rope_theta`` and ``rope_scaling`` for global layers and ``rope_local_base_freq``
    for local ones. Newer files have an object for each kind inside ``rope_parameters``.
    """
    rules = {key: values.get(key) for key in ("rope_theta", "rope_local_base_freq", "rope_scaling")}
    nested = values.get("rope_parameters")
    if nested is None:
        return rules
    if not isinstance(nested, Mapping):
        raise ValueError(f"rope_parameters: expected an object, got {shown(nested)}")
    for key, rule in nested.items():
        if key not in (_LOCAL, _GLOBAL):
            raise ValueError(
                f"rope_parameters: {shown(key)} is no kind of layer here (known: {_LOCAL}, {_GLOBAL})"
            )
        rules[f"rope_parameters.{key}"] = rule
    return rules


def _global_every(values: Mapping[str, Any]) -> int:
    """Return the distance of global layers: as given, or the place of the first one."""
    types = values.get("layer_types")
    if values.get("sliding_window_pattern") is not None or not isinstance(types, list):
        return size(values, "sliding_window_pattern", _EVERY)
    # A model without a global layer has a distance beyond its end.
    return types.index(_GLOBAL) + 1 if _GLOBAL in types else max(_EVERY, len(types) + 1)


def _layer_types(config: Gemma3Config) -> list[str]:
    return [_GLOBAL if config.is_global(i) else _LOCAL for i in range(config.n_layers)]
