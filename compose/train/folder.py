"""The folder of a run: the same on every rank, and used by one run at a time."""

import fcntl
import os
import stat
import sys
import time
import uuid
from datetime import datetime
from pathlib import Path
from typing import IO

import torch.distributed as dist

from compose.checkpoint.store import MARK, newest_first
from compose.errors import LEADS_OUT, ConfigError, leads_out, open_own
from compose.parallel.islands import current

_FILES = (".lock", "config.toml", "metrics.jsonl", MARK)
_FOLDERS = ("checkpoints", "traces", "tokenizer", "islands")


def strangers(folder: Path) -> list[str]:
    """Return one line for each file or folder of a run in ``folder`` that is not what a run makes.

    It may be a link, which could lead anywhere, or another kind of file. There is a line too for each
    checkpoint that a link names elsewhere.
    """
    problems = []
    for name in (*_FILES, *_FOLDERS):
        try:
            mode = (folder / name).lstat().st_mode
        except OSError:
            continue
        wanted, right = ("file", stat.S_ISREG) if name in _FILES else ("folder", stat.S_ISDIR)
        if stat.S_ISLNK(mode):
            problems.append(f"run.dir: {folder / name} is a symbolic link; a run writes within run.dir")
        elif not right(mode):
            problems.append(f"run.dir: {folder / name} is not a {wanted}; move it away")
    if problems:
        return problems
    for island in sorted((folder / "islands").glob("*")):
        if island.is_symlink() or not island.is_dir():
            problems.append(f"run.dir: {island} is no folder of an island; move it away")
        else:
            problems += strangers(island)
    outside = newest_first(folder / "checkpoints")
    return problems + [f"run.dir: {p}: {LEADS_OUT}" for p in outside if leads_out(p, folder)]


class RunFolder:
    """``run.dir``, or a new folder named by the time; creating the object is a collective.

    The first rank creates the folder, and holds its lock until :meth:`release` or the end of the
    process. It raises ConfigError if another run holds the lock, and, if the run ``saves``, unless all
    ranks see the folder: each saves its own part there.
    """

    def __init__(self, name: str, saves: bool = True) -> None:
        self._lock: IO[str] | None = None
        found: list[str] = ["", ""]
        if dist.get_rank() == 0:
            first, folder = _of_island(name)
            found = [str(folder), "\n".join(strangers(first)) or self._take(folder)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(found, src=0)
        if found[1]:
            raise ConfigError(*found[1].splitlines())
        self.path = Path(found[0])
        if unseen := _unseen(self.path):
            if saves:
                raise ConfigError(f"{unseen}; give one that all share, or set checkpoint.interval = 0")
            if dist.get_rank() == 0:
                print(f"{unseen}; nothing can be saved there", file=sys.stderr)

    def _take(self, folder: Path) -> str:
        """Lock the folder, and return the problem if that fails."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = open_own(folder / ".lock", "a+")
        except OSError as error:
            return f"run.dir: cannot write to {folder}: .lock: {error.strerror}"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            return f"run.dir: {folder} is in use by another run ({holder})"
        except OSError:
            return ""  # the file system has no locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        self._lock = file
        return ""

    def release(self) -> None:
        """Unlock the folder, so that another run may use it."""
        if self._lock:
            self._lock.close()


def _of_island(name: str) -> tuple[Path, Path]:
    """Return the run's folder, and that of this rank's island: all but the first have one within."""
    islands = current()
    own = str((Path(name) if name else _new()) if islands.index == 0 else "")
    first = Path(islands.everyone("run.dir", own)[0])
    return first, first / "islands" / str(islands.index) if islands.index else first


def _unseen(folder: Path) -> str:
    """Return the problem if a rank does not see a file that the first rank writes into the folder."""
    rank, name, found = dist.get_rank(), [f".seen-{uuid.uuid4().hex}"], [""] * dist.get_world_size()
    if len(found) > 1:
        if rank == 0:
            (folder / name[0]).touch()
        dist.broadcast_object_list(name, src=0)
        seen = os.path.exists(folder / name[0])
        dist.all_gather_object(found, "" if seen else f"rank {rank} on {os.uname().nodename}")
        if rank == 0:
            (folder / name[0]).unlink(missing_ok=True)
    who = next(filter(None, found), "")
    return who and f"run.dir: {folder} is not the same folder on all nodes: {who} has another"


def _new() -> Path:
    """Create and return a new folder; another run may have taken the first name already."""
    while True:
        folder = Path(f"runs/{datetime.now():%Y%m%d-%H%M%S}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            time.sleep(0.1)
        else:
            return folder
