"""Which rank holds up the others: what each was about to do, kept in the process group's store."""

import time
from typing import Literal, get_args

import torch.distributed as dist

from compose.parallel.heartbeat import DONE

Phase = Literal["the data", "forward and backward", "the optimizer's part", "the profile", "validation"]
# In the order of a step.
_PHASES = get_args(Phase)


def report_phase(step: int, phase: Phase) -> None:
    """Tell the other ranks what this one is about to do, so that they can name it if it never ends.

    Args:
        step: The optimizer step, counted from 1.
        phase: The part of the step. Every rank reports the same ones.
    """
    if dist.get_world_size() > 1:
        Stragglers(default_store(), dist.get_world_size()).report(dist.get_rank(), step, phase)


def default_store() -> dist.Store:
    """Return the store that the default process group was made with."""
    # Private, and in torch 2.11 to 2.15: no public call returns it.
    return dist.distributed_c10d._get_default_store()


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

    def straggler(self, wait: float = 0.0) -> str:
        """Say which rank is behind: of those that have not given up, the one that came least far.

        Args:
            wait: Seconds in which ranks may still give up.

        Returns:
            One line. Of several ranks it names the one that was heard of longest ago. Empty if no rank
            ever reported anything.
        """
        end = time.monotonic() + wait
        while len(self._waiting()) > 1 and time.monotonic() < end:
            time.sleep(0.1)
        waiting, seen = self._waiting(), []
        for rank in range(self.world_size):
            known = self._seen(rank)
            if known:
                step, phase, when = known
                seen.append((rank not in waiting, step, phase, when, rank))
        if not seen:
            return ""
        _, step, phase, when, rank = min(seen)
        return behind(rank, time.time() - when, f"{_PHASES[phase]} of step {step}")

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
        """Return the ranks that have not given up."""
        return {r for r in range(self.world_size) if not self.store.check([f"compose/gave_up/{r}"])}


def behind(rank: int, seconds: float, phase: str) -> str:
    """Return the line that names a rank, and the part of a step that it had not begun."""
    before = f", before {phase}" if phase else ""
    return f"rank {rank} is behind: last heard of {seconds:.0f} s ago{before}"
