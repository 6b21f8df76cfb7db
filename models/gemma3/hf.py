"""Hugging Face's weights and config.json of Gemma 1, 2 and 3; no tensor needs reshaping.

A file of the model that reads images too (``Gemma3ForConditionalGeneration``) is refused: its weights
have other names, and no model here has the part for images.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compose.errors import shown

from ..layers.hf_names import FEED_FORWARD, FIELDS, MODULES, QK_NORMS, in_layer
from ..layers.kinds import Kind, kind_of
from ..layers.published import keys, number, only, rope, size, table
from .model import Gemma3Config

_TEXT, _IMAGES = "gemma3_text", "gemma3"

_MODULES = (
    MODULES
    | QK_NORMS
    | FEED_FORWARD
    | {
        "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    }
)
_FIELDS = FIELDS | {"head_dim": "head_dim", "hidden_dim": "intermediate_size"}
_WINDOWS = {"window": "sliding_window", "query_pre_attn_scalar": "query_pre_attn_scalar"}
_CAPS = {"attention_softcap": "attn_logit_softcapping", "final_softcap": "final_logit_softcapping"}
_GELU = "gelu_pytorch_tanh"
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# transformers' distance of global layers, if a file does not say which layers are global.
_EVERY = {_TEXT: 6, "gemma2": 2, "vaultgemma": 2}
_ACTIVATION: dict[str, Any] = {
    "hidden_act": (_GELU,),
    "hidden_activation": (_GELU,),
    "use_bidirectional_attention": (False,),
}
# Older files have these besides. transformers reads layer_types in their place.
_BESIDES = ("_sliding_window_pattern", "cache_implementation", "sliding_window_size")
_SECOND = keys(_FIELDS | _WINDOWS | _CAPS, ("layer_types",), _ACTIVATION, _BESIDES)
_TIED: dict[str, Any] = {"norm_eps": 1e-6, "tie_embeddings": True}
_DEFAULTS = {**_TIED, "query_pre_attn_scalar": 256}
_SECOND_DEFAULTS = {**_DEFAULTS, "window": 4096, "attention_softcap": 50.0, "final_softcap": 30.0}
_ONE_ROPE = {"qk_norm": False, "rope_scaling": 1.0}
_NULL = ("attention_softcap", "final_softcap")
KINDS = {
    _TEXT: Kind(
        "Gemma3ForCausalLM",
        keys(
            _FIELDS
            | _WINDOWS
            | _CAPS
            | {"rope_local_theta": "rope_local_base_freq", "global_every": "sliding_window_pattern"},
            ("layer_types",),
            _ACTIVATION,
            _BESIDES,
        ),
        {"qk_norm": True, "post_norms": True},
        _MODULES,
        _DEFAULTS,
        null=_NULL,
        writes={"hidden_activation": _GELU, "attention_bias": False},
    ),
    "gemma2": Kind(
        "Gemma2ForCausalLM",
        _SECOND,
        _ONE_ROPE | {"post_norms": True},
        _MODULES,
        _SECOND_DEFAULTS,
        null=_NULL,
        writes={"hidden_activation": _GELU, "attention_bias": False},
    ),
    "gemma": Kind(
        "GemmaForCausalLM",
        # Gemma 1 was published as "gelu" and trained with the approximation; transformers takes that.
        keys(_FIELDS, (), _ACTIVATION | {"hidden_act": (_GELU, "gelu")}, _BESIDES),
        _ONE_ROPE
        | {"post_norms": False, "global_every": 1, "query_pre_attn_scalar": 0}
        | dict.fromkeys(_CAPS, 0.0),
        _MODULES | {"ffn_norm": "post_attention_layernorm"},
        _TIED,
        writes={"hidden_act": _GELU, "attention_bias": False},
    ),
}
KINDS["vaultgemma"] = replace(
    KINDS["gemma2"],
    architecture="VaultGemmaForCausalLM",
    fixed=_ONE_ROPE | {"post_norms": False},
)
MODEL_TYPES = (*KINDS, _IMAGES)  # the last one to be refused with its reason


def hf_name(name: str, config: Gemma3Config | None = None) -> str:
    """Return Hugging Face's name of our parameter; KeyError if they have none."""
    modules = KINDS[kind_of(KINDS, config, strict=False) if config else _TEXT].modules
    prefix, part = in_layer(name)
    return prefix + modules[part.removesuffix(".weight")] + ".weight"


