"""The planner's peak of memory against what ranks on CPUs really allocate, for drawn configurations.

    python benchmarks/planner_memory.py [--rows N] [--seed S]

prints one JSON line for each configuration and rank, and then one with the largest error. A row is a
second optimizer step: forward, backward, clipping and the optimizer. The measured bytes are those of
benchmarks/allocations.py.
"""

import gc
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from allocations import Allocations
from memory import held

from compose import clip_grad_norm_, forward_backward, init_mesh, legality
from compose.build import build, build_optimizer, loss_function
from compose.data import random_batch
from compose.legality.job import Job
from compose.toml import load

TRAIN = str(Path(__file__).parent.parent / "train.toml")
Keys = dict[str, object]


def job_of(keys: Keys, ranks: int) -> Job:
    """The job of train.toml with the keys of a row."""
    return legality.check(load(TRAIN, [(key, str(value)) for key, value in keys.items()]), ranks)


def measure(job: Job) -> int:
    """Bytes at the peak of a second step, of this rank; every rank calls it."""
    gc.collect()
    device, config = torch.device("cpu"), job.config
    seen, train = Allocations(device), config.train
    mesh = init_mesh(config.parallel, device.type)
    with tempfile.TemporaryDirectory() as scratch, seen.watched():
        composition = build(job, mesh, device)
        optimizer = build_optimizer(composition, job, folder=Path(scratch))
        count = train.global_batch // (config.parallel.dp_shard * config.parallel.dp_replicate)
        batch = random_batch(count, train.seq_len, config.model.config.vocab_size, 0)
        for name in ("positions", "document_ids"):
            del batch[name]
        for step in range(2):
            if step:
                gc.collect()
                seen.begin(held(config, composition.model, optimizer))
            forward_backward(
                composition, batch, micro_batch=train.micro_batch, loss_function=loss_function(config)
            )
            clip_grad_norm_(composition, train.max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return seen.peak()


def one_rank(rank: int, ranks: int, port: int, keys: Keys, out: str) -> None:
    """One rank of a row, which writes its peak."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    peak = measure(job_of(keys, ranks))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, peak)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()
    os._exit(0)  # a thread of gloo may still hold a tensor


def measured(keys: Keys, ranks: int) -> list[int]:
    """The peak of each rank, in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = Path(folder) / "peaks.json"
        mp.spawn(one_rank, (ranks, port, keys, str(out)), nprocs=ranks)
        return json.loads(out.read_text())
