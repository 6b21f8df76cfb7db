"""Names of the Hugging Face weights (``DeepseekV3ForCausalLM``, and V2's); none needs reshaping."""

import re

_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.router.gate": "mlp.gate",
    "moe.experts.w1": "mlp.experts.{}.gate_proj",
    "moe.experts.w2": "mlp.experts.{}.down_proj",
    "moe.experts.w3": "mlp.experts.{}.up_proj",
    "moe.shared.w1": "mlp.shared_experts.gate_proj",
    "moe.shared.w2": "mlp.shared_experts.down_proj",
    "moe.shared.w3": "mlp.shared_experts.up_proj",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of our parameter ``name``: 'layers.3.ffn_norm.weight' and so on.

    Theirs are not stacked: '{}' in the name of our experts' weight stands for the index of the expert,
    whose part ``weight[index]`` is. The router's bias is a buffer here as there.
    """
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if not layer:
        return _MODULES[name.removesuffix(".weight")] + ".weight"
    prefix, part = f"model.layers.{layer[1]}.", layer[2]
    if part == "moe.router.bias":
        return prefix + "mlp.gate.e_score_correction_bias"
    return prefix + _MODULES[part.removesuffix(".weight")] + ".weight"