def hf_config(config: Gemma3Config) -> dict[str, Any]:
    """Return the config.json of a model of this shape, with the keys of the published ones.

    Raises ValueError for what theirs cannot have.
    """
    c, name = config, kind_of(KINDS, config)
    if name == _TEXT and c.attention_softcap:
        raise ValueError(
            f"attention_softcap: {c.attention_softcap} is lost in Gemma3ForCausalLM, which does not"
            " apply attn_logit_softcapping"
        )
    if c.dim % c.n_heads and name != "gemma":
        raise ValueError(f"dim: {c.dim} is no multiple of n_heads = {c.n_heads}, which theirs needs")
    values = KINDS[name].write(name, c) | {"rope_theta": c.rope_theta, "max_position_embeddings": 8192}
    if name == "gemma":
        return values
    values |= {
        "layer_types": _layer_types(c),
        "query_pre_attn_scalar": c.query_pre_attn_scalar or c.head_dim,
    }
    if name != _TEXT:
        if c.rope_local_theta != c.rope_theta and c.global_every > 1:
            raise ValueError(
                f"rope_local_theta: {c.rope_local_theta} is not rope_theta = {c.rope_theta}, and"
                f" {KINDS[name].architecture} has one for all layers"
            )
        return values
    scaled = c.rope_scaling != 1.0
    return values | {
        "rope_scaling": {"rope_type": "linear", "factor": c.rope_scaling} if scaled else None,
        # All published models with scaling were trained to the first length.
        "max_position_embeddings": 131_072 if scaled else 32_768,
    }


def config_from_hf(values: Mapping[str, Any]) -> Gemma3Config:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a Gemma here cannot have.
    """
    name = values.get("model_type")
    if name == _IMAGES:
        raise ValueError(
            f'model_type: "{_IMAGES}" is the model that reads images too, and cannot be expressed here;'
            f' save its text model ("{_TEXT}") by itself'
        )
    only(values, "model_type", *KINDS)
    kind = KINDS[name or _TEXT]
    kind.keys.check(values)
    if name in (None, _TEXT) and values.get("attn_logit_softcapping") is not None:
        raise ValueError(
            f"attn_logit_softcapping: {shown(values['attn_logit_softcapping'])} is not applied by"
            " transformers' Gemma 3; set it to null, which gives the same model"
        )
    for cap in _CAPS.values():
        if values.get(cap) is not None and not number(values, cap) > 0:
            raise ValueError(f"{cap}: {number(values, cap)} should be above 0, or null for none")
    result = kind.read(Gemma3Config, values, ("global_every", "rope_local_theta"))
    if name in (None, _TEXT):
        rules = _rope_rules(values)
        places = ("rope_scaling", f"rope_parameters.{_GLOBAL}")
        theta, _, rule = rope(rules, ("linear",), places, default=1_000_000.0)
        result["rope_scaling"] = rule.get("factor", 1.0)
        places = (f"rope_parameters.{_LOCAL}",)
        local_theta, *_ = rope(rules, (), places, base="rope_local_base_freq")
    else:
        theta, *_ = rope(values, ())
        local_theta = theta if name != "gemma" else Gemma3Config.rope_local_theta
    scalar = result["query_pre_attn_scalar"]
    if name != "gemma" and scalar < 1:
        raise ValueError(f"query_pre_attn_scalar: {scalar} should be at least 1")
    result["query_pre_attn_scalar"] = 0 if scalar == result["head_dim"] else scalar
    result |= {"rope_theta": theta, "rope_local_theta": local_theta}
    if name == "gemma":
        return kind.keys.build(Gemma3Config, **result)
    result["global_every"] = _global_every(values, _EVERY[name or _TEXT])
    config = kind.keys.build(Gemma3Config, **result)
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
    for key, rule in table(values, "rope_parameters").items():
        if key not in (_LOCAL, _GLOBAL):
            raise ValueError(
                f"rope_parameters: {shown(key)} is no kind of layer here (known: {_LOCAL}, {_GLOBAL})"
            )
        rules[f"rope_parameters.{key}"] = rule
    return rules


def _global_every(values: Mapping[str, Any], default: int) -> int:
    """Return the distance of global layers: as given, or the place of the first one."""
    types = values.get("layer_types")
    if values.get("sliding_window_pattern") is not None or not isinstance(types, list):
        return size(values, "sliding_window_pattern", default)
    # A model without a global layer has a distance beyond its end.
    return types.index(_GLOBAL) + 1 if _GLOBAL in types else max(default, len(types) + 1)


def _layer_types(config: Gemma3Config) -> list[str]:
    return [_GLOBAL if config.is_global(i) else _LOCAL for i in range(config.n_layers)]
