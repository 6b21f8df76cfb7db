"""Runs that planned faults disturb, restarted until they end, and held against an undisturbed run.

One torchrun starts its ranks again by ``--max-restarts``, or the same command is given again, as a
person would. Of two torchruns (nodes on loopback) one that ended is started again too.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compose.checkpoint import store
from tests.support.checkpoints import shards
from tests.support.command_lines import begin, command, free_port, kill_sessions
from tests.support.helpers import ROOT
from tests.support.planned_faults import FLIPPED, IN_COPY, TORN, Planned, fired, write_plan
from tests.support.training import lines

# The line that tells of a fault. Others end ranks, of which torchrun tells or another rank.
NOTICES = {
    TORN: r"damaged and passed over",
    FLIPPED: r"damaged and passed over",
    IN_COPY: r"copies in memory: .* is damaged in",
    "bit in memory": r"differs? in|corrupt",
    "full disk": r"No space left on device",
}
ENDED = (
    r"exitcode|is behind|failed:|died|death of|RendezvousConnection|RendezvousClosed|Signals\.|is gone"
)
EQUAL = ("step", "loss", "grad_norm", "lr", "samples", "tokens")  # of each line of metrics.jsonl
CLOSE = 1e-4  # relative difference of losses where the mesh has changed


@dataclass(frozen=True)
class Case:
    """A run with its faults."""

    number: int
    mesh: str
    ranks: int
    """Ranks of each torchrun."""
    keys: tuple[str, ...]
    """Keys on which the numbers depend, as ``--parallel.tp=2``."""
    saving: tuple[str, ...]
    """Keys on which they do not."""
    plan: list[Planned]
    restarts: int = 0
    """torchrun's ``--max-restarts``."""
    nodes: int = 1
    fewest: int = 1
    """Nodes with which the run goes on."""

    @property
    def steps(self) -> int:
        return int(next(key for key in self.keys if "train.steps" in key).partition("=")[2])

    @property
    def batch(self) -> int:
        return int(next(key for key in self.keys if "global_batch" in key).partition("=")[2])


