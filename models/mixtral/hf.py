"""Hugging Face's weights and config.json (``MixtralForCausalLM``); no tensor needs reshaping."""

from collections.abc import Mapping
from typing import Any

from ..layers.hf_names import FIELDS, MODULES, NOT_TRAINED, PLAIN_ROUTER, TRAINING, in_layer
from ..layers.kinds import Kind, with_experts
from ..layers.published import keys, only, rope, unpublished
from .model import MixtralConfig

MODEL_TYPES = ("mixtral",)

_MODULES = MODULES | {
    "moe.router.gate": "block_sparse_moe.gate",
    **{f"moe.experts.w{n}": f"block_sparse_moe.experts.{{}}.w{n}" for n in (1, 2, 3)},
}
KIND = Kind(
    "MixtralForCausalLM",
    keys(
        {
            **FIELDS,
            **TRAINING,
            "n_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_dim": "intermediate_size",
            "window": "sliding_window",
            "balance_weight": "router_aux_loss_coef",
        },
        read=("head_dim", "num_experts"),
        only={"router_jitter_noise": (0,)},
    ),
    {},
    _MODULES,
    {"tie_embeddings": False, "balance_weight": 0.001, **NOT_TRAINED},
    like={"n_kv_heads": "n_heads"},
    null=("window",),
    writes={"hidden_act": "silu", "router_jitter_noise": 0.0, "max_position_embeddings": 32_768},
)


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
    unpublished(c, "Mixtral's", **PLAIN_ROUTER)
    return KIND.write("mixtral", c) | {"head_dim": c.head_dim, "rope_theta": c.rope_theta}


def config_from_hf(values: Mapping[str, Any]) -> MixtralConfig:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a Mixtral here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    KIND.keys.check(values)
    theta, *_ = rope(values, (), default=MixtralConfig.rope_theta)
    result = KIND.read(MixtralConfig, with_experts(values))
    config = KIND.keys.build(MixtralConfig, **result, rope_theta=theta)
    only(values, "head_dim", config.head_dim)
    return config
