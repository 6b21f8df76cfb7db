"""Benchmarks print one JSON line; figures of a test run mean nothing, LOG.md has some."""

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import training_runs
from tests.support.command_lines import execute
from tests.support.helpers import ROOT


def shown(*arguments: str, ranks: int = 0) -> list[dict[str, Any]]:
    done = execute(*arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return _rows(done.stdout)


def shown_here(name: str, *words: str) -> list[dict[str, Any]]:
    """What a benchmark without ranks shows, in this process."""
    folder = ROOT / "benchmarks"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        mock.patch.object(sys, "argv", [name, *words]),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        spec.loader.exec_module(module)
        try:
            module.main()
        finally:
            torch.set_default_device(None)  # moe.py sets it
    return _rows(out.getvalue())


def _rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_a_kept_run_of_other_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "done").write_text('[2, "train.steps=1", ""]')
    assert training_runs.run(tmp_path, 2, ["train.steps=1"]) == [{"step": 1}]
    with pytest.raises(SystemExit, match=r'holds a run of other keys, \[2, "train.steps=1"'):
        training_runs.run(tmp_path, 2, ["train.steps=2"])


@pytest.mark.slow
def test_overhead() -> None:
    trainer, styled = shown("benchmarks/overhead.py", "--steps", "1")
    assert (trainer["benchmark"], styled["benchmark"]) == ("overhead", "tp_dispatch")
    assert min(trainer["ratio"], trainer["tokens_per_second"], styled["time"]) > 0


@pytest.mark.full
def test_overhead_of_two_ranks() -> None:
    (result,) = shown("benchmarks/overhead.py", "--steps", "1", ranks=2)
    assert (result["benchmark"], result["tp"]) == ("tp", 2)
    assert result["time"] > 0


@pytest.mark.full
def test_checks() -> None:
    results = shown("benchmarks/overhead.py", "--checks", "--steps", "1", ranks=2)
    assert [each["benchmark"] for each in results] == ["check_state", "check_messages", "check_every"]
    assert min(each["time"] for each in results) > 0


