"""Faults of every key of [optimizer], and of what is trained at all."""

from tests.proof.sensitivity.row import SHARDED, Keys, Row

ONE: Keys = {"train__global_batch": 8}
MUON: Keys = ONE | {"optimizer__name": "muon"}
OFFLOADED: Keys = ONE | {"optimizer__offload": "cpu"}
_RULES = "compose.optim.parameter_rules:parameter_rules"
_SCHEDULE = "compose.optim.lr_schedule:learning_rate"


def _update(
    name: str, keys: Keys, place: str, old: str, new: str, names: str = "*", quantity: str = "update"
) -> Row:
    """A fault of one process's optimizer: updates differ, and gradients do not."""
    return Row(name, keys, place, old, new, quantity, names, ("gradient", "*"), ranks=1)


FAULTS: dict[str, list[Row]] = {
    "optimizer.name": [
        _update(
            "AdamW trains what Muon should",
            MUON,
            _RULES,
            'options.name if name in own else "adamw",',
            '"adamw",',
            "layers.*.attention.wq.weight",
        ),
        _update(
            "Muon does not look ahead",
            MUON,
            "compose.optim.muon:Muon._momentum",
            'g.add(momentum, alpha=options["momentum"])',
            "momentum",
            "layers.*.attention.wq.weight",
        ),
        _update(
            "Muon scales by the shorter side",
            MUON,
            "compose.optim.muon:Muon._update",
            "max(shape[1:])",
            "min(shape[1:])",
            "layers.*.feed_forward.w1.weight",
        ),
        _update(
            "Muon's iteration has another coefficient",
            MUON,
            "compose.optim.muon:orthogonalized",
            "a, b, c = COEFFICIENTS",
            "a, b, c = 3.4, -4.7750, 2.0315",
            "layers.*.attention.wq.weight",
        ),
    ],
    "optimizer.implementation": [
        _update(
            "the foreach step maximizes",
            ONE | {"optimizer__implementation": "foreach"},
            "compose.optim.optimizers:_adamw",
            '{"foreach": how == "foreach"}',
            '{"foreach": True, "maximize": how == "foreach"}',
        ),
        _update(
            "the step in a loop is amsgrad's",
            ONE | {"optimizer__implementation": "for-loop"},
            "compose.optim.optimizers:_adamw",
            '{"foreach": how == "foreach"}',
            '{"foreach": False, "amsgrad": True, "eps": 2 * options.eps}',
        ),
    ],
    "optimizer.offload": [
        _update(
            "offloaded AdamW counts from the second step",
            OFFLOADED,
            "compose.optim.offload:OffloadedAdamW._update",
            '["step"] - 1',
            '["step"]',
        ),
        _update(
            "offloaded AdamW reads no file",
            ONE | {"optimizer__offload": "nvme"},
            "compose.optim.offload:OffloadedAdamW._load",
            "file.read(piece.start, memory)",
            "pass",
        ),
        _update(
            "offloaded AdamW has no weight decay of 0.01",
            OFFLOADED | {"optimizer__weight_decay": 0.01},
            "compose.optim.offload:OffloadedAdamW._update",
            'weight_decay=group["weight_decay"]',
            "weight_decay=0.0",
            quantity="float64 update",
        ),
        _update(
            "offloaded AdamW has no weight decay",
            OFFLOADED | {"parallel__offload": "cpu"},
            "compose.optim.offload:OffloadedAdamW._update",
            'weight_decay=group["weight_decay"]',
            "weight_decay=0.0",
        ),
    ],
    "optimizer.lr": [
        _update(
            "another learning rate",
            ONE,
            "compose.optim.lr_schedule:set_learning_rate",
            "lr * group.get",
            "1.01 * lr * group.get",
        ),
    ],
    "optimizer.lr_scale": [
        _update(
            "lr_scale is forgotten",
            ONE | {"optimizer__lr_scale": '["output=0.5"]'},
            "compose.optim.lr_schedule:set_learning_rate",
            'group.get("lr_scale", 1.0)',
            "1.0",
            "output.weight",
        ),
        _update(
            "lr_scale reaches every parameter",
            ONE | {"optimizer__lr_scale": '["output=0.5"]'},
            _RULES,
            "lr_scale.get(name, 1.0)",
            "lr_scale.get(name, 0.5)",
            "layers.*.attention.wq.weight",
        ),
    ],
    "optimizer.beta1": [
        _update(
            "another beta1",
            ONE,
            "compose.optim.optimizers:_adamw",
            "(options.beta1, options.beta2)",
            "(options.beta1 - 0.01, options.beta2)",
        ),
    ],
    "optimizer.beta2": [
        _update(
            "beta2 a thousandth too large, float32",
            ONE,
            "compose.optim.optimizers:_adamw",
            "(options.beta1, options.beta2)",
            "(options.beta1, options.beta2 + 0.001)",
            quantity="float64 update",
        ),
    ],
    "optimizer.eps": [
        _update(
            "another eps",
            ONE,
            "compose.optim.optimizers:_adamw",
            '"eps": options.eps,',
            '"eps": 2 * options.eps,',
            quantity="float64 update",
        ),
    ],
    "optimizer.momentum": [
        _update(
            "another momentum",
            MUON,
            "compose.optim.optimizers:_muon",
            "momentum=settings.options.momentum",
            "momentum=0.9",
            "layers.*.attention.wq.weight",
        ),
    ],
    "optimizer.muon_except": [
        _update(
            "Muon trains what it should not",
            MUON | {"optimizer__muon_except": '["layers.*.attention.wo"]'},
            _RULES,
            " - excepted",
            "",
            "layers.*.attention.wo.weight",
        ),
    ],
    "optimizer.weight_decay": [
        _update(
            "no weight decay of 0.01, float32",
            ONE | {"optimizer__weight_decay": 0.01},
            "compose.optim.optimizers:grouped",
            '"weight_decay": rule.weight_decay}',
            '"weight_decay": 0.0}',
            quantity="float64 update",
        ),
        _update(
            "all weights decay",
            ONE,
            "compose.optim.optimizers:grouped",
            '"weight_decay": rule.weight_decay}',
            '"weight_decay": 0.1}',
            "*norm.weight",
        ),
        _update(
            "by the rules norms decay",
            ONE,
            _RULES,
            "float(name not in vectors)",
            "1.0",
            "*norm.weight",
            "float64 update",
        ),
        _update(
            "by the rules embeddings do not decay",
            ONE,
            _RULES,
            "float(name not in vectors)",
            "float(name not in vectors and 'embed' not in name)",
            "tok_embeddings.weight",
            "float64 update",
        ),
        _update(
            "Muon has no weight decay",
            MUON,
            "compose.optim.muon:Muon._update",
            '(1 - lr * options["weight_decay"])',
            "1",
            "layers.*.attention.wq.weight",
        ),
    ],
    "optimizer.weight_decay_scale": [
        _update(
            "weight_decay_scale is forgotten",
            ONE | {"optimizer__weight_decay_scale": '["tok_embeddings=0"]'},
            _RULES,
            "decay.get(name, float(name not in vectors))",
            "float(name not in vectors)",
            "tok_embeddings.weight",
            "float64 update",
        ),
    ],
    "optimizer.warmup": [
        _update(
            "warmup begins at 0",
            ONE,
            _SCHEDULE,
            "(step + 1) / (options.warmup + 1)",
            "step / options.warmup",
        ),
        _update("no warmup", ONE, _SCHEDULE, "if step < options.warmup:", "if step < 0:"),
    ],
    "optimizer.schedule": [
        _update(
            "the cosine is a line",
            ONE,
            "compose.optim.lr_schedule:cosine",
            "(1 + math.cos(math.pi * _progress(step, options.warmup, steps))) / 2",
            "1 - _progress(step, options.warmup, steps)",
        ),
        _update(
            "the line is a cosine",
            ONE | {"optimizer__schedule": "linear"},
            "compose.optim.lr_schedule:linear",
            "1 - _progress(step, options.warmup, steps)",
            "(1 + math.cos(math.pi * _progress(step, options.warmup, steps))) / 2",
        ),
    ],
    "optimizer.decay": [
        _update(
            "the last steps do not decay",
            ONE | {"optimizer__schedule": "constant", "optimizer__decay": 100},
            "compose.optim.lr_schedule:constant",
            "steps - options.decay",
            "steps",
        ),
    ],
    "optimizer.min_lr": [
        _update(
            "the rate falls to 0",
            ONE,
            _SCHEDULE,
            "options.min_lr + (1 - options.min_lr) * remaining",
            "remaining",
        ),
    ],
    "other": [
        _update(
            "clipping acts on one gradient alone",
            ONE,
            "compose.train.step:clip_grad_norm_",
            "_foreach_mul_(some, ",
            "_foreach_mul_(some[:1], ",
        ),
        Row(
            "LoRA leaves norms trained",
            SHARDED | {"model__lora__rank": 4, "model__lora__targets": '["layers.*.attention.w*"]'},
            "compose.memory.lora:adapt",
            "parameter.requires_grad_(False)",
            "parameter.requires_grad_(parameter.ndim < 2)",
            "trained",
            "layers.0.attention_norm.weight",
        ),
        Row(
            "LoRA misses a target",
            SHARDED | {"model__lora__rank": 4, "model__lora__targets": '["layers.*.attention.w*"]'},
            "compose.memory.lora:adapt",
            "for name in targets:",
            "for name in targets[1:]:",
            "trained",
            "layers.0.attention.wq.lora.A",
        ),
    ],
}
BY_KEY = FAULTS
SILENT = {"optimizer.offload_dir": "it says where files are"}
