"""Hugging Face's weights and config.json (``GPT2LMHeadModel``).

Their linear layers hold the transposed weight (D, N), and one layer makes queries, keys and values.
"""

import re
from collections.abc import Mapping
from typing import Any

from compose.checkpoint.hf_stored import Stored
from models.layers.published import keys, number, only, size, truth

from .model import GPT2Config

MODEL_TYPES = ("gpt2",)

_BASE = "transformer."  # older files, as the published ones, leave it out
_MODULES = {
    "embeddings.tokens": "wte",
    "embeddings.positions": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "attention.wo": "attn.c_proj",
    "ffn_norm": "ln_2",
    "feed_forward.w1": "mlp.c_fc",
    "feed_forward.w2": "mlp.c_proj",
}
_QKV = ("attention.wq", "attention.wk", "attention.wv")
_SIZES = {
    "vocab_size": "vocab_size",
    "max_seq_len": "n_positions",
    "dim": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
}
KEYS = {
    "gpt2": keys(
        {
            **_SIZES,
            "hidden_dim": "n_inner",
            "norm_eps": "layer_norm_epsilon",
            "tie_embeddings": "tie_word_embeddings",
        },
        # Other names of n_positions: an older one, and one that transformers takes as well.
        read=("n_ctx", "max_position_embeddings"),
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "reorder_and_upcast_attn": (False,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "scale_attn_weights": (True,),
        },
        # Dropout, of which there is none here, changes nothing outside of training. The others are of
        # a head that classifies sequences.
        besides=(
            *("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"),
            *("summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
        ),
        rope=False,
    )
}


def hf_name(name: str, config: GPT2Config | None = None) -> Stored:
    """Return the place of our parameter in Hugging Face's files.

    Args:
        name: Our name.
        config: Not used, since no place depends on it.

    Returns:
        The place, such as 'transformer.h.3.ln_1.weight'.

    Raises:
        KeyError: They have no such parameter.
    """
    module, _, kind = name.rpartition(".")
    if module == "output":
        return Stored("lm_head.weight")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    prefix, part = (f"{_BASE}h.{layer[1]}.", layer[2]) if layer else (_BASE, module)
    linear = kind == "weight" and part.startswith(("attention.", "feed_forward."))
    if part in _QKV:
        place = _QKV.index(part)
        return Stored(f"{prefix}attn.c_attn.{kind}", linear, place, len(_QKV), _BASE)
    return Stored(f"{prefix}{_MODULES[part]}.{kind}", linear, base=_BASE)


def hf_config(config: GPT2Config) -> dict[str, Any]:
    """Return the config.json of a model of this shape, with the keys of the published ones.

    It has no dropout, as the models here.
    """
    c = config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(c, ours) for ours, theirs in _SIZES.items()},
        "n_ctx": c.max_seq_len,
        "n_inner": None if c.hidden_dim == 4 * c.dim else c.hidden_dim,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "layer_norm_epsilon": c.norm_eps,
        "reorder_and_upcast_attn": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": c.tie_embeddings,
    }


def config_from_hf(values: Mapping[str, Any]) -> GPT2Config:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a GPT-2 here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    known = KEYS["gpt2"]
    known.check(values)
    sizes = {ours: size(values, theirs) for ours, theirs in _SIZES.items()}
    config = known.build(
        GPT2Config,
        **sizes,
        hidden_dim=size(values, "n_inner", 4 * sizes["dim"]),
        norm_eps=number(values, "layer_norm_epsilon"),
        tie_embeddings=truth(values, "tie_word_embeddings", True),
    )
    for other in ("n_ctx", "max_position_embeddings"):
        only(values, other, config.max_seq_len)
    return config
