"""Hugging Face's weights and config.json (``Qwen3ForCausalLM``, ``Qwen3MoeForCausalLM``).

No tensor needs reshaping.
"""

import re
from collections.abc import Mapping
from typing import Any

from models.layers.published import keys, number, only, rope, size, truth, unpublished

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
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "head_dim": "head_dim",
}
_FIELDS = {
    **_SIZES,
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_EXPERTS = {"top_k": "num_experts_per_tok", "expert_dim": "moe_intermediate_size"}
_ROUTER = {"normalize_weights": "norm_topk_prob", "balance_weight": "router_aux_loss_coef"}
# The fields that only training needs, under our own names.
_OURS = {one: one for one in ("balance_loss", "z_weight", "capacity_factor")}
KEYS = {
    "qwen3": keys(
        _FIELDS | {"hidden_dim": "intermediate_size"},
        read=("layer_types",),
        only={"use_sliding_window": (False,)},
        besides=("sliding_window",),  # not used without use_sliding_window
    ),
    "qwen3_moe": keys(
        _FIELDS | _EXPERTS | _ROUTER | _OURS | {"n_experts": "num_experts"},
        read=("layer_types", "num_local_experts"),
        only={"use_sliding_window": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
        # intermediate_size is for layers without experts, and there are none.
        besides=("sliding_window", "intermediate_size"),
    ),
}


def hf_name(name: str, config: Qwen3Config | None = None) -> str:
    """Return Hugging Face's name of our parameter: 'layers.3.ffn_norm.weight' and so on.

    Their experts are not stacked. In the name of our experts' weight '{}' stands for the index of the
    expert, whose part is ``weight[index]``.

    Args:
        name: Our name.
        config: Not used, since no name depends on it.

    Returns:
        Their name.

    Raises:
        KeyError: They have no such parameter, as for a router's buffers.
    """
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    prefix, part = (f"model.layers.{layer[1]}.", layer[2]) if layer else ("", name)
    return prefix + _MODULES[part.removesuffix(".weight")] + ".weight"


def hf_config(config: Qwen3Config) -> dict[str, Any]:
    """Return the config.json of a model of this shape.

    It has the keys of the published ones. Fields that only training needs are under our own names.
    Raises ValueError for a router that theirs cannot be.
    """
    c = config
    values: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if c.n_experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if c.n_experts else "qwen3",
        **{theirs: getattr(c, ours) for ours, theirs in _SIZES.items()},
        "intermediate_size": c.hidden_dim,
        "num_key_value_heads": c.n_kv_heads,
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
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **{theirs: getattr(c, ours) for ours, theirs in (_EXPERTS | _ROUTER | _OURS).items()},
    }


def config_from_hf(values: Mapping[str, Any]) -> Qwen3Config:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a Qwen3 here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    known = KEYS[values.get("model_type") or "qwen3"]
    known.check(values)
    layers = values.get("layer_types")
    for kind in layers if isinstance(layers, list) else [layers]:
        only({"layer_types": kind}, "layer_types", "full_attention")
    theta, _ = rope(values)
    sizes = {ours: size(values, theirs) for ours, theirs in _SIZES.items()}
    kinds: dict[str, Any] = {}
    if values.get("model_type") == "qwen3_moe":
        only(values, "balance_loss", "batch", "sequence")
        experts = {"num_experts": values.get("num_experts", values.get("num_local_experts"))}
        only(values, "num_local_experts", experts["num_experts"])
        kinds = {
            **{ours: size(values, theirs) for ours, theirs in _EXPERTS.items()},
            "n_experts": size(experts, "num_experts"),
            "normalize_weights": truth(values, "norm_topk_prob", False),
            "balance_weight": number(values, "router_aux_loss_coef", 0),
            "balance_loss": values.get("balance_loss") or Qwen3Config.balance_loss,
            "z_weight": number(values, "z_weight", 0),
            "capacity_factor": number(values, "capacity_factor", 0),
        }
        if not kinds["n_experts"]:
            raise ValueError("num_experts: 0 should be at least 1")
    else:  # the published size of dense layers is not used, as there is no such layer
        kinds = {"hidden_dim": size(values, "intermediate_size")}
    return known.build(
        Qwen3Config,
        **sizes,
        n_kv_heads=size(values, "num_key_value_heads", sizes["n_heads"]),
        norm_eps=number(values, "rms_norm_eps"),
        rope_theta=theta,
        tie_embeddings=truth(values, "tie_word_embeddings", False),
        **kinds,
    )
