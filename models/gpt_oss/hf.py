"""Hugging Face's weights and config.json (``GptOssForCausalLM``).

The experts' weights are transposed there, or in MXFP4 as OpenAI publishes them. They are written in the
first way only: rounding trained weights to 4 bits would change the model.
"""

from collections.abc import Mapping
from typing import Any

from compose.checkpoint.hf_stored import Stored
from compose.errors import shown

from ..layers.hf_names import FIELDS, MODULES, NOT_TRAINED, PLAIN_ROUTER, TRAINING, in_layer
from ..layers.kinds import Kind, with_experts
from ..layers.published import keys, layer_types, only, rope, shortest_pattern, size, table, unpublished
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
KIND = Kind(
    "GptOssForCausalLM",
    keys(
        {
            **FIELDS,
            **TRAINING,
            "head_dim": "head_dim",
            "n_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_dim": "intermediate_size",
            "window": "sliding_window",
            "layer_pattern": "layer_types",
            "swiglu_alpha": "swiglu_alpha",
            "swiglu_limit": "swiglu_limit",
            "balance_weight": "router_aux_loss_coef",
        },
        read=("num_experts", "experts_per_token", "quantization_config"),
        only={"attention_bias": (True,)},
        besides=("initial_context_length",),  # the original length, which YaRN's parameters have too
    ),
    {},
    _MODULES,
    {
        "tie_embeddings": False,
        "swiglu_alpha": GptOssConfig.swiglu_alpha,
        "swiglu_limit": GptOssConfig.swiglu_limit,
        "balance_weight": 0.001,
        **NOT_TRAINED,
    },
    like={"n_kv_heads": "n_heads"},
    writes={"hidden_act": "silu", "attention_bias": True},
)
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
        return Stored(theirs, transposed=True, mxfp4=True) if part in _WEIGHTS else theirs
    module, _, own = part.rpartition(".")
    return f"{prefix}{_MODULES[module]}.{own}"


def hf_config(config: GptOssConfig) -> dict[str, Any]:
    """Return the config.json of a model of this shape.

    It has the keys of the published ones, without a quantization. Fields that only training needs are
    under our own names. Raises ValueError for a router that theirs cannot be.
    """
    c = config
    unpublished(c, "gpt-oss'", **PLAIN_ROUTER)
    rule = {
        **_RULE,
        "factor": c.rope_factor,
        "beta_fast": c.rope_beta_fast,
        "beta_slow": c.rope_beta_slow,
        "truncate": c.rope_truncate,
        "original_max_position_embeddings": c.rope_original_len,
    }
    return KIND.write("gpt_oss", c) | {
        "layer_types": [_LAYERS["w" if c.has_window(i) else "f"] for i in range(c.n_layers)],
        "rope_theta": c.rope_theta,
        "rope_scaling": rule if c.rope_factor > 1 else {"rope_type": "default"},
        "max_position_embeddings": round(c.rope_original_len * c.rope_factor),
    }


def config_from_hf(values: Mapping[str, Any]) -> GptOssConfig:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a gpt-oss here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    KIND.keys.check(values)
    _check_quantization(values)
    if not (values.get("rope_scaling") or values.get("rope_parameters")):
        values = {**values, "rope_scaling": _RULE}
    theta, _, rule = rope(values, ("yarn",), default=GptOssConfig.rope_theta)
    result = KIND.read(GptOssConfig, with_experts(values), ("window", "layer_pattern"))
    only(values, "experts_per_token", result["top_k"])
    result |= _windows(values, result["n_layers"])
    result |= _yarn(rule, "rope_scaling" if values.get("rope_scaling") else "rope_parameters")
    return KIND.keys.build(GptOssConfig, **result, rope_theta=theta)


def _windows(values: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    """Return our fields of the windows: the shortest pattern that gives each layer its kind."""
    every = (GptOssConfig.layer_pattern * min(n_layers, 2**12))[:n_layers]  # the config refuses more
    if values.get("layer_types") is not None:
        kinds = {theirs: ours for ours, theirs in _LAYERS.items()}
        every = "".join(kinds[one] for one in layer_types(values, n_layers, *kinds))
    results: dict[str, Any] = {"layer_pattern": shortest_pattern(every)}
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
    key = "quantization_config"
    result = table(values, key)
    if values.get(key) is not None and result.get("quant_method") != "mxfp4":
        raise ValueError(f'{key}: {shown(result)} cannot be expressed here, only quant_method "mxfp4"')
