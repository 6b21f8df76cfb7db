"""A run whose folder is in object storage: written in a folder here, and sent while training goes on.

A store has no rename. So a checkpoint's manifest is sent last, when all that it lists is there, and is
deleted first: what has no manifest is no checkpoint. What was sent leaves the folder here.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch.distributed as dist

from compose.checkpoint import store
from compose.checkpoint.loading import cause_of
from compose.errors import write_whole
from compose.object_storage import Remote, StoreError
from compose.ops.tensors import gathered_objects

_SENDERS = 4  # files sent at once by a rank
_STAYS = ("checkpoints", "islands", "offload")  # folders of a run that are sent otherwise or not at all
CLAIM = ".claim"


def staging_of(url: Path, given: str) -> Path:
    """Return the folder here for a run at ``url``, in ``run.staging`` if that is given."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(given or f"{cache}/dtensor-compose") / str(url).replace("://", "/")


def put_folder(source: Path, target: Remote) -> None:
    """Send a folder, the manifest of a checkpoint in it last. Raises OSError."""
    files = (path for path in source.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == store.MANIFEST):
        (target / path.relative_to(source)).put(path)


class Uploads:
    """Sends the files of a run from its folder here, ``folder``, to that in a store, ``remote``."""

    def __init__(self, folder: Path, remote: Remote) -> None:
        self.folder, self.remote, self.token = folder, remote, ""
        self.sent: dict[Path, tuple[int, int]] = {}
        self.stranded = ""  # why the last checkpoint is not in object storage, and where it is
        self.begun = False  # whether a run has had the remote folder before

    def begin(self) -> None:
        """Claim the remote folder for this run, and fetch what a resumed run goes on with."""
        self.token = f"process {os.getpid()} on {os.uname().nodename}, {uuid.uuid4().hex}"
        self.begun = (self.remote / CLAIM).exists()
        (self.remote / CLAIM).write_bytes(self.token.encode())
        for name in self.remote.glob("*.id"):  # of the run at wandb and other services
            if not (self.folder / name.name).exists():
                (self.folder / name.name).write_bytes(name.read_bytes())

    def push(self) -> None:
        """Send the files of the run that have changed, besides checkpoints. Raises OSError."""
        for path in sorted(Path(top, name) for top, _, names in os.walk(self.folder) for name in names):
            name = path.relative_to(self.folder)
            if name.parts[0] in _STAYS or name.name.startswith(".") or not path.is_file():
                continue
            try:
                state = (path.stat().st_size, path.stat().st_mtime_ns)
                if self.sent.get(name) != state:
                    self._check_claim()
                    (self.remote / name).put(path)
                    self.sent[name] = state
            except FileNotFoundError:  # a profile, for example, removes its trace once that is packed
                if path.exists():
                    raise

    def _taken(self) -> str:
        """Tell which run has claimed the folder since; "" if none has."""
        holder = (self.remote / CLAIM).read_bytes().decode()
        return "" if holder == self.token else f"was taken by another run ({holder.partition(',')[0]})"

    def _check_claim(self) -> None:
        if taken := self._taken():
            raise StoreError(errno.EBUSY, taken, str(self.remote))

    def _place(self, name: str) -> Remote:
        return Remote(self.remote / "checkpoints" / name)

    def make_room(self, name: str) -> None:
        """Remove the parts of a checkpoint that was not sent whole; a damaged one gets another name.

        What another run that has claimed the folder wrote stays.
        """
        target = self._place(name)
        if self._taken():
            return
        if (target / store.MANIFEST).exists():
            store.set_aside(target, "damaged")
        elif target.exists():
            store.remove(target)

    def send_checkpoint(self, target: Path, files: Iterable[str], group: dist.ProcessGroup) -> str:
        """Send this rank's ``files``, then what the first rank has; return the problem, or "".

        A collective. The folder here stays until a later checkpoint was sent, if this one could not be.
        """
        final = target.with_name(target.name.removeprefix(".writing-"))
        # On the first rank's node it has its final name. Another may have that of an earlier start.
        source = target if target.exists() else final
        first, problem = group.rank() == 0, ""

        def complete() -> None:
            own = set(store.listed(source)) - set(self._place(final.name).sizes())
            self.send(source, final.name, own)
            self.push()  # before the manifest: metrics.jsonl has every step of a checkpoint
            self.complete(source, final.name)

        send = partial(self.send, source, final.name, files)
        for mine, work in ((first, self._check_claim), (True, send), (first, complete)):
            try:
                if mine and not problem:
                    work()
            except Exception as error:
                problem = cause_of(error)
            problem = next(filter(None, gathered_objects(problem, group)), "")
        self.stranded = problem and f"{self._place(final.name)}: {problem}; it is in {final}"
        old = store.newest_first(target.parent)
        # Another rank of this node may have begun the next one already.
        parts = sorted(p for p in target.parent.glob(".writing-*") if p.name <= target.name)
        for folder in (*old[1:], *parts[:-1]) if problem else (*old, *parts):
            shutil.rmtree(folder, ignore_errors=True)
        return problem

    def send(self, source: Path, name: str, files: Iterable[str]) -> None:
        """Send files of the checkpoint in ``source``. Raises OSError."""
        target = self._place(name)
        with ThreadPoolExecutor(_SENDERS) as senders:
            for _ in senders.map(lambda file: (target / file).put(source / file), sorted(files)):
                pass  # errors are raised here

    def complete(self, source: Path, name: str) -> None:
        """Send the manifest, if all that it lists is there, and this run still has the folder."""
        target = self._place(name)
        sizes = target.sizes()
        for file, size in store.listed(source).items():
            if sizes.get(file) != size:
                raise StoreError(errno.EIO, f"{file} was not sent whole", str(target))
        self._check_claim()
        (target / store.MANIFEST).put(source / store.MANIFEST)
        store.mark(self.remote)

    def send_left(self) -> list[str]:
        """Send the newest checkpoint here that an earlier run could not send; return lines on it."""
        root, kept = self.folder / "checkpoints", self.remote / "checkpoints"
        newest = max(map(store.step_of, store.sent(kept)), default=-1)
        lines, log = [], self.remote / "metrics.jsonl"
        for folder in store.newest_first(root):
            if not self.begun:
                kept_as = store.set_aside(folder, "earlier").name
                lines.append(f"{folder}: {self.remote} does not have its run; kept as {kept_as}")
                continue
            if store.step_of(folder) > newest and not store.problems(folder):
                self._check_claim()
                self.make_room(folder.name)
                self.send(folder, folder.name, store.listed(folder))
                self.complete(folder, folder.name)
                newest = store.step_of(folder)
                lines.append(f"{kept / folder.name}: sent now; an earlier run left it in {folder}")
            if store.step_of(folder) <= newest:
                shutil.rmtree(folder, ignore_errors=True)
        if not lines and log.exists():  # another machine may have taken these steps again
            write_whole(self.folder / "metrics.jsonl", log.read_bytes())
        return lines
