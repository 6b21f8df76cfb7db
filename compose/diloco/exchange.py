"""Messages between islands: ranks with the same place in their islands send each other bytes.

A thread sends and waits, so that training goes on meanwhile. Islands know each other by the store that
the whole job began with.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compose.parallel.islands import Islands

Misses = Callable[[str, int], bool]
_LOOK = 0.02  # seconds between two looks into the store


def nobody(unused_name: str, unused_island: int) -> bool:
    """Say that no island misses an exchange."""
    return False


class Exchange:
    """The exchanges of one rank with the ranks that have its place on other islands."""

    def __init__(self, islands: Islands, rank: int, timeout: timedelta, grace: float) -> None:
        """Connect; every rank of every island must.

        Args:
            islands: This rank's island among all.
            rank: This rank's place in its island.
            timeout: How long a message may take.
            grace: Seconds that an exchange waits for late islands; 0 waits for all of them.
        """
        self.islands, self.rank, self.grace = islands, rank, grace
        self.misses: Misses = nobody
        """Tells, by an exchange's name, which islands miss it; all must answer alike."""
        self.sent = 0
        """Bytes that this rank has sent since someone took the number."""
        # With their destinations: memory must stay until a message is read.
        self._unread: list[tuple[int, dist.Work, Tensor]] = []
        if islands.count > 1:
            store = dist.PrefixStore(f"between {rank}", islands.store)
            self._group: Any = dist.ProcessGroupGloo(store, islands.index, islands.count, timeout)
            self._thread = ThreadPoolExecutor(1, "exchange")

    def begin(self, name: str, message: Tensor, waits: bool = False) -> "Future[list[Tensor | None]]":
        """Begin to exchange messages of equal length.

        Args:
            name: The exchange; no other has its name.
            message: This rank's, (bytes,) in host memory.
            waits: Wait for all islands, whatever ``grace`` is.

        Returns:
            What will be the messages, in the order of islands; None for islands that miss it.
        """
        if self.islands.count == 1:
            alone: Future[list[Tensor | None]] = Future()
            alone.set_result([message])
            return alone
        grace = 0.0 if waits else self.grace
        if grace and self.rank == 0:
            self.islands.store.set(f"ready/{name}/{self.islands.index}", "")
        return self._thread.submit(self._run, name, message, grace)

    def _run(self, name: str, message: Tensor, grace: float) -> list[Tensor | None]:
        index, count = self.islands.index, self.islands.count
        there = self._there(name, grace)
        others = [island for island in range(count) if island != index]
        found: list[Tensor | None] = [None] * count
        waits = []
        before, self._unread = self._unread, []
        for island in others:
            if index in there:
                self._unread.append((island, self._group.send([message], island, 0), message))
            if island in there:
                found[island] = torch.empty_like(message)
                waits.append(self._group.recv([found[island]], island, 0))
        for wait in waits:
            wait.wait()
        if index in there:
            found[index] = message
            self.sent += len(message) * len(others)
        # An island that takes part has read all earlier messages. A late one reads them later.
        self._unread += [sent for sent in before if sent[0] not in there]
        for island, work, _ in before:
            if island in there:
                work.wait()
        return found

    def close(self) -> None:
        """Wait until all messages of this rank are read, and end."""
        if self.islands.count > 1:
            self._thread.shutdown()
            for _, work, _ in self._unread:
                work.wait()
            self._unread.clear()

    def _there(self, name: str, grace: float) -> set[int]:
        """Return the islands that take part, on which all ranks of all islands agree."""
        count, store = self.islands.count, self.islands.store if grace else None
        if store is None:
            return {island for island in range(count) if not self.misses(name, island)}
        begun, key = time.monotonic(), f"there/{name}"
        while not store.check([key]):
            ready = [i for i in range(count) if store.check([f"ready/{name}/{i}"])]
            late = time.monotonic() - begun > grace
            if self.rank == 0 and (len(ready) == count or (late and 2 * len(ready) >= count)):
                # The first to propose decides for all.
                store.compare_set(key, "", " ".join(map(str, ready)))
            time.sleep(_LOOK)
        return set(map(int, store.get(key).decode().split()))
