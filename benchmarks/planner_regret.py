"""Compare the planner's pick with the fastest mesh, on the ranks of this machine.

    python benchmarks/planner_regret.py [--ranks 4 8] [--models dense moe long] [--repeats 3]
        [--cluster FILE.toml] [--small]

measures the machine with ``python -m compose measure``, estimates every legal mesh of each model with
that file, runs them all in turn, and prints one JSON line for each mesh and one for each model: the
regret (time of the pick over that of the fastest mesh) and Spearman's rank correlation of predicted and
measured times. Measured is the median over the repeats of a step's time, on gloo and CPUs. The pick and
the meshes within 15% of the fastest then run again, seven times in turn: the least of a hundred noisy
medians is lower than its mesh is fast. The regret is of these times.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from planner_page import spearman

from compose import clip_grad_norm_, forward_backward, init_mesh
from compose.build import build, build_optimizer, loss_function
from compose.config import rules
from compose.config.job import Job
from compose.config.toml import load
from compose.data.samples import random_batch
from compose.planner.cluster import Cluster, load_cluster
from compose.planner.estimate import estimate

ROOT = Path(__file__).parent.parent
COMMON = {"train.global_batch": 8, "train.micro_batch": 1, "parallel.zero": 3}
MODELS: dict[str, dict[str, object]] = {
    "dense": {"model.dim": 256, "model.n_layers": 6, "model.hidden_dim": 768, "train.seq_len": 256},
    "moe": {
        "model.name": "qwen3",
        "model.preset": "debug_moe",
        "model.n_layers": 4,
        "train.seq_len": 256,
    },
    "long": {"model.dim": 128, "model.n_layers": 4, "model.hidden_dim": 384, "train.seq_len": 2048},
}
NEAR, FINAL = 1.15, 7  # which meshes run again, and how often
SMALL: dict[str, object] = {"model.n_layers": 2, "train.seq_len": 64}


def jobs(model: str, ranks: int, small: bool) -> list[Job]:
    """Every legal mesh of a model."""
    keys = COMMON | MODELS[model] | (SMALL if small else {})
    overrides = [(key, str(value)) for key, value in keys.items()]
    config, result = load(str(ROOT / "train.toml"), overrides), []
    eps = [e for e in (1, 2, 4, 8) if e <= ranks] if model == "moe" else [1]
    for ep in eps:
        free = replace(config, parallel=replace(config.parallel, ep=ep))
        for degrees, problems in rules.survey(free, ranks):
            if not problems:
                parallel = replace(free.parallel, **degrees)
                result.append(rules.check(replace(free, parallel=parallel), ranks))
    return result


def name_of(job: Job) -> str:
    """The degrees in words."""
    p = job.degrees
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return " ".join(f"{a} {getattr(p, a)}" for a in axes if getattr(p, a) > 1) or "1 rank"


def step_seconds(job: Job, steps: int = 3) -> float:
    """The median time of a step on this rank, after one that starts things up."""
    device, config = torch.device("cpu"), job.config
    composition = build(job, init_mesh(job.degrees), device)
    optimizer = build_optimizer(composition, job)
    count = config.train.global_batch // (job.degrees.dp_shard * job.degrees.dp_replicate)
    batch = random_batch(count, config.train.seq_len, config.model.config.vocab_size, dist.get_rank())
    taken = []
    for _ in range(1 + steps):
        dist.barrier()
        began = time.perf_counter()
        forward_backward(composition, batch, micro_batch=1, loss_function=loss_function(config))
        clip_grad_norm_(composition, config.train.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def one_rank(rank: int, ranks: int, port: int, job: Job, out: str) -> None:
    """One rank of one mesh."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    took = step_seconds(job)
    if rank == 0:
        Path(out).write_text(json.dumps(took))
    dist.barrier()
    os._exit(0)  # a thread of gloo may still hold a tensor


def measured(every: Sequence[Job], repeats: int) -> list[float]:
    """The median time of a step of each mesh, all meshes in turn.

    Each mesh has processes of its own. Groups that stay behind keep threads, which slow down the next.
    """
    results: list[list[float]] = [[] for _ in every]
    for _ in range(repeats):
        for job, times in zip(every, results, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                out = Path(folder) / "time.json"
                given = (job.world_size, port, job, str(out))
                mp.start_processes(one_rank, given, job.world_size, start_method="fork")
                times.append(json.loads(out.read_text()))
    return [statistics.median(times) for times in results]


def cluster_here(ranks: int) -> Cluster:
    """Measure this machine with so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "here.toml"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        measure = [*torchrun, "-m", "compose", "measure", "--out", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(measure, check=True, cwd=ROOT, env=environment, capture_output=True)
        return load_cluster(str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cluster", help="a file that `measure` made; else it is made here")
    parser.add_argument("--small", action="store_true", help="small models, for a test of this program")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        cluster = load_cluster(arguments.cluster) if arguments.cluster else cluster_here(ranks)
        for model in arguments.models:
            every = jobs(model, ranks, arguments.small)
            predicted = [estimate(job, cluster).step_seconds for job in every]
            result = measured(every, arguments.repeats)
            for job, expected, took in zip(every, predicted, result, strict=True):
                row = {
                    "benchmark": "planner_regret",
                    "model": model,
                    "ranks": ranks,
                    "mesh": name_of(job),
                }
                row |= {"predicted": round(expected, 4), "seconds": round(took, 4)}
                print(json.dumps(row), flush=True)
            pick = min(range(len(every)), key=predicted.__getitem__)
            last = [i for i, took in enumerate(result) if took < NEAR * min(result) or i == pick]
            again = dict(zip(last, measured([every[i] for i in last], FINAL), strict=True))
            summary = {
                "benchmark": "planner_regret",
                "model": model,
                "ranks": ranks,
                "meshes": len(every),
                "pick": name_of(every[pick]),
                "again": {name_of(every[i]): round(took, 4) for i, took in again.items()},
                "fastest": name_of(every[min(again, key=again.__getitem__)]),
                "regret": round(again[pick] / min(again.values()), 3),
                "spearman": round(spearman([*zip(predicted, result, strict=True)]), 3),
                "torch": torch.__version__,
            }
            print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
