"""Islands: parts of a job that train alone between exchanges of weights.

Each island is the world of its own ranks: its default process group has no others. So all that trains
within an island needs to know nothing of islands. Ranks of different islands meet in the store that all
of them began with, and in the groups of compose/diloco/exchange.py.
"""

import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

_STOP = "stop"
_LEFT = "left"
FAILED = "compose/failed"
_LOOK = 0.05  # seconds between two looks into the store
_PATIENCE = timedelta(minutes=30)  # for islands that are still starting


class Islands:
    """This rank's island among all."""

    def __init__(self, index: int = 0, count: int = 1, store: dist.Store | None = None) -> None:
        """Take the island's place among ``count``, and the store of all islands."""
        self.index, self.count, self._store = index, count, store
        self._calls: Counter[str] = Counter()
        self._posted = False

    @property
    def store(self) -> dist.Store:
        """The store that all islands share."""
        assert self._store is not None, "a job that is not divided has no other islands"
        return self._store

    def everyone(self, key: str, value: str) -> list[str]:
        """Return what each island's first rank gives; only first ranks call it, and wait for all.

        Args:
            key: A name for the question; the n-th calls with one name belong together.
            value: The answer of this island.

        Returns:
            The answers, in the order of islands.
        """
        if self.count == 1:
            return [value]
        self._calls[key] += 1
        place = f"everyone/{key}/{self._calls[key]}"
        self.store.set(f"{place}/{self.index}", value)
        keys = [f"{place}/{island}" for island in range(self.count)]
        self.store.wait(keys, _PATIENCE)
        return [self.store.get(key).decode() for key in keys]

    def note_stop(self, step: int, code: int = 0) -> None:
        """Tell the other islands how far this one has come, if any of them is to stop.

        Only first ranks call it, also while they wait for another island, which may wait for this.

        Args:
            step: The step that this island takes or has taken.
            code: Why this island is to stop; 0 if it is not.
        """
        if not self._posted and (code or self.store.check([_STOP])):
            self._posted = True
            self.store.set(f"{_STOP}/{self.index}", f"{step} {code}")
            self.store.set(_STOP, "")

    def stop(self, step: int, code: int) -> tuple[int, int]:
        """Agree on a last step, if any island is to stop; only first ranks call it.

        Args:
            step: Steps that this island has taken.
            code: Why it is to stop; 0 if it is not.

        Returns:
            (why, the last step), the same on all islands; or zeros.
        """
        self.note_stop(step, code)
        if not self._posted:
            return 0, 0
        keys = [f"{_STOP}/{island}" for island in range(self.count)]
        self.store.wait(keys, _PATIENCE)
        said = [tuple(map(int, self.store.get(key).decode().split())) for key in keys]
        return max(why for _, why in said), max(last for last, _ in said)

    def told(self, key: str, value: str) -> list[str] | None:
        """Note a value of this island; return the newest of each, or None if one has none yet."""
        keys = [f"told/{key}/{island}" for island in range(self.count)]
        self.store.set(keys[self.index], value)
        return [self.store.get(key).decode() for key in keys] if self.store.check(keys) else None

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

    def finished(self) -> None:
        """Tell the others that this island takes no more steps; only first ranks call it."""
        if self.count > 1 and not self._posted:
            self._posted = True
            self.store.set(f"{_STOP}/{self.index}", "0 0")


_current = Islands()


def current() -> Islands:
    """Return this process' island; a job that is not divided is one island."""
    return _current


def divide(store: dist.Store, rank: int, world_size: int, count: int) -> tuple[dist.Store, int, int]:
    """Divide a job into islands, and note this process' own.

    Args:
        store: The store of all ranks.
        rank: This rank among all.
        world_size: All ranks.
        count: Number of islands; it divides ``world_size``. Neighbouring ranks share an island.

    Returns:
        Store, rank and number of ranks for the default process group, which is the island's.
    """
    global _current
    if count == 1:
        _current = Islands()
        return store, rank, world_size
    size = world_size // count
    _current = Islands(rank // size, count, dist.PrefixStore("islands", store))
    return dist.PrefixStore(f"island {rank // size}", store), rank % size, size


def speaks() -> bool:
    """Whether this rank prints for the job: the first rank of the first island."""
    return dist.get_rank() == 0 and _current.index == 0
