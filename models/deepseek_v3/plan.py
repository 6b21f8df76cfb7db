"""The plan that cuts DeepSeek-V3: one value, for any mesh."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from compose import Parallel, Plan
from compose.parallel.tensor_parallel import SharedByHeads

from ..layers.plans import MoEPlan, decoder, residual_stream
from .model import DeepSeekV3Config


def plan(model: DeepSeekV3Config, parallel: Parallel) -> Plan:
    """Return the plan of a DeepSeek-V3 for these degrees."""
    stream = residual_stream(parallel)
    # PyTorch takes its default, Shard(-1), for another layout, and would redistribute to it.
    columns = ColwiseParallel(output_layouts=Shard(2))
    attention: dict[str, ParallelStyle] = {
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(stream, None, None, None),
            desired_input_layouts=(Replicate(), None, None, None),
        ),
        f"layers.*.attention.{'wq_b' if model.q_rank else 'wq'}": columns,
        "layers.*.attention.wkv_b": columns,
        "layers.*.attention.rope_key": SharedByHeads(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=stream),
    }
    # The latents are narrow, and every rank's heads read all of them. So every rank computes them.
    latents = ["wkv_a", "kv_norm", *(["wq_a", "q_norm"] if model.q_rank else [])]
    dense = [model.is_dense(layer) for layer in range(model.n_layers)]
    moe = MoEPlan("layers.*.moe", stream, parallel.tp, model.shared_width)
    return decoder(
        model,
        parallel,
        attention,
        (model.n_heads, model.n_heads),
        hidden_dim=model.hidden_dim if any(dense) else 0,
        moe=None if all(dense) else moe,
        whole=[f"layers.*.attention.{name}" for name in latents],
    )
