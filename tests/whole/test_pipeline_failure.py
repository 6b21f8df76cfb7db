"""A rank of a pipeline fails, in each schedule: the others end within seconds."""

import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from compose.pipeline.schedules import SCHEDULES
from tests.support.command_lines import QUICK, begin, command, free_port, kill_sessions, of_rank

SECONDS = 60  # on a busy machine, until all have ended; 5 of them are for a rank that ends by itself


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
    script, port = "tests/support/train_with_fault.py", free_port()
    fault = {"KIND": kind, "FAILS": str(fails), "WHEN": str(when)}
    launched = way == "torchrun"
    arguments = command(script, *words, ranks=2 if launched else 0)
    places = [{}] if launched else [of_rank(rank, 2, port) for rank in range(2)]
    processes = [begin(arguments, subprocess.DEVNULL, **fault, **place) for place in places]
    try:
        codes = [process.wait(180) for process in processes]
        seconds = time.time() - float(when.read_text())
        said = [process.communicate()[1] for process in processes]
    finally:
        kill_sessions(process for process in processes if process.poll() is None)
    assert all(code not in (0, 2) for code in codes), said
    assert seconds < SECONDS
    if way == "own loop":
        assert "the fault of this test" in said[fails]
        assert "Full Schedule" not in "".join(said)
    else:
        assert sum(text.count("ArithmeticError: the fault of this test") for text in said) == 1
