"""Hugging Face's names that most of its decoders share. A model's hf.py says where its own differ."""

import re
from typing import Any

MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
QK_NORMS = {f"attention.{one}_norm": f"self_attn.{one}_norm" for one in ("q", "k")}
FEED_FORWARD = {
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
# "{}" stands for the index of an expert, whose part of our stacked weight is weight[index].
EXPERTS = {
    "moe.router.gate": "mlp.gate",
    "moe.experts.w1": "mlp.experts.{}.gate_proj",
    "moe.experts.w2": "mlp.experts.{}.down_proj",
    "moe.experts.w3": "mlp.experts.{}.up_proj",
}
SHARED_EXPERTS = {
    "moe.shared.w1": "mlp.shared_experts.gate_proj",
    "moe.shared.w2": "mlp.shared_experts.down_proj",
    "moe.shared.w3": "mlp.shared_experts.up_proj",
}
FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# The fields of experts that only training needs, under our own names, and what absent keys say.
NOT_TRAINED = {"balance_loss": "batch", "z_weight": 0.0, "capacity_factor": 0.0}
TRAINING = {one: one for one in NOT_TRAINED}
# A router of a softmax alone: without groups, a scale, or biases that follow the load.
PLAIN_ROUTER: dict[str, Any] = {
    "scoring": "softmax",
    "normalize_weights": True,
    "n_groups": 1,
    "route_scale": 1.0,
    "bias_rate": 0.0,
}
# The keys of layers of multi-token prediction, which no model here has.
PREDICTION = ("num_nextn_predict_layers", "num_mtp_layers")
# Scales, under the keys that Granite gave them.
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def in_layer(name: str) -> tuple[str, str]:
    """Return the start of Hugging Face's name, such as 'model.layers.3.', and our name after it."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return (f"model.layers.{layer[1]}.", layer[2]) if layer else ("", name)
