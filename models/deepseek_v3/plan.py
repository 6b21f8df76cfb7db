"""The plan that cuts DeepSeek-V3: one value, for any mesh."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)

from compose import Parallel, Pipeline, Plan
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.local_parallel import LocalNorm
from compose.parallel.tensor_parallel import SharedByHeads
from compose.parallel.vocabulary_parallel import LocalEmbedding, LocalOutput

from ..layers.plans import MoEPlan, feed_forward, float8_feed_forward, outermost
from .model import DeepSeekV3Config


def plan(model: DeepSeekV3Config, parallel: Parallel) -> Plan:
    """Return the plan of a DeepSeek-V3 for these degrees."""
    # The layout of the residual stream between layers, (B, L, D) over tp.
    stream = Shard(1) if parallel.sequence else Replicate()
    # PyTorch takes its default, Shard(-1), for another layout, and would redistribute to it.
    columns = ColwiseParallel(output_layouts=Shard(2))
    gather = PrepareModuleInput(
        input_layouts=(stream, None, None, None),
        desired_input_layouts=(Replicate(), None, None, None),
    )
    shared = model.n_shared_experts * model.expert_dim
    moe = MoEPlan("layers.*.moe", stream, parallel.tp, shared)
    dense = feed_forward("layers.*.feed_forward", stream, model.hidden_dim % parallel.tp == 0)
    has_dense, has_moe = (
        any(model.is_dense(layer) is kind for layer in range(model.n_layers)) for kind in (True, False)
    )
    norms = ["layers.*.attention_norm", "layers.*.ffn_norm", "norm"]
    # The latents are narrow, and every rank's heads read all of them. So every rank computes them.
    latents = ["wkv_a", "kv_norm", *(["wq_a", "q_norm"] if model.q_rank else [])]
    compiled = ["layers.*"]
    if has_moe:
        compiled = moe.compile + (["layers.*.feed_forward"] if has_dense else [])
    ends = ["tok_embeddings", "norm", "output"]
    return Plan(
        tensor={
            "tok_embeddings": LocalEmbedding(stream),
            **({norm: LocalNorm() for norm in norms} if parallel.sequence else {}),
            "layers.*.attention": gather,
            f"layers.*.attention.{'wq_b' if model.q_rank else 'wq'}": columns,
            "layers.*.attention.wkv_b": columns,
            "layers.*.attention.rope_key": SharedByHeads(),
            "layers.*.attention.wo": RowwiseParallel(output_layouts=stream),
            **(dense if has_dense else {}),
            **(moe.tensor if has_moe else {}),
            "output": LocalOutput(stream, sharded=parallel.loss),
        },
        replicate=[f"layers.*.attention.{name}" for name in latents]
        + ([] if parallel.sequence else norms),
        context={"layers.*.attention.core": ContextParallel(parallel.cp_method, parallel.cp_balance)}
        | (moe.context if has_moe else {}),
        expert=moe.expert if has_moe else {},
        # A tied weight must be in one unit.
        shard=["layers.*", ends] if model.tie_embeddings else [ends[0], "layers.*", ends[1:]],
        checkpoint=["layers.*"],
        compile=compiled,
        float8=["layers.*.attention", "layers.*.attention.w*"]
        + (float8_feed_forward("layers.*.feed_forward") if has_dense else [])
        + (moe.float8 if has_moe else []),
        float8_except=outermost(model.n_layers),
        pipeline=Pipeline(first=ends[:1], layers="layers", last=ends[1:]),
        heads=(model.n_heads, model.n_heads),
        output=ends[2],
    )
