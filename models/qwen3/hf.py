"""Hugging Face's weights and config.json of Qwen3, and of the mixtures of experts like it.

``KINDS`` is the table of differences: one row for each architecture.
"""

from collections.abc import Mapping
from typing import Any

from compose.checkpoint.hf_stored import Stored

from ..layers.hf_names import (
    EXPERTS,
    FEED_FORWARD,
    FIELDS,
    MODULES,
    MULTIPLIERS,
    NOT_TRAINED,
    PLAIN_ROUTER,
    PREDICTION,
    QK_NORMS,
    SHARED_EXPERTS,
    TRAINING,
    in_layer,
)
from ..layers.kinds import Kind, kind_of, with_experts
from ..layers.published import keys, number, only, rope, share, size, truth
from ..layers.published_rope import positions, read_rule, written_rule
from ..layers.rope import RULES
from .model import Qwen3Config

_MODULES = MODULES | QK_NORMS | FEED_FORWARD | EXPERTS
_FIELDS = FIELDS | {"head_dim": "head_dim"}
_EXPERTS = {
    "n_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "balance_weight": "router_aux_loss_coef",
    **TRAINING,
}
_WEIGHTS = {"normalize_weights": "norm_topk_prob"}
# Every option, with the value that leaves it out.
_OFF: dict[str, Any] = {
    "qk_norm": "none",
    "qkv_bias": False,
    "rotary_dim": 0,
    "rope_interleaved": False,
    "norm_after": False,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention_scale": 0.0,
    "logit_scale": 1.0,
}
_OFF_EXPERTS: dict[str, Any] = {
    "n_dense_layers": 0,
    "shared_dim": 0,
    "n_shared_experts": 0,
    "shared_gate": False,
    **PLAIN_ROUTER,
}


def _row(
    architecture: str,
    fields: Mapping[str, str],
    fixed: Mapping[str, Any],
    modules: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    read: tuple[str, ...] = (),
    only: Mapping[str, tuple[Any, ...]] | None = None,
    besides: tuple[str, ...] = (),
    writes: Mapping[str, Any] | None = None,
) -> Kind:
    """Return a row: what is given is beside what every row has."""
    experts = "n_experts" in fields
    options = _OFF | (_OFF_EXPERTS if experts else {"n_experts": 0}) | dict(fixed)
    read = ("layer_types", "num_local_experts", "num_experts", *read) if experts else read
    training = {"balance_weight": 0.0, **NOT_TRAINED}
    return Kind(
        architecture,
        keys(_FIELDS | dict(fields), read, only, besides),
        {ours: value for ours, value in options.items() if ours not in fields},
        _MODULES | dict(modules or {}),
        {"tie_embeddings": False, "norm_eps": 1e-6}
        | (training if experts else {})
        | dict(defaults or {}),
        like={"n_kv_heads": "n_heads"},
        writes={"hidden_act": "silu"}
        | ({} if "qkv_bias" in fields else {"attention_bias": False})
        | dict(writes or {}),
    )


