"""Faults in each precision: of logic, which runs in float64 too, and of rounding."""

from dataclasses import replace

from tests.proof.sensitivity.row import CP, SHARDED, TP, Keys, Row
from tests.support.helpers import FLOAT8_SHAPE

FLOAT8: Keys = {"precision__float8": "tensorwise"}
REDUCED: dict[str, Keys] = {
    "bfloat16": {"precision__param": "bfloat16"},
    "float16": {"precision__param": "float16"},
    "float8": FLOAT8,
    "pure bfloat16": {
        "precision__param": "bfloat16",
        "precision__reduce": "bfloat16",
        "precision__master": "bfloat16",
        "precision__optimizer_state": "bfloat16",
    },
}
# Gradients are exact, and what is kept between steps is not.
KEPT: Keys = SHARDED | {"precision__optimizer_state": "bfloat16", "train__seed": 3}
ROUTED: Keys = SHARDED | {
    "model__name": "qwen3",
    "model__preset": "debug_moe",
    "model__balance_weight": 0.1,
    "model__z_weight": 0.01,
}

# In float32 tolerances of the update are wide; in each reduced precision the logic runs in float64.
LOGIC = [
    Row(
        "an auxiliary loss doubled",
        ROUTED,
        "compose.parallel.expert_parallel:begin_step",
        "= tokens, loss_scale",
        "= tokens // 2, loss_scale",
        "gradient",
        "layers.*.moe.router.gate.weight",
    ),
    Row(
        "no weight decay",
        SHARDED,
        "compose.optim.optimizers:grouped",
        '"weight_decay": rule.weight_decay}',
        '"weight_decay": 0.0}',
        "update",
        untouched=("gradient", "*"),
    ),
    Row(
        "no clipping",
        SHARDED,
        "compose.train.step:clip_grad_norm_",
        ".clamp(max=1.0) if max_norm > 0 else",
        ".clamp(max=1.0) if max_norm > 1e9 else",
        "update",
        untouched=("gradient", "*"),
    ),
    Row(
        "another beta2",
        SHARDED,
        "compose.optim.optimizers:_adamw",
        "(options.beta1, options.beta2)",
        "(options.beta1, options.beta2 + 0.01)",
        "update",
        untouched=("gradient", "*"),
    ),
    Row(
        "positions off by one on a rank",
        CP,
        "compose.parallel.context_parallel:shard_sequence",
        "pieces = value.chunk(count, 1)",
        "value = value + rank * (name == 'positions'); pieces = value.chunk(count, 1)",
        "gradient",
    ),
]


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
        old, new = '== "cpu", precision.float8', '== "cpu", "off"'
    keys = SHARDED | REDUCED[precision] | {"precision__master": "float32"}
    name = f"{precision} is not applied"
    return Row(name, keys, "compose.apply:apply", old, new, "rounding")


FAULTS: dict[str, list[Row]] = {
    "precision.param": [
        *(_in(precision, row) for precision in REDUCED for row in LOGIC),
        *map(_not_applied, REDUCED),
        Row(
            "no bias correction in bfloat16",
            KEPT,
            "compose.optim.adamw:AdamW._update",
            "lr / (1 - beta1**step)",
            "lr",
            "update",
        ),
        Row(
            "ring sums dq in bfloat16",
            CP | REDUCED["bfloat16"],
            "compose.ops.attention:Sums.__init__",
            "torch.promote_types(x.dtype, torch.float32)",
            "torch.bfloat16",
            "float64 gradient",
            "layers.*.attention.wq.weight",
        ),
        Row(
            "the gradient stays scaled",
            SHARDED | REDUCED["float16"],
            "compose.train.step:clip_grad_norm_",
            "scale = clipped / loss_scale",
            "scale = clipped",
            "float64 update",
            untouched=("float64 gradient", "*"),
        ),
        Row(
            "the norm stays scaled",
            SHARDED | REDUCED["float16"],
            "compose.train.step:clip_grad_norm_",
            ".sqrt() / loss_scale",
            ".sqrt()",
            "grad_norm",
        ),
        Row(
            "the loss is not scaled",
            SHARDED | REDUCED["float16"],
            "compose.train.step:forward_backward",
            "count / loss_scale,",
            "count,",
            "float64 gradient",
        ),
        Row(
            "an auxiliary loss is not scaled",
            ROUTED | REDUCED["float16"],
            "compose.parallel.expert_parallel:begin_step",
            "= tokens, loss_scale",
            "= tokens, 1.0",
            "float64 gradient",
            "layers.*.moe.router.gate.weight",
        ),
    ],
    "precision.reduce": [
        Row(
            "the sum of gradients in bfloat16, float32",
            SHARDED,
            "compose.apply:apply",
            "precision.reduce_dtype,",
            "torch.bfloat16,",
            "gradient",
        ),
        Row(
            "bfloat16 for the sum of gradients is not applied",
            SHARDED | {"precision__reduce": "bfloat16"},
            "compose.apply:apply",
            "precision.reduce_dtype,",
            "torch.float32 if precision.reduce == 'bfloat16' else precision.reduce_dtype,",
            "rounding",
        ),
    ],
    "precision.float8": [
        Row(
            "rowwise float8 is not applied",
            SHARDED | {"precision__float8": "rowwise"},
            "compose.apply:apply",
            '== "cpu", precision.float8',
            '== "cpu", "off"',
            "rounding",
        ),
        Row(
            "what is gathered in 8 bits has another scale",
            TP | FLOAT8_SHAPE,
            "compose.memory.float8:send_as_bytes",
            "given._scale,",
            "given._scale * 2,",
            "gradient",
        ),
    ],
    "precision.master": [
        Row(
            "weights stay float32 between steps",
            SHARDED | REDUCED["pure bfloat16"],
            "compose.apply:apply",
            "kept = precision.master_dtype if",
            "kept = torch.float32 if precision.master == 'bfloat16' and",
            "initial weight",
            "layers.*.attention.wq.weight",
        ),
    ],
    "precision.optimizer_state": [
        Row(
            "running means stay float32",
            KEPT,
            "compose.optim.optimizers:_adamw",
            "settings.state_dtype",
            "torch.float32",
            "rounding",
            "all updates",
            untouched=("gradient", "*"),
        ),
        Row(
            "a mean is rounded to the nearest",
            KEPT,
            "compose.optim.adamw:AdamW._update",
            "store(mean[here], m, bits)",
            "store(mean[here], m, 0 * bits + 0x8000)",
            "rounding",
            "all updates",
            untouched=("gradient", "*"),
        ),
        Row(
            "AdamW rounds by another seed's bits",
            KEPT,
            "compose.optim.optimizers:_adamw",
            "seed=settings.seed",
            "seed=0",
            "rounding",
            "all updates",
            untouched=("gradient", "*"),
        ),
        Row(
            "Muon rounds by another seed's bits",
            KEPT | {"optimizer__name": "muon"},
            "compose.optim.optimizers:_muon",
            "seed=settings.seed",
            "seed=0",
            "rounding",
            "all updates",
            untouched=("gradient", "*"),
        ),
        Row(
            "both of Adam's means are rounded by the same bits",
            KEPT,
            "compose.optim.adamw:AdamW._update",
            "bits >> 16",
            "bits",
            "rounding",
            "all updates",
            untouched=("gradient", "*"),
        ),
    ],
}
BY_KEY = FAULTS
SILENT: dict[str, str] = {}
