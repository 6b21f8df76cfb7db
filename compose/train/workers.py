"""DiLoCo workers: parts of a job, each of several ranks, that train alone between exchanges of weights.

A worker's default process group has no ranks of others. Ranks of different workers meet in the store
that all of them began with, and in the groups of compose/diloco/loop.py. Messages for users call a
worker an island, as the keys do.
"""

import contextlib
import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from compose.checkpoint import store as checkpoints
from compose.checkpoint.loading import workers_of
from compose.checkpoint.store import Peers
from compose.ops.torch_versions import default_store
from compose.train.heartbeat import ENDED, launcher, launcher_died, register_process

FAILED = "compose/failed"
_STOP, _LEFT, _PLACE, _SHARED = "stop", "left", "worker", "islands"
_ASKED, _KNOWN = "compose/asked", "compose/known"
_LOOK = 0.05  # seconds between two looks into the store
_OFTEN = 0.5  # the same, of ranks that wait for as long as the run takes
_PATIENCE = timedelta(minutes=30)  # for workers that are still starting


class Worker:
    """The worker of this rank among all; a job that is not divided is one worker."""

    def __init__(self, index: int = 0, count: int = 1, store: dist.Store | None = None) -> None:
        self.index, self.count, self._store = index, count, store
        self._posted = False

    @property
    def store(self) -> dist.Store:
        """The store that all workers share."""
        assert self._store is not None, "a job that is not divided has no other workers"
        return self._store

    @property
    def speaks(self) -> bool:
        """Whether this rank prints for the job: the first rank of the first worker."""
        return dist.get_rank() == 0 and self.index == 0

    def say(self, text: str, own: bool = False) -> None:
        """Print a line, once for the job; one about this worker's ``own`` steps also beside others'."""
        if self.speaks:
            print(text, flush=True)
        elif own and dist.get_rank() == 0:
            print(f"island {self.index}: {text}", flush=True)

    def everyone(self, key: str, value: str) -> list[str]:
        """Return what the first rank of each worker gives; only these call it, and wait for all.

        The n-th calls with one ``key`` belong together.
        """
        if self.count == 1:
            return [value]
        calls = self.store.add(f"calls/{key}/{self.index}", 1)
        keys = [f"everyone/{key}/{calls}/{worker}" for worker in range(self.count)]
        self.store.set(keys[self.index], value)
        self.store.wait(keys, _PATIENCE)
        return [self.store.get(key).decode() for key in keys]

    def told(self, key: str, value: str) -> list[str] | None:
        """Note a value of this worker; return the newest of each, or None if one has none yet."""
        keys = [f"told/{key}/{worker}" for worker in range(self.count)]
        self.store.set(keys[self.index], value)
        return [self.store.get(key).decode() for key in keys] if self.store.check(keys) else None

    def note_stop(self, step: int, code: int = 0) -> None:
        """Tell the others which step this worker takes or has taken, if any of them is to stop.

        ``code`` says why this one is to stop; 0 if it is not. Only first ranks call it, also while they
        wait for another worker, which may wait for this.
        """
        if not self._posted and (code or self.store.check([_STOP])):
            self._posted = True
            self.store.set(f"{_STOP}/{self.index}", f"{step} {code}")
            self.store.set(_STOP, "")

    def stop(self, step: int, code: int) -> tuple[int, int]:
        """Return (why, the last step), the same on all workers, or zeros; only first ranks call it.

        ``step`` and ``code`` are as in :meth:`note_stop`.
        """
        self.note_stop(step, code)
        if not self._posted:
            return 0, 0
        keys = [f"{_STOP}/{worker}" for worker in range(self.count)]
        self.store.wait(keys, _PATIENCE)
        said = [tuple(map(int, self.store.get(key).decode().split())) for key in keys]
        return max(why for _, why in said), max(last for last, _ in said)

    def finished(self) -> None:
        """Tell the others that this worker takes no more steps; only first ranks call it."""
        if self.count > 1 and not self._posted:
            self._posted = True
            self.store.set(f"{_STOP}/{self.index}", "0 0")

    def leave(self, rank: int, ranks: int, patience: float) -> None:
        """Note that a rank has ended; the first waits for all others, since it may hold the store."""
        if self.count == 1:
            return
        left, until = self.store.add(_LEFT, 1), time.monotonic() + patience
        while rank == self.index == 0 and left < ranks * self.count and time.monotonic() < until:
            if self.store.check([FAILED]):
                return
            time.sleep(_LOOK)
            left = self.store.add(_LEFT, 0)


