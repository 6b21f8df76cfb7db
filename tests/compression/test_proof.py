"""The proof of compressed messages: each composition is one process, and faults are named."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from compose.compression.packing import FEWEST
from compose.proof.observers import CODES as ROUNDING
from compose.proof.prove import prove
from compose.proof.report import Report
from tests.compression.cases import EXPERTS, INT4, INT8, Keys, comm, given
from tests.support.helpers import (
    make_job,
    parallel,
    prove_on,
    prove_whole,
    tier,
    tiered,
)
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DEEPSEEK, DIT, GPT_OSS, MIXTRAL, QWEN

ROWS: dict[str, Keys] = {kind: {"comm__activations": kind} for kind in ("int8", "float8")}
BFLOAT16: Keys = {"precision__param": "bfloat16"}
FLOAT16: Keys = {"precision__param": "float16"}
TIED: Keys = {"model__tie_embeddings": True}
BLOCK: Keys = {"compile__mode": "block"}
# Short for the meshes of many cases.
SHARDED, HSDP = parallel(dp_shard=2), parallel(dp_replicate=2, dp_shard=2)
REPLICAS, TENSOR = parallel(dp_replicate=2, zero=0), parallel(tp=2)
V = parallel(dp_shard=2, pp=2, pp_schedule="ZBVZeroBubble") | {"model__n_layers": 4}
CASES: dict[str, Keys] = {
    "zero 3, int8": parallel(dp_shard=4) | INT8,
    "zero 3 uneven, int4": parallel(dp_shard=3) | INT4 | {"train__global_batch": 6},
    "zero 2, bfloat16": parallel(dp_shard=2, zero=2) | comm("bfloat16"),
    "zero 1 x tp, powersgd": parallel(dp_shard=2, tp=2, zero=1) | comm("powersgd", "int8"),
    "zero 3, top_k": SHARDED | comm("top_k", "int4_diff"),
    "ddp, int4": parallel(dp_replicate=4, zero=0) | comm("int4"),
    "ddp near 2, int4": parallel(dp_replicate=4, zero=0) | comm("int4", near=2),
    "ddp, powersgd": REPLICAS | comm("powersgd"),
    "ddp, top_k": parallel(dp_replicate=3, zero=0) | comm("top_k") | {"train__global_batch": 6},
    "hsdp, int4": HSDP | INT4,
    "hsdp, top_k": HSDP | comm("top_k"),
    "hsdp zero 1, powersgd": HSDP | parallel(zero=1) | comm("powersgd"),
    "near 2, int4": parallel(dp_shard=4) | INT4 | {"comm__near": 2},
    "hpz, int8": parallel(dp_shard=4, zero3_reshard=2) | INT8,
    "bfloat16, int4": SHARDED | BFLOAT16 | INT4,
    "float16, int4": SHARDED | FLOAT16 | INT4,
    "bfloat16 reduction, int8": SHARDED | BFLOAT16 | INT8 | {"precision__reduce": "bfloat16"},
    "offload, int8": parallel(dp_shard=2, offload="cpu") | INT8,
    "muon, int4": SHARDED | INT4 | {"optimizer__name": "muon"},
    "chunked loss, recomputed, int4": SHARDED
    | INT4
    | {"train__loss_chunk": 16, "activation_checkpoint__mode": "selective"},
    "compiled, int8": SHARDED | BLOCK | INT8,
    "cp, int4": parallel(dp_shard=2, cp=2) | INT4,
    "tied over a V, int4": V | TIED | INT4,
    "tied in one unit, int8": parallel(dp_shard=2, zero=2) | TIED | INT8,
    "experts, hsdp, int4": HSDP | parallel(ep=2) | EXPERTS | INT4,
    "experts x tp, int8": parallel(dp_shard=2, tp=2, ep=2) | EXPERTS | INT8,
    "activations, tp": parallel(tp=2, sequence=False) | ROWS["int8"],
    "activations, tp 4, odd, float8": parallel(tp=4, sequence=False)
    | ROWS["float8"]
    | {"train__seq_len": 31},
    "activations, tp and sequence, float8": TENSOR | ROWS["float8"],
    "activations, tp x zero 3, all int8": TENSOR | SHARDED | ROWS["int8"] | INT8,
    "activations, tp, compiled": TENSOR | BLOCK | ROWS["int8"],
    "activations, tp x pp, recomputed": parallel(tp=2, pp=2, dp_shard=1)
    | ROWS["int8"]
    | {"activation_checkpoint__mode": "full", "comm__block": 16},
    "activations, tp, bfloat16": TENSOR | BFLOAT16 | ROWS["int8"],
    "activations, tp, float16": TENSOR | FLOAT16 | ROWS["int8"],
    "activations, tp x cp": parallel(tp=2, cp=2, dp_shard=1) | ROWS["int8"],
    "activations, experts": parallel(dp_shard=2, ep=2) | EXPERTS | ROWS["int8"],
    "activations, experts x tp, float8": parallel(dp_shard=2, tp=2, ep=4)
    | ROWS["float8"]
    | {"model__name": "qwen3", "model__preset": "debug_moe"},
}
SUITE = ("ddp, top_k", "tied in one unit, int8", "activations, experts")
SLOW = (
    *("zero 3 uneven, int4", "hsdp zero 1, powersgd", "zero 3, int8", "near 2, int4"),
    *("tied over a V, int4", "float16, int4", "activations, tp 4, odd, float8"),
    *("activations, tp and sequence, float8", "activations, tp x pp, recomputed"),
)


@pytest.mark.parametrize("name", tiered(CASES, SLOW, CASES.keys() - {*SLOW, *SUITE}))
def test_equals_one_process(pool: Pool, name: str) -> None:
    report = prove_on(pool, given(CASES[name]))
    if name.startswith("activations"):
        for what in ("lost of activations", "lost of activations' gradients"):
            rows = [row for row in report.rows if row.quantity.endswith(what)]
            assert rows
            # The limit is 1.25 times what is expected, and a little more for few elements.
            assert all(row.error > row.tolerance / 3 for row in rows), str(report)


def test_one_process_takes_the_same_steps(pool: Pool) -> None:
    """Else AdamW would step otherwise where bfloat16 gradients are only rounding."""
    small: Keys = {"model__n_layers": 1, "train__seq_len": 16, "train__global_batch": 2}
    report = prove_on(pool, given(CASES["activations, tp, bfloat16"]) | small)
    assert max(row.error for row in report.rows if row.quantity == "update") < 1e-3, str(report)


# Faults of one in 10^8 and of one in 10^5, in the sums of what travels plain and of codes.
TINY: dict[str, tuple[str, str, str]] = {
    "plain": (
        "packing:Packing._write",
        "terms.sum(0, dtype=out.dtype)",
        "terms.sum(0, dtype=out.dtype) * (1 + 1e-8)",
    ),
    "coded": (
        "codec:decode_into",
        "add else total)",
        "add else total * (1 + 1e-5 * (len(terms) > 1)))",
    ),
}


@pytest.mark.parametrize(
    ("fault", "pp"),
    [
        pytest.param(fault, pp, marks=tier(slow=pp > 1 or fault != "plain"))
        for fault in ("", *TINY)
        for pp in (1, 2)
    ],
)
def test_only_what_is_coded_may_be_rounded(pool: Pool, fault: str, pp: int) -> None:
    """Also where the first rank, whose rows count, holds none of it."""
    keys = given(comm("int8", block=64)) | {"parallel__dp_shard": 2, "parallel__pp": pp}
    keys |= {"model__n_layers": 1, "model__hidden_dim": 96, "train__global_batch": 4}
    report = pool.run(_with_tiny_fault, 2 * pp, fault, keys)[0]
    whole = make_job(2 * pp, **keys).model.named_parameters()
    coded = {name for name, p in whole if p.ndim > 1 and p.numel() >= FEWEST}
    rows = [row for row in report.rows if row.quantity == "float64 gradient"]
    assert coded < {row.name for row in rows}
    assert {row.name for row in rows if row.tolerance == ROUNDING} == coded, str(report)
    wrong = {row.name for row in rows if (row.name in coded) == (fault == "coded")} if fault else set()
    assert {row.name for row in rows if not row.ok} == wrong, str(report)


def _with_tiny_fault(fault: str, keys: Keys) -> Report:
    place, *change = TINY.get(fault, ("", "", ""))
    with mutated(f"compose.compression.{place}", *change) if fault else nullcontext():
        job = make_job(dist.get_world_size(), **keys)
        return prove(job, make_mesh(job.degrees), torch.device("cpu"), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["powersgd", "top_k", "int4"])
def test_remainders_of_replicas_in_float64(pool: Pool, code: str) -> None:
    """The account's sum over replicas once changed what a remainder was compared with."""
    prove_on(pool, given(comm(code)) | parallel(dp_replicate=2) | {"model__n_layers": 1}, prove_whole)


