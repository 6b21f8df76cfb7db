"""Hugging Face's weights and config.json (``DeepseekV3ForCausalLM``, and V2's).

No tensor needs reshaping. V2 has a softmax over its experts, without normalization and selection bias.
Its groups are chosen by their best expert. Kimi K2 and GLM-4.7-Flash (``Glm4MoeLiteForCausalLM``) are a
V3 under other names, and are written as one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compose.errors import shown

from ..layers.hf_names import (
    EXPERTS,
    FEED_FORWARD,
    FIELDS,
    MODULES,
    PREDICTION,
    SHARED_EXPERTS,
    in_layer,
)
from ..layers.kinds import Kind
from ..layers.published import keys, only, rope, size, truth, unpublished
from ..layers.rope import yarn_growth, yarn_magnitude, yarn_weight
from .model import DeepSeekV3Config

_LITE = "glm4_moe_lite"
MODEL_TYPES = ("deepseek_v3", "deepseek_v2", _LITE, "kimi_k2")

_MODULES = (
    MODULES
    | FEED_FORWARD
    | EXPERTS
    | SHARED_EXPERTS
    | {
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
    }
)
_FIELDS = {
    **{ours: theirs for ours, theirs in FIELDS.items() if ours != "n_kv_heads"},
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "hidden_dim": "intermediate_size",
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "n_dense_layers": "first_k_dense_replace",
    "q_rank": "q_lora_rank",
    "n_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "route_scale": "routed_scaling_factor",
    # The fields that only training needs.
    "balance_loss": "seq_aux",
    "balance_weight": "aux_loss_alpha",
    "bias_rate": "bias_rate",
    "z_weight": "z_weight",
    "capacity_factor": "capacity_factor",
}
# Fields for which a null means none. If the key is absent, transformers uses its own default.
_NULL = ("q_rank", "n_dense_layers", "n_shared_experts", "n_experts")
_GROUPED = "group_limited_greedy"  # V2's method, where it has groups
_GROUPS = {"n_groups": "n_group", "top_groups": "topk_group", "normalize_weights": "norm_topk_prob"}
_READ = ("num_key_value_heads", "head_dim", "qk_head_dim", "num_local_experts", "num_experts")
_ONLY: dict[str, tuple[Any, ...]] = {"moe_layer_freq": (1,), "rope_interleave": (True,)}
_THIRD = _ONLY | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_SECOND = _ONLY | {"scoring_func": ("softmax",), "topk_method": ("greedy", _GROUPED)}
_DEFAULTS = {"tie_embeddings": False, "z_weight": 0.0, "capacity_factor": 0.0}
_WRITES = {"moe_layer_freq": 1, "hidden_act": "silu", "attention_bias": False}
_WRITES |= {"num_nextn_predict_layers": 0}
_V3 = Kind(
    "DeepseekV3ForCausalLM",
    keys(_FIELDS | _GROUPS, _READ, _THIRD, PREDICTION),
    {"scoring": "sigmoid", "group_best": 2},
    _MODULES,
    # transformers moves no bias, and V3's training ended with 0: section 4.2 of arXiv:2412.19437.
    _DEFAULTS | {"balance_weight": 0.0, "bias_rate": 0.0},
    writes=_WRITES,
)
KINDS = {
    "deepseek_v3": _V3,
    "deepseek_v2": Kind(
        "DeepseekV2ForCausalLM",
        keys(
            _FIELDS,
            (*_READ, "n_group", "topk_group"),
            _SECOND | {"norm_topk_prob": (False,)},
            PREDICTION,
        ),
        {"scoring": "softmax", "normalize_weights": False},
        _MODULES,
        _DEFAULTS | {"balance_weight": 1e-3, "bias_rate": 0.0},
        writes=_WRITES,
    ),
    _LITE: replace(_V3, keys=keys(_FIELDS | _GROUPS, (*_READ, "mlp_layer_types"), _THIRD, PREDICTION)),
    "kimi_k2": _V3,
}
# The epsilon of the latents' norms in all published code, whatever rms_norm_eps says.
_LATENT_EPS = 1e-6


def hf_name(name: str, config: DeepSeekV3Config | None = None) -> str:
    """Return Hugging Face's name of our parameter: 'layers.3.ffn_norm.weight' and so on.

    Their experts are not stacked. In the name of our experts' weight '{}' stands for the index of the
    expert, whose part is ``weight[index]``. The router's bias is a buffer in both; V2 has none. Raises
    KeyError if they have no such parameter.
    """
    prefix, part = in_layer(name)
    if part == "moe.router.bias" and (config is None or config.scoring == "sigmoid"):
        return prefix + "mlp.gate.e_score_correction_bias"
    return prefix + _MODULES[part.removesuffix(".weight")] + ".weight"


def hf_config(config: DeepSeekV3Config) -> dict[str, Any]:
    """Return the config.json of a model of this shape.

    It has the keys of the published ones. Fields that only training needs are under our own names.
    Raises ValueError for what theirs cannot be.
    """
    c, third = config, config.scoring == "sigmoid"
    if (c.latent_norm_eps or c.norm_eps) != _LATENT_EPS:
        raise ValueError(
            f"norm_eps: {c.norm_eps} of latents is not theirs; set latent_norm_eps = {_LATENT_EPS}"
        )
    if c.n_groups > 1:
        unpublished(c, "DeepSeek-V3's" if third else "DeepSeek-V2's", group_best=2 if third else 1)
    if not third:
        unpublished(c, "DeepSeek-V2's", normalize_weights=False, bias_rate=0)
    rule = {
        "type": "yarn",
        "factor": c.rope_factor,
        "original_max_position_embeddings": c.rope_original_len,
        "beta_fast": c.rope_beta_fast,
        "beta_slow": c.rope_beta_slow,
        "mscale": c.rope_mscale,
        "mscale_all_dim": c.rope_mscale_all_dim,
    }
    # If one of the two is 0 and this key is absent, transformers takes the paper's magnitude.
    if not (c.rope_mscale and c.rope_mscale_all_dim) and c.rope_mscale != 1:
        rule["attention_factor"] = yarn_growth(c.rope_factor, c.rope_mscale, c.rope_mscale_all_dim)
    name = "deepseek_v3" if third else "deepseek_v2"
    return KINDS[name].write(name, c) | {
        **{theirs: getattr(c, ours) for ours, theirs in _GROUPS.items()},
        "first_k_dense_replace": c.n_dense_layers if c.n_experts else c.n_layers,
        "num_key_value_heads": c.n_heads,
        "q_lora_rank": c.q_rank or None,
        "rope_theta": c.rope_theta,
        "rope_scaling": rule if c.rope_factor > 1 else None,
        "max_position_embeddings": round(c.rope_original_len * c.rope_factor),
        "scoring_func": c.scoring,
        "topk_method": "noaux_tc" if third else _GROUPED if c.n_groups > 1 else "greedy",
        "seq_aux": c.balance_loss == "sequence",
    }


def config_from_hf(values: Mapping[str, Any]) -> DeepSeekV3Config:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a model here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    name = values.get("model_type") or "deepseek_v3"
    kind = KINDS[name]
    kind.keys.check(values)
    if name == _LITE:
        values = {**values, "first_k_dense_replace": _dense_layers(values)}
    theta, _, rule = rope(values, ("yarn",))
    none = {key: 0 for key in map(_FIELDS.__getitem__, _NULL) if values.get(key, 0) is None}
    result = kind.read(DeepSeekV3Config, {**values, **none}, ("balance_loss",))
    for key in ("num_local_experts", "num_experts"):
        only(values, key, result["n_experts"])
    only(values, "num_key_value_heads", result["n_heads"])
    only(values, "head_dim", result["rope_dim"])
    only(values, "qk_head_dim", result["nope_dim"] + result["rope_dim"])
    if name == "deepseek_v2":
        grouped = values.get("topk_method") == _GROUPED
        result["n_groups"] = size(values, "n_group") if grouped else 1
        result["top_groups"] = size(values, "topk_group") if grouped else 1
        result["group_best"] = 1 if grouped else 2
    return kind.keys.build(
        DeepSeekV3Config,
        **result,
        latent_norm_eps=0.0 if result["norm_eps"] == _LATENT_EPS else _LATENT_EPS,
        rope_theta=theta,
        balance_loss="sequence" if truth(values, "seq_aux", True) else "batch",
        **_yarn(rule, "rope_scaling" if values.get("rope_scaling") else "rope_parameters"),
    )


def _dense_layers(values: Mapping[str, Any]) -> int:
    """Return the number of first layers that are dense, from the kinds of layers."""
    given = values.get("mlp_layer_types")
    kinds = ["dense"] if given is None else given  # transformers takes the others as sparse
    count = kinds.count("dense") if isinstance(kinds, list) else 0
    known = given is None or (
        isinstance(given, list) and len(given) == size(values, "num_hidden_layers")
    )
    if not known or kinds != ["dense"] * count + ["sparse"] * (len(kinds) - count):
        raise ValueError(
            f"mlp_layer_types: {shown(kinds)} cannot be expressed here, only dense layers first"
        )
    only(values, "first_k_dense_replace", count)
    return count


def _yarn(rule: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return our fields of YaRN's parameters, as transformers reads them; none if they change nothing.

    Raises ValueError for what DeepSeek's own code reads differently, or a model here cannot have.
    """
    if not rule:
        return {}
    only({f"{key}.truncate": rule.get("truncate")}, f"{key}.truncate", True)
    factor = rule["factor"]
    mscale, all_dim = rule.get("mscale", 1.0), rule.get("mscale_all_dim", 0.0)
    if not factor >= 1:
        raise ValueError(f"{key}.factor: {factor} should be at least 1")
    for name, value in (("mscale", mscale), ("mscale_all_dim", all_dim)):
        if not value >= 0:
            raise ValueError(f"{key}.{name}: {value} should be at least 0")
    growth = yarn_growth(factor, mscale, all_dim)
    if "attention_factor" in rule:  # it is used as it is, whatever the other two are
        wanted = rule["attention_factor"]
        if abs(wanted - growth) > 1e-12 * growth:
            magnitude = wanted * yarn_magnitude(factor, all_dim)
            if not (factor > 1 and magnitude >= 1):
                raise ValueError(f"{key}.attention_factor: {shown(wanted)} cannot be expressed here")
            mscale = yarn_weight(factor, magnitude)
    elif not (rule.get("mscale") and rule.get("mscale_all_dim")) and (
        growth != yarn_magnitude(factor, 1.0)
    ):
        one, two = (shown(rule.get(name)) for name in ("mscale", "mscale_all_dim"))
        raise ValueError(
            f"{key}.mscale: {one} with mscale_all_dim {two}: transformers and DeepSeek's own code"
            " differ in what it means; add attention_factor"
        )
    if factor == 1:
        return {}
    return {
        "rope_factor": factor,
        "rope_original_len": rule["original_max_position_embeddings"],
        "rope_beta_fast": rule.get("beta_fast") or 32.0,
        "rope_beta_slow": rule.get("beta_slow") or 1.0,
        "rope_mscale": mscale,
        "rope_mscale_all_dim": all_dim,
    }
