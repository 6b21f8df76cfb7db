"""benchmarks/first_gpu.py on a CPU: what fails, crashes or hangs is said, and the others go on."""

import contextlib
import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import first_gpu, gpu, gpu_kernels, gpu_runs
from benchmarks.gpu_kernels import Skipped, compared
from benchmarks.gpu_paths import Place, waits
from benchmarks.gpu_report import BEGIN, END, Report
from benchmarks.gpu_runs import Check, Program
from tests.support.command_lines import launch
from tests.support.pool import Pool

CPU = torch.device("cpu")
COMMAND = ("benchmarks/first_gpu.py", "--device", "cpu", "--small")
NEEDS_A_GPU = {"tests marked gpu", "memory snapshot", "2 ranks: async_tp"}


@pytest.mark.full
def test_paths_of_a_cpu(tmp_path: Path) -> None:
    """All that a CPU can run passes, and the rest says why not."""
    file, table = tmp_path / "found.json", tmp_path / "table.md"
    words = ["--seconds=900", f"--json={file}", f"--table={table}"]
    program = Program(tmp_path / "said", *COMMAND, *words)
    code = program.process.wait(900)
    result = json.loads(file.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert code == 0, program.said
    assert list(rows) == [path.name for path in gpu_runs.checks("cpu", 1, True)]
    assert {name for name, row in rows.items() if row["outcome"] == "skipped"} == NEEDS_A_GPU
    assert result["counts"] == {"pass": len(rows) - 3, "fail": 0, "skipped": 3}
    assert result["versions"]["torch"] == torch.__version__
    turn = rows["figure: 1b 4096 in turn"]["figures"]
    assert min(turn["tokens_per_second"], turn["over_bare"]) > 0
    assert rows["figure: 1b 4096 compiled"]["figures"]["predicted"]["tokens_per_second"] > 0
    lines = [line for line in program.said if line.startswith(("pass", "fail", "skipped"))]
    assert len(lines) == len(rows)
    assert "| 1b 4096 compiled |" in table.read_text()
    assert rows["checkpoint: killed and resumed"]["figures"]["resumed_after"] in (10, 20)


SCRIPT = f"""
import os, resource, sys, time
sys.path.insert(0, {str(first_gpu.ROOT)!r})
from benchmarks import first_gpu, gpu_runs
from benchmarks.gpu_kernels import Skipped
from benchmarks.gpu_runs import Check

def works(place):
    return {{"error": 0.5, "process": os.getpid()}}

def skips(place):
    raise Skipped("no such thing here")

def fails(place):
    raise ValueError("the first line\\nthe second line")

def aborts(place):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()

def hangs(place):
    open({{here}}, "w").close()
    time.sleep(600)

def second_rank_fails(place):
    assert os.environ["RANK"] == "0", "this is rank 1"
    time.sleep(600)

def check(number, run, limit=60.0):
    return Check(f"{{number}} {{run.__name__}}", run, "programs", limit)

runs = [works, skips, fails, works, aborts, works]
PATHS = [check(number, run) for number, run in enumerate(runs)]
PATHS += [check(6, hangs, {{limit}}), check(7, works)]
PATHS += [Check("8 ranks", second_rank_fails, "ranks", 60.0, 2)]
gpu_runs.checks = lambda *given: PATHS
if __name__ == "__main__":
    sys.exit(first_gpu.main())
"""


def of_limit(seconds: float, here: Path) -> str:
    """The script, where the path that hangs may take so long, and makes a file ``here`` before."""
    return SCRIPT.replace("{limit}", str(seconds)).replace("{here}", repr(str(here)))


@pytest.mark.full
def test_what_fails_stops_no_other(tmp_path: Path) -> None:
    """An error, a crash, a hang, and one of two ranks; processes are made anew only where needed."""
    script, file = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(of_limit(2.0, tmp_path / "hangs"))
    done = launch(str(script), "--device=cpu", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert done.returncode == 1, done.stdout + done.stderr
    outcomes = ["pass", "skipped", "fail", "pass", "fail", "pass", "fail", "pass", "fail"]
    assert [row["outcome"] for row in rows] == outcomes
    assert rows[1]["reason"] == "no such thing here"
    assert rows[2]["reason"] == "ValueError: the first line"
    assert "in fails" in rows[2]["detail"]
    assert rows[4]["reason"].startswith("the process ended by SIGABRT: Fatal Python error: Aborted")
    where = rf"no answer in 2 s; it is in {script}, line \d+, hangs"
    assert re.fullmatch(where, rows[6]["reason"])
    assert rows[8]["reason"] == "this is rank 1"
    assert rows[8]["seconds"] < 120  # the first rank would sleep for 600
    first, again, third, last = (rows[n]["figures"]["process"] for n in (0, 3, 5, 7))
    assert first == again
    assert len({again, third, last}) == 3
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_is_cut_off_is_kept(tmp_path: Path) -> None:
    """After SIGTERM the file holds all lines so far, and no process is left."""
    script, file = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(of_limit(600.0, tmp_path / "hangs"))
    program = Program(tmp_path / "said", str(script), "--device=cpu", "--json", str(file))
    program.wait_for(lambda: sum("works" in line for line in program.said) == 3)
    program.wait_for((tmp_path / "hangs").exists)
    children = program.children()
    program.process.send_signal(signal.SIGTERM)
    assert program.process.wait(120) == 130, program.said
    assert json.loads(file.read_text())["counts"]["pass"] == 3
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_other_ranks_of_torchrun_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one starts ranks of its own."""
    monkeypatch.setenv("RANK", "1")
    assert first_gpu.main(["--device=cpu"]) == 0


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and no file."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_gpu.main([]) == 2
    said = "first_gpu.py: no GPU is visible; --device cpu runs what a CPU can\n"
    assert capsys.readouterr().err == said


class FakeWorker:
    """Takes the time of its path's name."""

    clock = 0.0

    def __init__(self, setting: Any, lane: str, ranks: int) -> None:
        pass

    def ready(self) -> dict[str, Any]:
        return {"outcome": "pass"}

    def ask(self, name: str, seconds: float, known: Any) -> dict[str, Any]:
        spent = float(name.split(" ")[0])
        FakeWorker.clock += min(spent, seconds)
        if spent > seconds:
            return {"outcome": "fail", "reason": f"no answer in {seconds:.0f} s", "unusable": "hangs"}
        return {"outcome": "pass", "figures": {}}

    def close(self) -> None:
        pass


def driven(folder: Path, paths: list[Check], device: str, until: float) -> list[dict[str, Any]]:
    """The rows of a report on ``paths``, of one device and of a run that ends at ``until``."""
    report = Report(folder / "found.json", {"torch": "2"}, [path.name for path in paths], 0.0)
    setting = first_gpu.Setting(device, 1, True, str(folder))
    first_gpu.Driver(setting, paths, report).run(paths, until)
    return list(report.rows.values())


def test_time_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that its own limit cuts off fails; one that the end of the time cuts off is skipped."""
    monkeypatch.setattr(first_gpu, "Worker", FakeWorker)
    monkeypatch.setattr(time, "monotonic", lambda: FakeWorker.clock)
    seconds = ("20 a", "100 b", "50 c", "1 d")
    paths = [Check(name, lambda place: None, "lane", 60.0) for name in seconds]
    rows = driven(tmp_path, paths, "cpu", 100.0)
    assert [(row["outcome"], row.get("reason")) for row in rows] == [
        ("pass", None),
        ("fail", "no answer in 60 s"),
        ("skipped", "no time left: cut off after 20 s"),
        ("skipped", "no time left"),
    ]


def test_too_few_gpus(tmp_path: Path) -> None:
    """Paths of several ranks are skipped on one GPU, and said to be."""
    path = Check("4 ranks: tp", lambda place: None, "ranks", ranks=4, devices=4)
    (row,) = driven(tmp_path, [path], "cuda", time.monotonic() + 100)
    assert row["reason"] == "it needs 4 GPUs, and 1 is there"


def test_the_file_is_whole_after_each_line(tmp_path: Path) -> None:
    """In the order of the list, whatever ends first; the table goes between its marks."""
    file, page = tmp_path / "found.json", tmp_path / "page.md"
    report = Report(file, {"torch": "2", "device": "X"}, ["kernel: a", "kernel: b", "figure: c"], 0.0)
    assert json.loads(file.read_text())["rows"] == []
    report.add("figure: c", {"outcome": "fail", "reason": "it is slow", "seconds": 1.0})
    report.add("kernel: a", {"outcome": "pass", "figures": {"error": 1e-3}, "seconds": 1.0})
    content = json.loads(file.read_text())
    assert [row["name"] for row in content["rows"]] == ["kernel: a", "figure: c"]
    assert content["counts"] == {"pass": 1, "fail": 1, "skipped": 0}
    assert report.figures() == {"kernel: a": {"error": 1e-3}, "versions": report.about}
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        report.end(page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\nX, torch 2, ")
    assert text.endswith(f"| c | fail: it is slow | | | | | | |\n{END}\nafter\n")
    assert text.count(BEGIN) == 1
    assert "old" not in text


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_a_kernel_that_is_off(factor: float) -> None:
    """It passes within the rounding of its type, and two percent are more."""
    torch.manual_seed(0)
    given = [torch.randn(8, 16).double(), torch.randn(16, 4).double()]
    run = partial(compared, lambda x, y: x @ y * factor, torch.matmul, given, torch.bfloat16)
    if factor == 1:
        assert 0 < run()["error"] < 5e-3
        return
    with pytest.raises(AssertionError, match=r"the result is .* away from float64, and plain PyTorch"):
        run()


@pytest.mark.parametrize("name", ["flash float32", "grouped_mm empty", "scaled_mm rowwise"])
def test_kernels_of_a_cpu(name: str) -> None:
    """All are near to float64."""
    assert dict(gpu_kernels.kernels("cpu"))[name](CPU)


def test_a_wait_is_counted() -> None:
    """On a CPU: what would be one on a GPU."""
    with waits(CPU) as result:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
        torch.ones(3).add(1)
    assert result == ["aten::_local_scalar_dense", "aten::nonzero"]


def test_what_goes_wrong_is_a_result(tmp_path: Path) -> None:
    """A reason of one line, whatever is raised."""
    place = Place(CPU, True, tmp_path)

    def raising(error: BaseException) -> Check:
        def run(place: Place) -> None:
            raise error

        return Check("a", run, "lane")

    def result(error: BaseException) -> tuple[str, str]:
        results = first_gpu.tried(raising(error), place, clean=False)
        return results["outcome"], results["reason"]

    assert result(Skipped("not here")) == ("skipped", "not here")
    assert result(AssertionError("\nfar off\nmore")) == ("fail", "far off")
    assert result(RuntimeError("CUDA error")) == ("fail", "RuntimeError: CUDA error")
    assert result(KeyError()) == ("fail", "KeyError: KeyError")
    assert result(SystemExit(2)) == ("fail", "SystemExit: 2")


def figures_of_rows(folder: Path) -> dict[str, Any]:
    """On the one rank of a pool: what each kind of row measures, in an order as on a GPU."""
    known: dict[str, Any] = {"limits": {"bfloat16_flops": 1e9}}
    for how in ("compiled", *gpu.FLOAT8, "eager", "bare", "trainer"):
        case = gpu.Case("8b", 8192, how)
        run = gpu.hugging_face if how == "trainer" else gpu.trained
        with contextlib.suppress(Skipped):
            known[f"figure: {case.name}"] = run(case, Place(CPU, True, folder, known=known))
    return known


@pytest.mark.slow
def test_rows(pool: Pool, tmp_path: Path) -> None:
    """Rows compare with the compiled one; float8 needs torchao, and the Trainer accelerate."""
    (known,) = pool.run(figures_of_rows, 1, tmp_path)
    rows = {name.split(" ")[-1]: row for name, row in known.items() if name != "limits"}
    assert {"compiled", "eager", "bare"} <= set(rows)
    compiled = rows.pop("compiled")
    assert "over_compiled" not in compiled
    for row in rows.values():
        right = row["tokens_per_second"] / compiled["tokens_per_second"]
        assert row["over_compiled"] == pytest.approx(right)
        assert (row["layers"], row["mfu"]) == (2, None)
        assert row["of_limit"] > 0
    assert rows["eager"]["recompute"] == "none"


def test_rows_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory does not suffice layers are recomputed; what else goes wrong is not tried again."""
    tried: list[str] = []
    fits: set[str] = set()

    def trained(case: gpu.Case, recompute: str, place: Place) -> dict[str, str]:
        tried.append(recompute)
        if recompute not in fits:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")
        return {"recompute": recompute}

    monkeypatch.setattr(gpu, "_trained", trained)
    case, place = gpu.Case("8b", 32, "eager"), Place(CPU, True, tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.trained(case, place)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.trained(case._replace(how="bare"), place)  # it has no layers that could be recomputed
    assert tried == ["none", "full", "none"]
    fits.add("full")
    assert gpu.trained(case, place) == {"recompute": "full"}
    with pytest.raises(Skipped, match="it does not fit into the device's memory"):
        gpu.fitting(gpu.trained, case._replace(how="bare"), place)
    tried.clear()

    def breaks(case: gpu.Case, recompute: str, place: Place) -> dict[str, str]:
        tried.append(recompute)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "_trained", breaks)
    with pytest.raises(RuntimeError, match="illegal"):
        gpu.fitting(gpu.trained, case, place)
    assert tried == ["none"]


def test_names_are_unique() -> None:
    """On every kind of machine; the JSON tells paths apart by them."""
    for kind, devices in (("cpu", 1), ("cuda", 1), ("cuda", 4), ("cuda", 8)):
        for small in (False, True):
            names = [path.name for path in gpu_runs.checks(kind, devices, small)]
            assert len(set(names)) == len(names)
            assert "8 ranks: pp, cp, tp" in names or devices < 8
