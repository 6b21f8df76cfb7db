"""A wrong file that ``plan --against`` reads is refused in one line."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compose.config.toml import dump, load
from compose.planner.against_run import MeasuredFigure, against, corrected
from compose.planner.cluster import MeasuredCopy, MeasuredProduct, Measurements, load_cluster
from compose.planner.estimate import Estimate, estimate
from compose.planner.measure import as_toml
from tests.support.helpers import ROOT, make_config, overrides, refusal

STEP = b'{"step": 1, "tokens_per_second": 2048.5, "grad_norm": NaN}\n'
NESTED = b'{"a":' * 50000 + b"1" + b"}" * 50000 + b"\n"
SHARES = dict.fromkeys(("matmul", "attention", "communication", "optimizer", "other"), 0.1)
KEPT: dict[str, object] = dict.fromkeys(
    ("weights", "gradients", "optimizer", "communication", "activations"), 1
)


def summary_of(seconds: object = 1, kept: dict[str, object] = KEPT, **shares: object) -> str:
    """The summary of one rank's profile."""
    memory = {"peak": 1, "at_peak": kept}
    rank = {"seconds_per_step": seconds, "time": SHARES | shares, "memory": memory}
    return json.dumps({"ranks": [rank]})


METRICS: list[tuple[bytes, str]] = [
    (STEP * 3 + b"\xff\xfe\n", "line 4 is no step"),
    (STEP * 3 + NESTED, "line 4 is no step"),
    (STEP * 3 + b"9" * 5000 + b"\n", "line 4 is no step"),
    (STEP + b"[]\n", "line 2 is no step"),
    (STEP.replace(b"2048.5", b"0"), "line 1: tokens_per_second is 0, and no rate"),
    (STEP.replace(b"2048.5", b"NaN"), "line 1: tokens_per_second is nan, and no rate"),
    (STEP.replace(b"2048.5", b"5e-324"), "line 1: tokens_per_second is 5e-324, and no rate"),
    (STEP.replace(b"2048.5", b"-1e999"), "line 1: tokens_per_second is -inf, and no rate"),
    (STEP.replace(b"2048.5", b'"9"'), "line 1: tokens_per_second is '9', and no rate"),
    (STEP.replace(b"2048.5", b"true"), "line 1: tokens_per_second is True, and no rate"),
    (STEP * 2 + b"\n", "holds 2 steps; more than 2 are needed"),
]
SUMMARIES: list[tuple[str, str]] = [
    ("[]", "is a list, not an object"),
    ('{"ranks": []}', "ranks: a list should have at least 1 item after validation, not 0"),
    (summary_of(0), "ranks[0].seconds_per_step: 0 should be greater than"),
    (summary_of("9"), 'ranks[0].seconds_per_step: expected a number, got "9"'),
    (summary_of(other=float("nan")), "holds NaN, which is not JSON"),
    (summary_of(other=2), "ranks[0].time.other: 2 should be less than or"),
    (summary_of(kept={"weights": 1}), "ranks[0].memory.at_peak.gradients: is missing"),
]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder of a run of three steps."""
    config = make_config(1, train__seq_len=16, model__dim=32, model__n_heads=2, model__n_kv_heads=2)
    (tmp_path / "config.toml").write_text(dump(config))
    (tmp_path / "metrics.jsonl").write_bytes(STEP * 3)
    (tmp_path / "traces").mkdir()
    return tmp_path


def test_the_newest_profile_is_that_of_the_last_step(made: Path) -> None:
    for steps, content in (("100-101", "[]"), ("5-6", "{}")):
        (made / f"traces/step{steps}_summary.json").write_text(content)
    assert _refusal(made).startswith(f"{made}/traces/step100-101_summary.json: ")


def _refusal(folder: Path) -> str:
    (problem,) = refusal(against, folder, load_cluster("cpu")).splitlines()
    return problem


@pytest.mark.parametrize(("content", "words"), METRICS, ids=[words for _, words in METRICS])
def test_metrics_that_are_none(made: Path, content: bytes, words: str) -> None:
    (made / "metrics.jsonl").write_bytes(content)
    assert _refusal(made) == f"{made}/metrics.jsonl: {words}"


@pytest.mark.parametrize(("content", "words"), SUMMARIES, ids=[words for _, words in SUMMARIES])
def test_a_profile_that_is_none(made: Path, content: str, words: str) -> None:
    (made / "traces/step2-2_summary.json").write_text(content)
    assert _refusal(made).startswith(f"{made}/traces/step2-2_summary.json: {words}")


def test_a_run_is_not_read_through_links_and_pipes(made: Path, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside"
    (made / "traces").rename(outside)
    (made / "traces").symlink_to(outside)
    leads = "is a link that leads out of its folder; put the file itself there"
    assert _refusal(made) == f"{made}/traces: {leads}"
    (made / "traces").unlink()
    outside.rename(made / "traces")
    summary = made / "traces/step2-2_summary.json"
    summary.symlink_to(made / "metrics.jsonl")
    assert _refusal(made) == f"{summary}: cannot be read: is a symbolic link"
    summary.unlink()
    (made / "metrics.jsonl").rename(made / "other")
    (made / "metrics.jsonl").symlink_to("other")
    assert _refusal(made) == f"{made}/metrics.jsonl: cannot be read: is a symbolic link"
    (made / "metrics.jsonl").unlink()
    os.mkfifo(made / "metrics.jsonl")
    assert _refusal(made) == f"{made}/metrics.jsonl: cannot be read: is no file"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dpo__beta": 0.1}, "dpo.beta: the second forward of DPO is not counted; "),
        ({"model__lora__rank": 2, "model__lora__base": "int8"}, 'model.lora.base: "int8" is not '),
    ],
)
def test_what_a_prediction_does_not_count_is_refused(
    made: Path, keys: dict[str, object], words: str
) -> None:
    """A run with it would be called slow, and --write would write a slower device."""
    config = load(str(ROOT / "train.toml"), overrides(keys))
    (made / "config.toml").write_text(dump(config))
    assert _refusal(made).startswith(f"{made}/config.toml: {words}")


RATIOS = [(1e24, 1e-18), (1.0, 1e24), (1e-18, 1e24), (5e-324, 1e24), (0.0, 1.0), (1.0, 0.0)]
PRODUCTS = tuple(MeasuredProduct("float32", 64, 64, 64, 1, seconds) for seconds in (1e10, 1e-10))
COPIES = (MeasuredCopy(1e6, 1e10), MeasuredCopy(2e6, 1e-10))


@pytest.mark.parametrize("measured", [Measurements(), Measurements(products=PRODUCTS, copies=COPIES)])
@pytest.mark.parametrize(("real", "predicted"), RATIOS)
def test_a_corrected_cluster_can_be_read(
    tmp_path: Path, real: float, predicted: float, measured: Measurements
) -> None:
    """Whatever the run measured."""
    cluster = replace(load_cluster("cpu"), measured=measured)
    names = ("product", "attention", "other")
    rows = [
        MeasuredFigure("step", 1.0, 1e20, "s"),
        *(MeasuredFigure(name, predicted, real, "s") for name in names),
    ]
    (tmp_path / "corrected.toml").write_text(as_toml(corrected(cluster, rows), []))
    assert load_cluster(str(tmp_path / "corrected.toml")).node == cluster.node


def test_each_kernel_of_attention_is_corrected() -> None:
    cluster = load_cluster("h100_sxm")
    rows = [MeasuredFigure(name, 1.0, 2.0, "s") for name in ("step", "product", "attention", "other")]
    before, after = cluster.efficiencies, corrected(cluster, rows).efficiencies
    assert after.attention["cudnn"] == tuple(share / 2 for share in before.attention["cudnn"])


def test_waits_for_the_host_are_no_communication(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile calls the device's waits for kernels that are issued late idle, and copies other."""
    (made / "traces/step2-2_summary.json").write_text(summary_of())
    real = estimate

    def late(*given: Any, **named: Any) -> Estimate:
        waits = {"dp_shard": 1.0, "pp": 2.0, "issue": 4.0, "copy": 8.0, "host": 16.0, "optimizer": 32.0}
        return replace(real(*given, **named), exposed=waits)

    monkeypatch.setattr("compose.planner.against_run.estimate", late)
    rows = {row.name: row for row in against(made, load_cluster("cpu"))}
    assert rows["exposed communication"].predicted == 3.0
