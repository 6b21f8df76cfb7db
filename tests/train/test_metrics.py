"""What is written of a step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compose.config.tables import Precision
from compose.train.metrics import MetricsWriter, device_peak, peak_flops, peak_memory
from tests.support.training import STEP


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
        ("NVIDIA GB200", "bfloat16", 2.5e15),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("AMD Instinct MI300X", "bfloat16", 1307e12),
        ("Some Future Device", "bfloat16", None),
    ],
)
def test_peak_flops(name: str, dtype: str, expected: float | None) -> None:
    assert peak_flops(name, dtype) == expected


def test_cpu_has_no_known_peak() -> None:
    cpu = torch.device("cpu")
    assert device_peak(cpu, Precision("bfloat16")) is None
    assert 10 * 2**20 < peak_memory(cpu) < 2**40


def test_files(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(STEP)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())  # before it is closed
    writer.close()
    assert line == {
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
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("loss")[0].step == 7
    assert events.Scalars("loss")[0].value == pytest.approx(1 / 3)
    assert "mfu" not in events.Tags()["scalars"]


def test_without_tensorboard(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(STEP)
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


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


def test_events_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Each number under its own name; steps that are run again take the place of those before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = {"routing": {"router": {"load": 2.0}}, "checkpoint": {"stall": 1.0}, "offload": {"a": 1.0}}
    for number, steps in enumerate((0, 1)):
        writer = MetricsWriter(tmp_path, tensorboard=True, steps=steps)
        for step in range(steps + 1, 4):
            metrics = replace(STEP, step=step, lr=number + 0.5, more=more)
            writer.write(replace(metrics, epochs={"b": 1.0}))
        writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    names = set(events.Tags()["scalars"])
    assert {"checkpoint/stall", "offload/a", "epochs/b", "load/router"} <= names
    assert [(event.step, event.value) for event in events.Scalars("lr")] == [
        (1, 0.5),
        (2, 1.5),
        (3, 1.5),
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
