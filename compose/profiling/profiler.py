"""The profiled steps of a run: which steps, on which ranks, and their files in ``run.dir``."""

import gzip
import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from pickle import dump
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from compose.errors import write_whole
from compose.ops.tensors import gathered_objects, local_tensor
from compose.profiling.summary import (
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    allocations,
    as_text,
    peak,
    snapshot,
    time_shares,
)
from compose.profiling.trace import NOTED, Trace, step_span
from compose.train.heartbeat import report_phase
from compose.train.hooks import Hook

if TYPE_CHECKING:
    from compose.train.trainer import Trainer

_GZIP = 5  # of 9; traces of large models are hundreds of megabytes, and other ranks wait for them
_HISTORY = 1_000_000  # events of the CUDA allocator that are kept; each takes some kilobytes


class Profiler(Hook):
    """Profiles those steps of [profile] that a run takes, on the chosen ranks, into its traces/."""

    def __init__(self, trainer: "Trainer") -> None:
        self.chosen, self.device = trainer.config.profile, trainer.device
        self.model, self.optimizer = trainer.composition.model, trainer.optimizer
        self.first, self.last = self.chosen.steps
        self.folder, self.done = trainer.folder / "traces", 0
        self.begun, self.open = False, ExitStack()
        self.recording: Recording | None = None

    def start(self, done: int) -> None:
        """Make ready to record, if steps are left to profile on this rank."""
        self.done, rank, chosen = done, dist.get_rank(), self.chosen
        if done < self.last and (not chosen.ranks or rank in chosen.ranks):
            self.recording = Recording(self.model, self.optimizer, self.device, chosen.memory)
        elif rank == 0 and self.last <= done:
            print(f"profile.steps: {list(chosen.steps)} are over: the run goes on after step {done}")

    def before_step(self, step: int) -> None:
        """Begin to profile a step, if it is one of the chosen steps."""
        if not self.first <= step <= self.last:
            if self.recording and step == self.first - 1:
                self.recording.prepare()
            return
        if not self.begun:
            self.begun, self.first = True, step
            if self.recording:
                self.recording.settle()
                self.recording.start()
        self.open.enter_context(step_span(step))

    def after_step(self, step: int) -> None:
        """End the profile of a step, and write all after the last one."""
        if not self.first <= step <= self.last:
            return
        if self.recording:
            self.recording.settle()
        self.open.close()
        self.done = step
        if step == self.last:
            self.finish()

    def finish(self) -> None:
        """Write the recording, if there is one, and print a summary; then it is a collective."""
        if not self.begun:
            return
        self.begun = False
        report_phase(self.done, "the profile")
        result: dict[str, Any] | None = None
        steps = f"step{self.first}-{self.done}"
        if self.recording:
            self.recording.stop()
            result = {"rank": dist.get_rank()}
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                result |= self.recording.write(self.folder / f"{steps}_rank{dist.get_rank()}")
            except (OSError, ValueError) as error:  # this must not end a run
                result["problem"] = str(error)
            self.recording = None  # this frees all that was recorded
        results = gathered_objects(result)
        if dist.get_rank() == 0:
            summary = {"steps": [self.first, self.done], "ranks": [each for each in results if each]}
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(self.folder / f"{steps}_summary.json", json.dumps(summary, indent=1))
            except OSError as error:
                print(f"profile: {error}")
            print(as_text(summary, self.folder), flush=True)

    def close(self, failed: bool) -> None:
        """Stop, and drop an unwritten recording."""
        self.open.close()
        if self.recording:
            self.recording.drop()
        self.begun = False