_LENGTH = ("max_position_embeddings",)  # for rules of RoPE
_NO_WINDOW: dict[str, Any] = {"use_sliding_window": (False,)}
_ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_WRITES = {"use_sliding_window": False, "sliding_window": None}
_WRITES_SPARSE = {**_WRITES, "decoder_sparse_step": 1, "mlp_only_layers": []}
_SIGMOID = {"scoring": "sigmoid"}
_SIGMOID_KEYS = {
    "n_groups": "n_group",
    "top_groups": "topk_group",
    "route_scale": "routed_scaling_factor",
    "bias_rate": "bias_rate",
    "n_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "n_dense_layers": "first_k_dense_replace",
    "hidden_dim": "intermediate_size",
}
# dots.llm1 was published with its choice's name under scoring_func; transformers reads neither.
_SIGMOID_ONLY: dict[str, Any] = {
    "scoring_func": ("sigmoid", "noaux_tc"),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
_SIGMOID_DEFAULTS = {"n_groups": 1, "top_groups": 1, "route_scale": 1.0, "bias_rate": 0.0}
_BIAS = {"moe.router.bias": "mlp.gate.e_score_correction_bias"}
_MTP = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
_GRANITE = {
    "moe.router.gate": "block_sparse_moe.router.layer",
    "moe.experts.w1": "block_sparse_moe.input_linear",
    "moe.experts.w3": "block_sparse_moe.input_linear",
    "moe.experts.w2": "block_sparse_moe.output_linear",
    "moe.shared.w1": "shared_mlp.input_linear",
    "moe.shared.w3": "shared_mlp.input_linear",
    "moe.shared.w2": "shared_mlp.output_linear",
}
_LOCAL = {"n_experts": "num_local_experts", "expert_dim": "intermediate_size"}
_GRANITE_KEYS = _EXPERTS | MULTIPLIERS | _LOCAL
_ONES = dict.fromkeys(MULTIPLIERS, 1.0)
KINDS = {
    "qwen3": _row(
        "Qwen3ForCausalLM",
        {"hidden_dim": "intermediate_size"},
        {"qk_norm": "head"},
        read=("layer_types", *_LENGTH),
        only=_NO_WINDOW,
        besides=("sliding_window",),  # not used without use_sliding_window
        writes=_WRITES,
    ),
    "qwen3_moe": _row(
        "Qwen3MoeForCausalLM",
        _EXPERTS | _WEIGHTS,
        {"qk_norm": "head"},
        defaults={"normalize_weights": False, "balance_weight": 0.001},
        read=_LENGTH,
        # The last three are in files of Qwen3-Coder, and not in transformers' class.
        only=_NO_WINDOW
        | _ALL_SPARSE
        | {"qkv_bias": (False,), "use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
        # intermediate_size is for layers without experts, and there are none.
        besides=("sliding_window", "intermediate_size"),
        writes=_WRITES_SPARSE,
    ),
    "qwen2_moe": _row(
        "Qwen2MoeForCausalLM",
        _EXPERTS | _WEIGHTS | {"qkv_bias": "qkv_bias", "shared_dim": "shared_expert_intermediate_size"},
        {"shared_gate": True},
        {one: theirs.replace("experts", "expert") for one, theirs in SHARED_EXPERTS.items()}
        | {"moe.shared_gate": "mlp.shared_expert_gate"},
        {"normalize_weights": False, "qkv_bias": True, "balance_weight": 0.001},
        _LENGTH,
        only=_NO_WINDOW | _ALL_SPARSE,
        besides=("sliding_window", "intermediate_size"),
        writes=_WRITES_SPARSE,
    ),
    "olmoe": _row(
        "OlmoeForCausalLM",
        _EXPERTS | _WEIGHTS | {"expert_dim": "intermediate_size"},
        {"qk_norm": "width"},
        defaults={"normalize_weights": False, "norm_eps": 1e-5, "balance_weight": 0.01},
        only={"clip_qkv": ()},
        writes={"clip_qkv": None},
    ),
    "flex_olmo": _row(
        "FlexOlmoForCausalLM",
        _EXPERTS | _WEIGHTS | {"expert_dim": "intermediate_size"},
        {"qk_norm": "width", "norm_after": True},
        {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"},
        {"normalize_weights": False, "balance_weight": 0.01},
        writes={"pad_token_id": None},  # theirs is a number that a small vocabulary lacks
    ),
    "granitemoe": _row(
        "GraniteMoeForCausalLM",
        _GRANITE_KEYS,
        {},
        _GRANITE,
        _ONES | {"balance_weight": 0.001},
        besides=("attention_dropout",),  # it changes nothing outside of training
    ),
    "granitemoeshared": _row(
        "GraniteMoeSharedForCausalLM",
        _GRANITE_KEYS | {"shared_dim": "shared_intermediate_size"},
        {},
        _GRANITE,
        _ONES | {"balance_weight": 0.001, "shared_dim": 0},
        besides=("attention_dropout",),
    ),
    "dots1": _row(
        "Dots1ForCausalLM",
        _EXPERTS | _WEIGHTS | _SIGMOID_KEYS,
        {"qk_norm": "head", **_SIGMOID},
        SHARED_EXPERTS | _BIAS,
        _SIGMOID_DEFAULTS | {"n_dense_layers": 0, "n_shared_experts": 0, "normalize_weights": False},
        ("max_window_layers", "sliding_window"),
        _SIGMOID_ONLY,
        besides=PREDICTION,
        writes={"sliding_window": None},
    ),
    "minimax_m2": _row(
        "MiniMaxM2ForCausalLM",
        _EXPERTS | _LOCAL | {"rotary_dim": "rotary_dim", "bias_rate": "bias_rate"},
        {"qk_norm": "width", **_SIGMOID},
        {
            "moe.router.gate": "block_sparse_moe.gate",
            "moe.router.bias": "block_sparse_moe.e_score_correction_bias",
            **{f"moe.experts.w{n}": f"block_sparse_moe.experts.{{}}.w{n}" for n in (1, 2, 3)},
        },
        {"balance_weight": 0.001, "bias_rate": 0.0},
        ("partial_rotary_factor", "attn_type_list"),
        {
            "router_jitter_noise": (0,),
            "scoring_func": ("sigmoid",),
            "qk_norm_type": ("per_layer",),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
            "sliding_window": (),
            # Factors on the stream, which older models of the family have.
            **{f"layernorm_{one}_beta": (1,) for one in ("full_attention", "linear_attention", "mlp")},
        },
        ("shared_moe_mode", "mlp_intermediate_size", *_MTP),
    ),
    "glm4_moe": _row(
        "Glm4MoeForCausalLM",
        _EXPERTS
        | _WEIGHTS
        | _SIGMOID_KEYS
        | {
            "qkv_bias": "attention_bias",
            "qk_norm": "use_qk_norm",
            "rotary_dim": "partial_rotary_factor",
        },
        _SIGMOID,
        SHARED_EXPERTS | _BIAS,
        _SIGMOID_DEFAULTS
        | {"n_dense_layers": 1, "n_shared_experts": 1, "normalize_weights": True, "qkv_bias": False}
        | {"norm_eps": 1e-5},
        ("attention_bias", "partial_rotary_factor"),
        _SIGMOID_ONLY,
        besides=PREDICTION,
    ),
}
MODEL_TYPES = tuple(KINDS)
# RoPE's base where config.json has none.
_THETAS = {"flex_olmo": 5e5, "minimax_m2": 5e6}
# Qwen's models are served with a rule for long texts (YaRN). The others' rules are refused.
_STRETCHED = ("qwen3", "qwen3_moe", "qwen2_moe")
# Their norms of queries and keys are as wide as the stream.
_OF_DIM = ("olmoe", "flex_olmo")


def hf_name(name: str, config: Qwen3Config | None = None) -> str | Stored:
    """Return Hugging Face's name of our parameter, or its place if they have fused it.

    Most of their experts are not stacked. In the name of our experts' weight '{}' stands for the index
    of the expert, whose part is ``weight[index]``. Raises KeyError if they have no such parameter, as
    for most of a router's buffers.
    """
    modules = KINDS[kind_of(KINDS, config, strict=False) if config else "qwen3"].modules
    prefix, part = in_layer(name)
    if part in modules and part.endswith(".bias"):
        return prefix + modules[part]
    module, kind = part.removesuffix(".weight"), "weight"
    if module.endswith(".bias"):
        module, kind = module.removesuffix(".bias"), "bias"
    theirs = f"{prefix}{modules[module]}.{kind}"
    if module[-2:] in ("w1", "w3") and modules[f"{module[:-1]}1"] == modules[f"{module[:-1]}3"]:
        return Stored(theirs, part=int(module[-1]) // 2, parts=2, dim=int("experts" in module))
    return theirs


def hf_config(config: Qwen3Config) -> dict[str, Any]:
    """Return the config.json of a model of this shape.

    It has the keys of the published ones. Fields that only training needs are under our own names.
    Raises ValueError for what no architecture of the table can be.
    """
    c, name = config, kind_of(KINDS, config)
    kind = KINDS[name]
    rule = written_rule(c)
    if rule and name not in _STRETCHED:
        field = "rope_scaling" if c.rope_stretches else "rope_magnitude"
        raise ValueError(
            f"{field}: {getattr(c, field)} has no place in the config.json of {kind.architecture}"
        )
    values = kind.write(name, c) | {"rope_theta": c.rope_theta, "rope_scaling": rule}
    values["max_position_embeddings"] = positions(c) if rule else 40_960
    if name == "qwen3":
        return values
    if not c.n_experts:
        raise ValueError(f"n_experts: 0 should be at least 1 in {kind.architecture}")
    values.setdefault("intermediate_size", c.hidden_dim)
    if "qk_norm" in kind.keys.fields:
        if c.qk_norm not in ("none", "head"):
            raise ValueError(
                f'qk_norm: "{c.qk_norm}" has no place in the config.json of {kind.architecture}'
            )
        values["use_qk_norm"] = c.qk_norm == "head"
    if kind.keys.fields.get("rotary_dim") == "partial_rotary_factor":
        values["partial_rotary_factor"] = (c.rotary_dim or c.head_dim) / c.head_dim
    elif "rotary_dim" in kind.keys.fields:
        values["rotary_dim"] = c.rotary_dim or c.head_dim
    if c.logit_scale != 1:
        values["logits_scaling"] = 1 / c.logit_scale
    if not c.attention_scale and "attention_scale" in kind.keys.fields:
        values["attention_multiplier"] = c.head_dim**-0.5
    if name in _OF_DIM and c.n_heads * c.head_dim != c.dim:
        raise ValueError(f"head_dim: {c.head_dim} is not dim / n_heads, which {kind.architecture} has")
    return values


def config_from_hf(values: Mapping[str, Any]) -> Qwen3Config:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a model here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    name = values.get("model_type") or "qwen3"
    kind = KINDS[name]
    kind.keys.check(values)
    only(values, "balance_loss", "batch", "sequence")
    layers = values.get("layer_types")
    for one in layers if isinstance(layers, list) else [layers]:
        only({"layer_types": one}, "layer_types", "full_attention")
    kinds = values.get("attn_type_list")
    for one in kinds if isinstance(kinds, list) else [kinds]:
        only({"attn_type_list": one}, "attn_type_list", 1)  # attention over all keys
    experts = kind.keys.fields.get("n_experts", "")
    values = with_experts(values, experts) if experts else values
    special = ("qk_norm", "rotary_dim", "logit_scale", "head_dim")
    result = kind.read(Qwen3Config, values, special)
    if name == "dots1":
        _check_no_window(values, result["n_layers"])
    own_head_dim = name in ("qwen3", "qwen3_moe")
    width = result["dim"] // max(result["n_heads"], 1)
    result["head_dim"] = size(values, "head_dim", None if own_head_dim else width)
    if name in _OF_DIM:
        only(values, "head_dim", width)
    if "qk_norm" in kind.keys.fields:
        result["qk_norm"] = "head" if truth(values, "use_qk_norm", False) else "none"
    if "logit_scale" in kind.keys.fields:
        divisor = number(values, "logits_scaling", 1.0)
        if not divisor > 0:
            raise ValueError(f"logits_scaling: {divisor} should be above 0")
        result["logit_scale"] = 1 / divisor
    part = "rotary_dim" in kind.keys.fields
    stretched = name in _STRETCHED
    rules = RULES if stretched else ()
    theta, stretch, rule = rope(values, rules, default=_THETAS.get(name, 10_000.0), part=part)
    if stretched:
        result |= read_rule(values, stretch, rule)
    if part:
        result["rotary_dim"] = _rotary_dim(values, rule, result["head_dim"])
    config = kind.keys.build(Qwen3Config, **result, rope_theta=theta)
    if experts and not config.n_experts:
        raise ValueError(f"{experts}: 0 should be at least 1")
    return config


def _check_no_window(values: Mapping[str, Any], n_layers: int) -> None:
    """Raise ValueError if transformers gives layers of a dots.llm1 a window; its default is 4096."""
    first = size(values, "max_window_layers", 62)
    if values.get("layer_types") is not None or first >= n_layers:
        return
    only(values, "sliding_window")
    if "sliding_window" not in values:
        raise ValueError(
            f"sliding_window: is absent, which is 4096 from layer {first} (max_window_layers) on, and"
            " no layer here has one; write null if theirs have none"
        )


def _rotary_dim(values: Mapping[str, Any], rule: Mapping[str, Any], head_dim: int) -> int:
    """Return the width that is rotated: 0 if it is the whole head."""
    key = "partial_rotary_factor"
    if values.get(key) is not None:
        only({key: rule.get(key)}, key, share(values, key))
    default = 0.5 if values.get("model_type") == "glm4_moe" else 1.0
    factor = share(values, key, rule.get(key, default))
    width = int(head_dim * factor)
    if values.get("rotary_dim") is not None:
        given = size(values, "rotary_dim")
        named = values.get(key) is not None or key in rule
        if named and given != width and factor != given / max(head_dim, 1):
            raise ValueError(f"rotary_dim: {given} is another than {width}, by {key} = {factor}")
        width = given
    if not 1 <= width <= head_dim:
        raise ValueError(f"partial_rotary_factor: leaves {width} of {head_dim} to rotate")
    return 0 if width == head_dim else width
