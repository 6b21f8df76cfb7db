"""A watch beside the run: it sees a rank that is silent or has failed, and a launcher that is gone.

A wait for a rank does not always end within ``comm.timeout``. A pipeline's messages on gloo keep the
limit that their group was made with. With no launcher the store is in rank 0, which may be the rank
that is stopped. So every rank has a thread that says in the store that the process runs, and two ranks
read what all have said. A slow rank is not silent: while it computes, waits, compiles, reads or writes
for long, it gives Python's lock to that thread.
"""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed as dist

_EVERY = 2.0  # seconds between two looks, or less if the limit is short
_GRACE = 30.0  # seconds from SIGTERM to the end, as torchrun gives
_LATER = 5.0  # seconds after the limit, so that an error of the backend's own is told first
_ECHO = 5.0  # seconds in which a rank ends by itself after another rank has reported its failure
DONE = b"done"


class Silence:
    """How long each rank has said nothing new; after ``limit`` seconds a rank counts as gone."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.heard: dict[int, tuple[bytes, float]] = {}

    def longest(self, said: Sequence[bytes], now: float) -> tuple[int, float] | None:
        """Return the rank that has been silent longest, and its seconds, if that is too long.

        Args:
            said: What each rank said last. It says something else each time; its last word is ``done``.
            now: The time, in seconds.

        Returns:
            (rank, seconds), or None.
        """
        for rank, word in enumerate(said):
            if rank not in self.heard or self.heard[rank][0] != word:
                self.heard[rank] = (word, now)
        silent = {rank: now - when for rank, (word, when) in self.heard.items() if word != DONE}
        rank = max(silent, key=silent.__getitem__, default=None)
        return (rank, silent[rank]) if rank is not None and silent[rank] > self.limit else None

    def forget(self) -> None:
        """Begin anew, since this process itself did not run for a while."""
        self.heard.clear()


class Watch:
    """Threads of this rank, from :meth:`start` to :meth:`stop`.

    Rank 0 and rank 1 report a rank that says nothing for three quarters of the limit. A rank also
    reports rank 0, with None as the store, if the store does not answer and is ``kept_by_first``. And
    they report a rank that lives, but for which others have waited longer than the limit. After a
    report this process ends. It ends too, if it has not ended by itself, when the key ``failed`` is
    in the store.

    Args:
        store: The store of all ranks; the watch opens its own connection to it.
        rank: This rank.
        world_size: How many ranks.
        limit: Seconds of silence.
        report: Called as ``report(store, rank, seconds)``.
        failed: The key that says that a rank has failed.
        awaited: What each rank is about to do, read from the store; ``DONE`` for those that nobody is
            ahead of.
        kept_by_first: Whether the store is in rank 0.
        parent: The process with which this one ends; 0 is none.
        end: Ends this process.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        limit: float,
        report: Callable[[dist.Store | None, int, float], None],
        failed: str,
        awaited: Callable[[dist.Store], Sequence[bytes]],
        kept_by_first: bool = False,
        parent: int = 0,
        end: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self.rank, self.world_size, self.limit, self.failed = rank, world_size, limit, failed
        self.report, self.awaited, self.end = report, awaited, end
        self.kept_by_first, self.parent = kept_by_first, parent
        # A store's connection serves one call at a time, and training may be waiting in a call.
        self.store: dist.Store | None = cast(Any, store).clone() if world_size > 1 else None
        self.answered = time.monotonic()
        self.stopped = threading.Event()
        self.looking = threading.Thread(target=self._look, daemon=True)
        self.talking = threading.Thread(target=self._talk, daemon=True)

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return min(_EVERY, self.limit / 8)

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
        try:
            # The first word is said at once: a rank that stops before it would not be missed.
            self.store.set(self._key(self.rank), str(count))
            while not self.stopped.wait(self.every):
                count += 1
                self.store.set(self._key(self.rank), str(count))
                failed = self.store.check([self.failed])
                self.answered = now = time.monotonic()
                if failed:
                    time.sleep(_ECHO)
                    self.end()
                    return
                if now - before > self.limit / 2:  # this process was stopped, or the store was
                    silence.forget()
                    lag.forget()
                before = now
                if self.store.check([_limit_key(self.rank)]):
                    self.limit = float(self.store.get(_limit_key(self.rank)))
                silence.limit, lag.limit = 0.75 * self.limit, self.limit + _LATER
                if keys and self.store.check(keys):
                    found = silence.longest(self.store.multi_get(keys), time.monotonic())
                    # NCCL's watchdog names no rank, and a pipeline's messages on gloo wait longer.
                    found = found or lag.longest(self.awaited(self.store), time.monotonic())
                    if found:
                        self.report(self.store, *found)
                        self.end()
                        return
        except RuntimeError:  # the store has ended, and whatever waits for other ranks will fail
            self.answered = float("inf")

    def _look(self) -> None:
        before = time.monotonic()
        while not self.stopped.wait(min(1.0, self.every)):
            now = time.monotonic()
            if now - before > self.limit / 2:  # this process was stopped, so nothing could answer
                self.answered = max(now, self.answered)
            before = now
            if self.parent and os.getppid() != self.parent:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(_GRACE)
                self.end()
                return
            silent = now - self.answered
            if self.kept_by_first and self.store and silent > 0.75 * self.limit:
                if self.rank == 1:
                    self.report(None, 0, silent)
                self.end()
                return

    def _key(self, rank: int) -> str:
        return f"compose/runs/{rank}"


def set_limit(store: dist.Store, rank: int, seconds: float) -> None:
    """Change the limit of the watch of this ``rank``, which reads it from ``store``."""
    store.set(_limit_key(rank), str(seconds))


def _limit_key(rank: int) -> str:
    return f"compose/limit/{rank}"


@functools.cache
def launcher() -> int:
    """Return the process of torchrun, with which this one ends; 0 without torchrun."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0


def launcher_died() -> bool:
    """Tell whether torchrun has ended before this process, which it started."""
    return launcher() not in (0, os.getppid())


def store_in_first_rank() -> bool:
    """Tell whether the store is in rank 0 and not in torchrun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
