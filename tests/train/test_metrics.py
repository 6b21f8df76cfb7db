"""The metrics of a step, and where they go, also when a disk is full and when a run goes on."""

import dataclasses
import errno
import json
import locale
import math
import os
import resource
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from compose.config.tables import Config, Metrics
from compose.memory.precision import Precision
from compose.train import metrics
from compose.train.metrics import (
    JsonLines,
    Sink,
    StepMetrics,
    device_peak,
    open_sinks,
    peak_flops,
    peak_memory,
)
from tests.support.training import STEP, logged_steps


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 80GB HBM3", "float8", 1979e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "float8", None),
        ("NVIDIA H200", "float32", None),
        ("NVIDIA H200 NVL", "bfloat16", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA GB200", "bfloat16", 2.5e15),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA A40", "bfloat16", 149.7e12),
        ("NVIDIA RTX A4000", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", 989e12),
        ("AMD Instinct MI300X", "bfloat16", 1307e12),
        ("AMD Instinct MI250X", "bfloat16", 191.5e12),  # a device is one of a card's two dies
        ("Some Future Device", "bfloat16", None),
    ],
)
def test_peak_flops(name: str, dtype: str, expected: float | None) -> None:
    assert peak_flops(name, dtype) == expected


def test_cpu_has_no_known_peak() -> None:
    cpu = torch.device("cpu")
    assert device_peak(cpu, Precision("bfloat16")) is None
    assert 10 * 2**20 < peak_memory(cpu) < 2**40


def test_console_line() -> None:
    assert STEP.console(steps=1000, seconds_left=3723.4) == (
        "step    7/1000  loss 0.3333  grad_norm 0.250  lr 3.00e-03  12,346 tokens/s  1.50 GiB"
        "  sample 70  left 1:02:03"
    )
    assert STEP.console(steps=1000, seconds_left=59.6).endswith("left 0:01:00")


def test_float16_has_bfloat16s_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert device_peak(torch.device("cuda"), Precision("float16")) == 989e12
    assert device_peak(torch.device("cuda"), Precision()) is None


def _written(folder: Path, *steps: StepMetrics, tensorboard: bool = True, done: int = 0) -> None:
    """Write steps to all sinks of a run that has done some."""
    result = open_sinks(Config(metrics=Metrics(tensorboard)), folder, done, print)
    for step in steps:
        for sink in result:
            sink.write(step)
    # On disk before it is closed.
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == done + len(steps)
    for sink in result:
        sink.close()


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_files(tmp_path: Path) -> None:
    _written(tmp_path, STEP)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 7,
        "loss": 1.0 / 3.0,
        "grad_norm": 0.25,
        "lr": 3e-3,
        "tokens": 7000,
        "samples": 70,
        "tokens_per_second": 12_345.6,
        "mfu": None,
        "memory": 3 * 2**29,
    }
    events = _events(tmp_path)
    assert events.Scalars("loss")[0].step == 7
    assert events.Scalars("loss")[0].value == pytest.approx(1 / 3)
    assert "mfu" not in events.Tags()["scalars"]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    """JSON has no NaN."""
    more = {"rewards": {"margin": math.inf, "by": {"x": math.nan, "y": 2.0}}, "texts": {"a": "b"}}
    _written(tmp_path, dataclasses.replace(STEP, validation_loss=math.nan, more=more))
    values = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert values["validation_loss"] is None
    rest = {"rewards": {"margin": None, "by": {"x": None, "y": 2.0}}, "texts": {"a": "b"}}
    assert {name: values[name] for name in more} == rest


def test_tensorboard_opens_on_the_loss(tmp_path: Path) -> None:
    """Its page sorts names, capitals first; texts and a picture say what is run."""
    from PIL import Image

    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")  # in which a text file without an encoding is ASCII
    (tmp_path / "config.toml").write_text('[run]\ndir = "runs/é"\n', "utf-8")
    Image.new("RGB", (4, 3)).save(tmp_path / "timeline.png")
    more = {"checkpoint": {"stall": 1.0}}
    try:
        _written(tmp_path, dataclasses.replace(STEP, validation_loss=0.5, more=more))
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    events = _events(tmp_path)
    assert sorted(events.Tags()["scalars"])[:2] == ["Loss/train", "Loss/validation"]
    assert events.Scalars("Loss/train")[0].value == events.Scalars("loss")[0].value
    assert events.Scalars("Loss/validation")[0].value == 0.5
    assert events.Tags()["images"] == ["timeline"]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert text.decode() == '```\n[run]\ndir = "runs/é"\n\n```'


