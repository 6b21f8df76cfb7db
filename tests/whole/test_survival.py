"""A run survives signals, and processes that die at any moment."""

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from compose.checkpoint import store
from compose.train.heartbeat import SAID, HeartbeatThreads, Silence, Stragglers, launcher, launcher_died
from compose.train.processes import TrainingError, _conclude, _first_to_fail
from compose.train.workers import Worker
from tests.support.checkpoints import shards
from tests.support.command_lines import (
    QUICK,
    begin,
    command,
    execute,
    free_port,
    kill_sessions,
    launch,
    of_rank,
)
from tests.support.helpers import ROOT
from tests.support.ledger import check_ledger, doing
from tests.support.nodes import PATH, children_of, wait_for
from tests.support.training import lines, logged_steps, wait_for_second_step, wait_for_steps

SAVING = [*QUICK, "--checkpoint.interval=1", "--metrics.console_every=1", "--metrics.tensorboard=false"]


def start(folder: Path, *words: str, ranks: int = 0, **options: Any) -> "subprocess.Popen[str]":
    arguments = command("train.py", *SAVING, f"--run.dir={folder}", *words, ranks=ranks)
    return begin(arguments, **options)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.full),
    ],
)
def test_a_warning_is_heeded(tmp_path: Path, number: signal.Signals) -> None:
    """The step is finished and saved, the exit code 0; the same command goes on."""
    words = ["--checkpoint.interval=0", "--train.steps=500"]
    process = start(tmp_path, *words)
    wait_for_second_step(process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    steps = len(lines(tmp_path))
    assert steps < 500
    assert output.splitlines()[-1] == (
        f"stopped by {number.name} after step {steps}; saved: the same command with"
        f" --run.dir={tmp_path} goes on"
    )
    last = f"--train.stop_after={steps + 2}"
    again = execute("train.py", *SAVING, f"--run.dir={tmp_path}", *words, last)
    assert again.returncode == 0, again.stderr
    assert f"{tmp_path}/checkpoints/{store.name_of(steps)}: resumed after step {steps}" in again.stdout
    assert logged_steps(tmp_path) == list(range(1, steps + 3))


@pytest.mark.full
def test_a_scheduler_warns_the_launcher(tmp_path: Path) -> None:
    """By SIGTERM to examples/launch.sh, of which the ranks hear; torchrun's code is then theirs."""
    words = [*SAVING, "--checkpoint.interval=0", "--train.steps=500", f"--run.dir={tmp_path}"]
    process = begin(["examples/launch.sh", "--nproc-per-node", "2", "train.py", *words], PATH=PATH)
    wait_for_second_step(process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    steps = len(lines(tmp_path))
    assert f"stopped by SIGUSR1 after step {steps}; saved: " in output


PHASES = ("start", "load", "step", "save")


def kill(
    folder: Path, phase: str, process: "subprocess.Popen[str]", chance: random.Random, gone: set[int]
) -> set[str]:
    """Kill one rank, of those that are not ``gone``, once it is in ``phase``; what it was doing then.
    Empty if the run ended. But at start-up nobody is killed before there is a checkpoint."""
    ledger = folder / "ledger"
    while process.poll() is None:
        if phase != "start" and not store.newest_first(folder / "run" / "checkpoints"):
            time.sleep(0.01)
            continue
        ranks = [rank for rank, now in doing(ledger).items() if phase in now and rank not in gone]
        if ranks:
            time.sleep(chance.choice([0, 0, chance.uniform(0, 0.05), chance.uniform(0, 1)]))
            victim, result = chance.choice(ranks), doing(ledger)
            with contextlib.suppress(ProcessLookupError):  # or it had ended already
                os.kill(victim, signal.SIGKILL)
                gone |= set(result)  # torchrun ends the others, and starts new ones
                now = result.get(victim, set())
                return now - {"start"} or now
        time.sleep(0.001)
    return set()


def uninterrupted(folder: Path, steps: int) -> Path:
    """A run that nobody kills."""
    assert start(folder, f"--train.steps={steps}", ranks=2).wait(300) == 0
    return folder


def killed(folder: Path, whole: Path, phases: Sequence[str], seed: int) -> Counter[str]:
    """Kill a random rank in each of ``phases``, then let the run end, and hold it against ``whole``.

    Returns how many were killed in which phase (of which a rank may be in two).
    """
    chance, ledger = random.Random(seed), folder / "ledger"
    ledger.mkdir(parents=True)
    words = [f"--run.dir={folder / 'run'}", f"--train.steps={len(lines(whole))}"]
    arguments = command("tests/support/train_with_ledger.py", *SAVING, *words, ranks=2)
    at = arguments.index("--nproc-per-node")
    arguments[at:at] = [f"--max-restarts={len(phases)}"]
    results: Counter[str] = Counter()
    gone: set[int] = set()
    with (folder / "output").open("w") as output:
        process = begin(arguments, output, output, LEDGER=str(ledger))
        for phase in phases:
            now = kill(folder, phase, process, chance, gone)
            results.update(["kills", *now] if now else [])
            print(f"seed {seed}: killed in {' and '.join(sorted(now)) or 'nothing'}", flush=True)
        code = process.wait(600)
    said = (folder / "output").read_text()
    assert code == 0, said[-3000:]
    assert "damaged and passed over" not in said, "what has a checkpoint's name is whole"
    newest = (store.newest_first(where / "checkpoints")[0] for where in (folder / "run", whole))
    assert shards(next(newest)) == shards(next(newest))
    keys = ("step", "loss", "grad_norm", "lr", "samples", "tokens")
    ours, theirs = (
        [[line[key] for key in keys] for line in lines(where)] for where in (folder / "run", whole)
    )
    assert ours == theirs
    at = keys.index("samples")
    results["again"] = check_ledger(ledger, samples=ours[-1][at], batch=ours[0][at])
    return results


@pytest.mark.slow
def test_a_rank_dies(tmp_path: Path) -> None:
    result = killed(tmp_path, uninterrupted(tmp_path / "whole", 10), ["save"], seed=1)
    assert result["kills"] == 1
    said = (tmp_path / "output").read_text()
    assert re.search(r": resumed after step \d", said)


@pytest.mark.full
def test_ranks_die_fifty_times(tmp_path: Path) -> None:
    """At start-up, in a load, in a step and in a save, five times in a run."""
    whole = uninterrupted(tmp_path / "whole", 40)
    results: Counter[str] = Counter()
    for seed in range(30):
        chance = random.Random(seed)
        phases = ["step" if seed % 2 else "save", *chance.sample(PHASES, 4)]
        results += killed(tmp_path / str(seed), whole, phases, seed)
        print(f"so far: {dict(results)}", flush=True)
        if results["kills"] >= 50:
            break
    assert results["kills"] >= 50
    assert all(results[phase] for phase in PHASES), results
    assert results["again"] > 0


@pytest.mark.full
@pytest.mark.parametrize("backend", ["gloo", "one that names nobody"])
def test_a_rank_that_hangs_is_named(tmp_path: Path, backend: str) -> None:
    """A first step may take longer than comm.timeout, a later one not, in groups of the mesh too.

    A backend may also wait longer, as NCCL's watchdog, which ends the process and names no rank.
    """
    patient = "dist.ProcessGroup.set_timeout = lambda *unused: None\n" if backend != "gloo" else ""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, runpy, signal, time\n"
        "import torch.distributed as dist\n"
        "from compose.data.batches import Batches\n"
        f"{patient}"
        "real = Batches.batch\n"
        "def batch(self, first):\n"
        "    if os.environ['RANK'] == '3' and first in (0, 32):\n"
        "        if first:  # or torchrun gives it 30 s to save\n"
        "            signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "        time.sleep(60 if first else 6)\n"
        "    return real(self, first)\n"
        "Batches.batch = batch\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    mesh = ["--parallel.dp_shard=2", "--parallel.tp=2", f"--run.dir={tmp_path / 'run'}"]
    done = launch(
        str(script),
        *QUICK,
        *mesh,
        "--train.steps=5",
        "--comm.timeout=4",
        "--comm.start_timeout=90",
        ranks=4,
    )
    assert done.returncode == 1
    assert logged_steps(tmp_path / "run") == [1, 2]
    (line,) = (row for row in done.stderr.splitlines() if "is behind" in row)
    assert re.fullmatch(r"rank 3 is behind: last heard of \d+ s ago, before the data of step 3", line)


def test_who_is_behind() -> None:
    """The rank that nobody saw give up; of several, the one that has come least far."""
    ranks = Stragglers(dist.HashStore(), 4)
    assert ranks.straggler() == ""
    for rank in (2, 0, 3, 1):
        ranks.report(rank, 7, "the data")
    assert ranks.straggler() == "rank 2 is behind: last heard of 0 s ago, before the data of step 7"
    with mock.patch("time.time", return_value=time.time() - 3600):  # a clock that was set back
        assert ranks.straggler() == "rank 2 is behind: last heard of 0 s ago, before the data of step 7"
    for rank in (0, 2, 3):
        ranks.report(rank, 7, "forward and backward")
    assert ranks.straggler().startswith("rank 1 is behind")
    ranks.report(1, 7, "forward and backward")
    for rank in (0, 1, 2):
        ranks.give_up(rank)
    assert ranks.straggler().startswith("rank 3 is behind")
    ranks.give_up(3)
    assert ranks.straggler().startswith("rank 0 is behind")


def test_who_is_silent() -> None:
    """Whoever says nothing new for longer than the limit, longest; not who is done."""
    silence = Silence(limit=4)
    assert silence.longest([b"1", b"1", b"1"], now=0) is None
    assert silence.longest([b"2", b"1", b"done"], now=3) is None
    assert silence.longest([b"2", b"1", b"done"], now=5) == (1, 5)
    assert silence.longest([b"2", b"2", b"done"], now=8) == (0, 5)
    silence.heard.clear()  # as if it had itself been stopped
    assert silence.longest([b"2", b"2", b"done"], now=99) is None


class Stopped(dist.HashStore):
    """The store of a process that is stopped: it does not answer."""

    def clone(self) -> "Stopped":
        return self

    def set(self, *unused: object) -> None:  # type: ignore[override]
        time.sleep(60)


class Clock:
    """For a watch: its time goes on by 0.05 s each time that one of its threads asks, so that what it
    finds does not depend on how busy the machine is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, thread: str = "_talk") -> None:
        self.thread, self.asked, self.jump = f"({thread})", 0, 0.0
        rest = types.SimpleNamespace(sleep=time.sleep, time=time.time, monotonic=self)
        monkeypatch.setattr("compose.train.heartbeat.time", rest)

    def __call__(self) -> float:
        self.asked += threading.current_thread().name.endswith(self.thread)
        return 0.05 * self.asked + self.jump


def watched(store: dist.Store, rank: int = 0, limit: float = 0.8, **options: Any) -> tuple[Any, ...]:
    """A watch that runs; what is set when it would end the process; and what it tells."""
    ended, told = threading.Event(), []
    watch = HeartbeatThreads(
        store,
        rank,
        2,
        limit,
        lambda store, rank, seconds: told.append((store is None, rank, seconds)),
        kept_by_first=True,
        end=ended.set,
        **options,
    )
    watch.start()
    return watch, ended, told


@pytest.mark.parametrize(("store", "found"), [(dist.HashStore, 1), (Stopped, 0)])
def test_a_stopped_rank_is_told_within_the_limit(
    store: type[dist.Store], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 by rank 0; and rank 0 by rank 1, where the store is in it."""
    Clock(monkeypatch, "_talk" if found else "_look")
    shared = store()
    if found:
        shared.set("compose/runs/1", "1")
    watch, ended, told = watched(shared, rank=1 - found)
    assert ended.wait(60)
    watch.stopped.set()
    without_store, who, seconds = told[0]
    assert (without_store, who) == (found == 0, found)
    assert 0.75 * watch.limit < seconds < watch.limit
    assert 0.75 * watch.limit + watch.every < watch.limit


def test_a_rank_that_was_stopped_itself_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-Z and fg nobody has said anything for long, but the watcher did not run either."""
    store = dist.HashStore()
    store.set("compose/runs/1", "1")
    clock = Clock(monkeypatch)
    watch, ended, told = watched(store, limit=3.0)

    def has_said(count: int) -> bool:
        known = store.check(["compose/runs/0"]) and int(store.get("compose/runs/0")) >= count
        return known or ended.is_set()

    try:
        wait_for(lambda: has_said(2))  # both were heard
        clock.jump = 99.0
        count = int(store.get("compose/runs/0"))
        wait_for(lambda: has_said(count + 3))
        assert not ended.is_set()
    finally:
        watch.stopped.set()
    assert not told


class BothTalk(dist.HashStore):
    """A store in which rank 1 says that it runs whenever rank 0 does."""

    def clone(self) -> "BothTalk":
        return self

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        super().set(key, value)
        if key == "compose/runs/0":
            super().set("compose/runs/1", value)


def test_a_rank_that_lives_and_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPU may hang: NCCL's own watchdog would end the process and name no rank."""
    monkeypatch.setattr("compose.train.heartbeat._LATER", 0.2)
    store = BothTalk()
    ranks = Stragglers(store, 2)
    for rank in (0, 1):
        ranks.report(rank, 7, "the data")
    clock = Clock(monkeypatch)
    watch, ended, told = watched(store)
    try:
        wait_for(lambda: clock() > 1.3 or ended.is_set())
        assert not ended.is_set(), "nobody is ahead"
        begun = clock()
        ranks.report(0, 7, "forward and backward")
        assert ended.wait(60)
        assert clock() - begun > 0.9
    finally:
        watch.stopped.set()
    assert [(missing, rank) for missing, rank, _ in told] == [(False, 1)]
    assert ranks.silent(1, 1.0) == "rank 1 is behind: last heard of 1 s ago, before the data of step 7"


def test_who_is_awaited() -> None:
    """Those that another rank is ahead of; also who has not begun the first step."""
    ranks = Stragglers(dist.HashStore(), 3)
    assert ranks.awaited() == [b"done"] * 3
    ranks.report(1, 1, "forward and backward")
    ranks.report(2, 1, "the data")
    assert ranks.awaited() == [b"0 0", b"done", b"1 0"]
    ranks.report(0, 1, "the data")
    assert ranks.awaited() == [b"1 0", b"done", b"1 0"]
    ranks.report(0, 2, "the data")
    ranks.report(1, 2, "the data")
    assert ranks.awaited() == [b"done", b"done", b"1 0"]


def test_a_failure_told_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within seconds, whatever they wait for; not before they had time to end by themselves."""
    monkeypatch.setattr("compose.train.heartbeat._ECHO", 0.3)
    store = dist.HashStore()
    watch, ended, told = watched(store, limit=60.0)
    assert not ended.wait(0.3)
    begun = time.monotonic()
    store.set(SAID, "")
    assert ended.wait(60)
    assert time.monotonic() - begun >= 0.3
    watch.stopped.set()
    assert not told


@pytest.mark.parametrize("word", ["", "gave up", "done"])
def test_a_rank_of_the_node_that_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """It is told of long before the limit, and then named as the one that others wait for."""
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(key, str(value))
    store, other = dist.HashStore(), subprocess.Popen(["sleep", "60"])
    store.set("compose/runs/1", "done" if word == "done" else "3")
    store.set("compose/process/1", str(other.pid))
    ranks = Stragglers(store, 2)
    for rank in (0, 1):
        ranks.report(rank, 7, "the data")
    watch, ended, told = watched(store, limit=60.0, parent=os.getppid(), launch=(store, 0))
    try:
        wait_for(lambda: watch.node)
        if word == "gave up":
            ranks.give_up(1)
        other.kill()
        other.wait()
        wait_for(lambda: not watch.node)  # its end is seen; the limit is not over for long
        assert ended.wait(1.0 if word else 20.0) == (not word)
    finally:
        watch.stopped.set()
    assert told == ([] if word else [(False, 1, 0.0)])
    if not word:
        ranks.report(0, 6, "the data")
        assert ranks.straggler(wait=60).startswith("rank 1 is behind")


def test_a_rank_of_the_node_that_has_ended_before_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is no more there to be watched."""
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(key, str(value))
    store = dist.HashStore()
    store.set("compose/runs/1", "3")
    store.set("compose/process/1", str(2**22 + 1))  # a number that Linux gives to no process
    watch, ended, told = watched(store, limit=60.0, parent=os.getppid(), launch=(store, 0))
    assert ended.wait(20)
    watch.stopped.set()
    assert told == [(False, 1, 0.0)]


def test_who_is_done_is_not_silent() -> None:
    """The last word stays the last."""
    store = dist.HashStore()
    watch, ended, _ = watched(store)
    wait_for(lambda: store.check(["compose/runs/0"]))
    watch.stop()
    assert store.get("compose/runs/0") == b"done"
    assert not watch.talking.is_alive()
    assert not ended.is_set()


def test_a_rank_ends_with_its_launcher() -> None:
    """A process whose parent is killed is asked to end, and if it does not, ends."""
    ended, asked = threading.Event(), []
    watch = HeartbeatThreads(
        dist.HashStore(),
        0,
        1,
        1.0,
        report=lambda *unused: None,
        parent=os.getppid() + 1,
        end=ended.set,
    )
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        with mock.patch("compose.train.heartbeat._GRACE", 0.0):
            watch.start()
            assert ended.wait(60)
    finally:
        watch.stopped.set()
        signal.signal(signal.SIGTERM, before)
    assert signal.SIGTERM in asked


@pytest.mark.parametrize("in_torchrun", [True, False])
def test_the_store_stays_until_others_know_that_an_error_is_told(
    in_torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is in rank 0, which fails first: a late rank without the store would tell it again."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(in_torchrun))
    monkeypatch.setattr("compose.train.processes._SKEW", 60.0)  # it ends by this in no case
    shared = dist.HashStore()
    first = threading.Thread(target=_conclude, args=(TrainingError("it ends"), shared, 0, 2, Worker()))
    first.start()
    wait_for(lambda: shared.check([SAID]))
    first.join(20.0 if in_torchrun else 1.0)
    assert first.is_alive() != in_torchrun
    assert not _first_to_fail(shared, Worker())
    first.join(20.0)
    assert not first.is_alive()


def test_a_launcher_dies_if_the_parent_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun the parent may be anything that ends first, as a shell under nohup."""
    launcher.cache_clear()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    try:
        for torchrun in (False, True):
            if torchrun:
                monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
            launcher.cache_clear()
            assert not launcher_died()
            with mock.patch("os.getppid", return_value=os.getppid() + 1):
                assert launcher_died() == torchrun
    finally:
        launcher.cache_clear()


def test_a_rank_is_heard_of_as_soon_as_it_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped before its first word would be waited for as long as the group waits."""
    monkeypatch.setattr("compose.train.heartbeat._EVERY", 60.0)
    store = dist.HashStore()
    watch = HeartbeatThreads(store, 0, 2, 1000.0, lambda *unused: None)
    watch.start()
    try:
        wait_for(lambda: store.check(["compose/runs/0"]), 20.0)
        assert store.get("compose/runs/0") == b"0"
    finally:
        watch.stop()


@pytest.mark.full
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("launcher", [True, False])
def test_a_stopped_rank_of_a_pipeline_is_named(tmp_path: Path, stopped: int, launcher: bool) -> None:
    """By SIGSTOP, within comm.timeout, with torchrun and without."""
    words = ["--train.steps=5000", "--parallel.pp=2"]
    words += ["--comm.timeout=8", "--comm.start_timeout=90", "--checkpoint.interval=0"]
    count, port = 2 if launcher else 0, free_port()
    places = [{}] if launcher else [of_rank(rank, 2, port) for rank in range(2)]
    processes = [
        start(tmp_path, *words, ranks=count, stdout=subprocess.DEVNULL, **place) for place in places
    ]
    errors, ranks, seconds = "", list[int](), 0.0
    try:
        wait_for_steps(tmp_path, 3, processes)
        ranks = children_of(processes[0].pid) if launcher else [process.pid for process in processes]
        # Each half second a watch reads whether the first step, with its limit of 90 s, is over.
        time.sleep(2)
        os.kill(ranks[stopped], signal.SIGSTOP)
        begun = time.monotonic()
        for errors in processes[0 if launcher else 1 - stopped].stderr or ():
            seconds = time.monotonic() - begun
            if "is behind" in errors:
                break
    finally:
        kill_sessions(processes)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert re.match(rf"rank {stopped} is behind: last heard of \d+ s ago", errors)
    assert seconds < 60  # on a quiet machine less than 8; without a watch 90


@pytest.mark.full
def test_no_rank_outlives_torchrun(tmp_path: Path) -> None:
    """Killed with one of its ranks: the other ends too, and the folder's lock is free."""
    words = ["--train.steps=5000", "--checkpoint.interval=0"]
    process = start(tmp_path, *words, ranks=2, stdout=subprocess.DEVNULL)
    wait_for_steps(tmp_path, 3, [process])
    first, second = children_of(process.pid)
    for pid in (process.pid, second):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 120
    while Path(f"/proc/{first}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.full
def test_a_restart_begins_with_nothing_of_the_attempt_before(tmp_path: Path) -> None:
    """Neither with the addresses of processes that are gone, nor with what was reported of them."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "from compose.cli.command_line import parse, run\n"
        "from compose.train.processes import process_group\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "def main(arguments):\n"
        "    time.sleep(attempt * int(os.environ['RANK']))\n"
        "    with process_group(parse(arguments, 'fails.py').config):\n"
        "        found = torch.ones(1)\n"
        "        dist.all_reduce(found)\n"
        "        raise ValueError(f'attempt {attempt}: {found.item()}')\n"
        "run(main)\n"
    )
    torchrun = command(str(script), ranks=2)
    torchrun.insert(torchrun.index("--nproc-per-node"), "--max-restarts=1")
    done = subprocess.run(torchrun, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    for attempt in range(2):
        assert done.stderr.count(f"ValueError: attempt {attempt}: 2.0") == 1
