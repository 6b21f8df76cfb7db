"""The process group of a command: its start, one report of an error, and its end."""

import contextlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from compose.config import Config
from compose.errors import ConfigError
from compose.parallel.mesh import Comm
from compose.runtime.heartbeat import Watch, launcher, store_in_first_rank

_SKEW = 3.0  # seconds within which ranks that wait for the same one give up
_SAID = "compose/said"


class Notes:
    """What each rank was about to do, kept where the others can read it if it never ends."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size, self.count = store, rank, world_size, 0

    def note(self, doing: str) -> None:
        """Of this rank; every rank makes the same notes."""
        self.count += 1
        self.store.set(f"compose/seen/{self.rank}", f"{self.count} {time.time()} {doing}")

    def give_up(self) -> None:
        """This rank has failed, so it is none that hangs."""
        self.store.set(f"compose/gave_up/{self.rank}", "")

    def laggard(self, wait: float = 0.0) -> str:
        """Return which rank is behind, among those that do not give up within ``wait`` seconds.

        It is the one with the fewest notes, heard of longest ago; empty if none ever noted anything.
        """
        end = time.monotonic() + wait
        while len(self._waiting()) > 1 and time.monotonic() < end:
            time.sleep(0.1)
        waiting, seen = self._waiting(), []
        for rank in range(self.world_size):
            if self.store.check([f"compose/seen/{rank}"]):
                count, when, doing = self.store.get(f"compose/seen/{rank}").decode().split(" ", 2)
                seen.append((rank not in waiting, int(count), float(when), rank, doing))
        if not seen:
            return ""
        _, _, when, rank, doing = min(seen)
        return _behind(rank, time.time() - when, doing)

    def silent(self, rank: int, seconds: float) -> str:
        """That ``rank``, of which nothing was heard for so long, is behind."""
        key = f"compose/seen/{rank}"
        known = self.store.get(key).decode().split(" ", 2) if self.store.check([key]) else []
        return _behind(rank, seconds, known[2] if known else "")

    def _waiting(self) -> set[int]:
        """Ranks that have not given up."""
        return {r for r in range(self.world_size) if not self.store.check([f"compose/gave_up/{r}"])}


def _behind(rank: int, seconds: float, doing: str) -> str:
    before = f", before {doing}" if doing else ""
    return f"rank {rank} is behind: last heard of {seconds:.0f} s ago{before}"


_notes: Notes | None = None
_watch: Watch | None = None


def note(doing: str) -> None:
    """Tell the other ranks what this one is about to do, so that they can say so if it never ends."""
    if _notes:
        _notes.note(doing)


def start_timeout(comm: Comm) -> timedelta:
    """Return how long a collective waits until the first step has ended."""
    return timedelta(seconds=max(comm.start_timeout, comm.timeout))


def set_timeout(timeout: timedelta, but: dist.ProcessGroup) -> None:
    """Set how long collectives wait from now on, and how long a rank may be silent.

    Meshes make their groups with PyTorch's own limit, whatever the default group has. On gloo, sends
    and receives between two ranks, as in a pipeline, keep the limit that their group was made with.

    Args:
        timeout: The new limit.
        but: The group that keeps its limit.
    """
    # This is private. But the groups of flattened meshes, and those that only one module knows, are
    # listed nowhere else.
    for group in dist.distributed_c10d._world.pg_map:
        if group is not but:
            group.set_timeout(timeout)
    if _watch:
        _watch.limit = timeout.total_seconds()


class TrainingError(Exception):
    """The run cannot go on, for a reason that fits on one line; every rank raises it alike."""


def pick_device(name: str) -> torch.device:
    """Return the device of this rank for ``run.device``: one GPU per local rank, or the CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(config: Config) -> Iterator[torch.device]:
    """Start the default process group, under torchrun or alone, and yield this rank's device.

    An error inside is reported once, by the rank where it happened first: a ConfigError (exit code 2)
    or TrainingError (1) as one line, anything else with its traceback (1). The other ranks exit
    quietly, since their errors only follow from it.
    """
    # FSDP warns about a view that is never changed in place here.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    store, rank, world_size = _rendezvous()
    global _notes, _watch
    notes = Notes(store, rank, world_size)
    _watch = Watch(
        store,
        rank,
        world_size,
        start_timeout(config.comm).total_seconds(),
        _report_silent,
        failed=_SAID,
        kept_by_first=store_in_first_rank(),
        parent=launcher(),
    )
    try:
        device = pick_device(config.run.device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("compose", store),
            rank=rank,
            world_size=world_size,
            timeout=start_timeout(config.comm),
            device_id=device if device.type == "cuda" else None,
        )
        _notes = notes if world_size > 1 else None
        _watch.start()
        yield device
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # No orderly shutdown: other ranks may be waiting in a collective until torchrun ends them.
        try:
            _conclude(error, notes)
        except RuntimeError:  # the store is gone, and with it torchrun or rank 0: nobody else tells
            _report(error, rank)
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ConfigError) else 1)
    _watch.stop()
    dist.destroy_process_group()


def _conclude(error: Exception, notes: Notes) -> None:
    """Tell of ``error`` if this rank is the first to fail; else let the first have told."""
    notes.give_up()
    if notes.store.add("compose/failed", 1) == 1:
        _report(error, notes.rank)
        if _from_others(error) and (behind := notes.laggard(wait=_SKEW)):
            print(behind, file=sys.stderr)
        notes.store.set(_SAID, "")
    else:
        _wait_for_first(notes.store)


def _wait_for_first(store: dist.Store) -> None:
    with contextlib.suppress(RuntimeError):
        store.wait([_SAID], timedelta(seconds=2 * _SKEW))


def _report_silent(store: dist.Store | None, rank: int, seconds: float) -> None:
    """Tell which rank is silent, if nobody has told of anything. store: None where that rank has it."""
    if store is None:
        print(_behind(rank, seconds, ""), file=sys.stderr, flush=True)
    elif store.add("compose/failed", 1) == 1:
        print(Notes(store, 0, 0).silent(rank, seconds), file=sys.stderr, flush=True)
        store.set(_SAID, "")
    else:
        _wait_for_first(store)


def _rendezvous() -> tuple[dist.Store, int, int]:
    """Return the store where ranks find each other, this rank's number, and the number of ranks."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # Torchrun's default rendezvous keeps one store. After a restart the addresses of the dead
        # processes would still be there. (c10d's rendezvous makes a new store; with several nodes each
        # node counts restarts by itself.)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    return store, rank, world_size


def _from_others(error: Exception) -> bool:
    """Tell whether a collective has failed, as it does if another rank has died or hangs."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _report(error: Exception, rank: int) -> None:
    if isinstance(error, (ConfigError, TrainingError)):
        print(error, file=sys.stderr)
    else:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
