"""The processes that make records: one for each, at most as many at a time as there are cores."""

import os
import queue
import signal
import warnings
from collections.abc import Callable, Hashable, Iterator
from multiprocessing import forkserver, get_context
from multiprocessing.context import BaseContext
from multiprocessing.pool import Pool
from types import TracebackType
from typing import Any
from unittest import mock

import torch

from compose.errors import ConfigError


class RecordPool:
    """Runs functions in processes, and yields what they return as they end.

    A process runs one function, since PyTorch keeps what it knows of a world's groups for the next one.
    """

    def __init__(self, workers: int = 0) -> None:
        """``workers``: processes at a time; 0: as many as this process has cores."""
        self._workers = workers or len(os.sched_getaffinity(0))
        self._pool: Pool | None = None
        self._ended: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._running = 0

    def __enter__(self) -> "RecordPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.terminate()

    def submit(self, name: Hashable, function: Callable[..., Any], *args: Any) -> None:
        """Run a function of a module, whose result :meth:`results` yields with ``name``."""

        def ended(result: Any) -> None:
            self._ended.put((name, result))

        self._running += 1
        if not self._pool:
            self._pool = _processes().Pool(self._workers, _begin, (), 1)
        self._pool.apply_async(function, args, callback=ended, error_callback=ended)

    def known(self, name: Hashable, result: object) -> None:
        """Have :meth:`results` yield a result that is there already."""
        self._running += 1
        self._ended.put((name, result))

    def results(self) -> Iterator[tuple[Any, Any]]:
        """Yield names and results until no function runs. A ConfigError is a result too."""
        while self._running:
            name, result = self._ended.get()
            self._running -= 1
            if isinstance(result, BaseException) and not isinstance(result, ConfigError):
                raise result
            yield name, result


def _processes() -> BaseContext:
    """Return how to start the processes that make records. They see no GPU.

    PyTorch's optimizers ask CUDA even for tensors without data, and a forked copy of a process that has
    used CUDA cannot call it.
    """
    if not torch.cuda.is_available():
        return get_context("fork")
    context = get_context("forkserver")
    context.set_forkserver_preload(["compose.planner.estimate"])
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()
    return context


def _begin() -> None:
    """Prepare a process that makes records."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the search, which ends the pool
    # FSDP warns about a view that is never changed in place here.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
