"""The command plan: what it prints and writes, from candidates whose figures the test chooses."""

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compose.cli import plan as command
from compose.config.toml import load
from compose.planner import answer, explain
from compose.planner.candidates import Space
from compose.planner.quick_units import ModelShape
from compose.planner.report import SearchResult
from tests.support.helpers import refusal
from tests.support.planned import Records, recorded

QUESTION = ["--model=llama:debug", "--gpus=16xa100_40gb", "--batch=64", "--seq-len=64"]


class Search:
    """Stands for the search: plain FSDP, and tp in the node, which is slower."""

    def __init__(self, size: float = 20.0) -> None:
        self.size = size
        self.spaces: list[Space] = []

    def __call__(self, space: Space, *_: Any) -> SearchResult:
        """Return two candidates."""
        self.spaces.append(space)
        plain = recorded(space, 2.0, self.size, parallel__zero=2)
        slower = recorded(space, 3.0, self.size, {"tp": 1.0}, parallel__tp=8)
        return SearchResult([plain, slower], 40, certain=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Search:
    """The search that stands for the real one."""
    monkeypatch.setattr(answer, "record_all", Records(2.5, 10.0))
    monkeypatch.setattr(explain, "record_all", Records(2.5, 10.0))
    result = Search()
    monkeypatch.setattr(command, "search", result)
    return result


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--against=run", "--json=x"], "--against: goes with --cluster and --write; remove --json"),
        (["a.toml", "--against=run"], "--against: goes with --cluster and --write; remove a.toml"),
        (
            ["--against=run", "--parallel.tp=2"],
            "--against: takes the keys of the run; remove --parallel.tp",
        ),
        (["--as-is", "--batch=64,128"], "--batch: --as-is takes one number"),
        (["--as-is", "--tokens=1T"], "--as-is: searches nothing; remove --tokens"),
        (["--as-is", "--free=train.micro_batch"], "--as-is: searches nothing; remove --free"),
        (["--as-is", "--objective=memory"], "--as-is: searches nothing; remove --objective"),
        (["--as-is", "--keep=train.seq_len"], "--as-is: searches nothing; remove --keep"),
        (["--objective=devices", "--batch=1,2"], "--batch: --objective devices takes one number"),
        ([*QUESTION, "--seconds=0"], "--seconds: 0 is not a number above 0, as 30"),
        (
            [*QUESTION, "--json=no/a.json"],
            "--json: cannot write no/a.json: No such file or directory",
        ),
        ([*QUESTION, "--report=tests"], "--report: tests is a folder"),
        ([*QUESTION, "--json="], "--json: . is a folder"),
        (
            [*QUESTION, "--write=/dev/null/a.toml"],
            "--write: cannot write /dev/null/a.toml: Not a directory",
        ),
        (["--objective=params", "--batch=1,2"], "--batch: --objective params takes one number"),
        ([*QUESTION, "--days=3"], "--days: goes with --objective devices"),
        (
            [*QUESTION, "--objective=devices", "--seconds=3"],
            "--objective: devices searches by its own rule; remove --seconds",
        ),
        ([*QUESTION, "--tokens=1TT"], "--tokens: 1TT is not a number above 0, as 15e12 or 1T"),
    ],
)
def test_flags_without_use_are_refused_before_the_search(
    made: Search, words: list[str], problem: str
) -> None:
    assert refusal(command.plan, words) == f"command line: {problem}"
    assert made.spaces == []


@pytest.mark.parametrize("flag", ["--write", "--json", "--report"])
@pytest.mark.parametrize("name", ["own.toml", "base.toml", "link.toml", "cluster.toml"])
def test_no_file_that_is_read_is_written(made: Search, tmp_path: Path, flag: str, name: str) -> None:
    own, base = tmp_path / "own.toml", tmp_path / "base.toml"
    base.write_text("[train]\nsteps = 3\n")
    own.write_text('extends = "base.toml"\n[train]\nsteps = 4\n')
    (tmp_path / "link.toml").symlink_to(own)
    cluster = tmp_path / "cluster.toml"
    words = [str(own), f"--cluster={cluster}", "--world-size=8", f"{flag}={tmp_path / name}"]
    shown = own if name == "link.toml" else tmp_path / name
    problem = f"command line: {flag}: {shown} is read for this plan; give another name"
    assert refusal(command.plan, words) == problem
    assert base.read_text() == "[train]\nsteps = 3\n"
    cluster.touch()
    model = tmp_path / "config.json"
    model.touch()
    for words, place in (([f"--gpus=8x{cluster}"], cluster), ([f"--model={tmp_path}"], model)):
        problem = f"command line: --json: {place} is read for this plan; give another name"
        assert refusal(command.plan, [*words, f"--json={place}"]) == problem
    twice = refusal(command.plan, [*QUESTION, "--json=a", "--write=a"])
    assert twice == "command line: --write: a is the file of --json; give another name"
    assert made.spaces == []


