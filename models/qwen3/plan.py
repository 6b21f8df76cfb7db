"""The plan that cuts Qwen3: one value, for any mesh."""

from compose import Parallel, Plan

from ..layers.plans import MoEPlan, decoder, grouped_attention, qk_norms, residual_stream
from .model import Qwen3Config


def plan(model: Qwen3Config, parallel: Parallel) -> Plan:
    """Return the plan of a Qwen3 for these degrees."""
    stream = residual_stream(parallel)
    dense = [model.is_dense(layer) for layer in range(model.n_layers)]
    moe = MoEPlan("layers.*.moe", stream, parallel.tp, model.shared_width, model.shared_gate)
    return decoder(
        model,
        parallel,
        grouped_attention(stream, model.n_kv_heads)
        | qk_norms(model.qk_norm, model.n_heads, model.n_kv_heads),
        (model.n_heads, model.n_kv_heads),
        hidden_dim=model.hidden_dim if any(dense) else 0,
        moe=None if all(dense) else moe,
        first=["embedding_scale"] if model.embedding_scale != 1 else [],
        last=["logit_scale"] if model.logit_scale != 1 else [],
    )
