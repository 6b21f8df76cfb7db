"""On a GPU: the same proof, and figures that only a GPU has."""

import json
from pathlib import Path

import pytest

from tests.test_trainer import execute

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_equals_one_process(precision: str) -> None:
    done = execute(
        "-m", "compose", "verify", "train.toml", "--run.device=cuda", f"--precision.param={precision}"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_trains(tmp_path: Path, precision: str) -> None:
    done = execute(
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
