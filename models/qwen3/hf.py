"""Names of the Hugging Face weights (``Qwen3ForCausalLM``, ``Qwen3MoeForCausalLM``); no tensor needs
reshaping."""

import re

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


def hf_name(name: str) -> str:
    """Hugging Face's name of our parameter ``name``: 'layers.3.ffn_norm.weight' and so on.

    Theirs are not stacked: '{}' in the name of our experts' weight stands for the index of the expert,
    whose part ``weight[index]`` is.
    """
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    prefix, part = (f"model.layers.{layer[1]}.", layer[2]) if layer else ("", name)
    return prefix + _MODULES[part.removesuffix(".weight")] + ".weight"
