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
from tests.support.helpers import agreed, make_job, prove_case, prove_whole, tier
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DEEPSEEK, DIT, GPT_OSS, MIXTRAL, QWEN

ROWS: dict[str, Keys] = {kind: {"comm__activations": kind} for kind in ("int8", "float8")}
CASES: dict[str, tuple[int, Keys]] = {
    "zero 3, int8": (4, {"parallel__dp_shard": 4, **INT8}),
    "zero 3 uneven, int4": (3, {"parallel__dp_shard": 3, "train__global_batch": 6, **INT4}),
    "zero 2, bfloat16": (2, {"parallel__dp_shard": 2, "parallel__zero": 2, **comm("bfloat16")}),
    "zero 1 x tp, powersgd": (
        4,
        {"parallel__dp_shard": 2, "parallel__tp": 2, "parallel__zero": 1, **comm("powersgd", "int8")},
    ),
    "zero 3, top_k": (2, {"parallel__dp_shard": 2, **comm("top_k", "int4_diff")}),
    "ddp, int4": (4, {"parallel__dp_replicate": 4, "parallel__zero": 0, **comm("int4")}),
    "ddp near 2, int4": (4, {"parallel__dp_replicate": 4, "parallel__zero": 0, **comm("int4", near=2)}),
    "ddp, powersgd": (2, {"parallel__dp_replicate": 2, "parallel__zero": 0, **comm("powersgd")}),
    "ddp, top_k": (
        3,
        {"parallel__dp_replicate": 3, "train__global_batch": 6, "parallel__zero": 0, **comm("top_k")},
    ),
    "hsdp, int4": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, **INT4}),
    "hsdp, top_k": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, **comm("top_k")}),
    "hsdp zero 1, powersgd": (
        4,
        {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, "parallel__zero": 1, **comm("powersgd")},
    ),
    "near 2, int4": (4, {"parallel__dp_shard": 4, **INT4, "comm__near": 2}),
    "hpz, int8": (4, {"parallel__dp_shard": 4, "parallel__zero3_reshard": 2, **INT8}),
    "bfloat16, int4": (2, {"parallel__dp_shard": 2, "precision__param": "bfloat16", **INT4}),
    "float16, int4": (2, {"parallel__dp_shard": 2, "precision__param": "float16", **INT4}),
    "bfloat16 reduction, int8": (
        2,
        {
            "parallel__dp_shard": 2,
            "precision__param": "bfloat16",
            "precision__reduce": "bfloat16",
            **INT8,
        },
    ),
    "offload, int8": (2, {"parallel__dp_shard": 2, "parallel__offload": "cpu", **INT8}),
    "muon, int4": (2, {"parallel__dp_shard": 2, "optimizer__name": "muon", **INT4}),
    "chunked loss, recomputed, int4": (
        2,
        {
            "parallel__dp_shard": 2,
            "train__loss_chunk": 16,
            "activation_checkpoint__mode": "selective",
            **INT4,
        },
    ),
    "compiled, int8": (2, {"parallel__dp_shard": 2, "compile__mode": "block", **INT8}),
    "cp, int4": (4, {"parallel__dp_shard": 2, "parallel__cp": 2, **INT4}),
    "tied over a V, int4": (
        4,
        {
            "parallel__dp_shard": 2,
            "parallel__pp": 2,
            "parallel__pp_schedule": "ZBVZeroBubble",
            "model__n_layers": 4,
            "model__tie_embeddings": True,
            **INT4,
        },
    ),
    "tied in one unit, int8": (
        2,
        {"parallel__dp_shard": 2, "parallel__zero": 2, "model__tie_embeddings": True, **INT8},
    ),
    "experts, hsdp, int4": (
        4,
        {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, "parallel__ep": 2, **EXPERTS, **INT4},
    ),
    "experts x tp, int8": (
        4,
        {"parallel__dp_shard": 2, "parallel__tp": 2, "parallel__ep": 2, **EXPERTS, **INT8},
    ),
    "activations, tp": (2, {"parallel__tp": 2, "parallel__sequence": False, **ROWS["int8"]}),
    "activations, tp 4, odd, float8": (
        4,
        {"parallel__tp": 4, "parallel__sequence": False, "train__seq_len": 31, **ROWS["float8"]},
    ),
    "activations, tp and sequence, float8": (2, {"parallel__tp": 2, **ROWS["float8"]}),
    "activations, tp x zero 3, all int8": (
        4,
        {"parallel__tp": 2, "parallel__dp_shard": 2, **ROWS["int8"], **INT8},
    ),
    "activations, tp, compiled": (2, {"parallel__tp": 2, "compile__mode": "block", **ROWS["int8"]}),
    "activations, tp x pp, recomputed": (
        4,
        {
            "parallel__tp": 2,
            "parallel__pp": 2,
            "parallel__dp_shard": 1,
            "activation_checkpoint__mode": "full",
            **ROWS["int8"],
            "comm__block": 16,
        },
    ),
    "activations, tp, bfloat16": (
        2,
        {"parallel__tp": 2, "precision__param": "bfloat16", **ROWS["int8"]},
    ),
    "activations, tp, float16": (2, {"parallel__tp": 2, "precision__param": "float16", **ROWS["int8"]}),
    "activations, tp x cp": (
        4,
        {"parallel__tp": 2, "parallel__cp": 2, "parallel__dp_shard": 1, **ROWS["int8"]},
    ),
    "activations, experts": (
        2,
        {"parallel__dp_shard": 2, "parallel__ep": 2, **EXPERTS, **ROWS["int8"]},
    ),
    "activations, experts x tp, float8": (
        4,
        {
            "parallel__dp_shard": 2,
            "parallel__tp": 2,
            "parallel__ep": 4,
            "model__name": "qwen3",
            "model__preset": "debug_moe",
            **ROWS["float8"],
        },
    ),
}
IN_THE_SUITE = ("ddp, top_k", "tied in one unit, int8", "activations, experts")
SLOW = (
    "zero 3 uneven, int4",
    "hsdp zero 1, powersgd",
    "zero 3, int8",
    "near 2, int4",
    "tied over a V, int4",
    "float16, int4",
    "activations, tp 4, odd, float8",
    "activations, tp and sequence, float8",
    "activations, tp x pp, recomputed",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=tier(slow=n in SLOW, full=n not in IN_THE_SUITE and n not in SLOW))
        for n in CASES
    ],
)
def test_equals_one_process(pool: Pool, name: str) -> None:
    ranks, keys = CASES[name]
    report = agreed(pool.run(prove_case, ranks, given(keys)))
    assert report.ok, str(report)
    if name.startswith("activations"):
        for what in ("lost of activations", "lost of activations' gradients"):
            rows = [row for row in report.rows if row.quantity.endswith(what)]
            assert rows
            # The limit is 1.25 times what is expected, and a little more for few elements.
            assert all(row.error > row.tolerance / 3 for row in rows), str(report)


