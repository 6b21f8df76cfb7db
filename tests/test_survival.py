"""What machines do to a run: signals, and processes that die at any moment."""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from compose.checkpoint import store
from compose.runtime import Notes
from tests.helpers import ROOT
from tests.test_trainer import QUICK, command, execute, lines

SAVING = [*QUICK, "--checkpoint.interval=1", "--metrics.console_every=1", "--metrics.tensorboard=false"]


def start(folder: Path, *words: str, ranks: int = 0) -> "subprocess.Popen[str]":
    arguments = command("train.py", *SAVING, f"--run.dir={folder}", *words, ranks=ranks)
    return subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def contents(folder: Path) -> dict[str, int]:
    """Checksums of the newest checkpoint's shards: equal ones are bitwise the same state."""
    newest = store.newest_first(folder / "checkpoints")[0]
    assert store.problems(newest) == []
    files = json.loads((newest / store.MANIFEST).read_text())["files"]
    return {name: entry["crc32"] for name, entry in files.items() if name.startswith("__")}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)]
)
def test_a_warning_is_heeded(tmp_path: Path, number: signal.Signals) -> None:
    """The step is finished and saved, the exit code 0; the same command goes on."""
    process = start(tmp_path, "--checkpoint.interval=0", "--train.steps=500")
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step   2"):
        assert process.poll() is None, process.communicate()[1]
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    steps = len(lines(tmp_path))
    assert steps < 500
    assert output.splitlines()[-1] == (
        f"stopped by {number.name} after step {steps}; saved: the same command with"
        f" --run.dir={tmp_path} goes on"
    )
    again = start(
        tmp_path, "--checkpoint.interval=0", "--train.steps=500", f"--train.stop_after={steps + 2}"
    )
    output, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert f"{tmp_path}/checkpoints/{store.name_of(steps)}: resumed after step {steps}" in output
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, steps + 3))


def workers(process: "subprocess.Popen[str]") -> list[int]:
    """Ids of a torchrun's ranks."""
    found = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid=,args="], capture_output=True, text=True
    )
    return [int(row.split()[0]) for row in found.stdout.splitlines() if "train.py" in row]


def killed_at_random(tmp_path: Path, kills: int, seed: int, steps: int = 40) -> int:
    """Kill a random rank at random moments until ``kills`` of them are dead, then let the run end; how
    many were."""
    chance = random.Random(seed)
    length = f"--train.steps={steps}"
    whole = start(tmp_path / "whole", length, ranks=2)
    assert whole.wait(300) == 0
    arguments = command("train.py", *SAVING, f"--run.dir={tmp_path / 'killed'}", length, ranks=2)
    at = arguments.index("--nproc-per-node")
    arguments[at:at] = [f"--max-restarts={kills}"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(arguments, cwd=ROOT, stdout=output, stderr=output)
        dead = 0
        while process.poll() is None and dead < kills:
            time.sleep(chance.uniform(0.1, 9.0))
            ranks = workers(process)  # type: ignore[arg-type]
            if ranks:
                try:
                    os.kill(chance.choice(ranks), signal.SIGKILL)
                    dead += 1
                except ProcessLookupError:
                    pass
        code = process.wait(600)
    assert code == 0, (tmp_path / "output").read_text()[-3000:]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    ours, theirs = lines(tmp_path / "killed"), lines(tmp_path / "whole")
    keys = ("step", "loss", "grad_norm", "lr", "samples", "tokens")
    assert [[a[k] for k in keys] for a in ours] == [[b[k] for k in keys] for b in theirs]
    return dead


def test_ranks_die(tmp_path: Path) -> None:
    assert killed_at_random(tmp_path, kills=1, seed=1, steps=20) > 0


@pytest.mark.full
def test_ranks_die_fifty_times(tmp_path: Path) -> None:
    dead = 0
    for seed in range(100):
        dead += killed_at_random(tmp_path / str(seed), kills=5, seed=seed)
        if dead >= 50:
            return
    raise AssertionError(f"only {dead} were killed")


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    """A first step may take longer than comm.timeout, a later one not, in groups of the mesh too."""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, runpy, signal, time\n"
        "from compose.data import Batches\n"
        "real = Batches.batch\n"
        "def batch(self, first):\n"
        "    if os.environ['RANK'] == '3' and first in (0, 32):\n"
        "        if first:  # or torchrun gives it 30 s to save\n"
        "            signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "        time.sleep(60 if first else 6)\n"
        "    return real(self, first)\n"
        "Batches.batch = batch\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    mesh = ["--parallel.dp_shard=2", "--parallel.tp=2", f"--run.dir={tmp_path / 'run'}"]
    done = execute(
        str(script),
        *QUICK,
        *mesh,
        "--train.steps=5",
        "--comm.timeout=4",
        "--comm.start_timeout=90",
        ranks=4,
    )
    assert done.returncode == 1
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]
    (line,) = (row for row in done.stderr.splitlines() if "is behind" in row)
    assert re.fullmatch(r"rank 3 is behind: last heard of \d+ s ago, before the data of step 3", line)


def test_who_is_behind() -> None:
    """The rank that nobody saw give up; of several, the one that has come least far."""
    store = dist.HashStore()
    ranks = [Notes(store, rank, 4) for rank in range(4)]
    assert ranks[0].laggard() == ""
    for number in (2, 0, 3, 1):
        ranks[number].note("the data of step 7")
    assert ranks[0].laggard().startswith("rank 2 is behind: last heard of 0 s ago, before the data of")
    for number in (0, 2, 3):
        ranks[number].note("forward and backward of step 7")
    assert ranks[0].laggard().startswith("rank 1 is behind")
    ranks[1].note("forward and backward of step 7")
    for number in (0, 1, 2):
        ranks[number].give_up()
    assert ranks[0].laggard().startswith("rank 3 is behind")
    ranks[3].give_up()
    assert ranks[0].laggard().startswith("rank 0 is behind")
