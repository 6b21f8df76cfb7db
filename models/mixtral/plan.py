"""The plan that cuts Mixtral: one value, for any mesh."""

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

from ..layers.plans import MoEPlan, outermost
from .model import MixtralConfig


def plan(model: MixtralConfig, parallel: Parallel) -> Plan:
    """Return the plan of a Mixtral for these degrees."""
    # The layout of the residual stream between layers, (B, L, D) over tp.
    stream = Shard(1) if parallel.sequence else Replicate()
    moe = MoEPlan("layers.*.moe", stream, parallel.tp)
    norms = ["layers.*.attention_norm", "layers.*.ffn_norm", "norm"]
    ends = ["tok_embeddings", "norm", "output"]
    return Plan(
        tensor={
            "tok_embeddings": LocalEmbedding(stream),
            **({norm: LocalNorm() for norm in norms} if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream, inputs=4),
            "layers.*.attention.wq": LocalColwise(),
            "layers.*.attention.w[kv]": LocalHeads(model.n_kv_heads),
            "layers.*.attention.wo": LocalRowwise(stream),
            **moe.tensor,
            "output": LocalOutput(stream, sharded=parallel.loss),
        },
        context={"layers.*.attention.core": ContextParallel(parallel.cp_method, parallel.cp_balance)}
        | moe.context,
        expert=moe.expert,
        replicate=[] if parallel.sequence else norms,
        # A tied weight must be in one unit.
        shard=["layers.*", ends] if model.tie_embeddings else [ends[0], "layers.*", ends[1:]],
        checkpoint=["layers.*"],
        compile=moe.compile,
        float8=["layers.*.attention", "layers.*.attention.w[qkvo]", *moe.float8],
        float8_except=outermost(model.n_layers),
        pipeline=Pipeline(first=ends[:1], layers="layers", last=ends[1:]),
        heads=(model.n_heads, model.n_kv_heads),
        output=ends[2],
    )