def test_one_process_takes_the_same_steps(pool: Pool) -> None:
    """Else AdamW would step otherwise where bfloat16 gradients are only rounding."""
    ranks, keys = CASES["activations, tp, bfloat16"]
    small: Keys = {"model__n_layers": 1, "train__seq_len": 16, "train__global_batch": 2}
    report = agreed(pool.run(prove_case, ranks, given(keys) | small))
    assert report.ok, str(report)
    assert max(row.error for row in report.rows if row.quantity == "update") < 1e-3, str(report)


FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    "a neighbour's scale": (
        "near 2, int4",
        "compose.compression.codec:read_steps",
        "= codes[..., -SCALE_BYTES:]",
        "= codes[..., -SCALE_BYTES:].roll(1, -2)",
        "lost of gradients",
    ),
    "a block off by one": (
        "zero 3, int8",
        "compose.compression.packing:Packing._write",
        ".unflatten(-1, (self.blocks, width))",
        ".unflatten(-1, (self.blocks, width)).roll(1, -2)",
        "lost of",
    ),
    "integer sums": (
        "zero 3, int8",
        "compose.compression.codec:_decode_into",
        "out.add_(found)",
        "out.add_(found.sign())",
        "gradient",
    ),
    "a sum that is a mean": (
        "zero 3, int8",
        "compose.compression.codec:decode_into",
        "_sum_into(place, terms, bits, add, compiled)",
        "_sum_into(place, terms, bits, add, compiled).div_(len(terms))",
        "gradient",
    ),
    "feedback added twice": (
        "zero 3 uneven, int4",
        "compose.compression.codec:_round_with_residual",
        ".mul_(kept_steps * scale)",
        ".mul_(2 * kept_steps * scale)",
        "lost of remainders",
    ),
    "what was sent stays in the remainder": (
        "zero 3 uneven, int4",
        "compose.compression.codec:_round_with_residual",
        "rest.add_(x).sub_(rounded * steps)",
        "rest.add_(x).sub_(rounded * steps * (1 - ADDED))",
        "lost of remainders",
    ),
    "a stale base": (
        "zero 3 uneven, int4",
        "compose.compression.gather:DifferenceGather.fill",
        'self.kept["base"], self.sent = base, True',
        "self.kept['base'] = self.__dict__.setdefault('first', base.clone()).clone(); self.sent = True",
        "gradient",
    ),
    "own weights that stay exact": (
        "zero 3 uneven, int4",
        "compose.compression.gather:DifferenceGather.fill",
        "base[group.rank()], self.writes_base = self.own, False",
        "self.writes_base = False",
        "gradient",
    ),
    "replicas left out": (
        "hsdp zero 1, powersgd",
        "compose.compression.compressor:ReplicaSum.hook",
        "    self.sum(flat)",
        "    pass",
        "gradient",
    ),
    "a neighbour's scale of a row": (
        "activations, tp 4, odd, float8",
        "compose.compression.activations:_decoded_float8",
        "* scales",
        "* scales.roll(1, 0)",
        "lost of activations",
    ),
    "a neighbour's rows": (
        "activations, tp 4, odd, float8",
        "compose.compression.activations:_sum",
        "list(codes)",
        "list(codes.roll(1, 0))",
        "lost of activations",
    ),
    "a rank left out": (
        "activations, tp 4, odd, float8",
        "compose.compression.activations:_sum",
        "got[1:]",
        "got[2:]",
        "lost of activations",
    ),
    "a gradient that is summed twice": (
        "activations, experts",
        "compose.compression.activations:_exchange_rows",
        "found = code.decode(",
        "found = (1 + gradient) * code.decode(",
        "lost of activations' gradients",
    ),
}
QUICK = ("feedback added twice", "a rank left out")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=tier(slow=name not in QUICK)) for name in FAULTS]
)
def test_faults_are_named(pool: Pool, fault: str) -> None:
    case, place, old, new, quantity = FAULTS[fault]
    ranks, keys = CASES[case]
    report = pool.run(_with_fault, ranks, place, old, new, given(keys))[0]
    assert not report.ok
    assert any(quantity in row.quantity for row in report.failed), str(report)


