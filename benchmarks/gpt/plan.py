"""The plan that cuts GPT as Megatron-LM does."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from compose import Parallel, Pipeline, Plan
from compose.parallel.local_parallel import LocalColwise, LocalInput, LocalNorm, LocalRowwise

from .model import GPTConfig


def plan(model: GPTConfig, parallel: Parallel) -> Plan:
    """Return the plan of a GPT for these degrees.

    Args:
        model: The model's config.
        parallel: The table [parallel].
    """
    stream = Shard(1) if parallel.sequence else Replicate()
    norms = ["layers.*.attention_norm", "layers.*.ffn_norm", "norm"]
    return Plan(
        tensor={
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            **({norm: LocalNorm() for norm in norms} if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream),
            "layers.*.attention.wqkv": LocalColwise(),
            "layers.*.attention.wo": LocalRowwise(stream),
            "layers.*.feed_forward": LocalInput(stream),
            "layers.*.feed_forward.w1": LocalColwise(),
            "layers.*.feed_forward.w2": LocalRowwise(stream),
            "output": ColwiseParallel(
                input_layouts=stream, output_layouts=Shard(2), use_local_output=False
            ),
        },
        replicate=[] if parallel.sequence else norms,
        shard=["tok_embeddings", "layers.*", ["norm", "output"]],
        checkpoint=["layers.*.attention.core" if model.recompute_core else "layers.*"],
        pipeline=Pipeline(first=["tok_embeddings"], layers="layers", last=["norm", "output"]),
        heads=(model.n_heads, model.n_heads),
        output="output",
    )
