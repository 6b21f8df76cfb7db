"""A pool of gloo ranks, started once, that serves the whole test run."""

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from compose import Parallel, init_mesh
from compose.train.workers import divide

TIMEOUT = timedelta(seconds=120)
MOST_THREADS = 100  # of a rank, each group having three
BUSY = 0.05  # of a processor: ranks that use more still compute, as compilers do for minutes
PATIENCE = 15.0  # seconds in which a process writes its stacks, unless it is stopped
LOST = "Timed out waiting"  # gloo's words
GRACE = 5.0  # seconds in which other ranks may end too when one has failed


def forks() -> ForkServerContext:
    """The context whose ``Process`` is a fork of a process that has imported torch and compose.

    A process that starts anew imports them for about 4 seconds of one core. A fork copies no threads,
    so the process that forks has none: it computes no gradient and runs no test.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


class Pool:
    """``run`` calls a function on the first N of ``size`` processes, as ranks of one process group."""

    def __init__(self, size: int = 8, timeout: timedelta = TIMEOUT) -> None:
        self.size, self.timeout, self.jobs = size, timeout, 0
        self.crashed = False
        self.store: dist.TCPStore | None = None
        self.workers: list[tuple[Any, Connection]] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None  # of the ranks' stacks

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, islands: int = 1
    ) -> list[Any]:
        """Return ``function(*args)`` of each rank; raise what the first rank to fail raised.

        If a rank's process crashes, or gloo waits in vain, the function runs again, once in a pool's
        life, with a warning. With a crash or an error come the stacks of ranks that gave no answer.

        ``function`` is a module's own, and what it takes and returns can be pickled. With ``islands``
        the ranks are those of so many process groups of equal size.
        """
        if self._crowded():
            time.sleep(0.3)  # some may still be closing
            if self._crowded():
                self.close()
        if not self.workers:
            self._start()
        self.jobs += 1
        for rank in range(world_size):
            self.workers[rank][1].send((self.jobs, function, rank, world_size, args, islands))
        answers = self._answers(world_size)
        failed = [f"rank {r} failed:\n{value}" for r, (good, value) in answers.items() if not good]
        if len(answers) == world_size and not failed:
            return [answers[rank][1] for rank in range(world_size)]
        crash = self._crash()
        missing = [rank for rank in range(world_size) if rank not in answers]
        where = self._stacks(missing)
        self.close()  # the others may be waiting for it; the next run starts new ones
        waited = failed[0] if failed and LOST in failed[0] else ""
        if (crash or waited) and not self.crashed:
            # Once in some ten thousand jobs a rank's heap is found corrupt, or a message between two
            # ranks that wait for it does not arrive. LOG.md, 2026-11-24 and 26.
            self.crashed = True
            warnings.warn(f"{crash or waited}; {function} runs again{where}", stacklevel=2)
            return self.run(function, world_size, *args, islands=islands)
        if not crash and not failed:
            raise TimeoutError(f"rank {missing[0]} did not answer{where}")
        raise AssertionError(f"{crash or failed[0]}{where}")

    def _answers(self, world_size: int) -> dict[int, tuple[bool, Any]]:
        """Return ranks' answers, in the order they came. Ranks that crash or hang are missing."""
        waiting = {self.workers[rank][1]: rank for rank in range(world_size)}
        answers: dict[int, tuple[bool, Any]] = {}
        limit = 1.5 * self.timeout.total_seconds()
        end = time.monotonic() + limit
        last, used = end + 4 * limit, self._processor_seconds()
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                before, used = used, self._processor_seconds()
                failed = any(not good for good, _ in answers.values())
                if failed or end == last or used - before < BUSY * limit:
                    break
                end = min(last, end + limit)
            for connection in ready:
                rank, good = waiting.pop(connection), False  # type: ignore[call-overload]
                with contextlib.suppress(EOFError):  # its process has died
                    good, _ = answers[rank] = connection.recv()  # type: ignore[union-attr]
                if not good:
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _processor_seconds(self) -> float:
        """Return what all ranks have used, with compilers that they started and that have ended."""
        seconds = 0.0
        for process, _ in self.workers:
            with contextlib.suppress(OSError):
                row = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                seconds += sum(map(int, row[11:15])) / os.sysconf("SC_CLK_TCK")
        return seconds

    def _stacks(self, ranks: list[int]) -> str:
        assert self.folder is not None
        result = stacks_of({rank: self.workers[rank][0] for rank in ranks}, Path(self.folder.name))
        waiting = "".join(_sockets(rank, process) for rank, (process, _) in enumerate(self.workers))
        return f"\n\n{result}{waiting}" if result else ""

    def _crash(self) -> str:
        """Name the first rank whose process has ended, with its code; "" if none has."""
        # A connection comes to its end a little before the process; an idle one has nothing to read.
        dead = [process for process, connection in self.workers if _at_its_end(connection)]
        wait([process.sentinel for process in dead], timeout=5.0 if dead else 0.0)
        codes = [(rank, process.exitcode) for rank, (process, _) in enumerate(self.workers)]
        return next((f"rank {r} ended with exit code {c}" for r, c in codes if c is not None), "")

    def _crowded(self) -> bool:
        """Whether groups that a rank could not let go have left it many threads."""
        tasks = [Path(f"/proc/{process.pid}/task") for process, _ in self.workers]
        return any(len(list(task.iterdir())) > MOST_THREADS for task in tasks if task.exists())

    def _start(self) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=self.timeout, wait_for_workers=False
        )
        self.folder = tempfile.TemporaryDirectory(prefix="stacks-")
        context = forks()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            given = (theirs, self.store.port, self.timeout, Path(self.folder.name) / str(rank))
            process = context.Process(target=_worker, args=given, daemon=True)
            process.start()
            self.workers.append((process, ours))

    def close(self, patience: float = 0.0) -> None:
        """End all processes; the next run starts new ones.

        patience: seconds for idle ranks to end by themselves, as a measurement of coverage needs.
        """
        for _, connection in self.workers:
            connection.close()
        for process, _ in self.workers:
            process.join(patience)
            process.kill()
            process.join()
        if self.folder:
            self.folder.cleanup()
        self.workers, self.store, self.folder = [], None, None


