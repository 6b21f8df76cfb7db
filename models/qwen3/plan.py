"""The plan that cuts Qwen3: one value, for any mesh."""

from torch.distributed.tensor import Replicate, Shard

from compose import Parallel, Pipeline, Plan
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.local_parallel import (
    LocalColwise,
    LocalHeads,
    LocalInput,
    LocalNorm,
    LocalRowwise,
)
from compose.parallel.vocabulary_parallel import LocalEmbedding, LocalOutput

from ..layers.plans import MoEPlan, feed_forward, float8_feed_forward, outermost, qk_norms
from .model import Qwen3Config


def plan(model: Qwen3Config, parallel: Parallel) -> Plan:
    """Return the plan of a Qwen3 for these degrees."""
    # The layout of the residual stream between layers, (B, L, D) over tp.
    stream = Shard(1) if parallel.sequence else Replicate()
    moe = MoEPlan("layers.*.moe", stream, parallel.tp, model.shared_width, model.shared_gate)
    hidden = feed_forward("layers.*.feed_forward", stream, model.hidden_dim % parallel.tp == 0)
    has_dense, has_moe = (
        any(model.is_dense(layer) is kind for layer in range(model.n_layers)) for kind in (True, False)
    )
    norms = ["layers.*.attention_norm", "layers.*.ffn_norm", "norm"]
    ends = ["tok_embeddings", "norm", "output"]
    # Constant factors, without weights.
    first = ends[:1] + (["embedding_scale"] if model.embedding_scale != 1 else [])
    last = ends[1:] + (["logit_scale"] if model.logit_scale != 1 else [])
    compiled = ["layers.*"]
    if has_moe:
        compiled = moe.compile + (["layers.*.feed_forward"] if has_dense else [])
    return Plan(
        tensor={
            "tok_embeddings": LocalEmbedding(stream),
            **({norm: LocalNorm() for norm in norms} if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream, inputs=4),
            "layers.*.attention.wq": LocalColwise(),
            "layers.*.attention.w[kv]": LocalHeads(model.n_kv_heads),
            **qk_norms(model.qk_norm, model.n_heads, model.n_kv_heads),
            "layers.*.attention.wo": LocalRowwise(stream),
            **(hidden if has_dense else {}),
            **(moe.tensor if has_moe else {}),
            "output": LocalOutput(stream, sharded=parallel.loss),
        },
        context={"layers.*.attention.core": ContextParallel(parallel.cp_method, parallel.cp_balance)}
        | (moe.context if has_moe else {}),
        expert=moe.expert if has_moe else {},
        replicate=[] if parallel.sequence else norms,
        # A tied weight must be in one unit.
        shard=["layers.*", ends] if model.tie_embeddings else [ends[0], "layers.*", ends[1:]],
        checkpoint=["layers.*"],
        compile=compiled,
        float8=["layers.*.attention", "layers.*.attention.w[qkvo]"]
        + (float8_feed_forward("layers.*.feed_forward") if has_dense else [])
        + (moe.float8 if has_moe else []),
        float8_except=outermost(model.n_layers),
        pipeline=Pipeline(first=first, layers="layers", last=last),
        heads=(model.n_heads, model.n_kv_heads),
        output=ends[2],
    )
