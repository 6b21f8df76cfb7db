"""The plan that cuts Llama: one value, for any mesh."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from compose import Parallel, Pipeline, Plan
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.local_parallel import (
    LocalColwise,
    LocalHeads,
    LocalInput,
    LocalNorm,
    LocalRowwise,
    LocalVector,
    LocalWideNorm,
)
from compose.parallel.vocabulary_parallel import LocalEmbedding, LocalOutput

from ..layers.plans import feed_forward, float8_feed_forward, outermost
from .config import LlamaConfig
from .model import norms_of


def plan(model: LlamaConfig, parallel: Parallel) -> Plan:
    """Return the plan of a Llama for these degrees."""
    # The layout of the residual stream between layers, (B, L, D) over tp.
    stream = Shard(1) if parallel.sequence else Replicate()
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
            **_qk_norms(model),
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


def _qk_norms(model: LlamaConfig) -> dict[str, ParallelStyle]:
    """Return the styles of the norms of queries and keys."""
    names = {"q": model.n_heads, "k": model.n_kv_heads}
    if model.qk_norm == "width":
        return {f"layers.*.attention.{one}_norm": LocalWideNorm(heads) for one, heads in names.items()}
    # They are whole and run on this rank's heads, so their gradients are summed over tp.
    return (
        {"layers.*.attention.[qk]_norm": LocalNorm(sequence_dim=2)} if model.qk_norm != "none" else {}
    )
