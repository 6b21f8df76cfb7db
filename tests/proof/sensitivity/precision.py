"""Faults in each precision: of logic, which runs in float64 too, and of rounding."""

from dataclasses import replace

from tests.proof.sensitivity.row import SHARDED, Keys, Row, table
from tests.support.helpers import FLOAT8_SHAPE

FLOAT8: Keys = {"precision__float8": "tensorwise"}
BFLOAT16: Keys = {"precision__param": "bfloat16"}
FLOAT16: Keys = {"precision__param": "float16"}
PURE_BFLOAT16: Keys = BFLOAT16 | {
    "precision__reduce": "bfloat16",
    "precision__master": "bfloat16",
    "precision__optimizer_state": "bfloat16",
}
REDUCED: dict[str, Keys] = {
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
    "float8": FLOAT8,
    "pure bfloat16": PURE_BFLOAT16,
}
# Gradients are exact, and what is kept between steps is not.
KEPT: Keys = SHARDED | {"precision__optimizer_state": "bfloat16", "train__seed": 3}
ROUTED: Keys = SHARDED | {
    "model__name": "qwen3",
    "model__preset": "debug_moe",
    "model__balance_weight": 0.1,
    "model__z_weight": 0.01,
}
LOGIC = table(
    """
[logic]
an auxiliary loss doubled | ROUTED | gradient | layers.*.moe.router.gate.weight
    in compose.parallel.expert_parallel:begin_step
    = tokens, loss_scale => = tokens // 2, loss_scale
no weight decay | SHARDED | update
    in compose.optim.optimizers:grouped with untouched='gradient/*'
    "weight_decay": rule.weight_decay} => "weight_decay": 0.0}
no clipping | SHARDED | update
    in compose.train.step:clip_grad_norm_ with untouched='gradient/*'
    .clamp(max=1.0) if max_norm > 0 else => .clamp(max=1.0) if max_norm > 1e9 else
no clipping at a limit that is far off | SHARDED train__max_norm=1000.0 | update
    in compose.train.step:clip_grad_norm_ with untouched='gradient/*'
    .clamp(max=1.0) if max_norm > 0 else => .clamp(max=1.0) if max_norm > 1e9 else
another beta2 | SHARDED | update
    in compose.optim.optimizers:_adamw with untouched='gradient/*'
    (options.beta1, options.beta2) => (options.beta1, options.beta2 + 0.01)
positions off by one on a rank | CP | gradient
    in compose.parallel.context_parallel:shard_sequence
    - pieces = value.chunk(count, 1)
    + value = value + rank * (name == 'positions'); pieces = value.chunk(count, 1)
""",
    globals(),
)["logic"]


def _in(precision: str, row: Row) -> Row:
    """The same fault, which the logic in float64 names."""
    return replace(
        row,
        name=f"{row.name}, {precision}",
        keys={**row.keys, **REDUCED[precision]},
        quantity=f"float64 {row.quantity}",
        untouched=row.untouched and (f"float64 {row.untouched[0]}", row.untouched[1]),
    )


def _not_applied(precision: str) -> Row:
    """The composition computes more exactly than it was asked to."""
    # In the run as it was asked for, and not in that of the logic.
    old = "precision.param_dtype,"
    new = "torch.float32 if precision.param in ('bfloat16', 'float16') else precision.param_dtype,"
    if precision == "float8":
        old, new = "tp, precision.float8,", 'tp, "off",'
    keys = SHARDED | REDUCED[precision] | {"precision__master": "float32"}
    name = f"{precision} is not applied"
    return Row(name, keys, "compose.apply:apply", old, new, "rounding")


FAULTS = table(
    """
[precision.param]
no bias correction in bfloat16 | KEPT | update
    in compose.optim.adamw:AdamW._update
    lr / (1 - beta1**step) => lr
ring sums dq in bfloat16 | CP precision__param=bfloat16 | float64 gradient | layers.*.attention.wq.weight
    in compose.ops.attention:GradientParts.__init__
    torch.promote_types(x.dtype, torch.float32) => torch.bfloat16
the gradient stays scaled | SHARDED precision__param=float16 | float64 update
    in compose.train.step:clip_grad_norm_ with untouched='float64 gradient/*'
    scale = clipped / loss_scale => scale = clipped
the norm stays scaled | SHARDED precision__param=float16 | grad_norm
    in compose.train.step:clip_grad_norm_
    .sqrt() / loss_scale => .sqrt()
the loss is not scaled | SHARDED precision__param=float16 | float64 gradient
    in compose.train.step:forward_backward
    count / loss_scale, => count,
an auxiliary loss is not scaled | ROUTED precision__param=float16 | float64 gradient | layers.*.moe.router.gate.weight
    in compose.parallel.expert_parallel:begin_step
    = tokens, loss_scale => = tokens, 1.0

[precision.reduce]
the sum of gradients in bfloat16, float32 | SHARDED | gradient
    in compose.apply:apply
    precision.reduce_dtype, => torch.bfloat16,
bfloat16 for the sum of gradients is not applied | SHARDED precision__reduce=bfloat16 | rounding
    in compose.apply:apply
    - precision.reduce_dtype,
    + torch.float32 if precision.reduce == 'bfloat16' else precision.reduce_dtype,

[precision.float8]
rowwise float8 is not applied | SHARDED precision__float8=rowwise | rounding
    in compose.apply:apply
    tp, precision.float8, => tp, "off",
what is gathered in 8 bits has another scale | FLOAT8_SHAPE TP | gradient
    in compose.memory.float8:send_as_bytes
    given._scale, => given._scale * 2,

[precision.master]
weights stay float32 between steps | PURE_BFLOAT16 SHARDED | initial weight | layers.*.attention.wq.weight
    in compose.apply:apply
    kept = precision.master_dtype if => kept = torch.float32 if precision.master == 'bfloat16' and

[precision.optimizer_state]
running means stay float32 | KEPT | rounding | all updates
    in compose.optim.optimizers:_adamw with untouched='gradient/*'
    settings.precision.state_dtype => max(settings.precision.state_dtype, torch.float32, key=lambda t: t.itemsize)
a mean is rounded to the nearest | KEPT | rounding | all updates
    in compose.optim.adamw:AdamW._update with untouched='gradient/*'
    store(mean[here], m, bits) => store(mean[here], m, 0 * bits + 0x8000)
AdamW rounds by another seed's bits | KEPT | rounding | all updates
    in compose.optim.optimizers:_adamw with untouched='gradient/*'
    seed=settings.seed => seed=0
Muon rounds by another seed's bits | KEPT optimizer__name=muon | rounding | all updates
    in compose.optim.optimizers:_muon with untouched='gradient/*'
    seed=settings.seed => seed=0
both of Adam's means are rounded by the same bits | KEPT | rounding | all updates
    in compose.optim.adamw:AdamW._update with untouched='gradient/*'
    bits >> 16 => bits
""",  # noqa: E501
    globals() | {"FLOAT8_SHAPE": FLOAT8_SHAPE},
)
FAULTS["precision.param"] = [
    *(_in(precision, row) for precision in REDUCED for row in LOGIC),
    *map(_not_applied, REDUCED),
    *FAULTS["precision.param"],
]
BY_KEY = FAULTS
SILENT: dict[str, str] = {}
