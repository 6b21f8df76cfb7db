"""The folder of a run, used by one run at a time, and what a run writes there and prints."""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from compose.checkpoint import in_memory
from compose.checkpoint.loading import cause_of
from compose.checkpoint.store import MARK, Progress, newest_first
from compose.checkpoint.uploads import Uploads, staging_of
from compose.composition import Composition
from compose.config.job import Job
from compose.config.toml import dump
from compose.data.batches import Batches
from compose.data.datasets import keep_tokenizer
from compose.data.samples import Conversations, Samples
from compose.data.tokenizer import TOKENIZER
from compose.errors import LEADS_OUT, ConfigError, leads_out, open_own, or_say, read_own, write_whole
from compose.memory.quantized import count_parameters
from compose.object_storage import Remote, as_path
from compose.ops.tensors import gathered_objects
from compose.optim.lr_schedule import short_of_warmup
from compose.parallel.mesh import AXES, crosses_nodes
from compose.train.held_state import copied_bytes, placements, state_bytes
from compose.train.metrics import Sink, StepMetrics, open_sinks
from compose.train.readings import Reading
from compose.train.workers import Worker

_KEPT = 3600.0  # seconds
_LEASE, _LOOK = 120.0, 0.5  # seconds; an NFS server keeps the lock of a lost node for 90 by default
TOKEN = ".copies"  # the file with the name of the run's copies in memory; no two folders share it
_FILES = (".lock", "config.toml", "metrics.jsonl", "plan.txt", "timeline.png", MARK, TOKEN)
_FILES += ("wandb.id", "mlflow.id", "comet.id")
_DRAWN = 2048  # micro-batches of all pipeline ranks; more take seconds, and bars of less than a pixel
_FOLDERS = ("checkpoints", "traces", "tokenizer", "islands")


def strangers(folder: Path) -> list[str]:
    """Return a line for each file, folder or checkpoint of a run that is a link or another kind."""
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

    The first rank creates the folder and holds its lock. Raises ConfigError if another run holds it,
    and, if the run ``saves``, unless all ranks see the folder: each saves its own part there.
    """

    def __init__(
        self, name: str, saves: bool = True, worker: Worker | None = None, staging: str = ""
    ) -> None:
        self._lock: IO[str] | None = None
        place = problem = ""
        if dist.get_rank() == 0:
            worker = worker or Worker()
            own = str((as_path(name) if name else _new()) if worker.index == 0 else "")
            first = folder = as_path(worker.everyone("run.dir", own)[0])
            if worker.index:  # all but the first worker have a folder within it
                folder = first / "islands" / str(worker.index)
            here = staging_of(folder, staging) if isinstance(folder, Remote) else folder
            place, problem = str(folder), "\n".join(strangers(first)) or self._take(here, folder)
        place, problem = gathered_objects((place, problem))[0]
        if problem:
            raise ConfigError(*problem.splitlines())
        self.place = as_path(place)
        """The folder that the user named, which may be in object storage."""
        self.path, self.uploads = self.place, None
        """The folder here, where the run writes."""
        if isinstance(self.place, Remote):
            self.path = staging_of(self.place, staging)
            if problem := _unmade(self.path, self.place):
                raise ConfigError(problem)
            self.uploads = Uploads(self.path, self.place)
            if dist.get_rank() == 0:
                self.uploads.begin()
        elif unseen := _unseen(self.path):
            if saves:
                raise ConfigError(f"{unseen}; give one that all share, or set checkpoint.interval = 0")
            if dist.get_rank() == 0:
                print(f"{unseen}; nothing can be saved there", file=sys.stderr)

    def _take(self, folder: Path, place: Path) -> str:
        """Lock the folder of this machine, and return the problem if that fails."""
        if problem := _unmade(folder, place):
            return problem
        until = 0.0
        try:
            file = open_own(folder / ".lock", "a+")
            try:
                while taken := _taken(file):
                    problem = f"run.dir: {folder} is in use by another run ({taken})"
                    if taken.endswith(f" on {os.uname().nodename}") or 0 < until < time.monotonic():
                        file.close()
                        return problem
                    if not until:
                        until = time.monotonic() + _LEASE
                        wait = f"waits for {_LEASE:g} s, in case that node is lost"
                        print(f"{problem}; {wait}", flush=True)
                    time.sleep(_LOOK)
            except OSError:
                return ""  # the file system has no locks
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}\n".encode())
        except OSError as error:
            return f"run.dir: cannot write to {folder}: .lock: {error.strerror}"
        self._lock = file
        return ""

    def copies(self, job: Job, composition: Composition) -> tuple[Path, int] | None:
        """Return the folder of this run's copies in shared memory, and their bytes; a collective.

        None without ``checkpoint.memory``. The folder goes by a name kept here. Copies that dead runs
        have left are removed.
        """
        if not job.config.checkpoint.memory:
            return None
        name = ""
        if dist.get_rank() == 0:
            path = self.path / TOKEN
            with or_say(f"run.dir: cannot write to {self.path}: {TOKEN}"):
                known = read_own(path) if path.exists() else b""
                # A copy of the folder is another run, and has another inode.
                mark = f" {self.path.stat().st_ino:x}".encode()
                if not re.fullmatch(b"[0-9a-f]{32}" + mark, known):
                    known = uuid.uuid4().hex.encode() + mark
                    write_whole(path, known)
                name = known[:32].decode()
        folder = in_memory.ROOT / f"{in_memory.PREFIX}{gathered_objects(name)[0]}"
        size = copied_bytes(placements(composition.model, composition.mesh, job.config), job)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            # Two slots of each rank here, and of as many peers.
            remove_left(folder, 4 * size * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return folder, size

    def release(self) -> str:
        """Send what is left, and unlock the folder, so that another run may use it.

        Returns the problem if a checkpoint or the rest of the run could not be sent to object storage.
        """
        problem = self.uploads.stranded if self.uploads else ""
        if self.uploads and dist.get_rank() == 0:
            try:
                self.uploads.push()
            except OSError as error:
                unsent = f"{self.place}: {cause_of(error)}; the rest of the run is in {self.path}"
                problem = problem or unsent
        if self._lock:
            self._lock.close()
        return problem


def _taken(file: IO[str]) -> str:
    """Take the lock of a file; return who has it, if another process does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or f"unknown on {os.uname().nodename}"
    return ""


