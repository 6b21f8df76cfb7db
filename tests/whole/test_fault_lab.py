"""benchmarks/faults.py: its ledger and its judgement, and a run that it disturbs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import MESHES, NODES, drawn
from compose.config import rules
from compose.config.toml import load
from tests.support.command_lines import launch
from tests.support.fault_runs import history
from tests.support.helpers import ROOT
from tests.support.planned_faults import RUNNING, STARTING


def attempt(
    name: str, after: int, steps: range, batch: int = 4, time: float = 0.0
) -> list[dict[str, Any]]:
    """The ledger of a rank that reads every second pair of samples: rank 0 of two."""
    entries: list[dict[str, Any]] = [{"from": after, "attempt": name, "time": time}]
    for step in steps:
        first = (step - 1) * batch
        entries.append({"batch": [first, [first, first + 1], "a hash"]})
        entries.append({"done": step, "time": time + step})
    return entries


def other(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ledger of rank 1."""
    result = json.loads(json.dumps(entries))
    for entry in result:
        if "batch" in entry:
            entry["batch"][1] = [number + 2 for number in entry["batch"][1]]
    return result


def write(folder: Path, *ranks: list[dict[str, Any]]) -> None:
    for rank, entries in enumerate(ranks):
        text = "\n".join(json.dumps(entry) for entry in entries)
        (folder / f"{rank}.jsonl").write_text(text + "\n")


def test_a_history_that_survived(tmp_path: Path) -> None:
    """Steps 3 and 4 are trained again, and count once."""
    whole = [*attempt("a", 0, range(1, 5)), *attempt("b", 2, range(3, 6), time=100.0)]
    write(tmp_path, whole, other(whole))
    seen = history(tmp_path, samples=20, batch=4)
    assert (seen.lost, seen.repeated, seen.problems) == (0, 0, [])
    assert seen.attempts == [(0.0, 0), (100.0, 2)]
    assert seen.steps_before(3.5) == 3
    assert seen.steps_before(99.0) == 4
    assert seen.steps_before(101.0) == 2


@pytest.mark.parametrize(
    ("again", "found"),
    [
        # It says that it began after step 3, with whose samples it does not begin.
        (attempt("b", 3, range(3, 6), time=9.0), (0, 4, ["step 4 began with sample 8"])),
        (attempt("b", 2, range(4, 6), time=9.0), (4, 0, ["step 3 began with sample 12"])),
        (attempt("b", 4, range(5, 6), time=9.0), (0, 0, [])),
    ],
)
def test_a_resume_that_miscounts(
    tmp_path: Path, again: list[dict[str, Any]], found: tuple[int, int, list[str]]
) -> None:
    whole = [*attempt("a", 0, range(1, 5)), *again]
    write(tmp_path, whole, other(whole))
    seen = history(tmp_path, samples=20, batch=4)
    lost, repeated, problems = found
    assert seen.problems[:1] == problems
    assert (seen.lost > 0, seen.repeated > 0) == (lost > 0, repeated > 0)


def test_ranks_that_disagree(tmp_path: Path) -> None:
    write(tmp_path, attempt("a", 0, range(1, 6)), other(attempt("a", 1, range(2, 6))))
    seen = history(tmp_path, samples=20, batch=4)
    assert seen.problems == ["ranks began after steps 0 and 1"]
    assert seen.lost == 2


def test_other_samples_of_the_same_numbers(tmp_path: Path) -> None:
    whole = [*attempt("a", 0, range(1, 5)), *attempt("b", 2, range(3, 6), time=9.0)]
    whole[-6]["batch"][2] = "another hash"  # of step 3, which is trained again
    write(tmp_path, whole, other(attempt("a", 0, range(1, 5))))
    assert history(tmp_path, samples=20, batch=4).problems == ["samples 8 to 9 were others before"]


def test_draws() -> None:
    """They repeat, have every mesh and moment, and each run is legal."""
    cases = [drawn(0, number, [], []) for number in range(150)]
    assert cases == [drawn(0, number, [], []) for number in range(150)]
    assert {case.mesh for case in cases} == {*MESHES, *NODES}
    moments = {fault.moment for case in cases for fault in case.plan}
    assert moments == {*STARTING, *RUNNING}
    for case in {(case.mesh, "memory" in str(case.saving)): case for case in cases}.values():
        words = (*case.keys, *case.saving, "--run.dir=run")
        keys = [tuple(key[2:].split("=", 1)) for key in words]
        rules.check(load(str(ROOT / "train.toml"), keys), case.ranks * case.nodes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_is_disturbed(tmp_path: Path) -> None:
    out = tmp_path / "faults.jsonl"
    done = launch("-m", "benchmarks.faults", f"--out={out}", "--run", "123", "--meshes", "zero 3")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) > 2
    assert all(row["bitwise"] and row["samples_lost"] == row["samples_repeated"] == 0 for row in rows)
    assert all(row["noticed"] is not None or row["harmless"] for row in rows)
    assert done.stdout.splitlines()[-1].startswith("| all |")
