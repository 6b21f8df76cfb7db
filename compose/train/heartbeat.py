"""A watch beside the run: it sees a rank that is dead, silent or behind, and a launcher that is gone.

A wait for a rank does not always end within ``comm.timeout``. A pipeline's messages on gloo keep the
limit that their group was made with. With no launcher the store is in rank 0, which may be the rank
that is stopped. So every rank has a thread that says in the store that the process runs, and two ranks
read what all have said. A slow rank is not silent: while it computes, waits, compiles, reads or writes
for long, it gives Python's lock to that thread. A rank that has ended is seen by the ranks of its node,
which the kernel tells at once.
"""

import contextlib
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast, get_args

import torch.distributed as dist

from compose import PARENT
from compose.ops.torch_versions import default_store

_EVERY = 0.5  # seconds between two words, or less if the limit is short
_RANKS = 1000  # ranks that can speak in a second; of more ranks each speaks less often
_LOOK = 0.25  # seconds between two looks at the processes of this node
_GRACE = 30.0  # seconds from SIGTERM to the end, as torchrun gives
_LATER = 5.0  # seconds after the limit, so that an error of the backend's own is told first
_ECHO = 5.0  # seconds in which a rank ends by itself after another rank has reported its failure
DONE = b"done"
SAID = "compose/said"  # the key of the store that is set once a rank has told of a failure
ENDED = "compose/ended"  # the key of a launch's store that has the code with which the run ends
_DIED = "compose/died"  # the key of the store that names a rank that has ended without a word


