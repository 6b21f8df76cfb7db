"""The plan that cuts GPT-2: one value, for any mesh."""

from compose import Parallel, Pipeline, Plan
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.local_parallel import (
    LocalColwise,
    LocalHeads,
    LocalInput,
    LocalNorm,
    LocalPositions,
    LocalRowwise,
)
from compose.parallel.vocabulary_parallel import LocalEmbedding, LocalOutput

from ..layers.plans import feed_forward, float8_feed_forward, outermost, residual_stream
from .model import GPT2Config


def plan(model: GPT2Config, parallel: Parallel) -> Plan:
    """Return the plan of a GPT-2 for these degrees."""
    stream = residual_stream(parallel)
    # Their parameters are whole on every rank. With a stream that is cut, each rank has its own tokens.
    norms = ["layers.*.attention_norm", "layers.*.ffn_norm", "norm"]
    positions = "embeddings.positions"
    own_tokens = {norm: LocalNorm() for norm in norms} | {positions: LocalPositions()}
    ends = ["embeddings", "norm", "output"]
    return Plan(
        tensor={
            "embeddings.tokens": LocalEmbedding(stream),
            **(own_tokens if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream, inputs=2),
            "layers.*.attention.wq": LocalColwise(),
            "layers.*.attention.w[kv]": LocalHeads(model.kv_heads),
            "layers.*.attention.wo": LocalRowwise(stream),
            **feed_forward("layers.*.feed_forward", stream, model.hidden_dim % parallel.tp == 0),
            "output": LocalOutput(stream, sharded=parallel.loss),
        },
        context={"layers.*.attention.core": ContextParallel(parallel.cp_method, parallel.cp_balance)},
        replicate=[] if parallel.sequence else [*norms, positions],
        # A tied weight must be in one unit.
        shard=["layers.*", ends] if model.tie_embeddings else [ends[0], "layers.*", ends[1:]],
        checkpoint=["layers.*"],
        compile=["layers.*"],
        float8=[
            "layers.*.attention",
            "layers.*.attention.w[qkvo]",
            *float8_feed_forward("layers.*.feed_forward"),
        ],
        float8_except=outermost(model.n_layers),
        pipeline=Pipeline(first=ends[:1], layers="layers", last=ends[1:]),
        heads=(model.n_heads, model.kv_heads),
        output=ends[2],
    )
