"""The folder of a run: the same on every rank, and of one run at a time."""

import fcntl
import os
import time
from datetime import datetime
from pathlib import Path
from typing import IO

import torch.distributed as dist

from compose.errors import ConfigError


class RunFolder:
    """``run.dir``, or a new folder named by the time; making one is a collective.

    The first rank creates it, and holds its lock until :meth:`release` or its end. Raises ConfigError
    where another run holds it.
    """

    def __init__(self, name: str) -> None:
        self._lock: IO[str] | None = None
        found: list[str] = ["", ""]
        if dist.get_rank() == 0:
            folder = Path(name) if name else _new()
            folder.mkdir(parents=True, exist_ok=True)
            found = [str(folder), self._take(folder)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(found, src=0)
        if found[1]:
            raise ConfigError(found[1])
        self.path = Path(found[0])

    def _take(self, folder: Path) -> str:
        """Lock the folder; what is wrong if that cannot be."""
        file = (folder / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            return f"run.dir: {folder} is in use by another run ({holder})"
        except OSError:
            return ""  # a file system without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        self._lock = file
        return ""

    def release(self) -> None:
        """Let another run have the folder."""
        if self._lock:
            self._lock.close()


def _new() -> Path:
    """A new folder, whose name another run may have taken already."""
    while True:
        folder = Path(f"runs/{datetime.now():%Y%m%d-%H%M%S}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            time.sleep(0.1)
        else:
            return folder
