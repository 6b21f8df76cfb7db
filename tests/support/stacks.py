"""Where the threads of a rank's process are when it hangs, or were when it crashed."""

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

PATIENCE = 3.0  # seconds in which a process writes its stacks, unless it is stopped


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
    found = []
    for rank, process in sorted(processes.items()):
        written = (folder / str(rank)).read_text(errors="replace").strip()
        if process.exitcode is None:
            found.append(f"rank {rank} is here:\n{written or 'it does not say'}{_native(process)}")
        elif written:
            found.append(f"rank {rank} ended here:\n{written}")
    return "\n\n".join(found)


def _sizes(processes: Mapping[int, BaseProcess], folder: Path) -> list[int]:
    running = [rank for rank, process in processes.items() if process.exitcode is None]
    return [(folder / str(rank)).stat().st_size for rank in running]


def _native(process: BaseProcess) -> str:
    spy = shutil.which("py-spy")
    if not spy:
        return ""
    command = [spy, "dump", "--native", "--nonblocking", "--pid", str(process.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return f"\n{done.stdout}{done.stderr}"