def divide(
    store: dist.Store, rank: int, world_size: int, count: int
) -> tuple[Worker, dist.Store, int, int]:
    """Divide a job into ``count`` workers of neighbouring ranks.

    Returns this rank's worker; and store, rank and number of ranks of its default process group.
    """
    if count == 1:
        return Worker(), store, rank, world_size
    index, own_rank = divmod(rank, world_size // count)
    own = dist.PrefixStore(f"island {index}", store)
    own.set(_PLACE, f"{index} {count}")
    return Worker(index, count, dist.PrefixStore(_SHARED, store)), own, own_rank, world_size // count


def this_worker() -> Worker:
    """Return the worker whose ranks are the default process group's."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        if store.check([_PLACE]):
            index, count = map(int, store.get(_PLACE).split())
            return Worker(index, count, dist.PrefixStore(_SHARED, store.underlying_store))
        store = store.underlying_store
    return Worker()


class SpareRanks:
    """The ranks of a launch that the run's mesh does not use: they wait, and end as the run does.

    ``store`` is that of the launch. They are not in the process group of the run.
    """

    def __init__(self, store: dist.Store, count: int) -> None:
        self.store, self.count = store, count

    def listen(self) -> None:
        """Begin to pass a signal that a spare has got on to this process, the first of the run."""
        if self.count:
            # A store's connection serves one call at a time.
            store = cast(Any, self.store).clone()
            threading.Thread(target=self._listen, args=(store,), daemon=True).start()

    def _listen(self, store: dist.Store) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended, and with it the job
            while not store.check([_ASKED]):
                time.sleep(_OFTEN)
            number = int(store.get(_ASKED))
            # While a run starts up it has nothing to save, and the signal has no effect.
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
                os.kill(os.getpid(), number)

    def release(self, code: int, patience: float = 3.0) -> None:
        """Say that the run has ended with ``code``; the first to say it counts.

        It waits until they know, since the store may be in this process.
        """
        with contextlib.suppress(RuntimeError):
            if self.count:
                self.store.compare_set(ENDED, "", str(code))
            until = time.monotonic() + patience
            while self.count and self.store.add(_KNOWN, 0) < self.count and time.monotonic() < until:
                time.sleep(_LOOK)

    def wait(self) -> int:
        """Wait as a spare; return the code with which the run ends."""
        noted: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: noted.append(number))
        try:
            if launcher():
                register_process(self.store)
            while not self.store.check([ENDED]):
                if noted:
                    self.store.set(_ASKED, str(noted[0]))
                if launcher_died():
                    return 1
                time.sleep(_OFTEN)
            code = int(self.store.get(ENDED))
            self.store.add(_KNOWN, 1)  # the first rank, which may have the store, now leaves
            return code
        except RuntimeError:  # the store was in a rank that has failed, or in its torchrun
            return 1


class WorkerCheckpoints(Peers):
    """Checkpoints of several workers, each with its own state: all go on from the same step."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.say = worker, worker.say

    def candidates(self, root: Path) -> list[Path | str]:
        """Return the checkpoints that all workers have, or why there is none.

        On another number of workers than before all go on from those of the first.
        """
        own, worker = checkpoints.sent(root), self.worker
        names, before = [folder.name for folder in own], next(filter(None, map(workers_of, own)), 0)
        said = worker.everyone("checkpoints", json.dumps([names, before]))
        everyone, numbers = zip(*map(json.loads, said), strict=True)
        before = next(filter(None, numbers), 0)
        common = set.intersection(*map(set, everyone))
        if common and before in (0, worker.count):
            return [folder for folder in own if folder.name in common]
        first = root if worker.index == 0 else root.parents[2] / root.name
        if before == worker.count > 1:
            steps = [", ".join(map(str, map(_step_of, one))) or "none" for one in everyone]
            held = "; ".join(f"island {i}: {some}" for i, some in enumerate(steps))
            return [
                f"run.dir: {first.parent}: its islands have no checkpoint of the same step ({held}),"
                " and none may lose what it has learned: put a folder back, or copy one into the"
                " checkpoints of all islands to go on from it alone"
            ]
        return [first / name for name in everyone[0]]

    def damage(self, own: list[str]) -> list[str]:
        """Return the damage of a checkpoint on all workers."""
        everyone = self.worker.everyone("damage", json.dumps(own))
        return [problem for one in everyone for problem in json.loads(one)]

    def others_lack(self, root: Path, folders: list[Path], step: int) -> list[Path]:
        """Return this worker's checkpoints after ``step``: this run will take these steps again."""
        own = checkpoints.sent(root) if self.worker.count > 1 else []
        return [p for p in own if checkpoints.step_of(p) > step and p not in folders]

    def oldest_to_keep(self, root: Path, count: int) -> float:
        """Return the oldest of the ``count`` newest steps of all workers. It and later ones stay.

        If the newest is damaged, they go on from the one before.
        """
        if self.worker.count == 1:
            return super().oldest_to_keep(root, count)
        names = [folder.name for folder in checkpoints.sent(root)]
        told = self.worker.told("checkpoints", json.dumps(names))
        common = set.intersection(*(set(json.loads(one)) for one in told)) if told else set()
        return min(sorted(map(_step_of, common))[-count:], default=0)


def _step_of(name: str) -> int:
    return checkpoints.step_of(Path(name))