class Silence:
    """How long each rank has said nothing new; after ``limit`` seconds a rank counts as gone."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.heard: dict[int, tuple[bytes, float]] = {}

    def longest(self, said: Sequence[bytes], now: float) -> tuple[int, float] | None:
        """Return (rank, seconds) of the rank that has been silent longest, if that is too long.

        ``said`` is what each rank said last: something else each time, and ``done`` at the end.
        """
        for rank, word in enumerate(said):
            if rank not in self.heard or self.heard[rank][0] != word:
                self.heard[rank] = (word, now)
        silent = {rank: now - when for rank, (word, when) in self.heard.items() if word != DONE}
        rank = max(silent, key=silent.__getitem__, default=None)
        return (rank, silent[rank]) if rank is not None and silent[rank] > self.limit else None


class HeartbeatThreads:
    """Threads of this rank, from :meth:`start` to :meth:`stop`.

    Rank 0 and rank 1 report a rank that says nothing for three quarters of the limit. A rank also
    reports rank 0, with None as the store, if the store does not answer and is ``kept_by_first``. And
    they report a rank that lives, but for which others have waited longer than the limit, in seconds.
    A rank also reports one that the same ``parent`` has started, and that has ended without a word (0:
    none has started them). ``launch`` is the store of all that were started, and how many of them are
    spares, which count too. After a report this process ends. It ends too, if it has not ended by
    itself, when the key SAID is in the store, or when the process ``parent`` ends.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        limit: float,
        report: Callable[[dist.Store | None, int, float], None],
        kept_by_first: bool = False,
        parent: int = 0,
        end: Callable[[], None] = lambda: os._exit(1),
        launch: tuple[dist.Store, int] | None = None,
    ) -> None:
        self.rank, self.world_size, self.limit = rank, world_size, limit
        self.report, self.end = report, end
        self.kept_by_first, self.parent = kept_by_first, parent
        # A store's connection serves one call at a time, and training may be waiting in a call.
        self.store: dist.Store | None = cast(Any, store).clone() if world_size > 1 else None
        self.launch: dist.Store | None = cast(Any, launch[0]).clone() if launch and parent else None
        self.spares = launch[1] if launch else 0
        self.answered = time.monotonic()
        self.node: dict[int, int] = {}  # by file that tells of the end of a process: its rank
        self.stopped = threading.Event()
        self.looking = threading.Thread(target=self._look, daemon=True)
        self.talking = threading.Thread(target=self._talk, daemon=True)

    @property
    def every(self) -> float:
        """Seconds between two words."""
        return min(max(_EVERY, self.world_size / _RANKS), self.limit / 8)

    def start(self) -> None:
        """Start the threads."""
        self.answered = time.monotonic()
        if self.store or self.parent:
            self.looking.start()
        if self.store:
            self.talking.start()

    def stop(self) -> None:
        """Say that this rank has done its work; others may go on."""
        self.stopped.set()
        if self.store:
            self.talking.join(_ECHO)  # or the thread's next word would come after the last one
            with contextlib.suppress(RuntimeError):  # the store may be gone already
                self.store.set(self._key(self.rank), DONE.decode())

    def _talk(self) -> None:
        assert self.store is not None
        silence, lag, count, before = Silence(self.limit), Silence(self.limit), 0, time.monotonic()
        # Two ranks read the words of all, since one of the two may be the silent one.
        keys = [self._key(rank) for rank in range(self.world_size if self.rank < 2 else 0)]
        neighbours = self._neighbours()
        try:
            if self.launch and neighbours:
                register_process(self.launch)
            # The first word is said at once: a rank that stops before it would not be missed.
            self.store.set(self._key(self.rank), str(count))
            while not self.stopped.wait(self.every):
                count += 1
                self.store.set(self._key(self.rank), str(count))
                said = self.store.check([SAID])
                self.answered = now = time.monotonic()
                if said:
                    time.sleep(0 if self.store.check([_DIED]) else _ECHO)
                    self.end()
                    return
                keys_of = [_process_key(place) for place in neighbours]
                if self.launch and neighbours and self.launch.check(keys_of):
                    self._open(neighbours, map(self.launch.get, keys_of))
                    neighbours = []
                if now - before > self.limit / 2:  # this process was stopped, or the store was
                    silence.heard.clear()
                    lag.heard.clear()
                before = now
                if self.store.check([limit_key(self.rank)]):
                    self.limit = float(self.store.get(limit_key(self.rank)))
                silence.limit, lag.limit = 0.75 * self.limit, self.limit + _LATER
                if keys and self.store.check(keys):
                    result = silence.longest(self.store.multi_get(keys), time.monotonic())
                    # NCCL's watchdog names no rank, and a pipeline's messages on gloo wait longer.
                    awaited = Stragglers(self.store, self.world_size).awaited()
                    result = result or lag.longest(awaited, time.monotonic())
                    if result:
                        self.report(self.store, *result)
                        self.end()
                        return
        except RuntimeError:  # the store has ended, and whatever waits for other ranks will fail
            self.answered = float("inf")

    def _look(self) -> None:
        before = time.monotonic()
        while not self.stopped.wait(min(_LOOK, self.every)):
            now = time.monotonic()
            if now - before > self.limit / 2:  # this process was stopped, so nothing could answer
                self.answered = max(now, self.answered)
            before = now
            if self.parent and os.getppid() != self.parent:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(_GRACE)
                self.end()
                return
            if any(self._without_a_word(self.node.pop(file)) for file in self._ended()):
                self.end()
                return
            silent = now - self.answered
            if self.kept_by_first and self.store and silent > 0.75 * self.limit:
                if self.rank == 1:
                    self.report(None, 0, silent)
                self.end()
                return

    def _neighbours(self) -> list[int]:
        """Return the places in the launch of this node's other ranks, if their ends can be seen."""
        if not self.launch or not self.parent or not hasattr(os, "pidfd_open"):
            return []
        own, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        node = range(own - local, own - local + int(os.environ["LOCAL_WORLD_SIZE"]))
        mine = range(own - self.rank, own - self.rank + self.world_size + self.spares)
        return [place for place in node if place in mine and place != own]

    def _open(self, places: Sequence[int], processes: Iterable[bytes]) -> None:
        """Ask the kernel to tell of the end of these processes."""
        files, own = {}, int(os.environ["RANK"])
        for place, process in zip(places, processes, strict=True):
            rank = place - own + self.rank
            try:
                files[os.pidfd_open(int(process))] = rank
            except ProcessLookupError:  # it has ended meanwhile; a pipe that is closed tells the same
                reading, writing = os.pipe()
                os.close(writing)
                files[reading] = rank
            except OSError:  # no more files, or the kernel is older than Linux 5.3
                break
        self.node = files

    def _ended(self) -> list[int]:
        """Return the files of the processes of this node that have ended."""
        poll = select.poll()
        for file in self.node:
            poll.register(file, select.POLLIN)
        return [file for file, _ in poll.poll(0)]

    def _without_a_word(self, rank: int) -> bool:
        """Tell whether a rank that has ended has said nothing of it, and report it then."""
        assert self.store is not None
        assert self.launch is not None
        with contextlib.suppress(RuntimeError):  # the store has ended, and with it the job
            if rank >= self.world_size:  # a spare
                if self.launch.check([ENDED]):
                    return False
            elif self.store.get(self._key(rank)) == DONE or Stragglers(
                self.store, self.world_size
            ).has_given_up(rank):
                return False
            self.store.set(_DIED, str(rank))
            self.report(self.store, rank, 0.0)
        return True

    def _key(self, rank: int) -> str:
        return f"compose/runs/{rank}"


def limit_key(rank: int) -> str:
    """Return the key of the store from which the watch of a rank reads its limit, in seconds."""
    return f"compose/limit/{rank}"


