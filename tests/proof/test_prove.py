"""Techniques of memory and speed together, on meshes of several axes: each equals one process."""

from typing import Any

import pytest

from tests.support.helpers import agreed, prove_case, tier
from tests.support.pool import Pool

# Sides of parts that float8 takes; several micro-batches.
BASE: dict[str, Any] = {
    "model__dim": 128,
    "model__hidden_dim": 192,
    "train__global_batch": 8,
    "train__micro_batch": 2,
}
EXPERTS: dict[str, Any] = {"model__name": "qwen3", "model__preset": "debug_moe"}
LATENT: dict[str, Any] = {"model__name": "deepseek_v3", "model__preset": "debug"}


def mesh(**degrees: Any) -> dict[str, Any]:
    return {f"parallel__{name}": value for name, value in degrees.items()}


# By name: ranks, keys. Their faults are those of their parts (test_faults.py, test_float8.py).
MIXTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "float8 x tp x zero 3 x compile x selective": (
        4,
        mesh(dp_shard=2, tp=2)
        | {
            "precision__float8": "tensorwise",
            "compile__mode": "block",
            "activation_checkpoint__mode": "selective",
        },
    ),
    "fp16 x ZBVZeroBubble x full": (
        2,
        mesh(pp=2, pp_schedule="ZBVZeroBubble")
        | {
            "precision__param": "float16",
            "model__n_layers": 4,
            "activation_checkpoint__mode": "full",
        },
    ),
    "offload x tp x accumulation": (4, mesh(dp_shard=2, tp=2, offload="cpu")),
    "chunks x loss parallel x pp x tied": (
        4,
        mesh(pp=2, tp=2) | {"train__loss_chunk": 13, "model__tie_embeddings": True},
    ),
    "muon x tp x zero 3 x ep": (
        4,
        mesh(dp_shard=2, tp=2, ep=2)
        | EXPERTS
        | {"optimizer__name": "muon", "model__dim": 64, "model__hidden_dim": 96},
    ),
    "float8 rowwise x ring x zero 2 x chunks": (
        4,
        mesh(dp_shard=2, cp=2, zero=2) | {"precision__float8": "rowwise", "train__loss_chunk": 11},
    ),
    "float8 x 1F1B x every_k x bf16": (
        4,
        mesh(pp=2, dp_shard=2)
        | {
            "precision__float8": "tensorwise",
            "precision__param": "bfloat16",
            "model__n_layers": 4,
            "activation_checkpoint__mode": "every_k",
        },
    ),
    "float8 gw_hp x experts x ep x tp": (
        4,
        mesh(dp_shard=2, tp=2, ep=4) | EXPERTS | {"precision__float8": "rowwise_gw_hp"},
    ),
    "float8 x hsdp x offload x fp16": (
        4,
        mesh(dp_replicate=2, dp_shard=2, offload="cpu")
        | {"precision__float8": "tensorwise", "precision__param": "float16"},
    ),
    "fp16 x ring x tp x z-loss": (
        4,
        mesh(cp=2, tp=2) | {"precision__param": "float16", "train__z_loss": 1e-3},
    ),
    "fp16 x zero 1 x experts x router losses": (
        4,
        mesh(dp_shard=4, zero=1, ep=2)
        | EXPERTS
        | {
            "precision__param": "float16",
            "model__balance_weight": 0.1,
            "model__z_weight": 0.01,
            "train__micro_batch": 1,
        },
    ),
    "pure bf16 x tp x zero 3 x budget": (
        4,
        mesh(dp_shard=2, tp=2)
        | {
            "precision__param": "bfloat16",
            "precision__master": "bfloat16",
            "precision__optimizer_state": "bfloat16",
            "activation_checkpoint__mode": "budget",
        },
    ),
    "bf16 states x Interleaved1F1B x selective": (
        2,
        mesh(pp=2, pp_schedule="Interleaved1F1B")
        | {
            "precision__optimizer_state": "bfloat16",
            "model__n_layers": 4,
            "activation_checkpoint__mode": "selective",
        },
    ),
    "state on the host x hsdp x tied x z-loss": (
        4,
        mesh(dp_replicate=2, dp_shard=2)
        | {"optimizer__offload": "cpu", "model__tie_embeddings": True, "train__z_loss": 1e-3},
    ),
    "state in files x tp x zero 2": (
        4,
        mesh(dp_shard=2, tp=2, zero=2) | {"optimizer__offload": "nvme"},
    ),
    "activations on the host x ring x chunks": (
        2,
        mesh(cp=2)
        | {
            "activation_checkpoint__mode": "full",
            "activation_checkpoint__offload": True,
            "train__loss_chunk": 17,
        },
    ),
    "activations on the host x DualPipeV x fp16": (
        2,
        mesh(pp=2, pp_schedule="DualPipeV")
        | {
            "model__n_layers": 4,
            "train__micro_batch": 1,
            "precision__param": "float16",
            "activation_checkpoint__mode": "full",
            "activation_checkpoint__offload": True,
        },
    ),
    "everything on the host x tp x every_k": (
        4,
        mesh(dp_shard=2, tp=2, offload="cpu")
        | {
            "activation_checkpoint__mode": "every_k",
            "activation_checkpoint__offload": True,
            "train__loss_chunk": 29,
        },
    ),
    "muon x pp x bf16 states x tied": (
        4,
        mesh(pp=2, tp=2)
        | {
            "optimizer__name": "muon",
            "precision__optimizer_state": "bfloat16",
            "model__tie_embeddings": True,
        },
    ),
    "muon x ring x compile": (2, mesh(cp=2) | {"optimizer__name": "muon", "compile__mode": "block"}),
    "compile x pp x every_k x fp16": (
        2,
        mesh(pp=2)
        | {
            "compile__mode": "block",
            "precision__param": "float16",
            "activation_checkpoint__mode": "every_k",
            "model__n_layers": 4,
        },
    ),
    "latent attention x float8 x selective x cp x ep": (
        4,
        mesh(dp_shard=2, cp=2, ep=2)
        | LATENT
        | {"precision__float8": "rowwise", "activation_checkpoint__mode": "selective"},
    ),
    "latent attention x muon x chunks x tp x ZBVZeroBubble": (
        4,
        mesh(pp=2, tp=2, pp_schedule="ZBVZeroBubble")
        | LATENT
        | {"optimizer__name": "muon", "train__loss_chunk": 19, "model__n_layers": 4},
    ),
}
IN_THE_SUITE = (
    "offload x tp x accumulation",
    "chunks x loss parallel x pp x tied",
    "float8 rowwise x ring x zero 2 x chunks",
    "latent attention x muon x chunks x tp x ZBVZeroBubble",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=tier(slow=True, full=name not in IN_THE_SUITE)) for name in MIXTURES],
)
def test_equals_one_process(pool: Pool, name: str) -> None:
    ranks, keys = MIXTURES[name]
    sizes = {} if "model__name" in keys else BASE
    batch = {key: BASE[key] for key in ("train__global_batch", "train__micro_batch")}
    for report in pool.run(prove_case, ranks, batch | sizes | keys):
        assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_bias_of_all_keys_is_in_both_errors(pool: Pool, kind: str) -> None:
    """AdamW takes a full step along the keys' bias, whose gradient is rounding alone."""
    shape = {"model__name": "gpt2", "precision__param": kind, "model__dim": 128, "model__n_layers": 5}
    report = agreed(pool.run(prove_case, 1, shape | {"train__seq_len": 256, "train__global_batch": 16}))
    assert report.ok, str(report)
