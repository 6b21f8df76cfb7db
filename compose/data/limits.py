"""Limits within which code of a stranger's runs, as a chat template's."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

try:
    import resource
except ImportError:  # where there is no such limit
    resource = None


class TooLong(BaseException):
    """What is limited took too long. No Exception, which the code itself might catch."""


@contextlib.contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Within it, of this process: at most ``seconds`` of processor time, and ``memory`` more bytes.

    Raises TooLong, and MemoryError. Time is limited in the main thread alone, memory on Linux alone.
    """
    with _time(seconds), _memory(memory):
        yield


@contextlib.contextmanager
def _time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _stop)
    try:
        # Again each second: a signal that comes within a finalizer is lost.
        signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLong


@contextlib.contextmanager
def _memory(more: int) -> Iterator[None]:
    there = Path("/proc/self/statm")
    if resource is None or not there.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(there.read_text().split()[0]) * resource.getpagesize()
    limit = used + more if soft == resource.RLIM_INFINITY else min(used + more, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
