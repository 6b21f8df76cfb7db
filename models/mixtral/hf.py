"""Hugging Face's weights and config.json (``MixtralForCausalLM``); no tensor needs reshaping."""

from collections.abc import Mapping
from typing import Any

from ..layers.hf_names import MODULES, TRAINING, in_layer
from ..layers.published import keys, number, only, rope, size, truth, unpublished
from .model import MixtralConfig

MODEL_TYPES = ("mixtral",)

_MODULES = MODULES | {
    "moe.router.gate": "block_sparse_moe.gate",
    **{f"moe.experts.w{n}": f"block_sparse_moe.experts.{{}}.w{n}" for n in (1, 2, 3)},
}
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "expert_dim": "intermediate_size",
    "top_k": "num_experts_per_tok",
}
KEYS = {
    "mixtral": keys(
        {
            **_SIZES,
            **TRAINING,
            "n_experts": "num_local_experts",
            "n_kv_heads": "num_key_value_heads",
            "norm_eps": "rms_norm_eps",
            "tie_embeddings": "tie_word_embeddings",
            "window": "sliding_window",
            "balance_weight": "router_aux_loss_coef",
        },
        read=("head_dim", "num_experts"),
        only={"router_jitter_noise": (0,)},
    )
}


def hf_name(name: str, config: MixtralConfig | None = None) -> str:
    """Return Hugging Face's name of our parameter; KeyError for others, as a router's buffers.

    Their experts are not stacked. In the name of our experts' weight '{}' stands for the index of the
    expert, whose part is ``weight[index]``.
    """
    prefix, part = in_layer(name)
    return prefix + _MODULES[part.removesuffix(".weight")] + ".weight"


def hf_config(config: MixtralConfig) -> dict[str, Any]:
    """Return the config.json of a model of this shape.

    It has the keys of the published ones. Fields that only training needs are under our own names.
    Raises ValueError for a router that theirs cannot be.
    """
    c = config
    unpublished(
        c,
        "Mixtral's",
        scoring="softmax",
        normalize_weights=True,
        n_groups=1,
        route_scale=1.0,
        bias_rate=0,
    )
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **{theirs: getattr(c, ours) for ours, theirs in (_SIZES | TRAINING).items()},
        "num_local_experts": c.n_experts,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "sliding_window": c.window or None,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "router_aux_loss_coef": c.balance_weight,
        "router_jitter_noise": 0.0,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": c.tie_embeddings,
    }


def config_from_hf(values: Mapping[str, Any]) -> MixtralConfig:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a Mixtral here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    known = KEYS["mixtral"]
    known.check(values)
    only(values, "balance_loss", "batch", "sequence")
    theta, _ = rope(values, default=MixtralConfig.rope_theta)
    sizes = {ours: size(values, theirs) for ours, theirs in _SIZES.items()}
    experts = {"num_local_experts": values.get("num_local_experts", values.get("num_experts"))}
    only(values, "num_experts", experts["num_local_experts"])
    config = known.build(
        MixtralConfig,
        **sizes,
        n_experts=size(experts, "num_local_experts"),
        n_kv_heads=size(values, "num_key_value_heads", sizes["n_heads"]),
        norm_eps=number(values, "rms_norm_eps"),
        rope_theta=theta,
        tie_embeddings=truth(values, "tie_word_embeddings", False),
        # A null means none.
        window=size(values, "sliding_window") if values.get("sliding_window") else 0,
        balance_weight=number(values, "router_aux_loss_coef", 0),
        balance_loss=values.get("balance_loss") or MixtralConfig.balance_loss,
        z_weight=number(values, "z_weight", 0),
        capacity_factor=number(values, "capacity_factor", 0),
    )
    only(values, "head_dim", config.head_dim)
    return config
