"""Where the metrics of steps go: a file of JSON lines, TensorBoard's events, the console.

A sink of another package is found by its entry point in the group "compose.sinks".
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any

from compose.config.tables import Config
from compose.errors import ConfigError, open_own, write_whole
from compose.train.metrics import StepMetrics


class Sink:
    """A place for metrics; the first rank of each DiLoCo worker makes one."""

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
        try:
            kept, strange = _lines_of(self.path, done)
            if strange:
                names = (self.path.with_name(f"{self.path.name}.damaged-{i}") for i in range(1, 10**6))
                aside = next(name for name in names if not os.path.lexists(name))
                self.path.rename(aside)
                _say(f"{self.path}: {strange} of its lines are no steps; it is kept as {aside}")
            # A new file replaces the old one, so that a crash leaves one of them whole.
            write_whole(self.path, b"".join(kept))
            self.file: IO[bytes] = open_own(self.path, "ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"run.dir: {self.path}: {error.strerror}") from None
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


class TensorBoard(Sink):
    """Events, one for each number; steps after those taken are dropped from earlier files."""

    def __init__(self, config: Config, folder: Path, done: int, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # its import takes half a second

        self.events: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Tell whether ``metrics.tensorboard`` is on."""
        return config.metrics.tensorboard

    def write(self, metrics: StepMetrics) -> None:
        """Add the step's numbers."""
        try:
            for name, value in _scalars(metrics.values()) if self.events else ():
                if name != "step" and value is not None:
                    self.events.add_scalar(name, value, metrics.step)
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


SINKS: tuple[type[Sink], ...] = (JsonLines, TensorBoard, Console)


def open_sinks(config: Config, folder: Path, done: int, say: Callable[[str], None]) -> list[Sink]:
    """Open the sinks that a config asks for, and those of other packages."""
    others = [entry.load() for entry in entry_points(group="compose.sinks")]
    return [kind(config, folder, done, say) for kind in (*SINKS, *others) if kind.wanted(config)]


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

    No run leaves a strange line, not even a killed one: it has no step and is not the last.
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
    """Return the step of a whole line."""
    try:
        values = json.loads(line.decode("utf-8")) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return step if type(step) is int and step > 0 else None


def _say(text: str) -> None:
    print(text, flush=True)
