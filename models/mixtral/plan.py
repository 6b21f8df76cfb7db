"""The plan that cuts Mixtral: one value, for any mesh."""

from compose import Parallel, Plan

from ..layers.plans import MoEPlan, decoder, grouped_attention, residual_stream
from .model import MixtralConfig


def plan(model: MixtralConfig, parallel: Parallel) -> Plan:
    """Return the plan of a Mixtral for these degrees."""
    stream = residual_stream(parallel)
    return decoder(
        model,
        parallel,
        grouped_attention(stream, model.n_kv_heads),
        (model.n_heads, model.n_kv_heads),
        moe=MoEPlan("layers.*.moe", stream, parallel.tp),
    )
