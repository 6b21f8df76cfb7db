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
from models.layers.plans import MoEPlan, feed_forward, float8_feed_forward, outermost

from .model import Qwen3Config


def plan(model: Qwen3Config, parallel: Parallel) -> Plan:
    """Return the plan of a Qwen3 for these degrees.

    Args:
        model: The model's config.
        parallel: The table [parallel].

    Returns:
        The plan.
    """
    # The layout of the residual stream between layers, (B, L, D) over tp.
    stream = Shard(1) if parallel.sequence else Replicate()
    moe = MoEPlan("layers.*.moe", stream, parallel.tp)
    hidden = feed_forward("layers.*.feed_forward", stream, model.hidden_dim % parallel.tp == 0)
    norms = ["layers.*.attention_norm", "layers.*.ffn_norm", "norm"]
    ends = ["tok_embeddings", "norm", "output"]
    return Plan(
        tensor={
            "tok_embeddings": LocalEmbedding(stream),
            **({norm: LocalNorm() for norm in norms} if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream, inputs=4),
            "layers.*.attention.wq": LocalColwise(),
            "layers.*.attention.w[kv]": LocalHeads(model.n_kv_heads),
            # These norms are whole and run on this rank's heads (B, L, heads, head_dim), so their
            # gradients are summed over tp.
            "layers.*.attention.[qk]_norm": LocalNorm(sequence_dim=2),
            "layers.*.attention.wo": LocalRowwise(stream),
            **(moe.tensor if model.n_experts else hidden),
            "output": LocalOutput(stream, sharded=parallel.loss),
        },
        context={"layers.*.attention.core": ContextParallel(parallel.cp_method, parallel.cp_balance)}
        | (moe.context if model.n_experts else {}),
        expert=moe.expert if model.n_experts else {},
        replicate=[] if parallel.sequence else norms,
        # A tied weight must be in one unit.
        shard=["layers.*", ends] if model.tie_embeddings else [ends[0], "layers.*", ends[1:]],
        checkpoint=["layers.*"],
        compile=moe.compile if model.n_experts else ["layers.*"],
        float8=["layers.*.attention", "layers.*.attention.w[qkvo]"]
        + (moe.float8 if model.n_experts else float8_feed_forward("layers.*.feed_forward")),
        float8_except=outermost(model.n_layers),
        pipeline=Pipeline(first=ends[:1], layers="layers", last=ends[1:]),
        heads=(model.n_heads, model.n_kv_heads),
        output=ends[2],
    )