@pytest.mark.full
def test_ten_thousand_steps_with_pauses_give_no_alarm() -> None:
    """On two cores it takes longer than other commands may."""
    done = subprocess.run(
        [sys.executable, "benchmarks/pauses.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=3600,
    )
    (result,) = _rows(done.stdout)
    assert (result["steps"], result["pauses"], result["alarms"]) == (10_000, 10, [])


@pytest.mark.full
def test_pauses_give_no_alarm() -> None:
    (result,) = shown("benchmarks/pauses.py", "--steps", "60", "--pauses", "2", "--ranks", "2")
    assert (result["steps"], result["pauses"], result["alarms"]) == (60, 2, [])


@pytest.mark.full
def test_context() -> None:
    results = shown("benchmarks/context.py", "--length", "128", ranks=2)
    assert [result["method"] for result in results] == ["ring", "allgather", "ulysses"]
    ring = results[0]
    assert ring["peak_bytes_at_twice_the_length"] / ring["peak_bytes"] == pytest.approx(2, rel=0.1)


def test_context_of_one_process() -> None:
    result = shown_here("context", "--device", "cpu", "--length", "128")[-1]
    assert result["time_to_flash"] > 0
    # Both are as far from float64 as bfloat16 is.
    assert 1e-3 < result["error"] < 2e-2
    assert 1e-3 < result["error_of_flash"] < 2e-2


def test_moe_of_one_process() -> None:
    results = shown_here("moe", "--device", "cpu", "--small")
    layers = [result for result in results if result["benchmark"] == "moe_layer"]
    assert [result["dtype"] for result in layers] == ["float32", "bfloat16"]
    for result in layers:
        assert min(result["moe_ms"], result["dense_ms"], result["ratio"]) > 0
    experts = results[len(layers) :]
    assert [result["n_experts"] for result in experts] == [8, 16, 32, 64, 128]
    assert all(min(result["forward_fraction"], result["fraction"]) > 0 for result in experts)


@pytest.mark.full
def test_moe_of_two_ranks() -> None:
    alone, parted = shown("benchmarks/moe.py", "--small", ranks=2)
    assert (alone["ep"], alone["waiting_ms"], parted["ep"]) == (1, 0, 2)
    for result in (alone, parted):
        assert 0 <= result["waiting_ms"] < result["dispatch_ms"] < result["step_ms"]
        assert 0 < result["share"] < 1


@pytest.mark.full
def test_checkpoint() -> None:
    result = shown("benchmarks/checkpoint.py", "--small")[-1]
    assert result["bytes"] > 12 * result["parameters"]
    ratios = [value for key, value in result.items() if "_over_" in key]
    assert len(ratios) == 5
    assert all(value > 0 for value in ratios)


@pytest.mark.slow
def test_generate() -> None:
    keys = ("--model.dim=64", "--model.hidden_dim=96", "--model.n_layers=1")
    (result,) = shown("benchmarks/generate.py", "--turns=2", *keys)
    assert result["benchmark"] == "generate"
    for prefix in ("", "window_"):
        for name in ("cache", "whole_text", "cache_over_whole_text"):
            assert result[prefix + name] > 0


def test_loss() -> None:
    results = shown_here("loss", "--tokens", "64", "--vocab", "2000", "--dim", "16")
    assert [result["chunk"] for result in results] == [2, 4, 8, 16, 32, 64]
    first = results[0]
    assert first["peak_bytes"] < first["whole_peak_bytes"] == pytest.approx(12 * 64 * 2000, rel=0.2)
    assert max(first["error"], first["whole_error"]) < 1e-6


@pytest.mark.parametrize(
    "techniques",
    [["full", "activation offload"], pytest.param([], marks=pytest.mark.full)],
)
@pytest.mark.slow
def test_memory(techniques: list[str]) -> None:
    """Here figures mean what they say: every technique saves what its formula does."""
    *results, last = shown("benchmarks/memory.py", "--small", *techniques)
    assert [result["technique"] for result in results] == techniques or len(results) > 15
    for result in results:
        assert result["saved_bytes"] == result["off_bytes"] - result["on_bytes"]
        assert result["saved_bytes"] == pytest.approx(result["formula_bytes"], rel=0.1), result
    assert last["worst"] in [result["technique"] for result in results]


@pytest.mark.slow
def test_slow_links() -> None:
    results = shown("benchmarks/slow_links.py", "--small", "--eager", "--steps", "1", ranks=2)
    kinds = ["int8, int8", "int4_diff, int4", "int8, powersgd"]
    assert [result["messages"] for result in results] == kinds
    for result in results:
        assert result["over_plain"] > 0
        assert 0 < result["share_of_messages"] < 1


@contextlib.contextmanager
def ran(ends: dict[str, tuple[float, ...]]) -> Iterator[list[str]]:
    """In place of training: runs that end with these validation losses, by kind and seed.

    It lists the folders of the runs.
    """
    folders = list[str]()

    def run(command: list[str], **options: Any) -> None:
        flag = next(word for word in command if word.startswith("--run.dir="))
        folder = Path(flag.partition("=")[2])
        name, _, seed = folder.name.rpartition("-seed")
        folder.mkdir(exist_ok=True)
        rows = [{"loss": 9.0}, {"loss": 8.0, "validation_loss": ends[name][int(seed)]}]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        folders.append(folder.name)

    with mock.patch("subprocess.run", run):
        yield folders


def test_compression(tmp_path: Path) -> None:
    """A run of the same keys is not made again."""
    words = ["--seeds=1", "--only", "int8", f"--runs={tmp_path}"]
    for expected in (["plain-seed0", "int8-seed0"], []):
        with ran({"plain": (2.0,), "int8": (2.1,)}) as folders:
            plain, quantized = shown_here("compression", *words)
        assert (plain["over_plain"], quantized["over_plain"]) == (0, 0.05)
        assert folders == expected


def test_islands(tmp_path: Path) -> None:
    ends = {"begin": (5.0, 5.0), "plain": (2.0, 4.0), "2-islands-half-missed": (2.1, 3.8)}
    words = ["--seeds=2", f"--runs={tmp_path}", "--only", "2 islands, half missed"]
    with ran(ends):
        plain, islands = shown_here("islands", *words)
    assert (plain["run"], plain["seeds"]) == ("plain", [0, 0])
    assert (islands["run"], islands["seeds"]) == ("2 islands, half missed", [0.05, -0.05])
    assert (islands["validation_loss"], islands["over_plain"]) == (2.95, 0)


@pytest.mark.full
def test_speed_of_islands() -> None:
    """All ways of exchanging train for one timed round, on a link that is not slowed down."""
    results = shown(
        "benchmarks/islands.py", "--speed", "--mbit=0", "--every=15", "--rounds=2", "--turns=1"
    )
    assert [row["run"] for row in results] == ["waits", "streaming", "streaming, int8"]
    assert results[0]["bytes_of_a_round"] > 3.9 * results[2]["bytes_of_a_round"] > 0
    assert min(row["speed_over_none"] for row in results) > 0


def test_precision(tmp_path: Path) -> None:
    """The runs are there already."""
    ends = {"float32": 2.0, "bf16": 2.1, "float32-seed1": 4.0, "bf16-seed1": 3.7}
    for name, end in ends.items():
        (tmp_path / name).mkdir()
        rows = [{"loss": end + 3 / step} for step in range(1, 21)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    picture = tmp_path / "curves.svg"
    words = ["--steps=20", "--only", "bf16", "--seeds=2", f"--runs={tmp_path}", f"--figure={picture}"]
    plain, other = shown_here("precision", *words)
    assert (plain["precision"], plain["over_float32"]) == ("float32", 0)
    last = (3 / 19 + 3 / 20) / 2
    apart = [0.1 / (2.0 + last), -0.3 / (4.0 + last)]
    assert other["seeds"] == pytest.approx(apart, abs=1e-5)
    assert other["over_float32"] == pytest.approx(sum(apart) / 2, abs=1e-5)
    assert picture.read_text().count("<polyline") == 4
