"""The plan that cuts Llama: one value, for any mesh."""

from compose import Parallel, Pipeline, Plan
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.local_parallel import (
    LocalColwise,
    LocalHeads,
    LocalInput,
    LocalNorm,
    LocalRowwise,
    LocalVector,
)
from compose.parallel.vocabulary_parallel import LocalEmbedding, LocalOutput

from ..layers.plans import feed_forward, float8_feed_forward, outermost, qk_norms, residual_stream
from .config import LlamaConfig
from .model import norms_of


def plan(model: LlamaConfig, parallel: Parallel) -> Plan:
    """Return the plan of a Llama for these degrees."""
    stream = residual_stream(parallel)
    norms = [*(f"layers.*.{norm}" for norm in norms_of(model)), "norm"]
    ends = ["tok_embeddings", "norm", "output"]
    # Constant factors, without weights.
    first = ends[:1] + (["embedding_scale"] if model.embedding_scale != 1 else [])
    last = ends[1:] + (["logit_scale"] if model.logit_scale != 1 else [])
    return Plan(
        tensor={
            "tok_embeddings": LocalEmbedding(stream),
            **({norm: LocalNorm() for norm in norms} if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream, inputs=4),
            "layers.*.attention.wq": LocalColwise(),
            "layers.*.attention.wk": LocalHeads(model.n_kv_heads),
            "layers.*.attention.wv": LocalHeads(model.n_kv_heads),
            **qk_norms(model.qk_norm, model.n_heads, model.n_kv_heads),
            "layers.*.attention.wo": LocalRowwise(stream),
            **({"layers.*.attention.sinks": LocalVector()} if model.sinks else {}),
            **feed_forward("layers.*.feed_forward", stream, model.hidden_dim % parallel.tp == 0),
            "output": LocalOutput(stream, sharded=parallel.loss),
        },
        context={"layers.*.attention.core": ContextParallel(parallel.cp_method, parallel.cp_balance)},
        replicate=[] if parallel.sequence else norms,
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
        pipeline=Pipeline(first=first, layers="layers", last=last),
        heads=(model.n_heads, model.n_kv_heads),
        output=ends[2],
    )
