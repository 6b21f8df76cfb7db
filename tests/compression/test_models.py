"""Every kind of model with every code of messages: each is one process."""

import pytest

from tests.compression.cases import Keys, comm
from tests.models.dit.shapes import DIT
from tests.support.experts import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN
from tests.support.helpers import agreed, prove_case, tier
from tests.support.pool import Pool

FEW: Keys = {"train__global_batch": 4, "train__micro_batch": 1, "train__seq_len": 16}
TEXT: Keys = FEW | {"model__n_layers": 1, "model__dim": 32, "model__n_heads": 4}
# An expert's layer has at least 4,096 elements, or nothing of it would be coded.
EXPERTS: Keys = TEXT | {"model__n_experts": 8}
MODELS: dict[str, Keys] = {
    "llama": TEXT | {"model__name": "llama"},
    "gpt2": TEXT | {"model__name": "gpt2"},
    "gemma3": TEXT | {"model__name": "gemma3"},
    "qwen3": TEXT | {"model__name": "qwen3"},
    "qwen3 with experts": EXPERTS | QWEN,
    "deepseek_v3": EXPERTS | DEEPSEEK | {"model__n_layers": 2},
    "mixtral": EXPERTS | MIXTRAL,
    "gpt_oss": EXPERTS | GPT_OSS,
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
IN_THE_SUITE = {(model, list(CODES)[i % len(CODES)]) for i, model in enumerate(MODELS)}


@pytest.mark.parametrize(
    ("model", "code"),
    [pytest.param(m, c, marks=tier(full=(m, c) not in IN_THE_SUITE)) for m in MODELS for c in CODES],
)
def test_weights_and_gradients(pool: Pool, model: str, code: str) -> None:
    report = agreed(pool.run(prove_case, 2, MODELS[model] | SHARDED | CODES[code]))
    assert report.ok, str(report)


ROWS: dict[str, Keys] = {kind: {"comm__activations": kind} for kind in ("int8", "float8")}


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
