"""The process group of a command: its start, one report of an error, its end, and signals to it."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist

from compose.config.models import source_files
from compose.config.tables import Config
from compose.config.toml import values_of
from compose.errors import ConfigError, toml_value
from compose.ops.torch_versions import default_store
from compose.train import heartbeat
from compose.train.workers import FAILED, SpareRanks, Worker, divide

_SKEW = 3.0  # seconds within which ranks that wait for the same one give up

LAUNCHER_DIED = signal.SIGHUP  # stands for SIGTERM to a rank whose torchrun is gone; it is not sent
# Keys of folders and files, whose paths may differ between nodes.
_OF_A_NODE = ("run.dir", "run.staging", "data.path", "data.validation", "optimizer.offload_dir")
_OF_A_NODE += ("checkpoint.load_hf", "model.lora.load")
_SENT = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
# A signal's code is its place here, from 1. If ranks got different signals, the last of them counts.
_ASKS = (*_SENT, LAUNCHER_DIED)
# Programs start tasks without making them ranks: the number of tasks, a task's own number, the program.
_OF_TASKS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    ("PMI_SIZE", "PMI_RANK", "mpirun"),
)
_ECHO = 2.0  # seconds within which a second signal is the first one, passed on by torchrun
_JOINED = 2.0  # seconds until the torchruns of all nodes know that a node has joined


def set_timeout(timeout: timedelta, but: Sequence[dist.ProcessGroup]) -> None:
    """Set how long collectives wait from now on, except in some groups, and ranks may be silent.

    Meshes make their groups with PyTorch's own limit. On gloo, sends and receives between two ranks, as
    in a pipeline, keep the limit that their group was made with.
    """
    # PyTorch lists the groups of flattened meshes, and those that only one module knows, here alone.
    for group in dist.distributed_c10d._world.pg_map:
        if not any(group is other for other in but):
            group.set_timeout(timeout + _backstop("nccl" in dist.get_backend(group)))
    default_store().set(heartbeat.limit_key(dist.get_rank()), str(timeout.total_seconds()))


def _backstop(nccl: bool) -> timedelta:
    """Return how much longer than the watch here (heartbeat.py) a group waits.

    NCCL's watchdog aborts the process and names no rank, so the watch must be first.
    """
    return timedelta(seconds=60 if nccl else 0)


def outlive(stream: IO[str]) -> None:
    """Ignore errors of writing to a stream, so that a full disk or a broken pipe ends no run."""

    def patient(call: Callable[..., Any], *given: Any) -> None:
        with contextlib.suppress(OSError):
            call(*given)

    vars(stream).update({name: partial(patient, getattr(stream, name)) for name in ("write", "flush")})


class TrainingError(Exception):
    """The run cannot go on, for a reason that fits on one line; every rank raises it."""


def pick_device(name: str) -> torch.device:
    """Return the device of this rank for ``run.device``: one GPU per local rank, or the CPU.

    A launcher may show each process its own GPU alone, as Slurm does with ``--gpu-bind``.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # It is read at the first use of CUDA. Segments that grow leave fewer gaps that nothing fits into.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if 1 < count <= local:
        raise ConfigError(
            f"run.device: local rank {local} has no GPU, since this process sees {count}: start at most"
            f" {count} processes on a node (--nproc-per-node {count}), or show each process its own GPU"
        )
    device = torch.device("cuda", 0 if count == 1 else local)
    torch.cuda.set_device(device)
    return device


def _claim(device: torch.device, store: dist.Store) -> None:
    """Raise ConfigError if another rank has this GPU: NCCL takes one rank on each."""
    if device.type != "cuda":
        return
    gpu = torch.cuda.get_device_properties(device)
    if store.add(f"compose/gpu/{socket.gethostname()}/{gpu.uuid}", 1) > 1:
        raise ConfigError(
            f"run.device: two ranks have the same {gpu.name} (CUDA_VISIBLE_DEVICES ="
            f" {os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}): start one process for each GPU, or run"
            " with --run.device=cpu"
        )


