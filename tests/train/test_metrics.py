"""What is written of a step."""

import pytest
import torch

from compose.memory.precision import Precision
from compose.train.metrics import device_peak, peak_flops, peak_memory
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