def _process_key(place: int) -> str:
    return f"compose/process/{place}"


def register_process(launch: dist.Store) -> None:
    """Say in the store of a launch which process this rank is, for the other ranks of its node."""
    launch.set(_process_key(int(os.environ["RANK"])), str(os.getpid()))


@functools.cache
def launcher() -> int:
    """Return the process of torchrun, with which this one ends; 0 without torchrun."""
    return PARENT if "TORCHELASTIC_RUN_ID" in os.environ else 0


def launcher_died() -> bool:
    """Tell whether torchrun has ended before this process, which it started."""
    return launcher() not in (0, os.getppid())


def store_in_first_rank() -> bool:
    """Tell whether the store is in rank 0 and not in torchrun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


Phase = Literal[
    "the data", "forward and backward", "the optimizer's part", "the profile", "validation", "samples"
]
# In the order of a step.
_PHASES = get_args(Phase)


def report_phase(step: int, phase: Phase) -> None:
    """Tell the other ranks what this one is about to do, so that they can name it if it never ends.

    Steps are counted from 1. Every rank reports the same phases.
    """
    if dist.get_world_size() > 1:
        Stragglers(default_store(), dist.get_world_size()).report(dist.get_rank(), step, phase)


class Stragglers:
    """The part of ``store`` in which ``world_size`` ranks say how far they have come."""

    def __init__(self, store: dist.Store, world_size: int) -> None:
        self.store, self.world_size = store, world_size

    def report(self, rank: int, step: int, phase: Phase) -> None:
        """Say that ``rank`` is about to begin this part of a step."""
        self.store.set(f"compose/seen/{rank}", f"{step} {_PHASES.index(phase)} {time.time()}")

    def give_up(self, rank: int) -> None:
        """Say that ``rank`` has failed, so it is none that hangs."""
        self.store.set(f"compose/gave_up/{rank}", "")

    def has_given_up(self, rank: int) -> bool:
        """Tell whether ``rank`` has said that it has failed."""
        return self.store.check([f"compose/gave_up/{rank}"])

    def straggler(self, wait: float = 0.0) -> str:
        """Say which rank has died, or is behind: of those that have not given up, the one least far.

        The rank that was heard of longest ago comes before others. Ranks may still give up for ``wait``
        seconds.
        """
        end = time.monotonic() + wait
        while len(self._waiting()) > 1 and time.monotonic() < end:
            time.sleep(0.1)
        waiting = self._waiting()
        known = [(rank, self._seen(rank)) for rank in range(self.world_size)]
        seen = [(rank not in waiting, *place, rank) for rank, place in known if place]
        if not seen:
            return ""
        _, step, phase, when, rank = min(seen)
        # Clocks of nodes differ, and may be set.
        return behind(rank, max(0.0, time.time() - when), f"{_PHASES[phase]} of step {step}")

    def silent(self, rank: int, seconds: float) -> str:
        """Say that nothing was heard of ``rank`` for so many seconds."""
        known = self._seen(rank)
        return behind(rank, seconds, f"{_PHASES[known[1]]} of step {known[0]}" if known else "")

    def awaited(self) -> list[bytes]:
        """Return what each rank was last about to do; for those that nobody is ahead of ``DONE``."""
        # One call where all have begun, as almost always.
        keys = [f"compose/seen/{rank}" for rank in range(self.world_size)]
        if self.store.check(keys):
            said = [word.rsplit(b" ", 1)[0] for word in self.store.multi_get(keys)]
        else:
            seen = [self._seen(rank) for rank in range(self.world_size)]
            said = [b"%d %d" % known[:2] if known else b"0 0" for known in seen]
        places = [tuple(map(int, word.split())) for word in said]
        front = max(places)
        return [DONE if place == front else word for place, word in zip(places, said, strict=True)]

    def _seen(self, rank: int) -> tuple[int, int, float] | None:
        """Return step, phase and time of a rank's last report."""
        key = f"compose/seen/{rank}"
        if not self.store.check([key]):
            return None
        step, phase, when = self.store.get(key).decode().split()
        return int(step), int(phase), float(when)

    def _waiting(self) -> set[int]:
        """Return the rank that has died, or else those that have not given up."""
        if self.store.check([_DIED]):
            return {int(self.store.get(_DIED))}
        return {rank for rank in range(self.world_size) if not self.has_given_up(rank)}


def behind(rank: int, seconds: float, phase: str) -> str:
    """Return the line that names a rank, and the part of a step that it had not begun."""
    before = f", before {phase}" if phase else ""
    return f"rank {rank} is behind: last heard of {seconds:.0f} s ago{before}"
