"""The plan that cuts Gemma 3: one value, for any mesh."""

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

from ..layers.plans import feed_forward, float8_feed_forward, outermost, qk_norms
from .model import Gemma3Config


def plan(model: Gemma3Config, parallel: Parallel) -> Plan:
    """Return the plan of a Gemma 3 for these degrees."""
    # The layout of the residual stream between layers, (B, L, D) over tp.
    stream = Shard(1) if parallel.sequence else Replicate()
    # Those after attention and the feed-forward network run on the stream too: w2 and wo have brought
    # it into its layout.
    of_layers = ["attention_norm", "ffn_norm"]
    of_layers += ["attention_post_norm", "ffn_post_norm"] if model.post_norms else []
    norms = [*(f"layers.*.{norm}" for norm in of_layers), "norm"]
    ends = ["tok_embeddings", "norm", "output"]
    return Plan(
        tensor={
            "tok_embeddings": LocalEmbedding(stream),
            **({norm: LocalNorm() for norm in norms} if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream, inputs=4),
            "layers.*.attention.wq": LocalColwise(),
            "layers.*.attention.w[kv]": LocalHeads(model.n_kv_heads),
            **qk_norms("head" if model.qk_norm else "none", model.n_heads, model.n_kv_heads),
            "layers.*.attention.wo": LocalRowwise(stream),
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
        pipeline=Pipeline(
            first=[ends[0], "embedding_scale"], layers="layers", last=[*ends[1:], "softcap"]
        ),
        heads=(model.n_heads, model.n_kv_heads),
        # Where logits are capped, they are not the projection's output, which this promises.
        output="" if model.final_softcap else ends[2],
    )
