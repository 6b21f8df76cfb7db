"""The plans of models equal one process, and faults in them are named."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models.gemma3.model
import models.qwen3.model
from compose import Parallel
from compose.ops.tensors import local_weight
from compose.parallel import local_parallel
from compose.parallel.local_parallel import _LocalRMSNorm
from compose.parallel.mesh import meshes
from compose.plan import resolve
from compose.proof.report import Report
from tests.support.faults import Fault, assert_named, partial_gradients_are_taken_as_whole, with_fault
from tests.support.helpers import (
    Keys,
    agreed,
    parallel,
    prove_case,
    prove_on,
    prove_step,
    proved,
    refused,
    tier,
)
from tests.support.pool import Pool
from tests.support.small_models import (
    AXES,
    DIT,
    GEMMA1,
    GEMMA2,
    GEMMA3,
    GLM4_MOE,
    GPT2,
    GPT_OSS,
    GRANITE_MOE,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    keys_of,
)

_ODD: Keys = {"dim": 36, "n_heads": 4, "n_kv_heads": 2, "head_dim": 10, "hidden_dim": 51}
# Every option of the llama family is in one of these.
LLAMAS: dict[str, Keys] = {
    name: {f"model__{field}": value for field, value in {**_ODD, **fields}.items()}
    for name, fields in {
        "llama, biases": {
            "qkv_bias": True,
            "wo_bias": True,
            "ffn_bias": True,
            "ffn_gated": False,
            "activation": "relu2",
            "norm": "layer",
            "rotary_dim": 4,
        },
        "llama, wide norms": {
            "qk_norm": "width",
            "norm_before": False,
            "norm_after": True,
            "window": 5,
            "layer_pattern": "wf",
            "rope_rule": "yarn",
            "rope_scaling": 4.0,
            "rope_scale_windows": False,
        },
        "llama, parallel": {
            "parallel_block": True,
            "norm": "layer_without_bias",
            "rope_interleaved": True,
            "logit_scale": 0.25,
            "window": 5,
            "layer_pattern": "wF",
            "tie_embeddings": True,
        },
        "llama, factors": {
            "norm": "layer_without_weight",
            "embedding_scale": 3.0,
            "residual_scale": 0.3,
            "attention_scale": 0.2,
            "qk_norm": "head_after_rope",
            "norm_after": True,
            "tie_embeddings": True,
        },
    }.items()
}
KEYS: dict[str, Keys] = {
    "gpt2": GPT2,
    "opt": GPT2 | {"model__activation": "relu", "model__position_offset": 2, "model__n_kv_heads": 1},
    "gemma3": GEMMA3,
    "gemma2": GEMMA2,
    "gemma1": GEMMA1,
    "qwen2_moe": QWEN2_MOE,
    "olmoe": OLMOE,
    "granite_moe": GRANITE_MOE,
    "glm4_moe": GLM4_MOE,
    "mixtral": MIXTRAL,
    "gpt_oss": GPT_OSS,
    "dit": DIT,
    "qwen3": {"model__name": "qwen3", "train__seq_len": 32, "train__global_batch": 16},
    **LLAMAS,
}
PIPELINE = "pp 2 train__micro_batch 1 train__global_batch 4 model__n_layers 4"
CAPPED = "model__attention_softcap 2.0 model__final_softcap 1.5"
FLOAT8 = "precision__float8 tensorwise"
# A batch's documents are shorter and longer than a window, and gpt_oss' limit bounds many values.
CASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "tp 2": "suite",
        "pp 2 cp 2 train__seq_len 13": "slow",
        "ds 2 tp 2 sequence false loss false model__tie_embeddings false": "full",
        "cp 2 tp 2 cp_method ulysses train__seq_len 14": "full",
        "pp 2 tp 2 pp_schedule ZBVZeroBubble model__n_layers 4": "full",
        "tp 4 zero 0 train__loss_chunk 5": "full",
        "dr 2 ds 2 zero 1 activation_checkpoint__mode selective": "full",
        "ds 2 tp 2 precision__param bfloat16": "full",
        "tp 2 comm__activations int8 model__dim 64": "full",
        "ds 2 tp 2 compile__mode block": "full",
        "ds 2 tp 2 optimizer__name muon": "full",
        f"tp 2 {FLOAT8} model__dim 64 model__hidden_dim 96 model__n_layers 3": "full",
    },
    "opt": {"ds 2 tp 2": "full", "pp 2 tp 2 sequence false": "slow"},
    "gemma3": {
        "cp 2 tp 2 train__seq_len 13": "full",
        f"pp 2 tp 2 sequence false {CAPPED}": "full",
        f"tp 2 cp 2 cp_method ulysses train__seq_len 14 {CAPPED}": "slow",
        "pp 2 ds 2 pp_schedule ZBVZeroBubble model__n_layers 4 model__tie_embeddings false": "full",
        "dr 2 ds 2 zero 1 activation_checkpoint__mode selective": "full",
        "tp 4 model__n_kv_heads 1 sequence false loss false": "slow",
        "ds 2 tp 2 zero 0 train__micro_batch 1": "full",
        "ds 2 cp 2 zero 2 cp_method allgather": "full",
        "ds 2 tp 2 precision__param bfloat16": "full",
        f"pp 2 cp 2 model__n_layers 3 {CAPPED}": "full",
        "ds 2 tp 2 train__loss_chunk 7": "full",
        "ds 2 tp 2 compile__mode block": "full",
    },
    "gemma2": {
        "ds 2 tp 2 sequence false": "full",
        "cp 2 tp 2 train__seq_len 13": "full",
        "pp 2 ds 2 model__n_layers 3": "slow",
    },
    "gemma1": {"ds 2 tp 2 model__tie_embeddings false": "slow", "pp 2 ds 2": "full"},
    "qwen2_moe": {
        "tp 2": "suite",
        "ds 2 tp 2 ep 2 sequence false": "full",
        "pp 2 ds 2 ep 2 optimizer__name muon": "full",
        "cp 2 ds 2 ep 2 train__seq_len 13": "full",
    },
    "olmoe": {
        "tp 2": "full",
        # Two ranks share a key/value head, and its part of the norm.
        "tp 4 ep 2": "full",
        "ds 2 tp 2 sequence false model__n_kv_heads 1": "full",
        "pp 2 tp 2 ep 2": "slow",
    },
    "granite_moe": {"ds 2 tp 2 ep 2": "slow", "pp 2 ds 2 ep 2 model__tie_embeddings true": "full"},
    "glm4_moe": {
        "ds 2 tp 2 ep 2": "full",
        "pp 2 tp 2 ep 2 model__n_layers 4 model__n_groups 4 model__top_groups 2": "slow",
        "cp 2 tp 2 train__seq_len 13": "full",
    },
    "mixtral": {
        "ds 2 ep 2": "suite",
        "cp 2 tp 2 ep 2 train__seq_len 13": "full",
        "tp 2 sequence false": "full",
        "pp 2 ds 2 ep 2 pp_schedule ZBVZeroBubble model__n_layers 4 model__tie_embeddings true": "slow",
        "cp 2 ep 2 cp_method ulysses model__window 0": "full",
        # The gate has no gradient.
        "ds 2 model__top_k 1 model__z_weight 0 model__balance_weight 0 optimizer__name muon"
        " model__dim 64 train__seq_len 64": "slow",
        "dr 2 ds 2 ep 2 zero 1 activation_checkpoint__mode selective": "full",
        "ds 3 ep 3 model__capacity_factor 1.0": "full",
        "ds 2 tp 2 ep 2 precision__param bfloat16": "full",
        "ds 2 ep 2 compile__mode block": "full",
    },
    "gpt_oss": {
        "ds 2 ep 2": "full",
        "cp 2 tp 2 ep 2 train__seq_len 13": "slow",
        "tp 2 sequence false": "slow",
        "pp 2 ds 2 ep 2 pp_schedule ZBVZeroBubble model__n_layers 4 model__tie_embeddings true": "full",
        "cp 2 tp 2 ep 2 cp_method ulysses model__layer_pattern f": "full",
        "tp 4 ep 2": "full",
        "dr 2 ds 2 ep 2 zero 1 activation_checkpoint__mode selective": "full",
        "ds 3 ep 3 model__capacity_factor 1.0": "full",
        "ds 2 tp 2 ep 2 precision__param bfloat16": "full",
        "ds 2 ep 2 compile__mode block": "full",
        f"tp 2 {FLOAT8} model__head_dim 16 model__n_layers 4": "full",
    },
    "dit": {
        "cp 2 tp 2 cp_balance headtail": "slow",
        "pp 2 ds 2 zero 2 pp_schedule Interleaved1F1B model__n_layers 4": "slow",
        "tp 3 sequence true model__n_heads 3 model__hidden_dim 37": "full",
        "tp 2 sequence false": "slow",
        "cp 2 cp_method ulysses cp_balance none": "slow",
        "cp 4 cp_method allgather": "full",
        "dr 2 ds 2 zero 0 model__channels 1 model__n_classes 1": "full",
        "ds 2 tp 2 sequence false precision__param bfloat16": "full",
        "ds 2 cp 2 compile__mode block activation_checkpoint__mode selective": "full",
        "cp 2 tp 2 cp_method ulysses model__n_heads 4": "full",
        "cp 3 cp_method ring cp_balance none": "full",
        "pp 2 tp 2 sequence false pp_schedule GPipe activation_checkpoint__mode full": "full",
        "pp 4 pp_schedule LoopedBFS model__n_layers 8": "full",
        "pp 2 cp 2 pp_schedule 1F1B zero 1": "full",
        "ds 2 optimizer__name muon": "full",
        "dr 2 ds 2 comm__gradients int8": "full",
        "ds 2 tp 2 sequence false precision__float8 rowwise model__dim 64 model__hidden_dim 128"
        " model__n_layers 3": "full",
    },
    "llama, biases": {
        "tp 2": "suite",
        "ds 2 tp 2": "full",
        "ds 2 tp 2 sequence false loss false": "slow",
        "tp 4": "full",
        "pp 2 cp 2 train__seq_len 13": "full",
        "ds 2 tp 2 optimizer__name muon": "full",
    },
    "llama, wide norms": {
        "tp 2": "full",
        "ds 2 tp 2": "full",
        "tp 4 sequence false": "full",
        "tp 4 model__n_kv_heads 1": "slow",
        "pp 2 tp 2 train__seq_len 14": "slow",
        "cp 2 ds 2 train__seq_len 13": "slow",
        "ds 2 tp 2 compile__mode block": "full",
        "ds 2 tp 2 precision__param bfloat16": "full",
    },
    "llama, parallel": {
        "ds 2 tp 2": "full",
        "pp 2 tp 2 sequence false train__loss_chunk 7": "slow",
        "cp 2 tp 2 train__seq_len 14": "slow",
    },
    "llama, factors": {
        "ds 2 tp 2": "full",
        "pp 2 tp 2 pp_schedule ZBVZeroBubble model__n_layers 4": "slow",
        "cp 2 tp 2 sequence false train__loss_chunk 5 train__seq_len 14": "slow",
    },
    # Where the key/value heads are fewer than tp, ranks share them, and k_norm's input. The full tier
    # has what is as with Llama, whose plan is the same there.
    "qwen3": {
        "": "suite",
        "tp 2": "full",
        "tp 2 sequence false loss false": "full",
        "tp 4": "slow",
        "tp 4 sequence false loss false": "full",
        "tp 4 model__n_kv_heads 1": "full",
        "ds 2 tp 2": "full",
        "ds 2 tp 2 zero 0": "full",
        "cp 2 cp_method ring": "slow",
        "cp 2 tp 2 cp_method ulysses": "full",
        f"{PIPELINE} pp_schedule ZBVZeroBubble model__tie_embeddings true": "suite",
        f"{PIPELINE} tp 2": "full",
        "tp 2 precision__param bfloat16": "full",
    },
}


NORMS = {"gemma3": 6, "qwen3": 4}  # of a layer


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=tier(slow=when == "slow", full=when == "full"))
        for name, cases in CASES.items()
        for case, when in cases.items()
    ],
)
def test_equals_one_process(pool: Pool, name: str, case: str) -> None:
    ranks, keys = keys_of(KEYS[name], case)
    # A plan leaves nothing behind for a second step; what these tables choose may do so.
    lasting = any(f"{table}__" in case for table in ("comm", "compile", "optimizer", "precision"))
    report = proved(pool.run(prove_case if lasting else prove_step, ranks, keys))
    norms = {row.name for row in report.rows if re.search(r"norm\.weight$", row.name)}
    if name in NORMS:
        assert len(norms) == 1 + NORMS[name] * int(str(keys["model__n_layers"]))


# Every model on every mesh of 8 ranks: sizes that all degrees divide.
EIGHT: dict[str, str] = {
    "gpt2": "model__n_layers 6 model__n_heads 8 model__dim 40",
    "gemma3": f"model__n_layers 4 model__n_heads 8 model__n_kv_heads 8 model__dim 64 {CAPPED}",
    "mixtral": "ep 2 model__n_layers 4 model__n_heads 8 model__n_kv_heads 8 model__dim 64",
    "gpt_oss": "ep 2 model__n_layers 4 model__n_heads 8 model__n_kv_heads 8",
    "dit": "model__n_layers 8 model__n_heads 8 model__dim 32 model__image_size 8 train__seq_len 16",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "pp"), [*((name, pp) for name in EIGHT for pp in (1, 2, 4)), ("gpt2", 8), ("dit", 8)]
)
def test_every_mesh_of_eight_ranks(pool: Pool, name: str, pp: int) -> None:
    """With ep 2 where the other axes allow it; ZeRO stages, cp methods and the like in turn."""
    proved = 0
    for degrees in meshes(8):
        if degrees["pp"] != pp:
            continue
        case = " ".join(f"{short} {degrees[axis]}" for short, axis in AXES.items())
        case += f" zero {proved % 4} cp_method {('ring', 'allgather', 'ulysses')[proved % 3]}"
        case += f" {EIGHT[name]}"
        if name == "gpt2":
            case += f" model__tie_embeddings {str(proved % 5 < 3).lower()}"
        if name in ("gpt_oss", "dit"):
            case += f" sequence {str(proved % 2 == 0).lower()}"
        prove_on(pool, keys_of(KEYS[name], case)[1])
        proved += 1
    assert proved == {1: 20, 2: 10, 4: 4, 8: 1}[pp]


MODULES: dict[str, Any] = {"qwen3": models.qwen3.model.Attention, "gemma3": models.gemma3.model.Block}


def _with_whole_norms(norm: str, keys: Keys) -> Report:
    """A proof as if every tp rank gave ``norm`` the same heads or tokens: its gradient, of which each
    rank found a part, counts as whole."""
    real, owner = _LocalRMSNorm.forward, MODULES[str(keys["model__name"])]
    made = owner.__init__

    def fake(self: Any, x: Tensor) -> Tensor:
        return self.normalized(x, self.weight.to_local()) if hasattr(self, "fault") else real(self, x)

    def marked(self: Any, *args: Any) -> None:
        made(self, *args)
        getattr(self, norm).fault = True

    with (
        mock.patch.object(_LocalRMSNorm, "forward", fake),
        mock.patch.object(owner, "__init__", marked),
    ):
        return prove_step(keys)


@pytest.mark.parametrize(
    ("name", "norm", "degrees"),
    [
        pytest.param("qwen3", "attention.q_norm", parallel(tp=4), marks=pytest.mark.slow),
        pytest.param(
            "qwen3", "attention.k_norm", parallel(tp=4, sequence=False), marks=pytest.mark.slow
        ),
        ("gemma3", "attention_post_norm", parallel(tp=2)),
    ],
)
def test_a_norm_not_summed_over_tp_is_named(pool: Pool, name: str, norm: str, degrees: Keys) -> None:
    keys = degrees | {"model__name": name}
    ranks = int(str(degrees["parallel__tp"]))
    report = pool.run(_with_whole_norms, ranks, norm.rpartition(".")[2], keys)[0]
    rows = {(row.quantity, row.name): row for row in report.rows}
    assert rows["loss", "step 1"].ok  # forward is right
    failed = {row.name for row in report.failed if row.quantity == "gradient"}
    assert failed == {f"layers.{i}.{norm}.weight" for i in range(2)}, str(report)


def test_a_norm_of_heads_under_replicate_is_refused() -> None:
    config = models.qwen3.Config(n_layers=2)
    right = models.qwen3.plan(config, Parallel(tp=2))
    pattern = "layers.*.attention.[qk]_norm"
    tensor = {n: s for n, s in right.tensor.items() if n != pattern}
    wrong = dataclasses.replace(right, tensor=tensor, replicate=[pattern])
    with torch.device("meta"):
        model = models.qwen3.Model(config)
    assert refused(resolve, wrong, model) == [
        f"plan.tensor: layers.*.attention.{name} is in a module with LocalInput, and has no style of"
        " compose.parallel.local_parallel; give it one, or that module PrepareModuleInput"
        for name in ("q_norm", "k_norm")
    ]


@contextmanager
def a_bias_is_added_before_the_sum() -> Iterator[None]:
    """All ranks of tp add the bias to their parts, so that the sum has it once for each rank."""
    row = local_parallel._RowLinear

    def fake(self: Any, input: Tensor) -> Tensor:
        return F.linear(input, local_weight(self.weight), local_weight(self.bias))

    with mock.patch.object(row, "forward", fake):
        yield


@contextmanager
def squares_are_of_a_rank_alone() -> Iterator[None]:
    """A norm over the whole width of queries or keys takes a rank's own part for the whole."""

    def alone(forward: str, backward: str, group: str, squares: Tensor) -> Tensor:
        return squares

    with mock.patch.object(local_parallel, "send_stream", alone):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (a_bias_is_added_before_the_sum, "llama, biases"),
        (squares_are_of_a_rank_alone, "llama, wide norms"),
    ],
)
def test_a_fault_in_an_option_of_llama_is_named(pool: Pool, fault: Fault, name: str) -> None:
    _, mesh = keys_of(KEYS[name], "tp 2")
    assert agreed(pool.run(prove_case, 2, mesh)).ok
    report = pool.run(with_fault, 2, fault, mesh)[0]
    assert not report.ok
    assert any(row.quantity == "loss" for row in report.failed)


# All but the keys' biases, which change no logit: a query's scores all move by the same.
EVERYTHING = {"embeddings.*", "*norm.*", "*.w[qvo12].*", "*.wk.weight"}


@pytest.mark.parametrize(
    ("fault", "keys", "names"),
    [
        (a_bias_is_added_before_the_sum, {}, EVERYTHING),
        pytest.param(
            a_bias_is_added_before_the_sum,
            {"parallel__sequence": False},
            EVERYTHING,
            marks=pytest.mark.slow,
        ),
        (
            partial_gradients_are_taken_as_whole,
            {},
            {"*.wo.bias", "*.w2.bias", "*norm.*", "embeddings.positions.weight"},
        ),
    ],
)
def test_a_wrong_bias_of_gpt2_is_named(pool: Pool, fault: Fault, keys: Keys, names: set[str]) -> None:
    _, mesh = keys_of(GPT2, "tp 2")
    assert_named(pool.run(with_fault, 2, fault, mesh | keys)[0], "gradient", names)
