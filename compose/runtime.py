"""The process group of a command: started, named in errors once, and shut down."""

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

_seen: tuple[dist.Store, int] | None = None  # where this rank says what it does, and its number


def note(doing: str) -> None:
    """Tell the other ranks what this one is about to do, so that they can say so if it never ends."""
    if _seen:
        store, rank = _seen
        store.set(f"compose/seen/{rank}", f"{time.time()} {doing}")


def laggards(store: dist.Store, world_size: int) -> str:
    """Which rank was heard of longest ago, and what it was doing then; empty if none ever said."""
    seen = []
    for rank in range(world_size):
        if store.check([f"compose/seen/{rank}"]):
            when, _, doing = store.get(f"compose/seen/{rank}").decode().partition(" ")
            seen.append((float(when), rank, doing))
    if not seen:
        return ""
    when, rank, doing = min(seen)
    return f"rank {rank} is behind: last heard of {time.time() - when:.0f} s ago, before {doing}"


class TrainingError(Exception):
    """The run cannot go on, for a reason that one line tells; every rank raises it alike."""


def pick_device(name: str) -> torch.device:
    """The device of this rank for ``run.device``: one GPU per local rank, or the CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(config: Config) -> Iterator[torch.device]:
    """The default process group, under torchrun or alone, and this rank's device.

    What goes wrong inside is reported by the rank where it went wrong first, once: a ConfigError
    (exit code 2) or TrainingError (1) as one line, anything else with its traceback (1). The others
    exit quietly, for theirs is only the echo of it.
    """
    # FSDP warns of a view that nothing here changes in place.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    if "RANK" in os.environ:
        store, rank, world_size = next(iter(dist.rendezvous("env://")))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    global _seen
    try:
        device = pick_device(config.run.device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("compose", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=config.comm.timeout),
            device_id=device if device.type == "cuda" else None,
        )
        _seen = (store, rank) if world_size > 1 else None
        yield device
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # No orderly shutdown: other ranks may be waiting in a collective until torchrun ends them.
        if store.add("compose/failed", 1) == 1:
            _report(error, rank)
            behind = laggards(store, world_size) if isinstance(error, RuntimeError) else ""
            if behind:
                print(behind, file=sys.stderr)
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ConfigError) else 1)
    dist.destroy_process_group()


def _report(error: Exception, rank: int) -> None:
    if isinstance(error, (ConfigError, TrainingError)):
        print(error, file=sys.stderr)
    else:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
