"""Techniques of memory and speed together, on meshes of several axes: each equals one process."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from compose.proof.prove import prove
from compose.proof.report import Report
from models.llama.model import Llama
from tests.support.helpers import (
    TINY,
    keys_in,
    make_job,
    prove_case,
    prove_on,
    prove_step,
    proved,
    small_ones_move,
    tier,
)
from tests.support.pool import Pool, make_mesh

BATCH = keys_in("train.global_batch=8 train.micro_batch=2")
# Sides of parts that float8 takes, for models that bring none of their own.
SIZES = keys_in("model.dim=128 model.hidden_dim=192")
EXPERTS = "model.name=qwen3 model.preset=debug_moe"
LATENT = "model.name=deepseek_v3 model.preset=debug"
# Keys by name. Their faults are those of their parts (test_faults.py, test_float8.py).
MIXTURES = {
    "float8 x tp x zero 3 x compile x selective": "dp_shard=2 tp=2 precision.float8=tensorwise"
    " compile.mode=block activation_checkpoint.mode=selective",
    "fp16 x ZBVZeroBubble x full": "pp=2 pp_schedule=ZBVZeroBubble precision.param=float16"
    " model.n_layers=4 activation_checkpoint.mode=full",
    "offload x tp x accumulation": "dp_shard=2 tp=2 offload=cpu",
    "chunks x loss parallel x pp x tied": "pp=2 tp=2 train.loss_chunk=13 model.tie_embeddings=true",
    "muon x tp x zero 3 x ep": f"dp_shard=2 tp=2 ep=2 {EXPERTS} optimizer.name=muon model.dim=64"
    " model.hidden_dim=96",
    "float8 rowwise x ring x zero 2 x chunks": "dp_shard=2 cp=2 zero=2 precision.float8=rowwise"
    " train.loss_chunk=11",
    "float8 x 1F1B x every_k x bf16": "pp=2 dp_shard=2 precision.float8=tensorwise"
    " precision.param=bfloat16 model.n_layers=4 activation_checkpoint.mode=every_k",
    "float8 gw_hp x experts x ep x tp": f"dp_shard=2 tp=2 ep=4 {EXPERTS}"
    " precision.float8=rowwise_gw_hp",
    "float8 x hsdp x offload x fp16": "dp_replicate=2 dp_shard=2 offload=cpu"
    " precision.float8=tensorwise precision.param=float16",
    "fp16 x ring x tp x z-loss": "cp=2 tp=2 precision.param=float16 train.z_loss=1e-3",
    "fp16 x zero 1 x experts x router losses": f"dp_shard=4 zero=1 ep=2 {EXPERTS}"
    " precision.param=float16 model.balance_weight=0.1 model.z_weight=0.01 train.micro_batch=1",
    "pure bf16 x tp x zero 3 x budget": "dp_shard=2 tp=2 precision.param=bfloat16"
    " precision.master=bfloat16 precision.optimizer_state=bfloat16 activation_checkpoint.mode=budget",
    "bf16 states x Interleaved1F1B x selective": "pp=2 pp_schedule=Interleaved1F1B model.n_layers=4"
    " precision.optimizer_state=bfloat16 activation_checkpoint.mode=selective",
    "state on the host x hsdp x tied x z-loss": "dp_replicate=2 dp_shard=2 optimizer.offload=cpu"
    " model.tie_embeddings=true train.z_loss=1e-3",
    "state in files x tp x zero 2": "dp_shard=2 tp=2 zero=2 optimizer.offload=nvme",
    "activations on the host x ring x chunks": "cp=2 activation_checkpoint.mode=full"
    " activation_checkpoint.offload=true train.loss_chunk=17",
    "activations on the host x DualPipeV x fp16": "pp=2 pp_schedule=DualPipeV model.n_layers=4"
    " train.micro_batch=1 precision.param=float16 activation_checkpoint.mode=full"
    " activation_checkpoint.offload=true",
    "everything on the host x tp x every_k": "dp_shard=2 tp=2 offload=cpu train.loss_chunk=29"
    " activation_checkpoint.mode=every_k activation_checkpoint.offload=true",
    "muon x pp x bf16 states x tied": "pp=2 tp=2 optimizer.name=muon"
    " precision.optimizer_state=bfloat16 model.tie_embeddings=true",
    "muon x ring x compile": "cp=2 optimizer.name=muon compile.mode=block",
    "compile x pp x every_k x fp16": "pp=2 compile.mode=block precision.param=float16"
    " activation_checkpoint.mode=every_k model.n_layers=4",
    "latent attention x float8 x selective x cp x ep": f"dp_shard=2 cp=2 ep=2 {LATENT}"
    " precision.float8=rowwise activation_checkpoint.mode=selective",
    "latent attention x muon x chunks x tp x ZBVZeroBubble": "pp=2 tp=2 pp_schedule=ZBVZeroBubble"
    f" {LATENT} optimizer.name=muon train.loss_chunk=19 model.n_layers=4",
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
    keys = keys_in(MIXTURES[name])
    sizes = {} if "model__name" in keys else SIZES
    prove_on(pool, BATCH | sizes | keys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_bias_of_all_keys_is_in_both_errors(pool: Pool, kind: str) -> None:
    """AdamW takes a full step along the keys' bias, whose gradient is rounding alone."""
    shape = "model.name=gpt2 model.dim=128 model.n_layers=5 train.seq_len=64 train.global_batch=4"
    keys = keys_in(f"{shape} precision.param={kind}")
    proved(pool.run(prove_case, 1, keys))


def _frozen(by_the_class: bool) -> Report:
    """The proof of a model whose first layer and embedding are frozen: by its class, or later."""
    init = Llama.__init__

    def freeze(model: Any) -> None:
        model.layers["0"].requires_grad_(False)
        model.tok_embeddings.requires_grad_(False)

    def freezes(self: Any, config: Any) -> None:
        init(self, config)
        freeze(self)

    keys = keys_in(
        "dp_shard=2 offload=cpu precision.param=bfloat16 train.global_batch=4 model.n_layers=2"
    )
    with mock.patch.object(Llama, "__init__", freezes) if by_the_class else nullcontext():
        job = make_job(2, **keys)
        if not by_the_class:
            freeze(job.model)
        with small_ones_move():
            return prove(job, make_mesh(job.degrees), torch.device("cpu"), 1)


@pytest.mark.parametrize("by_the_class", [True, False])
def test_what_a_model_freezes_itself_is_meant(pool: Pool, by_the_class: bool) -> None:
    report = pool.run(_frozen, 2, by_the_class)[0]
    assert {row.name for row in report.rows if row.quantity == "frozen weight"} >= {
        "tok_embeddings.weight"
    }
    wrong = [row.quantity for row in report.rows if not row.ok]
    assert wrong == ([] if by_the_class else ["trained"]), str(report)
    assert report.ok == by_the_class


def test_an_eps_that_is_not_the_file_s_is_said(pool: Pool) -> None:
    """With a small one rounding would decide some steps, so a larger one is proved."""
    small, large = (prove_on(pool, TINY | {"optimizer__eps": eps}, prove_step) for eps in (1e-8, 1e-5))
    assert small.notes == (
        "optimizer.eps: 1e-08, and here 1e-06: with less, rounding decides the step of an element whose"
        " gradient is only rounding",
    )
    assert large.notes == ()
