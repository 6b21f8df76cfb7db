"""The commands legal, schedule and verify: what they print, and what is wrong in one line."""

from pathlib import Path

import pytest

from compose.cli import COMMANDS
from compose.parallel.mesh import meshes
from tests.support.command_lines import QUICK, answered, execute


def test_the_list_of_commands_has_two_columns() -> None:
    shown = answered("-m", "compose", "--help").stdout.splitlines()[2:]
    assert [line.split("  ")[1] for line in shown] == list(COMMANDS)


def test_legal() -> None:
    done = answered("-m", "compose", "legal", "--world-size=6", "--model.n_layers=1")
    assert done.returncode == 0, done.stderr
    shown = [line.split() for line in done.stdout.splitlines()]
    assert shown[0] == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    end = next(i for i, row in enumerate(shown) if "meshes" in row)
    legal = [tuple(map(int, row)) for row in shown[1:end]]
    # Batch 16 in twos is not a multiple of 3 ranks, nor do 8 heads divide by 3; one layer is enough for
    # three stages, not for six.
    by_hand = {
        degrees
        for degrees in (tuple(d.values()) for d in meshes(6))
        if degrees[0] <= 3 and degrees[1] * degrees[2] in (1, 2) and degrees[4] in (1, 2)
    }
    assert set(legal) == by_hand
    assert len(legal) == len(by_hand)
    assert done.stdout.splitlines()[end] == (
        f"{len(legal)} meshes of 6 ranks are legal, {25 - len(legal)} are not:"
    )
    # A rule refuses so many stages before a table of their schedule is made, which takes hours.
    prime = answered("-m", "compose", "legal", "--world-size=1000003").stdout
    assert "1 meshes of 1000003 ranks are legal, 4 are not:" in prime
    alone = answered("-m", "compose", "legal", "train.toml", "--world-size=1").stdout
    assert alone.splitlines()[-1] == "1 meshes of 1 ranks are legal, 0 are not"


PP2 = "schedule --parallel.pp=2"
BAD = {
    "legal": "command line: legal: needs --world-size N, the number of ranks",
    "legal --world-size=x": "command line: --world-size: x is not a number of ranks",
    "legal --world-size=1000000": "command line: --world-size: 1000000 ranks have more than 2,000"
    " meshes, the most that legal checks; python -m compose plan looks for the best ones",
    "schedule": "train.toml: parallel.pp: 1 has no schedule; set --parallel.pp=2 or more",
    f"{PP2} --out=timeline.pdf": "command line: --out: timeline.pdf is neither .svg nor .png",
    f"{PP2} --out=nowhere/timeline.png": "command line: --out: cannot write nowhere/timeline.png: No"
    " such file or directory",
    f"{PP2} --parallel.pp_schedule=1F2B": "train.toml: parallel.pp_schedule: unknown schedule '1F2B';"
    " did you mean 1F1B? (known: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,"
    " ZBVZeroBubble, DualPipeV, PipeDream, PipeDream2BW, or a .csv file)",
    f"{PP2} --parallel.pp_schedule=own.csv": "train.toml: parallel.pp_schedule: cannot read own.csv: No"
    " such file or directory",
    f"{PP2} --parallel.pp_virtual_stages=2": "train.toml: parallel.pp_virtual_stages: 1F1B has 1 on"
    " each rank, not 2; use 1, or another parallel.pp_schedule",
    f"{PP2} --parallel.pp_schedule=Interleaved1F1B --train.global_batch=10": "train.toml:"
    " parallel.pp_schedule: Interleaved1F1B with parallel.pp 2 cannot run 5 micro-batches (PyTorch:"
    " Interleaved 1F1B requires the number of microbatches to be a multiple of the number of rounds"
    " (2), but got 5); nearest: 4 or 6 (train.global_batch is 2 times that)",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input(line: str) -> None:
    done = answered("-m", "compose", *line.split())
    assert done.stderr.splitlines() == [BAD[line]]
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_schedule_draws(tmp_path: Path) -> None:
    for suffix, start in ((".svg", b"<svg"), (".png", b"\x89PNG")):
        out = tmp_path / f"timeline{suffix}"
        done = answered("-m", "compose", "schedule", "--parallel.pp=4", f"--out={out}")
        assert done.returncode == 0, done.stderr
        assert out.read_bytes().startswith(start)
        assert "1F1B: 4 ranks, 8 micro-batches, layers [1, 1, 2, 1]" in done.stdout
        assert "bubble fraction 27.3%" in done.stdout
        assert "textbook: (p-1)/(m+p-1) = 27.3%" in done.stdout
        assert "rank 0: 4, rank 1: 3, rank 2: 2, rank 3: 1" in done.stdout


def test_verify_proves_the_outer_loop_too() -> None:
    """The report has the training of an island, and then the exchanges of islands."""
    words = ["--model.n_layers=1", "--model.dim=16", "--model.n_heads=2", "--model.n_kv_heads=1"]
    words += ["--train.global_batch=4", "--parallel.dp_replicate=2", "--outer.every=2"]
    done = execute("-m", "compose", "verify", "train.toml", *QUICK, *words, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = {line.partition("  ")[0] for line in done.stdout.splitlines()}
    assert {"gradient", "float64 update", "outer weight", "island's weight"} <= shown
    assert "\nequal to one process: " in done.stdout