class Recording:
    """The recording of one rank."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, memory: bool
    ) -> None:
        # At levels up to 5 torch 2.13 reports its beginning and end on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.model, self.optimizer, self.device, self.memory = model, optimizer, device, memory
        self.cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.cuda
        # Shapes are not recorded: for them the profiler keeps tensors, which changes memory.
        self.profile = profile(activities=activities, profile_memory=True)
        self.prepared = self.going = False
        self.before: dict[str, int] = {}
        self.noted: list[dict[int, str]] = []
        self.history: Any = None
        self.undo = ExitStack()

    def prepare(self) -> None:
        """Start the profiler a step early, so that the first step is free of its start-up time."""
        self.profile.prepare_trace()
        self.prepared = True

    def settle(self) -> None:
        """Wait for the device, so that a step's span holds all that the step gave it to do."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def start(self) -> None:
        """Record from now on."""
        if not self.prepared:
            self.prepare()
        hook = self.optimizer.register_step_pre_hook(lambda *unused: self._note_gradients())
        self.undo.callback(hook.remove)
        self.before = {
            WEIGHTS: sum(self._storages(self.model.parameters()).values()),
            OPTIMIZER: sum(self._state().values()),
        }
        if self.cuda:
            allocated = torch.cuda.memory_allocated(self.device)
            self.before[OTHER] = allocated - sum(self.before.values())
            if self.memory:
                # The name is private, but PyTorch's documentation says to use it.
                torch.cuda.memory._record_memory_history(max_entries=_HISTORY, stacks="python")
                self.undo.callback(torch.cuda.memory._record_memory_history, enabled=None)
        else:
            self.before[OTHER] = sum(self._storages(self.model.buffers()).values())
            self.undo.enter_context(_waits_marked())
        self.profile.start_trace()
        self.going = True

    def stop(self) -> None:
        """Record no more."""
        self._note(dict.fromkeys(self._state(), OPTIMIZER))
        self.profile.stop_trace()
        self.prepared = self.going = False
        if self.cuda and self.memory:
            self.history = torch.cuda.memory._snapshot()
        self.undo.close()

    def drop(self) -> None:
        """Stop, if this was prepared and has not been stopped."""
        if self.prepared and not self.going:
            self.start()
        if self.going:
            self.stop()

    def write(self, path: Path) -> dict[str, Any]:
        """Write the trace and the memory's snapshot beside ``path``, and return the summary."""
        plain, memory = (path.with_name(f"{path.name}{end}") for end in (".json", "_memory.pickle"))
        unfinished = Path(f"{plain}.tmp")  # Kineto's, which it leaves if it fails
        for old in (plain, unfinished, Path(f"{plain}.gz"), memory):
            old.unlink(missing_ok=True)  # a link could lead anywhere
        try:
            self.profile.export_chrome_trace(str(plain))
            if not plain.exists():
                raise OSError(f"{plain}: the trace could not be written; the disk may be full")
            content = plain.read_bytes()
        finally:
            for old in (plain, unfinished):
                old.unlink(missing_ok=True)
        try:
            events = json.loads(content)
        except ValueError as error:  # Kineto escapes no quote in a name
            raise ValueError(f"the trace is no JSON, which a range's name may cause: {error}") from None
        trace = Trace(events, self.cuda)
        result = allocations(trace, self.noted)
        try:
            with gzip.open(f"{plain}.gz", "xb", _GZIP) as file:
                file.write(content)
            if self.memory:
                with memory.open("xb") as file:
                    dump(self.history if self.cuda else snapshot(result, self.before), file)
        except OSError:  # half a file cannot be read
            for old in (Path(f"{plain}.gz"), memory):
                old.unlink(missing_ok=True)
            raise
        return {
            "seconds_per_step": (trace.end - trace.start) / 1e6 / len(trace.steps),
            "time": time_shares(trace),
            "memory": peak(result, self.before),
        }

    def _note_gradients(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self._note(dict.fromkeys(self._storages(gradients), GRADIENTS))

    def _note(self, what: dict[int, str]) -> None:
        self.noted.append(what)
        with record_function(NOTED):
            pass

    def _state(self) -> dict[int, int]:
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return self._storages(value for value in values if isinstance(value, Tensor))

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return bytes by address of this rank's ``tensors`` on the device, each storage once."""
        plain = map(local_tensor, tensors)
        result = (t.untyped_storage() for t in plain if t.device.type == self.device.type)
        return {storage.data_ptr(): storage.nbytes() for storage in result}


def _waits_marked() -> AbstractContextManager[Any]:
    """Record ranges around waits for messages, of which PyTorch records none."""
    real = dist.Work.wait

    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        with record_function("compose::wait"):
            return real(self, *args, **kwargs)

    return mock.patch.object(dist.Work, "wait", wait)
