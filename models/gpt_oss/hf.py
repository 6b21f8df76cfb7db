"""Hugging Face's weights and config.json (``GptOssForCausalLM``).

The experts' weights are transposed there, or in MXFP4 as OpenAI publishes them. They are written in the
first way only: rounding trained weights to 4 bits would change the model.
"""

from collections.abc import Mapping
from typing import Any

from compose.checkpoint.hf_stored import Mxfp4, Stored

from ..layers.hf_names import MODULES, TRAINING, in_layer
from ..layers.published import keys, number, only, rope, shown, size, truth, unpublished
from ..layers.rope import yarn_magnitude
from .model import GptOssConfig

MODEL_TYPES = ("gpt_oss",)

_MODULES = MODULES | {"moe.router.gate": "mlp.router"}
# Parameters whose own name is another one too.
_PARAMETERS = {
    "attention.sinks.weight": "self_attn.sinks",
    "moe.experts.gate_up": "mlp.experts.gate_up_proj",
    "moe.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "moe.experts.down": "mlp.experts.down_proj",
    "moe.experts.down_bias": "mlp.experts.down_proj_bias",
}
_WEIGHTS = ("moe.experts.gate_up", "moe.experts.down")
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "expert_dim": "intermediate_size",
    "top_k": "num_experts_per_tok",
}
KEYS = {
    "gpt_oss": keys(
        {
            **_SIZES,
            **TRAINING,
            "n_experts": "num_local_experts",
            "n_kv_heads": "num_key_value_heads",
            "norm_eps": "rms_norm_eps",
            "tie_embeddings": "tie_word_embeddings",
            "window": "sliding_window",
            "layer_pattern": "layer_types",
            "swiglu_alpha": "swiglu_alpha",
            "swiglu_limit": "swiglu_limit",
            "balance_weight": "router_aux_loss_coef",
        },
        read=("num_experts", "experts_per_token", "quantization_config"),
        only={"attention_bias": (True,)},
        besides=("initial_context_length",),  # the original length, which YaRN's parameters have too
    )
}
_LAYERS = {"w": "sliding_attention", "f": "full_attention"}
# transformers takes the published models' rule if config.json has none.
_RULE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def hf_name(name: str, config: GptOssConfig | None = None) -> str | Stored:
    """Return Hugging Face's name of our parameter, or the place of experts' weights.

    Raises KeyError if they have no such parameter, as for a router's buffers.
    """
    prefix, part = in_layer(name)
    if part in _PARAMETERS:
        theirs = prefix + _PARAMETERS[part]
        return Stored(theirs, transposed=True, code=Mxfp4()) if part in _WEIGHTS else theirs
    module, _, own = part.rpartition(".")
    return f"{prefix}{_MODULES[module]}.{own}"


def hf_config(config: GptOssConfig) -> dict[str, Any]:
    """Return the config.json of a model of this shape.

    It has the keys of the published ones, without a quantization. Fields that only training needs are
    under our own names. Raises ValueError for a router that theirs cannot be.
    """
    c = config
    unpublished(
        c,
        "gpt-oss'",
        scoring="softmax",
        normalize_weights=True,
        n_groups=1,
        route_scale=1.0,
        bias_rate=0,
    )
    rule = {
        **_RULE,
        "factor": c.rope_factor,
        "beta_fast": c.rope_beta_fast,
        "beta_slow": c.rope_beta_slow,
        "truncate": c.rope_truncate,
        "original_max_position_embeddings": c.rope_original_len,
    }
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **{theirs: getattr(c, ours) for ours, theirs in (_SIZES | TRAINING).items()},
        "num_local_experts": c.n_experts,
        "num_key_value_heads": c.n_kv_heads,
        "hidden_act": "silu",
        "attention_bias": True,
        "sliding_window": c.window,
        "layer_types": [_LAYERS["w" if c.has_window(i) else "f"] for i in range(c.n_layers)],
        "swiglu_alpha": c.swiglu_alpha,
        "swiglu_limit": c.swiglu_limit,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": rule if c.rope_factor > 1 else {"rope_type": "default"},
        "router_aux_loss_coef": c.balance_weight,
        "max_position_embeddings": round(c.rope_original_len * c.rope_factor),
        "tie_word_embeddings": c.tie_embeddings,
    }