def test_without_tensorboard(tmp_path: Path) -> None:
    _written(tmp_path, STEP, tensorboard=False)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_events_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Numbers have their own names; steps that run again replace those before."""
    more = {"routing": {"router": {"load": 2.0}}, "checkpoint": {"stall": 1.0}, "offload": {"a": 1.0}}
    for number, done in enumerate((0, 1)):
        each = dataclasses.replace(STEP, lr=number + 0.5, more=more, epochs={"b": 1.0})
        steps = [dataclasses.replace(each, step=step) for step in range(done + 1, 4)]
        _written(tmp_path, *steps, done=done)
    events = _events(tmp_path)
    names = set(events.Tags()["scalars"])
    assert {"checkpoint/stall", "offload/a", "epochs/b", "load/router"} <= names
    assert [(event.step, event.value) for event in events.Scalars("lr")] == [
        (1, 0.5),
        (2, 1.5),
        (3, 1.5),
    ]
    (tmp_path / "metrics.jsonl").unlink()
    _written(tmp_path, dataclasses.replace(STEP, step=1, lr=2.5))  # it begins again
    assert [(event.step, event.value) for event in _events(tmp_path).Scalars("lr")] == [(1, 2.5)]


class _Kept(Sink):
    """A sink of another package."""

    steps: ClassVar[list[int]] = []

    def write(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics.step)


def test_a_sink_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is its class and one entry point."""
    entry = EntryPoint("kept", f"{__name__}:_Kept", "compose.sinks")
    monkeypatch.setattr(metrics, "entry_points", lambda group: [entry] if group == entry.group else [])
    _written(tmp_path, STEP)
    assert _Kept.steps == [7]


def _write(folder: Path, *steps: int, after: int = 0) -> JsonLines:
    writer = JsonLines(Config(), folder, after, print)
    for step in steps:
        writer.write(_step(step))
    return writer


def _step(step: int) -> Any:
    return dataclasses.replace(STEP, step=step)


def test_a_line_that_was_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, 1, 2).close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    _write(tmp_path, 3, after=2).close()
    assert logged_steps(tmp_path) == [1, 2, 3]
    path.write_bytes(path.read_bytes()[:-9])
    _write(tmp_path, 4, after=3).close()
    assert logged_steps(tmp_path) == [1, 2, 4], "what is lost is not made up"
    assert capsys.readouterr().out == ""
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "strange", [b"\xff\xfe\n", b"[1]\n", b'{"step": "2"}\n', b"\n", b"[" * 9999 + b"\n"]
)
def test_a_line_that_no_run_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strange: bytes
) -> None:
    """Is left out, said, and kept beside."""
    _write(tmp_path, 1, 2).close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(strange + path.read_bytes())
    before = path.read_bytes()
    _write(tmp_path, 3, after=2).close()
    assert logged_steps(tmp_path) == [1, 2, 3]
    aside = tmp_path / "metrics.jsonl.damaged-1"
    assert aside.read_bytes() == before
    assert capsys.readouterr().out == (f"{path}: 1 of its lines are no steps; it is kept as {aside}\n")


def test_a_file_that_a_server_no_longer_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is opened again: its old handle (ESTALE) would be of no use for the rest of the run."""
    writer, stale = _write(tmp_path, 1), mock.Mock()
    stale.write.side_effect = OSError(errno.ESTALE, "Stale file handle")
    stale.fileno.return_value = -1
    writer.file.close()
    writer.file = stale
    writer.write(_step(2))
    writer.write(_step(3))
    writer.close()
    assert logged_steps(tmp_path) == [1, 2, 3]
    assert capsys.readouterr().out.endswith("metrics.jsonl is written again, no line of it is lost\n")


def test_metrics_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said once; what could not be written is, as soon as there is room."""
    writer, path = _write(tmp_path, 1, 2), tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        writer.write(_step(3))
        writer.write(_step(4))
        assert logged_steps(tmp_path) == [1, 2], "nor is half a line there"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().out
    assert said == f"{path} cannot be written: {os.strerror(errno.EFBIG)}; training goes on\n"
    writer.write(_step(5))
    writer.close()
    assert logged_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out == f"{path} is written again, no line of it is lost\n"
