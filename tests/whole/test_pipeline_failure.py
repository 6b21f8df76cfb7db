"""A rank of a pipeline fails, in each schedule: the others end within seconds."""

import os
import signal
import subprocess
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from compose.pipeline.schedules import SCHEDULES
from tests.support.command_lines import QUICK, command, free_port
from tests.support.helpers import ROOT

SECONDS = 25  # until all processes have ended; 5 of them are for a rank that ends by itself


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "schedule", "kind", "fails"),
    [
        (way, schedule, kind, index % 2)
        for way in ("torchrun", "processes", "own loop")
        for index, (schedule, kind) in enumerate(product(SCHEDULES, ("forward", "backward")))
    ],
)
def test_the_other_ranks_end(tmp_path: Path, way: str, schedule: str, kind: str, fails: int) -> None:
    when = tmp_path / "when"
    words = [*QUICK, "--model.n_layers=4", "--parallel.pp=2", f"--parallel.pp_schedule={schedule}"]
    words.insert(0, "own" if way == "own loop" else f"--run.dir={tmp_path / 'run'}")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "KIND": kind,
        "FAILS": str(fails),
        "WHEN": str(when),
    }
    if way == "torchrun":
        processes = [started(words, environment, ranks=2)]
    else:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        processes = [started(words, environment | rank) for rank in ranks]
    try:
        codes = [process.wait(180) for process in processes]
        seconds = time.time() - float(when.read_text())
        said = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert all(code not in (0, 2) for code in codes), said
    assert seconds < SECONDS
    if way == "own loop":
        assert "the fault of this test" in said[fails]
        assert "Full Schedule" not in "".join(said)
    else:
        assert sum(text.count("ArithmeticError: the fault of this test") for text in said) == 1


def started(words: list[str], environment: dict[str, str], ranks: int = 0) -> Any:
    """tests/support/train_with_fault.py, in a session of its own."""
    return subprocess.Popen(
        command("tests/support/train_with_fault.py", *words, ranks=ranks),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
