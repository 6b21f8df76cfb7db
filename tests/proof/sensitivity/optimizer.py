"""Faults of every key of [optimizer], and of what is trained at all."""

from tests.proof.sensitivity.row import Keys, table

ONE: Keys = {"train__global_batch": 8}
MUON: Keys = ONE | {"optimizer__name": "muon"}
OFFLOADED: Keys = ONE | {"optimizer__offload": "cpu"}

FAULTS = table(
    """
[optimizer.name]
AdamW trains what Muon should | MUON | update | layers.*.attention.wq.weight
    in compose.optim.parameter_rules:parameter_rules
    options.name if name in own else "adamw", => "adamw",
Muon does not look ahead | MUON | update | layers.*.attention.wq.weight
    in compose.optim.muon:Muon._momentum
    g.add(momentum, alpha=options["momentum"]) => momentum
Muon scales by the shorter side | MUON | update | layers.*.feed_forward.w1.weight
    in compose.optim.muon:Muon._update
    max(shape[1:]) => min(shape[1:])
Muon's iteration has another coefficient | MUON | update | layers.*.attention.wq.weight
    in compose.optim.muon:orthogonalized
    a, b, c = COEFFICIENTS => a, b, c = 3.4, -4.7750, 2.0315

[optimizer.implementation]
the foreach step maximizes | train__global_batch=8 optimizer__implementation=foreach | update
    in compose.optim.optimizers:_adamw
    {"foreach": how == "foreach"} => {"foreach": True, "maximize": how == "foreach"}
the step in a loop is amsgrad's | train__global_batch=8 optimizer__implementation=for-loop | update
    in compose.optim.optimizers:_adamw
    {"foreach": how == "foreach"} => {"foreach": False, "amsgrad": True, "eps": 2 * options.eps}

[optimizer.offload]
offloaded AdamW counts from the second step | OFFLOADED | update
    in compose.optim.offload:OffloadedAdamW._update
    ["step"] - 1 => ["step"]
offloaded AdamW reads no file | train__global_batch=8 optimizer__offload=nvme | update
    in compose.optim.offload:OffloadedAdamW._load
    file.read(piece.start, memory) => pass
offloaded AdamW has no weight decay of 0.01 | OFFLOADED optimizer__weight_decay=0.01 | float64 update
    in compose.optim.offload:OffloadedAdamW._update
    weight_decay=group["weight_decay"] => weight_decay=0.0
offloaded AdamW has no weight decay | OFFLOADED parallel__offload=cpu | update
    in compose.optim.offload:OffloadedAdamW._update
    weight_decay=group["weight_decay"] => weight_decay=0.0

[optimizer.weight_decay, rounded]
AdamW that rounds has no weight decay | train__global_batch=8 precision__param=bfloat16 precision__master=bfloat16 precision__optimizer_state=bfloat16 | float64 update
    in compose.optim.adamw:AdamW._update
    (1 - lr * group["weight_decay"]) => 1.0

[optimizer.lr]
another learning rate | train__global_batch=8 | update
    in compose.optim.lr_schedule:set_learning_rate
    lr * group.get => 1.01 * lr * group.get

[optimizer.lr_scale]
lr_scale is forgotten | train__global_batch=8 optimizer__lr_scale='["output=0.5"]' | update | output.weight
    in compose.optim.lr_schedule:set_learning_rate
    group.get("lr_scale", 1.0) => 1.0
lr_scale reaches every parameter | train__global_batch=8 optimizer__lr_scale='["output=0.5"]' | update | layers.*.attention.wq.weight
    in compose.optim.parameter_rules:parameter_rules
    lr_scale.get(name, 1.0) => lr_scale.get(name, 0.5)

[optimizer.beta1]
another beta1 | train__global_batch=8 | update
    in compose.optim.optimizers:_adamw
    (options.beta1, options.beta2) => (options.beta1 - 0.01, options.beta2)

[optimizer.beta2]
beta2 a thousandth too large, float32 | train__global_batch=8 | float64 update
    in compose.optim.optimizers:_adamw
    (options.beta1, options.beta2) => (options.beta1, options.beta2 + 0.001)

[optimizer.eps]
another eps | train__global_batch=8 | float64 update
    in compose.optim.optimizers:_adamw
    "eps": options.eps, => "eps": 2 * options.eps,

[optimizer.momentum]
another momentum | MUON | update | layers.*.attention.wq.weight
    in compose.optim.optimizers:_muon
    momentum=settings.options.momentum => momentum=0.9

[optimizer.muon_except]
Muon trains what it should not | MUON optimizer__muon_except='["layers.*.attention.wo"]' | update | layers.*.attention.wo.weight
    in compose.optim.parameter_rules:parameter_rules
    -  - excepted
    +

[optimizer.weight_decay]
no weight decay of 0.01, float32 | train__global_batch=8 optimizer__weight_decay=0.01 | float64 update
    in compose.optim.optimizers:grouped
    "weight_decay": rule.weight_decay} => "weight_decay": 0.0}
all weights decay | train__global_batch=8 | update | *norm.weight
    in compose.optim.optimizers:grouped
    "weight_decay": rule.weight_decay} => "weight_decay": 0.1}
by the rules norms decay | train__global_batch=8 | float64 update | *norm.weight
    in compose.optim.parameter_rules:parameter_rules
    float(name not in vectors) => 1.0
by the rules embeddings do not decay | train__global_batch=8 | float64 update | tok_embeddings.weight
    in compose.optim.parameter_rules:parameter_rules
    float(name not in vectors) => float(name not in vectors and 'embed' not in name)
Muon has no weight decay | MUON | update | layers.*.attention.wq.weight
    in compose.optim.muon:Muon._update
    (1 - lr * options["weight_decay"]) => 1

[optimizer.weight_decay_scale]
weight_decay_scale is forgotten | train__global_batch=8 optimizer__weight_decay_scale='["tok_embeddings=0"]' | float64 update | tok_embeddings.weight
    in compose.optim.parameter_rules:parameter_rules
    decay.get(name, float(name not in vectors)) => float(name not in vectors)

[optimizer.warmup]
warmup begins at 0 | train__global_batch=8 | update
    in compose.optim.lr_schedule:learning_rate
    max(0, step - options.warmup_from) => step
no warmup | train__global_batch=8 | update
    in compose.optim.lr_schedule:learning_rate
    if step < options.warmup: => if step < 0:

[optimizer.warmup_from]
warmup forgets where it begins | train__global_batch=8 optimizer__warmup_from=0 | update
    in compose.optim.lr_schedule:learning_rate
    max(0, step - options.warmup_from) => step + 1

[optimizer.schedule]
the cosine is a line | train__global_batch=8 | update
    in compose.optim.lr_schedule:cosine
    - (1 + math.cos(math.pi * _progress(step, steps, options))) / 2
    + 1 - _progress(step, steps, options)
the line is a cosine | train__global_batch=8 optimizer__schedule=linear | update
    in compose.optim.lr_schedule:linear
    - 1 - _progress(step, steps, options)
    + (1 + math.cos(math.pi * _progress(step, steps, options))) / 2

[optimizer.decay]
the last steps do not decay | train__global_batch=8 optimizer__schedule=constant optimizer__decay=100 | update
    in compose.optim.lr_schedule:_progress
    steps - options.decay => steps
the cosine forgets where it begins | train__global_batch=8 optimizer__decay=100 | update
    in compose.optim.lr_schedule:_progress
    if options.decay else => if False else

[optimizer.decay_end]
a rate that stays falls after it | train__global_batch=8 optimizer__schedule=constant optimizer__decay_end=125 | update
    in compose.optim.lr_schedule:constant
    if options.decay else => if True else
the decay goes on to the last step | train__global_batch=8 optimizer__decay_end=125 | update
    in compose.optim.lr_schedule:learning_rate
    options.decay_end or steps => steps

[optimizer.min_lr]
the rate falls to 0 | train__global_batch=8 | update
    in compose.optim.lr_schedule:learning_rate
    options.min_lr + (1 - options.min_lr) * remaining => remaining

[other]
clipping acts on one gradient alone | train__global_batch=8 | update
    in compose.train.step:clip_grad_norm_
    _foreach_mul_(some, => _foreach_mul_(some[:1],
LoRA leaves norms trained | SHARDED model__lora__rank=4 model__lora__targets='["layers.*.attention.w*"]' | trained | layers.0.attention_norm.weight
    in compose.memory.lora:adapt with ranks=2 untouched=
    parameter.requires_grad_(False) => parameter.requires_grad_(parameter.ndim < 2)
LoRA misses a target | SHARDED model__lora__rank=4 model__lora__targets='["layers.*.attention.w*"]' | trained | layers.0.attention.wq.lora.A
    in compose.memory.lora:adapt with ranks=2 untouched=
    for name in targets: => for name in targets[1:]:
""",  # noqa: E501
    globals(),
    ranks=1,
    untouched=("gradient", "*"),
)
BY_KEY = FAULTS
SILENT = {"optimizer.offload_dir": "it says where files are"}