def _at_its_end(connection: Connection) -> bool:
    """Whether the process at the other end has closed it, and will answer nothing more."""
    try:
        while connection.poll():
            connection.recv_bytes()
    except (EOFError, OSError):
        return True
    return False


def _worker(connection: Connection, port: int, timeout: timedelta, stacks: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    _file = leave_stacks(stacks)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    gc.freeze()  # so that a collection looks at what tests have made alone
    while True:
        try:
            job, function, rank, world_size, args, islands = connection.recv()
        except EOFError:
            return
        try:
            everyone = dist.PrefixStore(f"job{job}", store)
            _, own, rank, world_size = divide(everyone, rank, world_size, islands)
            dist.init_process_group(
                "gloo",
                store=own,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
            answer = (True, function(*args))
            dist.barrier()
            groups = list(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
            # Groups live in cycles with the models that used them, two threads and a socket each.
            gc.collect()
            # Gloo closes each connection at the next turn of a loop of 10 ms.
            threading.Thread(target=groups.clear, daemon=True).start()
            del groups
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def leave_stacks(path: Path) -> TextIO:
    """Let this process write the stacks of all threads to ``path`` if it crashes or gets SIGUSR1.

    The file must be kept: the C code that writes knows its number alone.
    """
    file = path.open("w")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    return file


def stacks_of(processes: Mapping[int, BaseProcess], folder: Path) -> str:
    """The stacks of those ``processes`` that have crashed or run, each with a title, by rank.

    Each has called ``leave_stacks`` for a file of ``folder`` with its rank's number. Where py-spy is
    installed, the stacks of C++ follow.
    """
    for process in processes.values():
        if process.exitcode is None and process.pid:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, signal.SIGUSR1)
    end = time.monotonic() + PATIENCE
    while (before := _sizes(processes, folder)) and time.monotonic() < end:
        time.sleep(0.1)
        if all(before) and before == _sizes(processes, folder):
            break
    results = []
    for rank, process in sorted(processes.items()):
        written = (folder / str(rank)).read_text(errors="replace").strip()
        if process.exitcode is None:
            results.append(f"rank {rank} is here:\n{written or 'it does not say'}{_native(process)}")
        elif written:
            results.append(f"rank {rank} ended here:\n{written}")
    return "\n\n".join(results)


def _sizes(processes: Mapping[int, BaseProcess], folder: Path) -> list[int]:
    running = [rank for rank, process in processes.items() if process.exitcode is None]
    return [(folder / str(rank)).stat().st_size for rank in running]


def _sockets(rank: int, process: BaseProcess) -> str:
    """The connections of a rank with bytes that it has not read, or its peer has not received.

    Bytes that are not read mean that gloo's thread was not woken. If there are none, gloo itself
    has lost the message.
    """
    folder, result = Path(f"/proc/{process.pid}"), ""
    with contextlib.suppress(OSError):
        own = {Path(os.path.realpath(file)).name for file in (folder / "fd").iterdir()}
        for line in (folder / "net" / "tcp").read_text().splitlines()[1:]:
            fields = line.split()
            sent, read = (int(number, 16) for number in fields[4].split(":"))
            if f"socket:[{fields[9]}]" in own and (sent or read):
                result += f"\nrank {rank}, {fields[1]} to {fields[2]}:"
                result += f" {read} bytes not read, {sent} not received"
    return result


def _native(process: BaseProcess) -> str:
    spy = shutil.which("py-spy")
    if not spy:
        return ""
    command = [spy, "dump", "--native", "--nonblocking", "--pid", str(process.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return f"\n{done.stdout}{done.stderr}"


_last: tuple[int | str, ...] = ()


def make_mesh(parallel: Parallel) -> DeviceMesh:
    """``compose.init_mesh``, for use in a pool.

    DTensor caches results by a mesh's layout, with the names of its process groups; those are other
    groups once a mesh of another shape, or with another ep, was made in this process, or other groups
    before it. The caches are then emptied.
    """
    global _last
    mesh = init_mesh(parallel)
    names = (mesh.get_group(axis).group_name for axis in range(mesh.ndim))
    made = (*mesh.shape, parallel.ep, *names)
    if made != _last:
        _clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
    _last = made
    return mesh
