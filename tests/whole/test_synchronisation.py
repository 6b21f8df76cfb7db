"""A training step on CUDA keeps the host waiting at the named places only, and this needs no GPU."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.helpers import Keys, make_job, parallel, tier
from tests.support.small_models import DIT
from tests.support.waits import waits_of

# Where the host may wait in a step, by the beginning of what is found, and why.
ALLOWED = {
    "compose/parallel/expert_parallel.py, _exchange_counts": "the sizes of a layer's all-to-alls, once",
    "compose/parallel/expert_parallel.py, _row_counts": "no wait: they are in host memory by now",
    "compose/parallel/step_rules.py, _buffers": "no wait: one that forward changes is compared once",
    "models/layers/moe.py, _has_kernel": "no wait: on meta the grouped product runs, as on a GPU",
    "compose/train/readings.py, read_step": "loss and norm, before the weights change",
    "compose/parallel/expert_parallel.py, __call__": "what routers and stages report, right after it",
}
MODELS: dict[str, Keys] = {
    "llama": {"train__loss_chunk": 24, "train__z_loss": 0.1},
    "gpt2": {},
    "gemma3": {},
    "qwen3": {},
    "qwen3_moe": {"model__name": "qwen3", "model__preset": "debug_moe"},
    "mixtral": {},
    "deepseek_v3": {"model__n_layers": 2},  # the first layer has no experts
    "gpt_oss": {},
    "dit": DIT | {"parallel__sequence": False},
}
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
AXES: dict[str, Keys] = {
    "none": {},
    "dp_shard": parallel(dp_shard=2),
    "dp_replicate": parallel(dp_replicate=2, dp_shard=1),
    "tp": parallel(tp=2, dp_shard=1),
    "cp": parallel(cp=2, dp_shard=1),
    "pp": parallel(pp=2, dp_shard=1) | {"model__n_layers": 2},
    "ep": parallel(dp_shard=2, ep=2),
}
OPTIONS: dict[str, Keys] = {
    "float16": {"precision__param": "float16"},
    "float8": {
        "precision__float8": "tensorwise",
        "model__dim": 512,
        "model__hidden_dim": 2048,
        "train__seq_len": 512,
    },
    "muon": {"optimizer__name": "muon"},
    "bfloat16": {"precision__master": "bfloat16", "precision__optimizer_state": "bfloat16"},
    "recomputed": {"activation_checkpoint__mode": "full"},
    "offload": {"activation_checkpoint__offload": True},
    "codes": {"comm__gradients": "int4", "comm__weights": "int8"},
    "adapters": {"model__lora__rank": 4, "model__lora__targets": '["layers.*.attention.w*"]'},
    "validation": {"train__validate_every": 2},
    "documents": {},
    "ulysses": parallel(cp=2, dp_shard=1, cp_method="ulysses"),
    "zero bubble": parallel(pp=2, dp_shard=1, pp_schedule="ZBVZeroBubble") | {"model__n_layers": 4},
}
# Options add these.
ADDED = {
    "compose/compression/compressor.py, metrics": "what codes have lost, right after loss and norm",
    "compose/train/evaluate.py, loss": "the loss of a whole validation",
}
QUICKLY: Keys = {
    "metrics__tensorboard": False,
    "train__stop_after": 2,
    "train__global_batch": 8,
    "precision__param": "bfloat16",
    "model__n_layers": 1,
}
QUICK = {("llama", "none"), ("mixtral", "ep"), ("gpt2", "dp_shard")}
# Each model and each axis once; the axes cut a model with experts as they cut Llama.
SLOW = {(model, "none") for model in MODELS} | {("llama", axis) for axis in AXES}


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@pytest.mark.parametrize(
    ("model", "axis"),
    [
        pytest.param(
            model,
            axis,
            marks=tier(slow=(model, axis) not in QUICK, full=(model, axis) not in SLOW | QUICK),
        )
        for model in MODELS
        for axis in AXES
        if axis != "ep" or model in EXPERTS
    ],
)
def test_a_step_waits_at_the_named_places(tmp_path: Path, model: str, axis: str) -> None:
    keys = QUICKLY | {"model__name": model} | MODELS[model] | AXES[axis]
    job = make_job(1 if axis == "none" else 2, **(keys | {"run__dir": tmp_path}))
    result = waits_of(job)
    assert _strange(result, ALLOWED) == []
    # The reading, the routers', and one for the sizes of messages in each layer of experts, here one.
    assert _count(result) <= (1 if model not in EXPERTS else 2 if axis != "ep" else 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_wait_at_the_named_places(tmp_path: Path, name: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 20)
    keys = QUICKLY | parallel(dp_shard=2) | OPTIONS[name] | {"run__dir": tmp_path / "run"}
    if name == "validation":
        keys["data__validation"] = text
    if name == "documents":  # three that end within the first samples
        for number in range(3):
            (tmp_path / f"{number}.md").write_text("A short one. " * 2)
        keys["data__path"] = str(tmp_path / "*.md")
    result = waits_of(make_job(2, **keys))
    assert _strange(result, ALLOWED | ADDED) == []
    assert _count(result) <= 2


def _strange(found: Mapping[str, int], allowed: Mapping[str, str]) -> list[str]:
    return [where for where in found if not where.startswith(tuple(allowed))]


def _count(found: Mapping[str, int]) -> int:
    return sum(count for where, count in found.items() if ": another path" not in where)
