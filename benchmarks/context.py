"""Context parallel's attention on the ranks of one machine: peak memory and time, by method.

    torchrun --nproc-per-node 4 benchmarks/context.py [--length N]

prints one JSON line per method: bytes of live tensors at the peak of one rank's forward and backward at
two lengths, and time as a ratio to the ring's, the methods taking turns.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from compose.context_parallel import ContextParallel, Method
from models.layers.attention import AttentionCore

METHODS: list[Method] = ["ring", "allgather", "ulysses"]
HEADS, KV_HEADS, WIDTH = 8, 4, 32
TURNS = 5


def inputs(length: int) -> list[Tensor]:
    """This rank's q, k, v of a sequence of ``length``."""
    part = length // dist.get_world_size()
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, part, n, WIDTH, requires_grad=True) for n in heads]


def peak_bytes(core: nn.Module, length: int) -> int:
    """Most bytes of tensors allocated and not yet freed in one forward and backward.

    The least of three runs: gloo lets go of a collective's tensors when it gets to it.
    """
    return min(_peak_of_one_run(core, length) for _ in range(3))


def _peak_of_one_run(core: nn.Module, length: int) -> int:
    q, k, v = inputs(length)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=cpu) as trace:
        core(q, k, v).sum().backward()
    live = peak = 0
    for event in trace.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()  # type: ignore[attr-defined]
            peak = max(peak, live)
    return peak


def seconds(core: nn.Module, length: int) -> float:
    """Time of one forward and backward of all ranks."""
    q, k, v = inputs(length)
    dist.barrier()
    start = time.perf_counter()
    core(q, k, v).sum().backward()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192, help="shorter of the two sequences")
    length = parser.parse_args().length
    dist.init_process_group("gloo")
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cores = {m: parallelize_module(AttentionCore(), mesh, ContextParallel(m)) for m in METHODS}
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(TURNS + 1):  # the first warms up
        for method, core in cores.items():
            spent = seconds(core, length)
            if turn:
                times[method].append(spent)
    for method, core in cores.items():
        ratios = [a / b for a, b in zip(times[method], times["ring"], strict=True)]
        result = {
            "benchmark": "context",
            "method": method,
            "ranks": dist.get_world_size(),
            "length": length,
            "peak_bytes": peak_bytes(core, length),
            "peak_bytes_at_twice_the_length": peak_bytes(core, 2 * length),
            "time_to_ring": round(statistics.median(ratios), 3),
            "torch": torch.__version__,
        }
        if dist.get_rank() == 0:
            print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
