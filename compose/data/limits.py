"""Limits for running code from a stranger, such as a chat template."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

try:
    import resource
except ImportError:  # this system has no such limits
    resource = None


class TooLong(BaseException):
    """The error for limited code that takes too long.

    It is no Exception, since the code itself might catch that.
    """


@contextlib.contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Limit this process to ``seconds`` of processor time and ``memory`` more bytes.

    Time is limited only in the main thread, and memory only on Linux.
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
        # Repeat each second: an exception raised within a finalizer is lost.
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
