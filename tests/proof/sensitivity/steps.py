"""Faults of the loss, and of what saves memory."""

from tests.proof.sensitivity.row import SHARDED, TP, Keys, Row

ONE: Keys = {"train__global_batch": 8}

LOSS = [
    Row(
        "the loss is that of the last chunk",
        ONE | {"train__loss_chunk": 16},
        "compose.ops.cross_entropy:_in_chunks",
        "loss + losses.sum()",
        "losses.sum()",
        "loss",
        untouched=("gradient", "*"),
        ranks=1,
    ),
    Row(
        "the output's gradient is that of the last chunk",
        ONE | {"train__loss_chunk": 16},
        "compose.ops.cross_entropy:_add_product",
        "total.addmm_(a, b)",
        "total.addmm_(a, b, beta=0)",
        "gradient",
        "output.weight",
        untouched=("gradient", "layers.*"),
        ranks=1,
    ),
    Row(
        "half the z-loss, in chunks",
        ONE | {"train__loss_chunk": 16, "train__z_loss": 0.1},
        "compose.ops.cross_entropy:_differentiate",
        "(1 + 2 * z_loss * log_zs)",
        "(1 + z_loss * log_zs)",
        "gradient",
        untouched=("loss", "step 1"),
        ranks=1,
    ),
]
# Enough of a micro-batch that its activations are worth a copy.
LARGE: Keys = ONE | {"train__seq_len": 128, "train__micro_batch": 4}
MEMORY: dict[str, list[Row]] = {
    "activation_checkpoint.mode": [
        Row(
            "recomputed layers hand no gradient back",
            ONE | {"activation_checkpoint__mode": "full"},
            "compose.memory.activation_checkpointing:_recomputing",
            "*args,",
            "*(x.detach() if hasattr(x, 'detach') else x for x in args),",
            "gradient",
            "tok_embeddings.weight",
            untouched=("loss", "step 1"),
            ranks=1,
        ),
        Row(
            "no layer runs again",
            ONE | {"activation_checkpoint__mode": "full"},
            "compose.memory.activation_checkpointing:apply_activation_checkpointing",
            "in units.items()",
            "in ()",
            "option",
            "activation_checkpoint.mode",
            ranks=1,
        ),
        Row(
            "the last layer does not run again, on stages",
            ONE
            | {
                "parallel__pp": 2,
                "parallel__dp_shard": 1,
                "model__n_layers": 4,
                "activation_checkpoint__mode": "selective",
            },
            "compose.memory.activation_checkpointing:recomputed_units",
            "dict.fromkeys(units, operators(options.keep))",
            "dict.fromkeys(units[:-1], operators(options.keep))",
            "runs again",
            "layers.3",
            untouched=("runs again", "layers.[012]"),
        ),
    ],
    "activation_checkpoint.every": [
        Row(
            "the first layers run again, not the second ones",
            ONE | {"activation_checkpoint__mode": "every_k", "activation_checkpoint__every": 2},
            "compose.memory.activation_checkpointing:recomputed_units",
            "units[options.every - 1 ::",
            "units[options.every - 2 ::",
            "runs again",
            "layers.0",
            ranks=1,
        ),
        Row(
            "a layer that runs again has another input, every_k",
            ONE | {"activation_checkpoint__mode": "every_k", "activation_checkpoint__every": 2},
            "compose.memory.activation_checkpointing:_recomputing",
            "*args,",
            "*(x.detach() if hasattr(x, 'detach') else x for x in args),",
            "gradient",
            "layers.0.*",
            untouched=("loss", "step 1"),
            ranks=1,
        ),
    ],
    "activation_checkpoint.keep": [
        Row(
            "backward finds other products than forward kept",
            ONE
            | {"activation_checkpoint__mode": "selective", "activation_checkpoint__keep": '["matmul"]'},
            "compose.memory.activation_checkpointing:_Only.__torch_dispatch__",
            "return self.mode.__torch_dispatch__(func, types, args, kwargs)",
            "y = self.mode.__torch_dispatch__(func, types, args, kwargs); "
            "return y * 1.01 if 'Cached' in type(self.mode).__name__ else y",
            "gradient",
            "layers.*",
            untouched=("loss", "step 1"),
            ranks=1,
        ),
    ],
    "activation_checkpoint.budget": [
        Row(
            "no layer runs again, budget",
            ONE | {"activation_checkpoint__mode": "budget", "activation_checkpoint__budget": 0.1},
            "compose.memory.activation_checkpointing:apply_activation_checkpointing",
            "in units.items()",
            "in ()",
            "option",
            "activation_checkpoint.mode",
            ranks=1,
        ),
        Row(
            "a layer that runs again has another input, budget",
            ONE | {"activation_checkpoint__mode": "budget", "activation_checkpoint__budget": 0.1},
            "compose.memory.activation_checkpointing:_recomputing",
            "*args,",
            "*(x.detach() if hasattr(x, 'detach') else x for x in args),",
            "gradient",
            "tok_embeddings.weight",
            untouched=("loss", "step 1"),
            ranks=1,
        ),
    ],
    "activation_checkpoint.offload": [
        Row(
            "activations stay where they are",
            LARGE | {"activation_checkpoint__offload": True, "activation_checkpoint__mode": "full"},
            "compose.apply:apply",
            "activations.wrap(model.get_submodule(name))",
            "pass",
            "kept in place",
            "layers.*",
            untouched=("runs again", "*"),
            ranks=1,
        ),
        Row(
            "no activation is worth a copy",
            LARGE | {"activation_checkpoint__offload": True},
            "compose.memory.activation_offload:_Unit.pack",
            "local.nbytes < LEAST or",
            "True or",
            "option",
            "activation_checkpoint.offload",
            ranks=1,
        ),
        Row(
            "activations are rounded on their way to the host",
            LARGE | {"activation_checkpoint__offload": True},
            "compose.memory.activation_offload:ActivationOffload.out_of",
            "copy = tensor.clone()",
            "copy = tensor.bfloat16().to(tensor.dtype)",
            "gradient",
            "layers.*",
            untouched=("loss", "step 1"),
            ranks=1,
        ),
    ],
    "parallel.offload": [
        Row(
            "weights stay on the device",
            SHARDED | {"parallel__offload": "cpu"},
            "compose.parallel.data_parallel:apply_data_parallel",
            "if how.offload:",
            "if False:",
            "on the host",
            "parallel.offload",
            untouched=("gradient", "*"),
        ),
    ],
    "compile": [
        Row(
            "a compiled layer gets no documents",
            TP | {"compile__mode": "block", "model__n_layers": 1},
            "compose.memory.compilation:apply_compile",
            "_settled(torch.compile(module.forward, fullgraph=True, **how))",
            "(lambda f: lambda *a, **k: f(a[0], a[1], a[2], None))"
            "(_settled(torch.compile(module.forward, fullgraph=True, dynamic=False,"
            " backend='aot_eager')))",
            "loss",
            "step 1",
        ),
    ],
}
FAULTS = {"loss": LOSS, **MEMORY}
BY_KEY = FAULTS
SILENT: dict[str, str] = {}
