"""The plan that cuts a diffusion transformer: one value, for any mesh."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput

from compose import Parallel, Pipeline, Plan
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.local_parallel import LocalColwise, LocalInput, LocalLinear, LocalRowwise
from compose.parallel.tensor_parallel import SharedByHeads

from ..layers.plans import feed_forward, float8_feed_forward, outermost, residual_stream
from .model import DiTConfig

_CONDITIONS = ["layers.*.condition", "final.condition"]
_WHOLE = ["time_in", "time_out", "label", "modulation"]


def plan(model: DiTConfig, parallel: Parallel) -> Plan:
    """Return the plan of a diffusion transformer for these degrees.

    Time and class are the same on all ranks of tp, which embed them alike. With ``sequence`` each rank
    uses the result for its own patches, so the gradient is summed there.
    """
    stream = residual_stream(parallel)
    ends = ["embedding.projection", "final.projection"]
    by_patches = {
        "embedding": PrepareModuleInput(
            input_layouts=(Replicate(), Replicate()),
            desired_input_layouts=(Shard(1), Shard(1)),
            use_local_output=True,
        ),
        **{end: LocalLinear() for end in ends},
        **{f"{condition}.shared": SharedByHeads() for condition in _CONDITIONS},
        "final": PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=True
        ),
    }
    return Plan(
        tensor={
            **(by_patches if parallel.sequence else {}),
            "layers.*.attention": LocalInput(stream, inputs=2),
            "layers.*.attention.w[qkv]": LocalColwise(),
            "layers.*.attention.wo": LocalRowwise(stream),
            **feed_forward("layers.*.feed_forward", stream, model.hidden_dim % parallel.tp == 0),
        },
        context={"layers.*.attention.core": ContextParallel(parallel.cp_method, parallel.cp_balance)},
        replicate=[
            *(f"{condition}.{part}" for condition in _CONDITIONS for part in _WHOLE),
            *([] if parallel.sequence else ends),
        ],
        shard=["embedding", "layers.*", "final"],
        checkpoint=["layers.*"],
        compile=["layers.*"],
        float8=[
            "layers.*.attention",
            "layers.*.attention.w[qkvo]",
            *float8_feed_forward("layers.*.feed_forward"),
        ],
        float8_except=outermost(model.n_layers),
        # A layer's modulation enters the stream at six places.
        pipeline=Pipeline(["embedding"], "layers", ["final"], two_parts=False),
        heads=(model.n_heads, model.n_heads),
    )