def test_remainders_of_gradients_in_bfloat16(pool: Pool) -> None:
    """The account once rounded what was sent to the type of gradients, which residuals do not do."""
    keys = given(comm("int4", block=16)) | {"parallel__dp_shard": 2, "model__n_layers": 1}
    keys |= {"precision__param": "bfloat16", "precision__reduce": "bfloat16"}
    report = prove_on(pool, keys)
    assert any(row.quantity == "lost of residuals" for row in report.rows)


FEW: Keys = {"train__global_batch": 4, "train__micro_batch": 1, "train__seq_len": 16}
TEXT: Keys = FEW | {"model__n_layers": 1, "model__dim": 32, "model__n_heads": 4}
# An expert's layer has at least 4,096 elements, or nothing of it would be coded.
WITH_EXPERTS: Keys = TEXT | {"model__n_experts": 8}
MODELS: dict[str, Keys] = {
    "llama": TEXT | {"model__name": "llama"},
    "gpt2": TEXT | {"model__name": "gpt2"},
    "gemma3": TEXT | {"model__name": "gemma3"},
    "qwen3": TEXT | {"model__name": "qwen3"},
    "qwen3 with experts": WITH_EXPERTS | QWEN,
    "deepseek_v3": WITH_EXPERTS | DEEPSEEK | {"model__n_layers": 2},
    "mixtral": WITH_EXPERTS | MIXTRAL,
    "gpt_oss": WITH_EXPERTS | GPT_OSS,
    "dit": DIT | FEW | {"train__seq_len": 9, "model__dim": 64, "model__hidden_dim": 96},
}
CODES: dict[str, Keys] = {
    "int8": INT8,
    "int4": INT4,
    "bfloat16": comm("bfloat16", "int8"),
    "powersgd": comm("powersgd", "int4_diff"),
    "top_k": comm("top_k", "int4_diff"),
}
# Every model once, and every code.
ONE_EACH = {(model, list(CODES)[i % len(CODES)]) for i, model in enumerate(MODELS)}


@pytest.mark.parametrize(
    ("model", "code"),
    [pytest.param(m, c, marks=tier(full=(m, c) not in ONE_EACH)) for m in MODELS for c in CODES],
)
def test_weights_and_gradients(pool: Pool, model: str, code: str) -> None:
    prove_on(pool, MODELS[model] | SHARDED | CODES[code])


@pytest.mark.parametrize("model", [m for m in MODELS if m != "dit"])  # a rule refuses it
@pytest.mark.parametrize("code", tiered(ROWS, slow=ROWS, full=("float8",)))
def test_activations(pool: Pool, model: str, code: str) -> None:
    """Experts send their rows, with weights and gradients in codes too; other models the stream."""
    experts = "model__n_experts" in MODELS[model]
    mesh = SHARDED | CODES["int4"] | {"parallel__ep": 2} if experts else TENSOR
    prove_on(pool, MODELS[model] | mesh | ROWS[code])