def _with_fault(place: str, old: str, new: str, keys: Keys) -> Report:
    with mutated(place, old, new):
        return prove_case(keys)


# Faults of one in 10^8 and of one in 10^5, in the sums of what travels plain and of codes.
TINY: dict[str, tuple[str, str, str]] = {
    "plain": (
        "compose.compression.packing:Packing._write",
        "terms.sum(0, dtype=out.dtype)",
        "terms.sum(0, dtype=out.dtype) * (1 + 1e-8)",
    ),
    "coded": (
        "compose.compression.codec:decode_into",
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
    with mutated(*TINY[fault]) if fault else nullcontext():
        job = make_job(dist.get_world_size(), **keys)
        return prove(job, make_mesh(job.degrees), torch.device("cpu"), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["powersgd", "top_k", "int4"])
def test_remainders_of_replicas_in_float64(pool: Pool, code: str) -> None:
    """The account's sum over replicas once changed what a remainder was compared with."""
    keys = given(comm(code)) | {"parallel__dp_replicate": 2, "model__n_layers": 1}
    report = agreed(pool.run(prove_whole, 2, keys))
    assert report.ok, str(report)


def test_remainders_of_gradients_in_bfloat16(pool: Pool) -> None:
    """The account once rounded what was sent to the type of gradients, which remainders do not do."""
    keys = given(comm("int4", block=16)) | {"parallel__dp_shard": 2, "model__n_layers": 1}
    keys |= {"precision__param": "bfloat16", "precision__reduce": "bfloat16"}
    report = agreed(pool.run(prove_case, 2, keys))
    assert any(row.quantity == "lost of remainders" for row in report.rows)
    assert report.ok, str(report)


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
    "int8": comm("int8", "int8"),
    "int4": comm("int4", "int4_diff"),
    "bfloat16": comm("bfloat16", "int8"),
    "powersgd": comm("powersgd", "int4_diff"),
    "top_k": comm("top_k", "int4_diff"),
}
SHARDED: Keys = {"parallel__dp_shard": 2}
# Every model once, and every code.
ONE_EACH = {(model, list(CODES)[i % len(CODES)]) for i, model in enumerate(MODELS)}


@pytest.mark.parametrize(
    ("model", "code"),
    [pytest.param(m, c, marks=tier(full=(m, c) not in ONE_EACH)) for m in MODELS for c in CODES],
)
def test_weights_and_gradients(pool: Pool, model: str, code: str) -> None:
    report = agreed(pool.run(prove_case, 2, MODELS[model] | SHARDED | CODES[code]))
    assert report.ok, str(report)


@pytest.mark.parametrize("model", [m for m in MODELS if m != "dit"])  # a rule refuses it
@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=tier(slow=True, full=code == "float8")) for code in ROWS]
)
def test_activations(pool: Pool, model: str, code: str) -> None:
    """Experts send their rows, with weights and gradients in codes too; other models the stream."""
    experts = "model__n_experts" in MODELS[model]
    mesh = SHARDED | CODES["int4"] | {"parallel__ep": 2} if experts else {"parallel__tp": 2}
    report = agreed(pool.run(prove_case, 2, MODELS[model] | mesh | ROWS[code]))
    assert report.ok, str(report)