@dataclass
class Launch:
    """A torchrun that was started, and what it has printed: (when, line)."""

    node: int
    process: "subprocess.Popen[str]"
    output: Path
    begun: float = field(default_factory=time.time)
    ended: float | None = None
    said: list[tuple[float, str]] = field(default_factory=list)
    read: int = 0

    def look(self) -> int | None:
        """Read what is new, and return the exit code if there is one."""
        code = self.process.poll()
        with self.output.open("rb") as file:
            file.seek(self.read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.read += len(whole) + len(newline)
        now = time.time()
        self.said += [(now, line) for line in whole.decode(errors="replace").splitlines()]
        if code is not None and self.ended is None:
            self.ended = now
        return code


class Disturbed:
    """A run of a case in ``folder``, from :meth:`run` to its end."""

    def __init__(self, case: Case, folder: Path, limit: float) -> None:
        """Prepare; the run is given up after ``limit`` seconds."""
        self.case, self.folder, self.limit = case, folder, limit
        self.ledger, self.faults = folder / "ledger", folder / "faults"
        self.launches: list[Launch] = []
        self.failures: list[str] = []
        self.port = free_port()

    def run(self) -> None:
        """Start, restart, and wait for the end."""
        self.ledger.mkdir(parents=True)
        self.faults.mkdir()
        write_plan(self.faults, self.case.plan)
        end = time.monotonic() + self.limit
        current = [self._launch(node) for node in range(self.case.nodes)]
        again: dict[int, float] = {}  # when a node is started again
        continued: set[int] = set()
        try:
            while True:
                time.sleep(0.1)
                self._continue(continued)
                codes = [launch.look() for launch in current]
                if 0 in codes and (None not in codes or self._wait_for_others(current)):
                    return
                if time.monotonic() > end:
                    self.failures.append(f"has not ended after {self.limit:.0f} s")
                    return
                for node, code in enumerate(codes):
                    if code is None or 0 in codes:
                        continue
                    when = again.setdefault(node, time.monotonic() + 1.0)
                    if time.monotonic() >= when:
                        del again[node]
                        current[node] = self._launch(node)
                        if len(self.launches) > 3 * len(self.case.plan) + 10:
                            self.failures.append("does not recover")
                            return
        finally:
            kill_sessions([launch.process for launch in self.launches if launch.ended is None])
            self._end_ranks()

    def _wait_for_others(self, current: list[Launch]) -> bool:
        """Some torchrun has ended well: so should the others."""
        end = time.monotonic() + 60
        while time.monotonic() < end and None in [launch.look() for launch in current]:
            time.sleep(0.1)
        return True

    def _launch(self, node: int) -> Launch:
        case = self.case
        words = [f"--run.dir={self.folder / 'run'}", *case.keys, *case.saving]
        whole = command("tests/support/train_with_ledger.py", *words, ranks=case.ranks)
        more = [f"--max-restarts={case.restarts}"]
        number = len(self.launches)
        variables = {"PYTHONPATH": str(ROOT), "LEDGER": str(self.ledger), "FAULTS": str(self.faults)}
        if case.nodes > 1:
            more += [f"--nnodes={case.fewest}:{case.nodes}", "--rdzv-backend=c10d", "--rdzv-id=mine"]
            more += [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--local-addr=127.0.0.1"]
            more += ["--rdzv-conf", f"is_host={node == 0},last_call_timeout=5"]
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        else:
            more.append(f"--master-port={self.port}")
            variables["LAUNCH"] = str(number)
        at = whole.index("--nproc-per-node")
        whole[at:at] = more
        output = self.folder / f"output-{number}"
        with output.open("w") as file:
            process = begin(whole, file, file, **variables)
        self.launches.append(Launch(node, process, output))
        return self.launches[-1]

    def _continue(self, continued: set[int]) -> None:
        """Let processes go on that were stopped for a while."""
        for number, fault in enumerate(self.case.plan):
            if fault.kind != "stop" or not fault.seconds or number in continued:
                continue
            note = fired(self.faults, number)
            if note and time.time() > note["time"] + fault.seconds:
                continued.add(number)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(note["pid"], signal.SIGCONT)

    def _end_ranks(self) -> None:
        """End ranks that are left, and say so: none may outlive the run for long."""
        until = time.monotonic() + 5
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        stopped = {n["pid"] for i in range(len(self.case.plan)) if (n := fired(self.faults, i))}
        for pid in left:
            if not self.failures and pid not in stopped:
                self.failures.append(f"process {pid} has outlived the run")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """The ranks of this run that live."""
        left = []
        for path in self.faults.glob("pid-*"):
            pid = int(path.name.partition("-")[2])
            with contextlib.suppress(OSError):
                mine = f"FAULTS={self.faults}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
                left += [pid] if mine else []
        return left

    def said(self) -> list[tuple[float, str]]:
        """All that was printed, in order."""
        return sorted(pair for launch in self.launches for pair in launch.said)


@dataclass
class History:
    """What the ledger says of a run."""

    attempts: list[tuple[float, int]]
    """(when it began, after which step), in order."""
    done: list[tuple[float, int]]
    """(when, step) of each end of a step, on any rank, in order."""
    lost: int
    repeated: int
    problems: list[str]

    def steps_before(self, when: float) -> int:
        """The last step that was done in the attempt that went on then."""
        begun, after = max([a for a in self.attempts if a[0] <= when], default=(0.0, 0))
        return max([step for t, step in self.done if begun <= t <= when], default=after)


def history(ledger: Path, samples: int, batch: int) -> History:
    """Read a ledger: a sample counts as trained once in the history of weights that survived.

    An attempt begins with a checkpoint, whose weights hold the steps up to it, and takes the place of
    what was trained after them.
    """
    begun: dict[str, tuple[float, int]] = {}
    steps: dict[str, dict[int, set[tuple[int, ...]]]] = {}
    contents: dict[tuple[int, ...], str] = {}
    done, problems = [], []
    for path in sorted(ledger.glob("*.jsonl")):
        attempt, step = "", 0
        for entry in map(json.loads, path.read_text().splitlines()):
            if "from" in entry:
                attempt, step = entry["attempt"], entry["from"]
                first, after = begun.setdefault(attempt, (entry["time"], step))
                begun[attempt] = (min(first, entry["time"]), after)
                if step != after:
                    problems.append(f"ranks began after steps {after} and {step}")
            elif "batch" in entry:
                step += 1
                first, numbers, content = entry["batch"]
                if first != (step - 1) * batch:
                    problems.append(f"step {step} began with sample {first}")
                steps.setdefault(attempt, {}).setdefault(step, set()).add(tuple(numbers))
                if contents.setdefault(tuple(numbers), content) != content:
                    problems.append(f"samples {numbers[0]} to {numbers[-1]} were others before")
            else:
                done.append((entry["time"], entry["done"]))
    survived: dict[int, set[tuple[int, ...]]] = {}
    order = sorted(begun, key=lambda attempt: begun[attempt][0])
    for attempt in order:
        after = begun[attempt][1]
        survived = {step: rows for step, rows in survived.items() if step <= after}
        survived |= steps.get(attempt, {})
    trained = [n for parts in survived.values() for rows in parts for n in rows]
    lost, repeated = len(set(range(samples)) - set(trained)), len(trained) - len(set(trained))
    return History([begun[a] for a in order], sorted(done), lost, repeated, sorted(set(problems)))


def undisturbed(case: Case, folder: Path) -> Path:
    """A run with the case's keys that nothing disturbs, in ``folder``."""
    if not (folder / "ended").exists():
        words = command("train.py", *case.keys, "--checkpoint.interval=1000", f"--run.dir={folder}")
        if case.ranks * case.nodes > 1:
            words = command(*words[1:], ranks=case.ranks * case.nodes)
        process = begin(words)
        _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the undisturbed run failed:\n{errors[-3000:]}")
        (folder / "ended").touch()
    return folder


def judge(run: Disturbed, whole: Path) -> list[dict[str, Any]]:
    """Return a row for each fault that happened; failures of the run are in ``run.failures``."""
    case, folder = run.case, run.folder / "run"
    notes = [fired(run.faults, number) for number in range(len(case.plan))]
    seen = history(run.ledger, case.steps * case.batch, case.batch)
    said = run.said()
    run.failures += seen.problems[:2]
    if seen.lost or seen.repeated:
        run.failures.append(f"{seen.lost} samples lost, {seen.repeated} trained twice")
    equal = None if run.failures else _compared(run, folder, whole)
    rows = []
    for number, (fault, note) in enumerate(zip(case.plan, notes, strict=True)):
        if not note:
            continue
        row = _row(run, seen, said, fault, note)
        if row["noticed"] is None and not row["harmless"]:
            run.failures.append(f"fault {number} ({fault.kind}) was never noticed")
        rows.append({"fault": number, **row})
    for row in rows:
        row |= {"samples_lost": seen.lost, "samples_repeated": seen.repeated, "bitwise": equal}
    run.failures += _unexplained(seen, rows)
    return rows


def _compared(run: Disturbed, folder: Path, whole: Path) -> bool | None:
    """Hold the run's end against the undisturbed one's; None where the mesh has changed."""
    ours, theirs = ([[x[key] for key in EQUAL] for x in lines(at)] for at in (folder, whole))
    if unwritten := _unwritten(run):
        there = [line[0] for line in ours]
        theirs = [x for x in theirs if x[0] in there or x[0] not in unwritten]
    if len(ours) < len(theirs):
        run.failures.append(f"ended with 0 after step {len(ours)} of {len(theirs)}")
        return None
    worlds = {note["world"] for i in range(len(run.case.plan)) if (note := fired(run.faults, i))}
    state = [store.read_state(store.newest_first(at / "checkpoints")[0]) for at in (folder, whole)]
    if (
        state[0].ranks != state[1].ranks
        or len(worlds | {state[1].ranks}) > 1
        or run.case.fewest < run.case.nodes
    ):
        far = [a[0] for a, b in zip(ours, theirs, strict=True) if abs(a[1] - b[1]) > CLOSE * abs(b[1])]
        if far:
            run.failures.append(f"the loss differs from step {far[0]} on, on a mesh that changed")
        return None
    if ours != theirs:
        step = next(a[0] for a, b in zip(ours, theirs, strict=True) if a != b)
        run.failures.append(f"the loss or gradient differs from step {step} on")
        return False
    newest = [store.newest_first(at / "checkpoints")[0] for at in (folder, whole)]
    if newest[0].name != newest[1].name:
        run.failures.append(f"ended with 0, and its newest checkpoint is {newest[0].name}")
        return False
    if shards(newest[0]) != shards(newest[1]):
        run.failures.append("the weights or the optimizer's state differ at the end")
        return False
    return True


def _unwritten(run: Disturbed) -> range:
    """Steps whose lines may be lost: of a rank that has died before the disk of its log had room."""
    notes = [(fault, fired(run.faults, i)) for i, fault in enumerate(run.case.plan)]
    full = [note for fault, note in notes if note and fault.kind == "full disk" and fault.how == "log"]
    # The line of a step is written in the next one.
    return range(min(note["step"] for note in full) - 1, run.case.steps) if full else range(0)


def _row(
    run: Disturbed, seen: History, said: list[tuple[float, str]], fault: Planned, note: dict[str, Any]
) -> dict[str, Any]:
    when = note["time"]
    harmless = fault.kind == "slow rank" or (fault.kind == "stop" and fault.seconds > 0)
    pattern = NOTICES.get(fault.kind, ENDED)
    signs = [t for t, line in said if t > when and re.search(pattern, line)]
    if fault.kind not in NOTICES:
        # Somebody else has to notice that a node is lost, than whoever starts its torchrun again.
        lost = note["agent"] if run.case.nodes > 1 and "agent" in note else 0
        others = [launch for launch in run.launches if launch.process.pid != lost]
        signs += [launch.ended for launch in others if launch.ended and launch.ended > when]
    stays = harmless or fault.kind == "full disk"  # the run goes on
    began = next(((t, step) for t, step in seen.attempts if t > when), None)
    after = when if stays else began[0] if began else float("inf")
    recovered = next((t for t, _ in seen.done if t > after), began[0] if began else None)
    lost = 0
    if began and not stays and "start" not in note["doing"]:  # there the fault before has lost them
        lost = max(0, seen.steps_before(when) - began[1])
    return {
        "kind": fault.kind,
        "how": fault.how,
        "moment": fault.moment,
        "doing": note["doing"],
        "step": note["step"],
        "rank": fault.rank,
        "time": when,
        "harmless": harmless,
        "stays": stays,
        "noticed": min(signs) - when if signs and not harmless else None,
        "recovered": recovered - when if recovered else None,
        "steps_lost": lost,
        "world": note["world"],
    }


def _unexplained(seen: History, rows: list[dict[str, Any]]) -> list[str]:
    """Attempts that began with no fault before them that ends one."""
    result = []
    for (before, _), (begun, _) in zip(seen.attempts, seen.attempts[1:], strict=False):
        if not any(
            row["time"] < begun and row["time"] > before - 120 and not row["stays"] for row in rows
        ):
            result.append(f"began again at {begun:.1f} without a fault")
    return result
