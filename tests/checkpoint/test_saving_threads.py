"""A save leaves no threads behind, which would slow down training on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

# Threads of the process at the end of each step; the first save is after the second step.
THREADS = """
import os, runpy, sys
from compose.train.trainer import Trainer
step = Trainer.step
def counted(self):
    self.checkpointer.wait()
    print("threads", len(os.listdir("/proc/self/task")), flush=True)
    return step(self)
Trainer.step = counted
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_save_leaves_no_threads(tmp_path: Path) -> None:
    keys = ["train.steps=4", "train.global_batch=2", "train.seq_len=64", "checkpoint.interval=2"]
    words = [f"--{key}" for key in (*keys, f"run.dir={tmp_path}", "metrics.tensorboard=false")]
    done = subprocess.run(
        [sys.executable, "-c", THREADS, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("threads")]
    assert len(counts) == 4
    assert counts[3] == counts[1], done.stdout
    assert "assuming the intent" not in done.stderr