def config_from_hf(values: Mapping[str, Any]) -> GptOssConfig:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a gpt-oss here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    known = KEYS["gpt_oss"]
    known.check(values)
    only(values, "balance_loss", "batch", "sequence")
    _check_quantization(values)
    if not (values.get("rope_scaling") or values.get("rope_parameters")):
        values = {**values, "rope_scaling": _RULE}
    theta, rule = rope(values, "yarn", default=GptOssConfig.rope_theta)
    sizes = {ours: size(values, theirs) for ours, theirs in _SIZES.items()}
    experts = {"num_local_experts": values.get("num_local_experts", values.get("num_experts"))}
    only(values, "num_experts", experts["num_local_experts"])
    only(values, "experts_per_token", sizes["top_k"])
    return known.build(
        GptOssConfig,
        **sizes,
        n_experts=size(experts, "num_local_experts"),
        n_kv_heads=size(values, "num_key_value_heads", sizes["n_heads"]),
        norm_eps=number(values, "rms_norm_eps"),
        tie_embeddings=truth(values, "tie_word_embeddings", False),
        swiglu_alpha=number(values, "swiglu_alpha", GptOssConfig.swiglu_alpha),
        swiglu_limit=number(values, "swiglu_limit", GptOssConfig.swiglu_limit),
        balance_weight=number(values, "router_aux_loss_coef", 0),
        balance_loss=values.get("balance_loss") or GptOssConfig.balance_loss,
        z_weight=number(values, "z_weight", 0),
        capacity_factor=number(values, "capacity_factor", 0),
        rope_theta=theta,
        **_windows(values, sizes["n_layers"]),
        **_yarn(rule, "rope_scaling" if values.get("rope_scaling") else "rope_parameters"),
    )


def _windows(values: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    """Return our fields of the windows: the shortest pattern that gives each layer its kind."""
    types = values.get("layer_types")
    letters = GptOssConfig.layer_pattern
    if types is not None:
        if not isinstance(types, list) or len(types) != n_layers:
            raise ValueError(f"layer_types: expected a list of {n_layers} names, got {shown(types)}")
        for one in types:
            only({"layer_types": one}, "layer_types", *_LAYERS.values())
        kinds = {theirs: ours for ours, theirs in _LAYERS.items()}
        letters = "".join(kinds[one] for one in types)
    every = "".join(letters[i % len(letters)] for i in range(n_layers))
    shortest = next(
        n for n in range(1, n_layers + 1) if all(every[i] == every[i % n] for i in range(n_layers))
    )
    results: dict[str, Any] = {"layer_pattern": every[:shortest]}
    # Without a layer that has a window, its size means nothing.
    return results | ({"window": size(values, "sliding_window")} if "w" in every else {})


def _yarn(rule: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return our fields of YaRN's parameters; none if they change nothing."""
    if not rule:
        return {}
    factor = rule["factor"]
    if not factor >= 1:
        raise ValueError(f"{key}.factor: {factor} should be at least 1")
    for name in ("mscale", "mscale_all_dim"):
        only({f"{key}.{name}": rule.get(name)}, f"{key}.{name}")
    magnitude = yarn_magnitude(factor, 1.0)
    only(
        {f"{key}.attention_factor": rule.get("attention_factor")}, f"{key}.attention_factor", magnitude
    )
    if factor == 1:
        return {}
    return {
        "rope_factor": factor,
        "rope_original_len": rule["original_max_position_embeddings"],
        "rope_beta_fast": rule.get("beta_fast") or 32.0,
        "rope_beta_slow": rule.get("beta_slow") or 1.0,
        "rope_truncate": rule.get("truncate", True),
    }


def _check_quantization(values: Mapping[str, Any]) -> None:
    """Raise ValueError for another quantization than MXFP4, whose weights the files themselves show."""
    key, result = "quantization_config", values.get("quantization_config")
    if result is None:
        return
    if not isinstance(result, Mapping):
        raise ValueError(f"{key}: expected an object, got {shown(result)}")
    if result.get("quant_method") != "mxfp4":
        raise ValueError(f'{key}: {shown(result)} cannot be expressed here, only quant_method "mxfp4"')