@contextmanager
def process_group(config: Config, islands: int = 1, ranks: int = 0) -> Iterator[torch.device]:
    """Start the default process group, under torchrun or alone, and yield this rank's device.

    An error inside is reported once, by the rank where it happened first: a ConfigError (exit code 2)
    or TrainingError (1) as one line, anything else with its traceback (1). The other ranks exit
    quietly, since their errors only follow from it.

    The ranks are divided into so many ``islands`` (DiLoCo workers). The default process group has the
    ranks of this one's own. If only the first ``ranks`` of the launch are used, the others call
    :func:`stand_by`.
    """
    # FSDP warns about a view that is never changed in place here.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    everyone, rank, world_size = _rendezvous(config)
    spares = SpareRanks(everyone, world_size - ranks if ranks else 0)
    world_size -= spares.count

    def end() -> None:
        # The store may be in a process that is stopped, and then does not answer.
        telling = threading.Thread(target=spares.release, args=(1,), daemon=True)
        telling.start()
        telling.join(_SKEW + 1)
        os._exit(1)

    worker, store, rank, world_size = divide(everyone, rank, world_size, islands)
    timeout = config.comm.first_step_timeout
    try:
        _agree(everyone, config)
        device = pick_device(config.run.device)
        _claim(device, store)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("compose", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout + _backstop(device.type == "cuda"),
            device_id=device if device.type == "cuda" else None,
        )
        store = default_store()
        watch = heartbeat.HeartbeatThreads(
            store,
            rank,
            world_size,
            timeout.total_seconds(),
            partial(_report_silent, worker, world_size),
            kept_by_first=heartbeat.store_in_first_rank() and worker.index == 0,
            parent=heartbeat.launcher(),
            end=end,
            launch=(everyone, spares.count),
        )
        watch.start()
        if rank == 0:
            spares.listen()
        yield device
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError):
            heartbeat.Stragglers(store, world_size).give_up(rank)
        spares.release(130)
        sys.exit(130)
    except Exception as error:
        # No orderly shutdown: other ranks may be waiting in a collective until torchrun ends them.
        try:
            _conclude(error, store, rank, world_size, worker)
        except RuntimeError:  # the store is gone, and with it torchrun or rank 0: nobody else tells
            _report(error, rank)
        sys.stderr.flush()
        code = 2 if isinstance(error, ConfigError) else 1
        spares.release(code)
        os._exit(code)
    watch.stop()
    dist.destroy_process_group()
    spares.release(0)
    with contextlib.suppress(RuntimeError):  # the store has ended, and with it the job
        worker.leave(rank, world_size, timeout.total_seconds())


def stand_by(config: Config) -> int:
    """Wait as a rank that the run's mesh does not use; return the code with which the run ends."""
    everyone, *_ = _rendezvous(config)
    _agree(everyone, config)
    return SpareRanks(everyone, 1).wait()


def _agree(store: dist.Store, config: Config) -> None:
    """Raise ConfigError if another rank has another config, also one of ``run.elastic``, or code."""
    keys = values_of(config)
    mine = {name: toml_value(value) for name, value in keys.items() if name not in _OF_A_NODE}
    code = b"".join(path.read_bytes() for path in source_files(config.model.name))
    mine["the code"] = hashlib.sha256(code).hexdigest()[:12]
    here = os.uname().nodename
    there, theirs = json.loads(store.compare_set("compose/config", "", json.dumps([here, mine])))
    cure = ", or nodes of one kind, as run.elastic chooses by their devices" * config.run.elastic
    if problems := [
        f"{name}: {mine.get(name)} on {here}, and {theirs.get(name)} on {there}: all ranks need the"
        f" same file, keys and code{cure}"
        for name in mine | theirs
        if mine.get(name) != theirs.get(name)
    ]:
        raise ConfigError(*problems)


def _conclude(error: Exception, store: dist.Store, rank: int, world_size: int, worker: Worker) -> None:
    """Tell of ``error`` if this rank is the first to fail; else let the first have told."""
    # A torchrun that has seen a rank die ends the others at once. Then nobody would tell, and ranks
    # that are still in their step would wait for it. This rank ends by itself within seconds.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stragglers = heartbeat.Stragglers(store, world_size)
    stragglers.give_up(rank)
    if _first_to_fail(store, worker):
        _report(error, rank)
        # A collective fails if another rank has died or hangs.
        from_others = isinstance(error, dist.DistError) or "/gloo/" in str(error)
        if from_others and (line := stragglers.straggler(wait=_SKEW)):
            print(line, file=sys.stderr)
        store.set(heartbeat.SAID, "")
    else:
        _wait_for_first(store)
    # If the store is in this rank, it stays until the others know that they are not the first.
    end = time.monotonic() + _SKEW if rank == 0 and heartbeat.store_in_first_rank() else 0.0
    while time.monotonic() < end and store.add(FAILED, 0) < world_size:
        time.sleep(0.05)


def _first_to_fail(store: dist.Store, worker: Worker) -> bool:
    """Note that a rank has failed; return whether it is the first, of all workers."""
    first = store.add(FAILED, 1) == 1
    return first and (worker.count == 1 or worker.store.add(FAILED, 1) == 1)


def _wait_for_first(store: dist.Store) -> None:
    with contextlib.suppress(RuntimeError):
        store.wait([heartbeat.SAID], timedelta(seconds=2 * _SKEW))