def test_the_answer_stands_before_the_table(made: Search, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.plan([*QUESTION, "--tokens=1T", "--explain"]) == 0
    question, run, why, costs, gap, header, *rest = capsys.readouterr().out.splitlines()
    assert "64 samples a step" in question
    assert run.startswith("Run ZeRO-2 over 16 devices; ")
    assert (
        why == "Plain FSDP takes 2.50 s (+25.0%); tensor parallel 8 in the node takes 3.00 s (+50.0%)."
    )
    assert costs.startswith("1T tokens take ")
    assert (gap, header.split()[:2]) == ("", ["dp_shard", "tp"])
    assert "tp 8, zero 3: +1.00 s a step (+50.0%): messages of tp +1.00 s" in rest
    assert "with as many of a100_80gb: 2.50 s a step, 0.80 times the tokens/s" in rest
    assert "with half the batch: 2.50 s a step, 0.40 times the tokens/s" in rest
    words = shlex.split(rest[-1])
    assert words[:4] == ["torchrun", "--nnodes", "2", "--rdzv-backend"]
    assert {"--model.preset=debug", "--train.global_batch=64", "--parallel.zero=2"} <= set(words)


def test_the_file_that_is_written_stands_alone(made: Search, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("plan.json", "best.toml")]
    words = [f"--json={files[0]}", f"--write={files[1]}", "--parallel.sequence=false"]
    assert command.plan([*QUESTION, *words]) == 0
    config, data = load(str(files[1])), json.loads(files[0].read_text())
    assert (config.model.preset, config.precision.param, config.train.seq_len) == (
        "debug",
        "bfloat16",
        64,
    )
    assert (config.parallel.dp_shard, config.parallel.zero, config.parallel.sequence) == (16, 2, False)
    assert len(data["sentences"]) == 3
    assert data["sentences"][0].startswith(f"Run {data['composition']}: ")
    steps = {name: one["step_seconds"] for name, one in data["expected"].items()}
    assert steps == {"plain FSDP": 2.5, "tensor parallel 8 in the node": 3.0}
    assert data["expected"]["plain FSDP"]["composition"].startswith("FSDP (ZeRO-3) over 16 devices; ")
    assert set(data["sensitivities"]) == {
        "twice the devices",
        "twice the memory",
        "links between nodes twice as fast",
        'compile.mode = "block"',
    }
    assert "compile.mode" not in data["sentences"][2]  # it is slower here
    assert {"cluster", "world_size", "capacity", "candidates"} <= set(data)


def test_what_does_not_fit_has_no_command(made: Search, capsys: pytest.CaptureFixture[str]) -> None:
    made.size = 60.0
    assert command.plan(QUESTION) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Nearest to fit is ZeRO-2 over 16 devices; ")
    assert lines[-1].startswith("2 of 40 candidates that may fit were looked at, and none fits")


def test_a_question_pins_what_the_command_line_names(made: Search) -> None:
    assert command.plan([*QUESTION, "--parallel.tp=2"]) == 0
    [space] = made.spaces
    assert "parallel.tp" in space.fixed
    assert not {"parallel.zero", "activation_checkpoint.mode", "train.micro_batch"} & set(space.fixed)


def test_batches_are_compared(made: Search, capsys: pytest.CaptureFixture[str]) -> None:
    """A step takes 2 s whatever the batch here, so the largest is the best."""
    words = ["--model=llama:debug", "--gpus=16xa100_40gb", "--seq-len=64", "--batch=64,128,32"]
    assert command.plan([*words, "--tokens=1B"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("")
    header, *rows = [line.split()[:5] for line in lines[start + 1 : start + 5]]
    assert header[:2] == ["batch", "tokens"]
    assert [row[0] for row in rows] == ["64", "128", "32"]
    for samples, row in zip((64, 128, 32), rows, strict=True):
        days = 1e9 / (samples * 64 / 2.0) / 86400
        assert row[3:] == [f"{days:.2f}", f"{days * 24 * 16:,.0f}"]
    assert any(f"{1e9 / (128 * 64 / 2) / 86400:.3g} days" in line for line in lines[:4])


@pytest.mark.parametrize(
    ("when", "line"),
    [
        ("in its quick estimates", "capped: batch 128, 32 left out; "),
        (
            "in its records",
            "capped: batch 128: 2 of 40 candidates that may fit were looked at, and batch 32 left"
            " out; ",
        ),
    ],
)
def test_batches_that_a_cap_leaves_out_are_told(
    made: Search,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when: str,
    line: str,
) -> None:
    """Ctrl-C or --seconds ends the second of three batches, and the first one is the answer."""

    def search(space: Space, *rest: Any) -> SearchResult:
        result = made(space, *rest)
        if len(made.spaces) == 1:
            return result
        if when == "in its quick estimates":
            raise KeyboardInterrupt
        slow = [recorded(space, 9.0, 20.0, parallel__zero=2)]
        return replace(result, candidates=[*slow, *result.candidates[1:]], capped=True)

    monkeypatch.setattr(command, "search", search)
    words = ["--model=llama:debug", "--gpus=16xa100_40gb", "--seq-len=64", "--batch=64,128,32"]
    assert command.plan(words) == 0
    shown = capsys.readouterr().out
    assert "64 samples a step" in shown.splitlines()[0]
    assert f"\n{line}without the cap the answer may be another\n" in shown


def test_the_cap_is_of_all_batches(made: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def search(space: Space, most: int, seconds: float, *_: Any) -> SearchResult:
        given.append(seconds)
        time.sleep(0.2)
        return made(space)

    monkeypatch.setattr(command, "search", search)
    words = ["--model=llama:debug", "--gpus=16xa100_40gb", "--seq-len=64", "--batch=64,128"]
    assert command.plan([*words, "--seconds=100"]) == 0
    assert given[1] <= given[0] - 0.2


def test_a_batch_that_no_mesh_divides_is_a_line(
    made: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are compared, and the question has the batch of the best."""

    def search(space: Space, *rest: Any) -> SearchResult:
        if space.config.train.global_batch == 63:
            return SearchResult([], 0)
        return made(space, *rest)

    monkeypatch.setattr(command, "search", search)
    words = ["--model=llama:debug", "--gpus=16xa100_40gb", "--seq-len=64", "--batch=63,128,32"]
    assert command.plan(words) == 0
    shown = capsys.readouterr()
    assert (
        "batch 63: command line: no mesh of 16 ranks is legal: train.global_batch: 63 is not a multiple"
        " of dp_replicate x dp_shard x train.micro_batch = 16 x 1 = 16; nearest: 64" in shown.err
    )
    assert "128 samples a step" in shown.out.splitlines()[0]


@pytest.mark.parametrize("part", ["sensitivities", "explain", "further"])
def test_ctrl_c_ends_the_comparisons_alone(
    made: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    def interrupted(*unused: Any) -> list[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, part, interrupted)
    assert command.plan([*QUESTION, "--explain"]) == 0
    shown = capsys.readouterr()
    assert "interrupted: some comparisons are left out" in shown.err
    assert "To run it" in shown.out


def test_the_answer_does_not_wait_for_what_to_buy(
    made: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = []
    monkeypatch.setattr(
        command, "sensitivities", lambda *_: before.append(capsys.readouterr().out) or []
    )
    assert command.plan(QUESTION) == 0
    _, first, second, *others = before[0].splitlines()
    assert first.startswith("Run ")
    assert second.startswith("Plain FSDP ")
    assert not others
    assert "device-hours" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("words", [["--objective=devices", "--tokens=1B", "--days=1"]])
def test_kinds_of_device_go_without(words: list[str]) -> None:
    text = refusal(command.plan, ["--model=llama:debug", "--gpus=8xh100+8xa100", *words])
    assert text == "command line: --objective: goes with one kind of device; --gpus names several"


def test_the_largest_size_that_fits(
    made: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest has no candidate, and the next one has one that does not fit by its record."""
    sizes = {28: 60.0, 16: 20.0}

    def search(space: Space, *rest: Any) -> SearchResult:
        made.size = sizes[space.config.model.config.n_layers]
        return made(space, *rest)

    def candidates(space: Space, shape: ModelShape) -> Iterator[int]:
        yield from [1] if shape.count in sizes else []

    monkeypatch.setattr(command, "STANDARD", ("1b", "3b", "8b"))
    monkeypatch.setattr(command, "candidates", candidates)
    monkeypatch.setattr(command, "search", search)
    assert command.plan(["--objective=params", "--gpus=16xa100_40gb", "--batch=64"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("1b: 1.24B parameters")
    refused = [line.split()[2] for line in shown.err.splitlines() if "does not fit" in line]
    assert refused == ["8b", "3b"]
    assert '\npinned: parallel.offload = "none" (--objective params); ' in shown.out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model=7b", "--gpus=8xh100"], "params looks for a standard size; it goes without --model"),
        (["a.toml", "--gpus=8xh100"], "params looks for a standard size; it goes without a.toml"),
        (["--cluster=h100_sxm"], "params needs --gpus, as 16xa100_40gb"),
    ],
)
def test_the_largest_size_takes_no_model(words: list[str], line: str) -> None:
    text = refusal(command.plan, ["--objective=params", *words])
    assert text == f"command line: --objective: {line}"


def test_degrees_that_leave_no_mesh_are_named() -> None:
    words = ["--model=llama:debug", "--gpus=16xa100_40gb", "--seq-len=64", "--parallel.tp=3"]
    assert refusal(command.plan, words) == (
        "command line: no mesh of 16 ranks is legal: parallel: the degrees' product tp 3 does not"
        " divide the world size 16; nearest: parallel.tp = 2"
    )
