"""The metrics of a step (sinks.py writes them), and the peaks of devices."""

import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from compose.memory.precision import Precision

# Dense peak FLOP/s by a part of torch.cuda.get_device_name(), first match wins; bfloat16 and float8
# without sparsity, from the makers' data sheets (docs/metrics.md names them).
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "GB200": {"bfloat16": 2.5e15, "float8": 5.0e15},
    "B200": {"bfloat16": 2.25e15, "float8": 4.5e15},
    "H200": {"bfloat16": 989e12, "float8": 1979e12},
    "H100 NVL": {"bfloat16": 835e12, "float8": 1671e12},
    "H100 PCIe": {"bfloat16": 756e12, "float8": 1513e12},
    "H100": {"bfloat16": 989e12, "float8": 1979e12},
    "H20": {"bfloat16": 148e12, "float8": 296e12},
    "A100": {"bfloat16": 312e12},
    "A40": {"bfloat16": 149.7e12},
    "L40S": {"bfloat16": 362e12, "float8": 733e12},
    "L4": {"bfloat16": 121e12, "float8": 242e12},
    "MI325X": {"bfloat16": 1307e12, "float8": 2615e12},
    "MI300X": {"bfloat16": 1307e12, "float8": 2615e12},
    "MI250X": {"bfloat16": 383e12},
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of a device in FLOP/s for products of a type, if it is known."""
    for name, rates in PEAK_FLOPS.items():
        if name in device_name:
            return rates.get(dtype)
    return None


def device_peak(device: torch.device, precision: Precision) -> float | None:
    """Return the peak FLOP/s of a device in the precision of forward and backward, if it is known."""
    if device.type != "cuda":
        return None
    # float16 and bfloat16 have the same peak.
    dtype = "bfloat16" if precision.param == "float16" else precision.param
    return peak_flops(torch.cuda.get_device_name(device), dtype)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes this rank has used: of the GPU's allocator, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl; docs/metrics.md defines each field."""

    step: int
    loss: float | None
    """null if it was not finite."""
    grad_norm: float | None
    lr: float
    tokens: int
    samples: int
    tokens_per_second: float
    mfu: float | None
    memory: int
    z_loss: float | None = None
    """The z-loss of the model's own logits."""
    loss_scale: float | None = None
    """The factor of the step's loss, in float16."""
    epochs: Mapping[str, float] = field(default_factory=dict)
    """Epochs of each set of data, if there are several."""
    validation_loss: float | None = None
    """The loss on data.validation, if it was measured."""
    skipped: int = 0
    """Steps of this process that were not finite."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Reports of routers, saves and hooks, by key."""

    def values(self) -> dict[str, Any]:
        """Return the values by key, without those that say nothing."""
        values = asdict(self)
        more = values.pop("more")
        values = {n: v for n, v in values.items() if n not in _OPTIONAL or v != _OPTIONAL[n]}
        return values | {name: value for name, value in more.items() if value != {}}

    def console(self, steps: int, seconds_left: float) -> str:
        """Return the step as a line for a person, with all ``steps`` of the run and the time left."""
        minutes, seconds = divmod(round(seconds_left), 60)
        mfu = "" if self.mfu is None else f"  mfu {self.mfu:.1%}"
        loads = [report["load"] for report in self.more.get("routing", {}).values() if "load" in report]
        validation = (
            "" if self.validation_loss is None else f"  validation_loss {self.validation_loss:.4f}"
        )
        load = f"  load {max(loads):.2f}" if loads else ""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {_shown(self.loss, 4)}{validation}"
            f"  grad_norm {_shown(self.grad_norm, 3)}  lr {self.lr:.2e}"
            f"  {self.tokens_per_second:,.0f} tokens/s{mfu}{load}  {self.memory / 2**30:.2f} GiB"
            f"  sample {self.samples:,}  left {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        )


_OPTIONAL = {"z_loss": None, "loss_scale": None, "epochs": {}, "validation_loss": None, "skipped": 0}


def _shown(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"
