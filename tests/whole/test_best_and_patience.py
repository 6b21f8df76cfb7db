"""Epochs, the best checkpoints and an early end, on runs of which a rank is killed."""

import json
import os
import random
import re
import signal
import string
from pathlib import Path
from typing import Any

import pytest

from compose.checkpoint import store
from compose.checkpoint.hf_folder import checkpoints
from tests.support.command_lines import QUICK, TIMEOUT, answered, begin, command, execute
from tests.support.training import lines, logged_steps, wait_for_steps

MESHES = {
    "data and tensor": (4, ["--parallel.dp_shard=2", "--parallel.tp=2"]),
    "pipeline": (2, ["--parallel.pp=2"]),
}
SAID = re.compile(
    r"^stopped after step (\d+): 4 validations .* of step (\d+) \(train.patience\)$", re.M
)


def _words(folder: Path) -> list[str]:
    """A run on 24 samples, which it learns by heart while the loss on others rises again."""
    chance = random.Random(0)
    text = " ".join(chance.choice(string.ascii_letters) * chance.randint(1, 5) for _ in range(2000))
    (folder / "train.txt").write_text(text[: 24 * 32 + 1])
    (folder / "other.txt").write_text(text[3000 : 3000 + 9 * 32])
    keys = {
        "data.path": folder / "train.txt",
        "data.validation": folder / "other.txt",
        "train.epochs": 40,
        "train.global_batch": 8,
        "train.validate_every": 3,
        "train.patience": 4,
        "optimizer.warmup": 3,
        "optimizer.lr": 0.01,
        "checkpoint.interval": 5,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_best": 2,
        "metrics.tensorboard": "false",
    }
    return ["train.py", *QUICK, *(f"--{key}={value}" for key, value in keys.items())]


def _kill_a_rank(folder: Path, words: list[str], ranks: int, after: int) -> None:
    """Begin or go on, and send SIGKILL to the last rank once so many steps were taken."""
    process = begin(command(*words, ranks=ranks))
    wait_for_steps(folder, after, [process])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    of_rank = [pid for pid in children if f"RANK={ranks - 1}" in _environment(pid)]
    os.kill(int(of_rank[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode
    assert re.search(r"exitcode *: -9", errors), errors


def _environment(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def _decisions(folder: Path, output: str) -> dict[str, Any]:
    """Return what was decided, without the losses, whose rounding depends on the mesh."""
    said = SAID.search(output)
    assert said, output
    newest = store.newest_first(folder / "checkpoints")
    state = json.loads((newest[0] / store.STATE).read_text())
    config = (newest[0] / "config.toml").read_text()
    return {
        "end": said.groups(),
        "steps": logged_steps(folder),
        "validations": [step for step, _ in state["validations"]],
        "kept": [path.name for path in newest],
        "best first": [path.name for path in checkpoints(folder, best=True)],
        "config": re.findall(r"^(?:steps = \d+|epochs = .*)$", config, re.M),
    }


@pytest.mark.full
def test_the_same_decisions_after_two_kills(tmp_path: Path) -> None:
    """On the same mesh bitwise so, and on another one too; convert takes the best."""
    words, results, folder = _words(tmp_path), {}, tmp_path
    for name, (ranks, mesh) in MESHES.items():
        for many in (0, 2):
            folder = tmp_path / f"{name}, {many} kills"
            run = [*words, *mesh, f"--run.dir={folder}"]
            last = int(results[next(iter(results))]["end"][0]) if results else 0
            for after in sorted((last - 8, 8)[:many]):
                _kill_a_rank(folder, run, ranks, after)
            done = execute(*run, ranks=ranks)
            assert done.returncode == 0, done.stderr
            results[folder.name] = _decisions(folder, done.stdout)
        whole, killed = (lines(tmp_path / f"{name}, {many} kills") for many in (0, 2))
        losses = [[line.get("validation_loss") for line in each] for each in (whole, killed)]
        assert losses[0] == losses[1]
    first, *others = results.values()
    assert first["config"] == ["steps = 120", "epochs = 0.0"]
    assert len(first["kept"]) == 3
    assert len(first["steps"]) < 120
    assert int(first["end"][1]) == store.step_of(Path(first["best first"][0]))
    assert others == [first] * (2 * len(MESHES) - 1)
    done = answered("-m", "compose", "convert", str(folder), str(tmp_path / "out"), "--best")
    best = folder / "checkpoints" / first["best first"][0]
    assert done.stdout.startswith(f"{best}: has the lowest validation loss\n"), done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
