"""The metrics of a step, the peaks of devices, and the sinks: JSON lines, TensorBoard, the console.

Sinks that talk to a service are in compose/train/trackers.py. A sink of another package is found by its
entry point in the group "compose.sinks".
"""

import contextlib
import errno
import json
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch

from compose.checkpoint.store import set_aside
from compose.config.tables import Config
from compose.errors import open_own, or_say, write_whole
from compose.memory.precision import Precision
from compose.train.readings import Reading

# Dense peak FLOP/s by a part of torch.cuda.get_device_name(), first match wins; bfloat16 and float8
# without sparsity, from the makers' data sheets (docs/metrics.md names them).
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "GB200": {"bfloat16": 2.5e15, "float8": 5.0e15},
    "B200": {"bfloat16": 2.25e15, "float8": 4.5e15},
    "H200 NVL": {"bfloat16": 835e12, "float8": 1671e12},
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
    "MI250X": {"bfloat16": 191.5e12},  # a device is one of a card's two dies
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of a device in FLOP/s for products of a type, if it is known."""
    for name, rates in PEAK_FLOPS.items():
        # An A4000 is no A40, and an instance of MIG is a part of its GPU.
        if re.search(rf"{name}(?!\d)", device_name) and " MIG " not in device_name:
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
    """Epochs of each set of data."""
    validation_loss: float | None = None
    """The loss on data.validation, if it was measured."""
    skipped: int = 0
    """Steps of this process that were not finite."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Reports of routers, saves and hooks, by key."""

    def with_numbers(self, reading: Reading) -> "StepMetrics":
        """Return the line with the numbers that were read; None where one is not finite."""
        numbers = (reading.loss, reading.norm, reading.z_loss)
        loss, norm, z_loss = (n if n is not None and math.isfinite(n) else None for n in numbers)
        return replace(self, loss=loss, grad_norm=norm, z_loss=z_loss)

    def values(self) -> dict[str, Any]:
        """Return the values by key, without those that say nothing; None if one is not finite."""
        values = asdict(self)
        more = values.pop("more")
        values = {n: v for n, v in values.items() if n not in _OPTIONAL or v != _OPTIONAL[n]}
        return _finite(values | {name: value for name, value in more.items() if value != {}})

    def flat(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the numbers and the texts by the names of their curves, as "checkpoint/stall"."""
        known = {name: value for name, value in _scalars(self.values()) if value is not None}
        texts = {name: value for name, value in known.items() if isinstance(value, str)}
        return {n: v for n, v in known.items() if n != "step" and n not in texts}, texts

    def console(self, steps: int, seconds_left: float) -> str:
        """Return the step as a line for a person, with all ``steps`` of the run and the time left."""
        minutes, seconds = divmod(round(seconds_left), 60)
        mfu = "" if self.mfu is None else f"  mfu {self.mfu:.1%}"
        loads = [report["load"] for report in self.more.get("routing", {}).values() if "load" in report]
        measured = self.validation_loss
        validation = "" if measured is None else f"  validation_loss {measured:.4f}"
        load = f"  load {max(loads):.2f}" if loads else ""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {_shown(self.loss, 4)}{validation}"
            f"  grad_norm {_shown(self.grad_norm, 3)}  lr {self.lr:.2e}"
            f"  {self.tokens_per_second:,.0f} tokens/s{mfu}{load}  {self.memory / 2**30:.2f} GiB"
            f"  sample {self.samples:,}  left {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        )


_OPTIONAL = {"z_loss": None, "loss_scale": None, "epochs": {}, "validation_loss": None, "skipped": 0}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


class Sink:
    """A place for metrics; the first rank of each DiLoCo worker makes one."""

    last: int | None = None
    """The last step that a service has, if it can tell. It gets the steps after that one."""

    def __init__(self, config: Config, folder: Path, done: int, say: Callable[[str], None]) -> None:
        """Take the config, the run's folder, the steps taken, and what prints a line for the job."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Tell whether a run of this config has this sink."""
        return True

    def write(self, metrics: StepMetrics) -> None:
        """Take the metrics of a step."""

    def close(self) -> None:
        """Write what is left."""


class JsonLines(Sink):
    """metrics.jsonl: a line for each step, on disk when :meth:`write` returns, if possible.

    The file keeps its lines of the steps taken, so that a resumed run leaves one line for each step. If
    nothing can be written, it says so once, keeps the lines, and writes them when it can.
    """

    def __init__(self, config: Config, folder: Path, done: int, say: Callable[[str], None]) -> None:
        self.path = folder / "metrics.jsonl"
        with or_say(f"run.dir: {self.path}"):
            kept, strange = _lines_of(self.path, done)
            if strange:
                aside = set_aside(self.path, "damaged")
                _say(f"{self.path}: {strange} of its lines are no steps; it is kept as {aside}")
            # A new file replaces the old one, so that a crash leaves one of them whole.
            write_whole(self.path, b"".join(kept))
            self.file: IO[bytes] = open_own(self.path, "ab", buffering=0)
        self.size, self.waiting, self.problem = sum(map(len, kept)), b"", ""

    def write(self, metrics: StepMetrics) -> None:
        """Append a line."""
        self._append(json.dumps(metrics.values()).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        """Write the waiting lines and ``line``, all or nothing."""
        self.waiting += line
        try:
            left = memoryview(self.waiting)
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                if error.errno == errno.ESTALE:  # a file server has forgotten this handle, for good
                    stale, self.file = self.file, open_own(self.path, "ab", buffering=0)
                    stale.close()
            with contextlib.suppress(OSError):
                os.truncate(self.file.fileno(), self.size)  # half a line would spoil the next one
            if not self.problem:
                self.problem = error.strerror or str(error)
                _say(f"{self.path} cannot be written: {self.problem}; training goes on")
            return
        self.size += len(self.waiting)
        self.waiting = b""
        if self.problem:
            self.problem = ""
            _say(f"{self.path} is written again, no line of it is lost")

    def close(self) -> None:
        """Write what waits, or say that it is lost."""
        if self.waiting:
            self._append(b"")
        if self.waiting:
            count = self.waiting.count(b"\n")
            _say(f"{self.path}: the last {count} steps are not in it: {self.problem}")
        self.file.close()


# The files of a run's folder that describe the run. The first three are the run's own; the page is
# that of ``compose plan --report``.
DESCRIPTIONS = ("config.toml", "plan.txt", "timeline.png", "plan.html")


class TensorBoard(Sink):
    """Events, one for each number; steps after those taken are dropped from earlier files.

    Its page sorts the names, capitals first, and begins with the names of ``_FIRST``.
    """

    _FIRST: ClassVar = {"loss": "Loss/train", "validation_loss": "Loss/validation"}

    def __init__(self, config: Config, folder: Path, done: int, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # its import takes half a second

        # A start that was killed before its first checkpoint has left events of steps from 0 on.
        self.events: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else 0)
        for path in (folder / name for name in DESCRIPTIONS):
            if path.suffix in (".toml", ".txt") and path.is_file():
                self.events.add_text(path.stem, f"```\n{path.read_text('utf-8')}\n```", done)
            elif path.suffix == ".png" and path.is_file():
                from PIL import Image

                picture = np.asarray(Image.open(path))
                self.events.add_image(path.stem, picture, done, dataformats="HWC")

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Tell whether ``metrics.tensorboard`` is on."""
        return config.metrics.tensorboard

    def write(self, metrics: StepMetrics) -> None:
        """Add the step's numbers."""
        try:
            numbers, texts = metrics.flat() if self.events else ({}, {})
            first = {tag: numbers[name] for name, tag in self._FIRST.items() if name in numbers}
            for name, value in (first | numbers).items():
                self.events.add_scalar(name, value, metrics.step)
            for name, text in texts.items():
                self.events.add_text(name, text, metrics.step)
        except OSError as error:  # an error of TensorBoard's thread, which then writes no more
            self.events = None
            _say(f"TensorBoard's events cannot be written: {error.strerror}; training goes on")

    def close(self) -> None:
        """Write what is left."""
        try:
            if self.events:
                self.events.close()
        except OSError as error:
            _say(f"TensorBoard's events cannot be written: {error.strerror}")


class Console(Sink):
    """A line for a person, every ``metrics.console_every`` steps."""

    def __init__(self, config: Config, folder: Path, done: int, say: Callable[[str], None]) -> None:
        train, self.say, self.every = config.train, say, config.metrics.console_every
        self.steps, self.last_step = train.steps, train.last_step
        self.tokens = train.global_batch * train.seq_len

    def write(self, metrics: StepMetrics) -> None:
        """Print the step, if its number or a validation asks for it."""
        step = metrics.step
        due = step in (1, self.last_step) or step % self.every == 0
        if due or metrics.validation_loss is not None:
            left = (self.last_step - step) * self.tokens / metrics.tokens_per_second
            self.say(metrics.console(self.steps, left))
        for prompt, text in metrics.more.get("texts", {}).items():
            self.say(f"step {step}: {prompt!r} continues {text!r}")


SINKS: tuple[type[Sink], ...] = (JsonLines, TensorBoard, Console)


def open_sinks(config: Config, folder: Path, done: int, say: Callable[[str], None]) -> list[Sink]:
    """Open the sinks that a config asks for, and those of other packages, which no step waits for."""
    from compose.train.trackers import TRACKERS, BackgroundSink

    given = (config, folder, done, say)
    own: list[Sink] = [kind(*given) for kind in SINKS if kind.wanted(config)]
    loads = {name: partial(TRACKERS.__getitem__, name) for name in config.metrics.sinks}
    loads |= {entry.name: entry.load for entry in entry_points(group="compose.sinks")}
    return own + [BackgroundSink(name, load, given) for name, load in loads.items()]


def earlier_steps(folder: Path, done: int) -> Iterator[StepMetrics]:
    """Yield the metrics of the steps taken, as the run's file has them."""
    names = {each.name for each in fields(StepMetrics)}
    for line in _lines_of(folder / "metrics.jsonl", done)[0]:
        values = json.loads(line)
        known = {name: values.pop(name) for name in names & values.keys()}
        yield StepMetrics(**known, more=values)


def _scalars(values: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value): "table/key" for a table, and "key/name" for a table of tables by name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and table:
            yield from ((f"{key}/{name}", number) for key, number in value.items())
        elif isinstance(value, Mapping):
            yield from _scalars(value, name)
        else:
            yield f"{table}/{name}" if table else name, value


def _lines_of(path: Path, steps: int) -> tuple[list[bytes], int]:
    """Return the lines of the first ``steps`` steps, once each, and the number of strange lines.

    A strange line has no step, and is not the last. No run leaves one, not even one that was killed.
    """
    try:
        with open_own(path) as file:
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return [], 0
    kept: dict[int, bytes] = {}
    strange = 0
    for place, line in enumerate(lines):
        step = _step_of(line)
        if step is None:
            strange += place + 1 < len(lines)  # the last line may be cut short
        elif step <= steps:
            strange += step in kept
            kept.setdefault(step, line)
    return list(kept.values()), strange


def _step_of(line: bytes) -> int | None:
    try:
        values = json.loads(line.decode("utf-8")) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return step if type(step) is int and step > 0 else None


def _say(text: str) -> None:
    print(text, flush=True)
