"""The plan that cuts gpt-oss: one value, for any mesh."""

from compose import Parallel, Plan
from compose.parallel.local_parallel import LocalVector

from ..layers.plans import MoEPlan, decoder, grouped_attention, residual_stream
from .model import GptOssConfig


def plan(model: GptOssConfig, parallel: Parallel) -> Plan:
    """Return the plan of a gpt-oss for these degrees."""
    stream = residual_stream(parallel)
    return decoder(
        model,
        parallel,
        grouped_attention(stream, model.n_kv_heads) | {"layers.*.attention.sinks": LocalVector()},
        (model.n_heads, model.n_kv_heads),
        moe=MoEPlan("layers.*.moe", stream, parallel.tp),
    )
