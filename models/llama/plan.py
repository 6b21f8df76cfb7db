"""The plan that cuts Llama: one value, for any mesh."""

from torch.distributed.tensor import Replicate, Shard

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
from models.layers.plans import outermost

from .model import LlamaConfig


def plan(model: LlamaConfig, parallel: Parallel) -> Plan:
    """Return the plan of a Llama for these degrees.

    Args:
        model: The model's config.
        parallel: The table [parallel].

    Returns:
        The plan.
    """
    # The layout of the residual stream between layers, (B, L, D) over tp.
    stream = Shard(1) if parallel.sequence else Replicate()
    hidden = LocalColwise(even=model.hidden_dim % parallel.tp == 0)
    norms = ["layers.*.attention_norm", "layers.*.ffn_norm", "norm"]
    ends = ["tok_embeddings", "norm", "output"]
    return Plan(
        tensor={
            "tok_embeddings": LocalEmbedding(stream),
            **({norm: LocalNorm() for norm in norms} if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream, inputs=4),
            "layers.*.attention.wq": LocalColwise(),
            "layers.*.attention.wk": LocalHeads(model.n_kv_heads),
            "layers.*.attention.wv": LocalHeads(model.n_kv_heads),
            "layers.*.attention.wo": LocalRowwise(stream),
            **({"layers.*.attention.sinks": LocalVector()} if model.sinks else {}),
            "layers.*.feed_forward": LocalInput(stream),
            "layers.*.feed_forward.w1": hidden,
            "layers.*.feed_forward.w3": hidden,
            "layers.*.feed_forward.w2": LocalRowwise(stream),
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
            "layers.*.feed_forward",
            "layers.*.feed_forward.w[123]",
        ],
        float8_except=outermost(model.n_layers),
        pipeline=Pipeline(first=ends[:1], layers="layers", last=ends[1:]),
        heads=(model.n_heads, model.n_kv_heads),
        output=ends[2],
    )
