"""Saves a run while it goes on, and resumes it.

A training step waits only until the state is copied into host memory. A thread with a process group of
its own then writes the copy. A checkpoint is whole before anything reads or deletes it by name
(store.py).
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from compose.checkpoint import loading, rank_state, store
from compose.checkpoint.dcp_storage import save_parts
from compose.checkpoint.in_memory import WHOLE, Copies
from compose.checkpoint.local_shards import LocalShard, named_tensors, parts, staged
from compose.checkpoint.store import Progress
from compose.checkpoint.uploads import Uploads
from compose.composition import Composition
from compose.config.tables import Config
from compose.config.toml import dump
from compose.errors import ConfigError, or_say, there
from compose.ops.tensors import gathered_objects, on_first_rank


@dataclass
class SaveReport:
    """The result of one save."""

    step: int
    stall: float  # seconds for which training stood still
    seconds: float = 0.0  # seconds until the checkpoint was published
    bytes: int = 0
    problem: str = "it did not end"
    """The reason why the checkpoint was not published; empty if it was."""

    def metrics(self) -> dict[str, float]:
        """Return the values for metrics.jsonl."""
        values, rate = asdict(self), self.bytes / self.seconds if self.seconds else 0.0
        failed = float(bool(values.pop("problem")))
        return {**values, "bytes_per_second": rate, "failed": failed}


class Checkpointer:
    """Saves and resumes one run. Every rank makes one, and calls its methods after the same steps."""

    def __init__(
        self,
        config: Config,
        composition: Composition,
        optimizer: torch.optim.Optimizer,
        folder: Path,
        data: Mapping[str, Any] | None = None,
        beside: Sequence[rank_state.HasState] = (),
        peers: store.Peers | None = None,
        uploads: Uploads | None = None,
        copied: tuple[Path, int] | None = None,
    ) -> None:
        """Prepare to save, ``beside`` too, in step with ``peers``; a collective.

        ``uploads``: what is saved in ``folder`` goes to object storage, and a run resumes from there.
        ``copied``: the folder of copies in memory, and the bytes of this rank's state.
        """
        self.data = dict(data or {})
        self.config, self.composition, self.optimizer = config, composition, optimizer
        self.root, self.beside, self.peers = folder / "checkpoints", beside, peers or store.Peers()
        self.uploads = uploads
        self.kept = uploads.remote / "checkpoints" if uploads else self.root
        self.label = rank_state.label_of(config, beside)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # A rank may wait long for the slowest rank's disk, while no step waits for that.
        group = dist.new_group(backend="gloo", timeout=config.comm.first_step_timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        everyone = gathered_objects(self.data, group)
        for other in (rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]):
            raise ConfigError(f"data.path: rank {other} reads other data than the first rank does")
        self.fields = loading.saved_fields(config) if self.rank == 0 else {}
        self.fields |= {"data": self.data, "ranks": self.ranks}
        said, timeout = dump(config), config.comm.first_step_timeout
        self.copies = Copies(*copied, self.fields, said, timeout) if copied else None
        self.thread: threading.Thread | None = None
        self.report: SaveReport | None = None
        self.unreported: SaveReport | None = None  # of a save for whose end the next one has waited
        self.failures = 0
        self.broken = False  # a rank was so late in a save that the group cannot be used again
        self.stage: dict[str, LocalShard] | None = None  # the last copy, whose memory is used again
        self.reads_files = False  # saves do, of state that is in files
        self.only_in_memory = False  # the step that was resumed has no checkpoint yet
        self.passed = set[int]()  # steps whose checkpoints were damaged when the run began

    def resume(self) -> Progress | None:
        """Load the newest whole checkpoint; print what was loaded, changed and passed over."""
        run = self.kept.parent
        if self.rank == 0 or self.uploads:  # each node has its own folder for uploads
            store.clean(self.root)
        if self.rank == 0 and self.uploads:
            for line in self.uploads.send_left():
                self.peers.say(line, own=True)
        own = self.peers.candidates(self.kept) if self.rank == 0 else []
        if self.rank == 0 and self.uploads:
            for part in sorted({*store.newest_first(self.kept)} - {*store.sent(self.kept)}):
                self.peers.say(f"{part}: was not sent whole, and is passed over", own=True)
        folders = on_first_rank(list, own, group=self.group)
        if folders and isinstance(folders[0], str):
            raise ConfigError(folders[0])
        copied = self.copies.find(self.peers.say) if self.copies else None
        if copied:
            newer = [folder for folder in folders if store.step_of(folder) > copied.step]
            if newer:
                self.peers.say(f"copies in memory are of step {copied.step}, before {newer[0].name}")
            folders = [*newer, copied.folder, *folders[len(newer) :]]
        for folder in folders:
            reader = copied.reader if copied and folder == copied.folder else None
            problems: list[str] = []
            if not reader:
                damaged = loading.damage(folder, self.group)
                problems = on_first_rank(self.peers.damage, damaged, group=self.group)
            if problems:
                self.peers.say(f"{folder}: damaged and passed over: {'; '.join(problems)}")
                self.passed.add(store.step_of(folder))
                continue
            model = self.config, self.composition, self.group, self.optimizer
            known = loading.load(folder, *model, reader)
            filled = loading.load_beside(folder, self.beside, self.group, reader)
            if other := loading.data_changes(folder, known, self.data):
                self.peers.say(other)
            place = f"{run}: {copied}" if reader else str(folder)
            self.peers.say(f"{place}: resumed after step {known.step}")
            dropped = rank_state.load(folder, self.label, self.beside, self.group, filled, known.step)
            if dropped:
                self.peers.say(dropped)
            if self.rank == 0:
                self._set_aside(folders, known.step)
                if known.step and (changed := loading.changes(folder, self.config)):
                    self.peers.say(f"{folder}: goes on with {', '.join(changed)}")
            if self.copies:
                self.copies.settle(copied, read=bool(reader))
            steps = [store.step_of(other) for other in folders if other != folder]
            self.only_in_memory = bool(reader) and known.step not in steps
            return known.progress
        if folders or on_first_rank(there, run / store.MARK, group=self.group):
            reason = "none of its checkpoints is whole" if folders else "its checkpoints are gone"
            raise ConfigError(
                f"run.dir: {run}: {reason}, and a run that begins at step 1 would write over the rest:"
                f" put one back into {self.kept}, or begin anew in another run.dir"
            )
        if self.copies:
            self.copies.settle(copied)
        return None

    def due(self, progress: Progress, enough: str) -> bool:
        """Return whether the state is to be saved now; ``enough``: why no other step follows."""
        keep = self.config.checkpoint
        last = bool(enough) or progress.step == self.config.train.last_step
        wanted = last or progress.step in progress.best(keep.keep_best)
        return keep.interval > 0 and (wanted or progress.step % keep.interval == 0)

    def save(self, progress: Progress, wait: bool = False) -> None:
        """Begin to save the state as it is now, after the end of an earlier save."""
        begun = time.perf_counter()
        self.wait()
        self.unreported, self.only_in_memory = self.finished(), False
        state = self._state(progress.step)
        # State in files would not fit into memory. It changes only in the optimizer's step.
        files = {n: p for n, p in state.items() if p.local.untyped_storage().filename}
        if files and not self.reads_files:
            self.reads_files = True
            self.optimizer.register_step_pre_hook(lambda *_: self._let_go())
        self.stage = staged({n: p for n, p in state.items() if n not in files}, self.stage)
        state = self.stage | files
        kept = rank_state.copied(self.beside)
        self.report = SaveReport(progress.step, stall=time.perf_counter() - begun)
        given = (self.report, state, kept, progress, begun)
        self.thread = threading.Thread(target=self._try_to_write, args=given, daemon=True)
        self.thread.start()
        if wait or not self.config.checkpoint.async_:
            self.wait()
            self.report.stall = time.perf_counter() - begun

    def _state(self, step: int) -> dict[str, LocalShard]:
        """Return this rank's parts of all that is saved after a step."""
        for other in self.beside:
            other.before_save(step)
        adapters = self.config.model.lora.rank > 0
        state = parts(named_tensors(self.composition, self.optimizer, adapters))
        return state | {name: p for other in self.beside for name, p in other.tensors().items()}

    def copy(self, progress: Progress, last: int) -> None:
        """Copy the state into memory; ``last`` is the greatest :attr:`copying` of all ranks."""
        assert self.copies
        state = self._state(progress.step)
        own = rank_state.as_part(self.rank, self.label, rank_state.copied(self.beside))
        self.copies.take(state | own, progress, last)

    @property
    def copying(self) -> int:
        """The state of this rank's last copy in memory, before a collective of the step."""
        return self.copies.state if self.copies else WHOLE

    def end(self) -> str:
        """Wait for the last save, and remove the copies in memory; a collective. The run ends well.

        Return a line if the last checkpoint could not be saved. Then the copies stay.
        """
        self.wait()
        if self.copies and self.copies.thread:
            self.copies.thread.join()
        self.finished()
        failed = self.report.step if self.report and self.report.problem else 0
        # A rank whose group is broken has nobody to ask.
        if step := failed if self.broken else max(gathered_objects(failed, self.group)):
            return f"the checkpoint of step {step}, the last, could not be saved: start again, to go on"
        if self.copies:
            self.copies.remove()
        return ""

    def wait(self) -> None:
        """Wait until no save is going on."""
        if self.thread:
            self.thread.join()

    def _let_go(self) -> None:
        """Wait, before the optimizer's step, until a save has read the optimizer's files."""
        if self.thread and self.report:
            begun = time.perf_counter()
            self.wait()
            self.report.stall += time.perf_counter() - begun

    def finished(self) -> SaveReport | None:
        """Return the report of a save on this rank that has ended since the last call, or None."""
        if self.thread is None or self.thread.is_alive():
            report, self.unreported = self.unreported, None
            return report
        self.thread, report = None, self.report
        if report and report.problem:
            self.failures += 1
            left = self.config.checkpoint.fail_after - self.failures
            self.peers.say(
                f"checkpoint of step {report.step} failed: {report.problem}; training goes on"
                f"{f', and stops after {left} more' if left > 0 else ''}",
                own=True,
            )
        return report

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of its threads, for which no step waits."""
        return [self.group, self.copies.group] if self.copies else [self.group]

    @property
    def failed(self) -> int:
        """1 if ``checkpoint.fail_after`` saves have failed, 2 if no other one can succeed, else 0."""
        return 2 if self.broken else int(0 < self.config.checkpoint.fail_after <= self.failures)

    def failure(self, failed: int) -> str:
        """Return why the run ends, by what :attr:`failed` is on the first rank."""
        if failed == 2:
            return "a rank was too late in a save, and no save can follow: start again, to go on"
        many = self.config.checkpoint.fail_after
        return f"{many} checkpoints could not be saved (checkpoint.fail_after)"

    def _set_aside(self, folders: list[Path], step: int) -> None:
        """Rename this run's checkpoints after ``step`` that its peers lack."""
        for folder in self.peers.others_lack(self.kept, folders, step):
            with or_say(f"{folder}: cannot be renamed"):
                kept = store.set_aside(folder, "earlier")
            self.peers.say(f"{folder}: other islands lack this step; kept as {kept.name}", own=True)

    def _try_to_write(self, report: SaveReport, *given: Any) -> None:
        try:
            self._write(report, *given)
        except Exception as error:
            if not report.problem:  # the checkpoint itself is whole
                raise
            report.problem, self.broken = loading.cause_of(error), True

    def _write(
        self,
        report: SaveReport,
        state: Mapping[str, LocalShard],
        kept: Mapping[str, Tensor] | None,
        progress: Progress,
        begun: float,
    ) -> None:
        """Write on every rank, then publish on the first one. This runs in the thread."""
        target = self.root / f".writing-{store.name_of(progress.step)}"
        problem, files = "", {}
        try:
            self._begin(progress.step)
            # With one rank gloo's own threads would gather the plan. On a CPU they would keep OpenMP
            # threads, and with more threads than cores each parallel region of training takes longer.
            files = save_parts(target, state, self.group if self.ranks > 1 else None)
            files |= rank_state.write(target, self.rank, self.label, kept)
        except (Exception, CheckpointException) as error:  # DCP's own error is a BaseException
            problem = loading.cause_of(error)
        everyone = gathered_objects((problem, files), self.group)
        problem, size = next((words for words, _ in everyone if words), ""), 0
        if not problem:
            written = [entries for _, entries in everyone]
            problem, size = on_first_rank(self._publish, target, progress, written, group=self.group)
        if problem and (self.rank == 0 or self.uploads):  # which have a folder on each node
            shutil.rmtree(target, ignore_errors=True)
        elif self.uploads:
            problem = self.uploads.send_checkpoint(target, files, self.group)
        report.problem, report.bytes = problem, size
        report.seconds = time.perf_counter() - begun
        if self.rank == 0 and not problem:
            self._prune(progress)

    def _publish(self, target: Path, progress: Progress, files: list[Any]) -> tuple[str, int]:
        """Publish what all ranks have written; return (problem, bytes)."""
        try:
            tensors = {name: entry for part in files for name, entry in part.items()}
            state = {**asdict(progress), **self.fields}
            everything = store.write_run_state(target, state, dump(self.config), tensors)
            # Else a node without power could lose lines of steps that are not taken again.
            with contextlib.suppress(OSError):
                store.flush(self.root.parent / "metrics.jsonl")
            store.publish(target, everything, elsewhere=bool(self.uploads))
        except OSError as error:
            return loading.cause_of(error), 0
        with contextlib.suppress(OSError):  # the checkpoint is published in any case
            store.mark(self.root.parent)
        return "", sum(entry["size"] for entry in everything.values())

    def _prune(self, progress: Progress) -> None:
        keep, newest = self.config.checkpoint, self.kept / store.name_of(progress.step)
        before = self.peers.oldest_to_keep(self.kept, keep.keep_last)
        try:
            # A save may have failed: the best that are there stay.
            held = {*map(store.step_of, store.sent(self.kept))} if keep.keep_best else set()
            best = [step for step in store.best_first(progress.validations) if step in held]
            kept = best[: keep.keep_best]
            self.passed.discard(progress.step)  # now there is a whole one of this step
            store.prune(newest, keep.keep_last, keep.keep_every, before, kept, self.passed)
        except OSError as error:
            problem = f"an old checkpoint could not be removed: {loading.cause_of(error)}"
            self.peers.say(f"{self.kept}: {problem}", own=True)

    def _begin(self, step: int) -> None:
        """Make an empty folder on the first rank. If it fails there, every rank raises OSError."""

        def begun() -> str:
            try:
                store.begin(self.root, step)
                if self.uploads:
                    self.uploads.make_room(store.name_of(step))
            except OSError as error:
                return loading.cause_of(error)
            return ""

        if problem := on_first_rank(begun, group=self.group):
            raise OSError(problem)
