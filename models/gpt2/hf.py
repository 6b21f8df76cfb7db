"""Hugging Face's weights and config.json of GPT-2, OPT and StarCoder (``GPTBigCodeForCausalLM``).

GPT-2's linear layers hold the transposed weight (D, N). Its one layer, and StarCoder's, makes queries,
keys and values.
"""

import re
from collections.abc import Mapping
from typing import Any

from compose.checkpoint.hf_stored import Stored

from ..layers.kinds import Kind, kind_of
from ..layers.published import keys, only, size
from .model import GPT2Config

_MODULES = {
    "base": "transformer.",  # older files, as the published ones, leave it out
    "layers": "h",
    "embeddings.tokens": "wte",
    "embeddings.positions": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "attention.wq": "attn.c_attn",
    "attention.wk": "attn.c_attn",
    "attention.wv": "attn.c_attn",
    "attention.wo": "attn.c_proj",
    "ffn_norm": "ln_2",
    "feed_forward.w1": "mlp.c_fc",
    "feed_forward.w2": "mlp.c_proj",
}
_QKV = ("attention.wq", "attention.wk", "attention.wv")
_FIELDS = {
    "vocab_size": "vocab_size",
    "max_seq_len": "n_positions",
    "dim": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "hidden_dim": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
}
_OPT_FIELDS = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "ffn_dim",
    "tie_embeddings": "tie_word_embeddings",
}
_GELU: dict[str, Any] = {"activation_function": ("gelu_new", "gelu_pytorch_tanh")}
_GELU["scale_attn_weights"] = (True,)
# Dropout, of which there is none here, changes nothing outside of training. The others are of a head
# that classifies sequences.
_BESIDES = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"),
    *("summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
)
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_WORDS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_OFF = {"n_kv_heads": 0, "activation": "gelu_tanh", "position_offset": 0}
# Other names of n_positions: an older one, and one that transformers takes as well.
_POSITIONS = ("n_ctx", "max_position_embeddings")
KINDS = {
    "gpt2": Kind(
        "GPT2LMHeadModel",
        keys(
            _FIELDS,
            _POSITIONS,
            _GELU | {"reorder_and_upcast_attn": (False,), "scale_attn_by_inverse_layer_idx": (False,)},
            # Older files have these: tokens and a cache of the first GPT.
            (*_BESIDES, "n_special", "output_past", "predict_special_tokens"),
            rope=False,
        ),
        _OFF,
        _MODULES,
        {"tie_embeddings": True},
        writes=_NO_DROPOUT
        | {"activation_function": "gelu_new", "scale_attn_weights": True}
        | {"reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False},
    ),
    "gpt_bigcode": Kind(
        "GPTBigCodeForCausalLM",
        keys(
            _FIELDS | {"activation": "activation_function"},
            _POSITIONS,
            # With more heads of keys, a file has queries, keys and values of each head in turn.
            {"scale_attn_weights": (True,), "multi_query": (True,), "num_key_value_heads": (1,)},
            (
                *(*_BESIDES, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
                *("inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache"),
                *("validate_runner_input", "runner_max_sequence_length"),
            ),
            rope=False,
        ),
        {"n_kv_heads": 1, "position_offset": 0},
        _MODULES,
        {"tie_embeddings": True, "norm_eps": 1e-5},
        writes=_NO_DROPOUT | {"scale_attn_weights": True, "multi_query": True},
    ),
    "opt": Kind(
        "OPTForCausalLM",
        keys(
            _OPT_FIELDS,
            ("word_embed_proj_dim",),
            {
                "activation_function": ("relu",),
                "do_layer_norm_before": (True,),
                "_remove_final_layer_norm": (False,),
                "enable_bias": (True,),
                "layer_norm_elementwise_affine": (True,),
            },
            ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "init_std"),
            rope=False,
        ),
        {"n_kv_heads": 0, "activation": "relu", "position_offset": 2, "norm_eps": 1e-5},
        {
            "base": "model.",
            "layers": "decoder.layers",
            "embeddings.tokens": "decoder.embed_tokens",
            "embeddings.positions": "decoder.embed_positions",
            "norm": "decoder.final_layer_norm",
            "attention_norm": "self_attn_layer_norm",
            "attention.wq": "self_attn.q_proj",
            "attention.wk": "self_attn.k_proj",
            "attention.wv": "self_attn.v_proj",
            "attention.wo": "self_attn.out_proj",
            "ffn_norm": "final_layer_norm",
            "feed_forward.w1": "fc1",
            "feed_forward.w2": "fc2",
        },
        {"tie_embeddings": True},
        writes={"activation_function": "relu", "do_layer_norm_before": True, "dropout": 0.0},
    ),
}
MODEL_TYPES = tuple(KINDS)


def hf_name(name: str, config: GPT2Config | None = None) -> Stored:
    """Return the place of our parameter in Hugging Face's files; KeyError if they have none."""
    kind = kind_of(KINDS, config, strict=False) if config else "gpt2"
    modules = KINDS[kind].modules
    module, _, own = name.rpartition(".")
    if module == "output":
        return Stored("lm_head.weight")
    base = modules["base"]
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    prefix, part = (f"{base}{modules['layers']}.{layer[1]}.", layer[2]) if layer else (base, module)
    linear = own == "weight" and part.startswith(("attention.", "feed_forward.")) and kind == "gpt2"
    theirs = f"{prefix}{modules[part]}.{own}"
    if part in _QKV and kind != "opt":
        rows = (config.dim, config.head_dim, config.head_dim) if config and config.n_kv_heads else ()
        return Stored(theirs, linear, _QKV.index(part), len(_QKV), base, rows=rows)
    return Stored(theirs, linear, base=base)


def hf_config(config: GPT2Config) -> dict[str, Any]:
    """Return the config.json of a model of this shape, with the keys of the published ones.

    It has no dropout, as the models here. Raises ValueError for options that no architecture has.
    """
    c, name = config, kind_of(KINDS, config)
    values = KINDS[name].write(name, c)
    if name == "opt":
        return values | {"word_embed_proj_dim": c.dim}
    if name == "gpt_bigcode":
        values["activation_function"] = next(
            one for one, ours in _WORDS.items() if ours == c.activation
        )
    return values | {
        "n_ctx": c.max_seq_len,
        "n_inner": None if c.hidden_dim == 4 * c.dim else c.hidden_dim,
    }


def config_from_hf(values: Mapping[str, Any]) -> GPT2Config:
    """Return the config for a config.json, the inverse of :func:`hf_config`.

    Raises ValueError, with key and value, for what a GPT-2 here cannot have.
    """
    only(values, "model_type", *MODEL_TYPES)
    name = values.get("model_type") or "gpt2"
    kind = KINDS[name]
    kind.keys.check(values)
    result = kind.read(GPT2Config, values, ("hidden_dim", "activation"))
    if name == "gpt_bigcode":
        only(values, "activation_function", *_WORDS)
        result["activation"] = _WORDS[values.get("activation_function") or "gelu_pytorch_tanh"]
    key = kind.keys.fields["hidden_dim"]
    result["hidden_dim"] = size(values, key, None if name == "opt" else 4 * result["dim"])
    config = kind.keys.build(GPT2Config, **result)
    if name == "opt":
        only(values, "word_embed_proj_dim", config.dim)
        return config
    for other in _POSITIONS:
        only(values, other, config.max_seq_len)
    return config