def _report_silent(
    worker: Worker, world_size: int, store: dist.Store | None, rank: int, seconds: float
) -> None:
    """Tell which rank is silent, if no failure is told yet. ``store`` is None if that rank holds it."""
    if store is None:
        print(heartbeat.behind(rank, seconds, ""), file=sys.stderr, flush=True)
    elif _first_to_fail(store, worker):
        line = heartbeat.Stragglers(store, world_size).silent(rank, seconds)
        print(line, file=sys.stderr, flush=True)
        store.set(heartbeat.SAID, "")
    else:
        _wait_for_first(store)


def _rendezvous(config: Config) -> tuple[dist.Store, int, int]:
    """Return the store where ranks find each other, this rank's number, and the number of ranks."""
    if "RANK" not in os.environ:
        for count, place, name in _OF_TASKS:
            tasks = os.environ.get(count, "1")
            if tasks != "1" and os.environ.get(place) == "0":
                alone = (
                    f"environment: {name} has {tasks} tasks, and RANK is not set: each task runs alone"
                )
                print(f"{alone}; torchrun makes ranks of them", file=sys.stderr, flush=True)
                break
        return dist.HashStore(), 0, 1
    limit = config.comm.first_step_timeout
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=limit)))
    except dist.DistError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            why = str(error).splitlines()[0].rstrip(".")
            print(
                f"rank {os.environ['RANK']} did not meet the others at {where} ({why}); all"
                f" {os.environ['WORLD_SIZE']} ranks must start within {limit.total_seconds():.0f} s"
                " (the longer of comm.start_timeout and comm.timeout)",
                file=sys.stderr,
            )
        sys.exit(1)
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # Torchrun's default rendezvous keeps one store. After a restart the addresses of the dead
        # processes would still be there. (c10d's rendezvous makes a new store; with several nodes each
        # node counts restarts by itself.)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    return store, rank, world_size


def _report(error: Exception, rank: int) -> None:
    if isinstance(error, (ConfigError, TrainingError)):
        print(error, file=sys.stderr)
    else:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)


def name_of(asked: signal.Signals) -> str:
    """Return what has asked a run to end, for a person."""
    return {signal.SIGINT: "Ctrl-C", LAUNCHER_DIED: "the death of a torchrun"}.get(asked, asked.name)


class Signals:
    """A context in which SIGINT, SIGTERM and SIGUSR1 let the current step finish.

    A second signal, later than the echo of the first, ends the process at once. In a thread beside the
    main one it does nothing.
    """

    def __init__(self, device: torch.device, worker: Worker) -> None:
        self.device, self.worker, self.code, self.since = device, worker, 0, 0.0
        self.agreed, self.ends = (0, 0), 0.0

    def __enter__(self) -> "Signals":
        # Python takes handlers in the main thread alone. Ray's workers train in another one.
        sent = _SENT if threading.current_thread() is threading.main_thread() else ()
        self.previous = {number: signal.signal(number, self._note) for number in sent}
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        time.sleep(max(0.0, self.ends - time.monotonic()))
        if dist.get_rank() == 0:
            self.worker.finished()

    def asked(self, step: int, code: int) -> signal.Signals | None:
        """Return the signal that asks the run to end, the same on every rank.

        Workers do not wait for each other after each step. If one is asked, they agree on a step.
        ``code`` is the greatest of all ranks, which were asked within the last step.
        """
        if self.worker.count > 1:
            if not self.agreed[1]:
                self.agreed = self._agreed(step, code)
            code = self.agreed[0] if step >= self.agreed[1] else 0
        if (
            code
            and _ASKS[code - 1] == signal.SIGTERM
            and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
        ):
            # A torchrun that starts its ranks again, since a node has joined, ends them by SIGTERM.
            # Another that does not know of the node yet takes the end of its own ranks for the run's.
            self.ends = time.monotonic() + _JOINED
        return _ASKS[code - 1] if code else None

    def _agreed(self, step: int, code: int) -> tuple[int, int]:
        """Return why and after which step all workers stop; zeros if they do not."""
        result = self.worker.stop(step, code) if dist.get_rank() == 0 else (0, 0)
        # A fill takes its value along; a tensor made of a list would be copied, and waited for.
        shared = torch.stack([torch.full((), n, dtype=torch.int64, device=self.device) for n in result])
        if dist.get_world_size() > 1:
            dist.broadcast(shared, src=0)
        why, last = shared.tolist()
        return why, last

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.code and now > self.since + _ECHO:
            raise KeyboardInterrupt
        if not self.code:
            orphan = number == signal.SIGTERM and heartbeat.launcher_died()
            self.code, self.since = _ASKS.index(LAUNCHER_DIED if orphan else number) + 1, now