def remove_left(own: Path, needed: int) -> None:
    """Remove the copies of this user's runs of which no process is left, but not our ``own``.

    Those of the last hour stay while ``needed`` bytes are free, since their runs may be started again.
    """
    folders = in_memory.ROOT.glob(f"{in_memory.PREFIX}*")
    for age, folder in sorted(((_age(folder), folder) for folder in folders), reverse=True):
        try:
            if folder == own or folder.lstat().st_uid != os.geteuid():
                continue
            if age < _KEPT and shutil.disk_usage(in_memory.ROOT).free >= needed:
                continue
            with _unused(folder):
                # While torchrun starts ranks again, it alone is there.
                if not any(_lives(path.name.partition("-")[0], age) for path in folder.iterdir()):
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is in use, or gone
            continue


def _unmade(folder: Path, place: Path) -> str:
    """Make a run's folder on this machine; return the problem. Its ``place`` may be in a store."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(place, Remote):
            return f"run.staging: cannot write to {folder}: {error.strerror}; set it to a folder here"
        return f"run.dir: cannot write to {folder}: {error.strerror}"
    return ""


def remove_copies(run: Path) -> None:
    """Remove the copies of a run that has ended from a node of which it has used no rank."""
    with contextlib.suppress(OSError):  # it has none, or a rank of this node is still there
        if name := re.match(b"[0-9a-f]{32} ", read_own(run / TOKEN)):
            folder = in_memory.ROOT / f"{in_memory.PREFIX}{name[0][:32].decode()}"
            with _unused(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _unused(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of copies. Raises OSError if ranks hold it, or the folder is gone."""
    handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _age(folder: Path) -> float:
    """Return the seconds since something in a folder was written; 0 if it is gone."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return 0.0


def _lives(owner: str, age: float) -> bool:
    """Tell whether a torchrun, or a run without one, lives; in another container if it did lately."""
    process, _, space = owner.partition(".")
    if space and space != str(in_memory.process_space()):
        return age < _KEPT
    try:
        with contextlib.suppress(PermissionError):  # another user's
            os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    return True


def _unseen(folder: Path) -> str:
    """Return the problem if a rank does not see a file that the first rank writes into the folder."""
    if dist.get_world_size() == 1:
        return ""
    rank, name = dist.get_rank(), [f".seen-{uuid.uuid4().hex}"]
    if rank == 0:
        (folder / name[0]).touch()
    dist.broadcast_object_list(name, src=0)
    seen = os.path.exists(folder / name[0])
    result = gathered_objects("" if seen else f"rank {rank} on {os.uname().nodename}")
    if rank == 0:
        (folder / name[0]).unlink(missing_ok=True)
    who = next(filter(None, result), "")
    return who and f"run.dir: {folder} is not the same folder on all nodes: {who} has another"


def _new() -> Path:
    """Create and return a new folder; another run may have taken the first name already."""
    while True:
        folder = Path(f"runs/{datetime.now():%Y%m%d-%H%M%S}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        time.sleep(0.1)


def overview(
    job: Job, composition: Composition, sets: Sequence[Samples], resumed: Progress | None
) -> dict[str, str]:
    """Return what a run trains, on what and where, by name; ``resumed`` is what a checkpoint held."""
    config, train, lora = job.config, job.config.train, job.config.model.lora
    drawn, begun = f"drawn by train.seed {train.seed}", config.checkpoint.load_hf
    held = f"of the checkpoint of step {resumed.step}" if resumed else ""
    weights = f"of {begun}" if begun else drawn
    adapters = held or (f"of {lora.load}" if lora.load else drawn)
    count = count_parameters(job.model)
    trained = sum(p.numel() for p in job.model.parameters() if p.requires_grad)
    share = f"of which {trained:,} are trained ({trained / count:.2%})"
    samples, steps, done = sum(map(len, sets)), train.last_step, resumed or Progress(0, 0, 0)
    used = done.samples + max(0, steps - done.step) * train.global_batch
    named = [f"{each.name} {len(each):,}" for each in sets]
    packing = [text for each in sets if (text := getattr(each, "packing", ""))]
    axes = [f"{axis} {n}" for axis in (*AXES, "ep") if (n := getattr(config.parallel, axis)) > 1]
    axes.append(f"zero {config.parallel.zero}")
    ranks = job.world_size * job.islands
    device = composition.mesh.device_type
    held_bytes = state_bytes(placements(composition.model, composition.mesh, config), job)
    size = sum(held_bytes.values()) / 2**30
    return {
        "weights": f"{weights}; adapters {adapters}" if lora.rank else held or weights,
        "parameters": f"{count:,}, {share if trained < count else 'all trained'}",
        "samples": f"{samples:,} of {train.seq_len:,} tokens ({', '.join(named)})",
        **({"packing": "; ".join(packing)} if packing else {}),
        "tokens": f"{used * train.seq_len:,}, {train.global_batch * train.seq_len:,} in a step",
        "epochs": f"{used / samples:.4g}",
        "steps": f"{steps:,}" + (f" of {train.steps:,}" if steps < train.steps else ""),
        "mesh": f"{ranks} rank{'s' * (ranks > 1)}: {', '.join(axes)}",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "memory": f"{size:.3g} GiB of weights, gradients and optimizer on the first rank;"
        " python -m compose plan tells activations too",
    }


class RunReport:
    """The files and the console of a run; other ranks' reports do nothing."""

    def __init__(self, job: Job, held: RunFolder, batches: Batches, done: int, worker: Worker) -> None:
        """Open the files; ``done`` steps were taken. Raises ConfigError if one cannot be written."""
        config, folder = job.config, held.path
        self.place, self.worker, self.say, self.sets = held.place, worker, worker.say, batches.sets
        self.sinks: list[Sink] = []
        # Steps whose numbers are not read: the newest, and others of a pipeline without a flush.
        self.unwritten: deque[StepMetrics] = deque()
        if dist.get_rank() != 0:
            return
        with or_say(f"run.dir: cannot write to {folder}: config.toml"):
            write_whole(folder / "config.toml", dump(config))
        with contextlib.suppress(OSError):  # for people alone
            write_whole(folder / "plan.txt", f"{job.plan}\n")
            if 1 < job.degrees.pp <= _DRAWN / job.micro_batches:
                from compose.pipeline.pictures import drawing, write_png
                from compose.pipeline.timeline import of_run, simulate

                table, title = of_run(job.degrees, job.micro_batches)
                write_png(drawing(simulate(table), title), str(folder / "timeline.png"))
        keep_tokenizer(config, batches, folder / TOKENIZER)
        self.sinks = open_sinks(config, folder, done, self.say)

    def begin(self, job: Job, composition: Composition, resumed: Progress | None) -> None:
        """Say what is run, and from which progress it goes on, if there is any."""
        config, train = job.config, job.config.train
        if resumed and resumed.step >= train.last_step:
            key = "stop_after" if train.last_step == train.stop_after else "steps"
            self.say(
                f"{self.place}: {resumed.step} steps are done, and train.{key} ="
                f" {train.last_step}: nothing is left to train"
            )
        for each in self.sets if self.worker.speaks else ():
            if isinstance(each, Conversations):
                self.say(f"{each.name}:\n{each.table()}")
        self.say(f"{self.place}: {count_parameters(job.model):,} parameters")
        if self.worker.speaks:
            rows = overview(job, composition, self.sets, resumed)
            self.say("\n".join(f"  {name:<12}{text}" for name, text in rows.items()))
        if job.islands > 1:
            self.say(f"{job.islands} islands of {job.world_size} ranks, which train alone")
        if composition.float8.recipe != "off":
            self.say(str(composition.float8))
        if short := short_of_warmup(train.steps, config.optimizer):
            self.say(short)
        slow = config.precision.param == "float32" and config.compile.mode == "off"
        if slow and composition.mesh.device_type == "cuda":
            self.say(
                'this GPU is faster with precision.param = "bfloat16" and compile.mode = "block"'
                " (recipes/llama_one_gpu.toml)"
            )
        if crossing := crosses_nodes(job.degrees):
            self.say(f"{crossing}, whose links are slow; docs/planning.md")

    def add(self, metrics: StepMetrics) -> None:
        """Take a step, to be written when its numbers are read."""
        self.unwritten.append(metrics)

    def write(self, reading: Reading) -> None:
        """Write and print the oldest step that is not written, of which these are the numbers."""
        metrics = self.unwritten.popleft().with_numbers(reading)
        for sink in self.sinks:
            sink.write(metrics)

    def close(self) -> None:
        """Close the files."""
        for sink in self.sinks:
            sink.close()
