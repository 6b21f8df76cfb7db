"""Signals that ask a run to end: noted at once, and acted on by all ranks between two steps."""

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from compose.parallel.heartbeat import launcher_died
from compose.parallel.islands import Islands, current

LAUNCHER_DIED = signal.SIGHUP  # stands for SIGTERM to a rank whose torchrun is gone; it is not sent
_SENT = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
# Their codes are their places, from 1. If ranks got different signals, the last of this list counts.
_ASKS = (*_SENT, LAUNCHER_DIED)
_ECHO = 2.0  # seconds within which a second signal is the first one, passed on by torchrun


class Signals:
    """A context in which SIGINT, SIGTERM and SIGUSR1 let the current step finish.

    A second signal, later than the echo of the first, ends the process at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.code, self.since = device, 0, 0.0
        self.agreed = (0, 0)

    def __enter__(self) -> "Signals":
        self.previous = [signal.signal(number, self._note) for number in _SENT]
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in zip(_SENT, self.previous, strict=True):
            signal.signal(number, handler)
        if dist.get_rank() == 0:
            current().finished()

    def asked(self, step: int, code: int) -> signal.Signals | None:
        """Return the signal that asks the run to end, the same on every rank.

        LAUNCHER_DIED is a fault: the others' torchrun must not take the run for finished.

        Islands do not wait for each other after each step. If one is asked, they agree on a step.

        Args:
            step: Steps taken so far.
            code: The greatest ``code`` of all ranks, which were asked within the last step.

        Returns:
            The signal, or None.
        """
        islands = current()
        if islands.count > 1:
            if not self.agreed[1]:
                self.agreed = self._agreed(islands, step, code)
            code = self.agreed[0] if step >= self.agreed[1] else 0
        return _ASKS[code - 1] if code else None

    def _agreed(self, islands: Islands, step: int, code: int) -> tuple[int, int]:
        """Return why and after which step all islands stop; zeros if they do not."""
        found = islands.stop(step, code) if dist.get_rank() == 0 else (0, 0)
        # A fill takes its value along; a tensor made of a list would be copied, and waited for.
        shared = torch.stack([torch.full((), n, dtype=torch.int64, device=self.device) for n in found])
        if dist.get_world_size() > 1:
            dist.broadcast(shared, src=0)
        why, last = shared.tolist()
        return why, last

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.code and now > self.since + _ECHO:
            raise KeyboardInterrupt
        if not self.code:
            orphan = number == signal.SIGTERM and launcher_died()
            self.code, self.since = _ASKS.index(LAUNCHER_DIED if orphan else number) + 1, now
