"""On a GPU: the same proof, and figures that only a GPU has."""

import json
import pickle
from pathlib import Path

import pytest

from tests.command_lines import launch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_equals_one_process(precision: str) -> None:
    done = launch(
        "-m", "compose", "verify", "train.toml", "--run.device=cuda", f"--precision.param={precision}"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_experts_equal_one_process(model: str) -> None:
    preset = {"qwen3": "debug_moe", "deepseek_v3": "debug"}[model]
    words = ["--run.device=cuda", f"--model.name={model}", f"--model.preset={preset}"]
    done = launch("-m", "compose", "verify", "train.toml", *words, "--precision.param=bfloat16")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_muon_and_kept_in_bfloat16(precision: str) -> None:
    """On one GPU; in bfloat16 weights and state are kept in it too."""
    words = [f"--precision.{key}={precision}" for key in ("param", "master", "optimizer_state")]
    words += ["--run.device=cuda", "--optimizer.name=muon"]
    done = launch("-m", "compose", "verify", "train.toml", *words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_trains(tmp_path: Path, precision: str) -> None:
    done = launch(
        "train.py",
        "--run.device=cuda",
        f"--precision.param={precision}",
        f"--run.dir={tmp_path}",
        "--train.stop_after=50",
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 3
    assert 2**20 < lines[-1]["memory"] < 2**33


NO_MASK = """
from models.layers.attention import Documents
from train import main

def refuse(self):
    raise AssertionError("a mask was built")

Documents.mask = property(refuse)
main({arguments!r})
"""


def test_no_mask_is_built(tmp_path: Path) -> None:
    arguments = ["--run.device=cuda", "--precision.param=bfloat16", f"--run.dir={tmp_path}"]
    done = launch("-c", NO_MASK.format(arguments=[*arguments, "--train.stop_after=2"]))
    assert done.returncode == 0, done.stderr


def test_ring_of_two_against_flash() -> None:
    done = launch("benchmarks/context.py", "--device", "cuda", "--length", "4096")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["error"] < 2 * result["error_of_flash"]


def test_profile(tmp_path: Path) -> None:
    done = launch(
        "train.py",
        "--run.device=cuda",
        "--precision.param=bfloat16",
        f"--run.dir={tmp_path}",
        "--train.stop_after=6",
        "--profile.steps=[4, 6]",
        "--profile.memory=true",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "traces" / "step4-6_summary.json").read_text())["ranks"][0]
    assert sum(result["time"].values()) == pytest.approx(1)
    assert min(result["time"][kind] for kind in ("matmul", "attention", "optimizer", "other")) > 0
    memory = result["memory"]
    assert sum(memory["at_peak"].values()) == memory["peak"]
    assert memory["most"]["gradients"] >= memory["most"]["weights"]
    # That of the whole run is as much, or a little more, of the first step.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 0.9 * lines[-1]["memory"] < memory["peak"] <= lines[-1]["memory"]
    snapshot = pickle.loads((tmp_path / "traces" / "step4-6_rank0_memory.pickle").read_bytes())
    assert snapshot["segments"]
    assert any(entry["frames"] for entry in snapshot["device_traces"][0])
