"""Context parallel's attention on the ranks of one machine: peak memory and time, by method.

    torchrun --nproc-per-node 4 benchmarks/context.py [--length N]

prints one JSON line per method: bytes of live tensors at the peak of one rank's forward and backward at
two lengths, and time as a ratio to the ring's, the methods taking turns.

    python benchmarks/context.py --device cuda [--length N]

prints one JSON line of one process: the blocks and merges of both ranks of a ring of two, one after the
other, and the operator itself, against torch's own flash attention: time as a ratio, and the error of
each against float64.

    python benchmarks/context.py --window W [--device cuda]

prints one JSON line: time and bytes of forward and backward at several lengths, and the slope of their
logarithms; 1 is linear growth.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from compose import AttentionOptions, attention
from compose.ops.attention import GradientParts, MergedOutput, parts_of
from compose.ops.attention_layout import task_of
from compose.parallel.context_parallel import ContextParallel, Method, chunk_starts

sys.path.insert(0, str(Path(__file__).parents[1]))  # models/ is of the checkout

from models.layers.attention import AttentionCore

METHODS: list[Method] = ["ring", "allgather", "ulysses"]
HEADS, KV_HEADS, WIDTH = 8, 4, 32
TURNS = 5
LENGTHS = [4096, 8192, 16384, 32768]


def inputs(length: int) -> list[Tensor]:
    """This rank's q, k, v of a sequence of ``length``."""
    part = length // dist.get_world_size()
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, part, n, WIDTH, requires_grad=True) for n in heads]


def peak_bytes(core: nn.Module, length: int) -> int:
    """Most bytes of tensors allocated and not yet freed in one forward and backward.

    The least of three runs: gloo lets go of a collective's tensors when it gets to it.
    """

    def run() -> None:
        q, k, v = inputs(length)
        core(q, k, v).sum().backward()

    return min(peak_of(run) for _ in range(3))


def peak_of(run: Callable[[], None], device: str = "cpu") -> int:
    """Most bytes of tensors allocated and not yet freed within a call."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=cpu) as trace:
        run()
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


def ring_of_two(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of causal attention, (1, S, H, K), in the parts a ring of two would have."""
    length = q.shape[1] // 2
    starts = [chunk_starts(r, 2, "headtail", length) for r in range(2)]
    places = [torch.cat([torch.arange(c, c + length // 2) for c in s]).to(q.device) for s in starts]
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dkv = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
    scores = (True, 0, q.shape[-1] ** -0.5, 0.0)
    for mine, rows in enumerate(places):
        here = q[:, rows].transpose(1, 2)
        of_q, total = GradientParts([here], once=False), MergedOutput(here, here.shape[-1])
        # A rank's own keys first, then what the ring brings.
        arrived = []
        for source in (mine, 1 - mine):
            keys, values = (x[:, places[source]].transpose(1, 2) for x in (k, v))
            task = task_of((None, None), (starts[mine], starts[source]), scores)
            arrived.append((keys, values, places[source], parts_of(task, here, keys, values)))
        for keys, values, _, parts in arrived:
            for part in parts.forward(here, keys, values):
                total.add(*part)
        whole = total.out.to(q.dtype)
        out[:, rows] = whole.transpose(1, 2)
        result = (whole, total.lse)
        for keys, values, rows_k, parts in arrived:
            of_kv = GradientParts([keys, values], once=False)
            for at_q, at_k, (one, *two) in parts.backward(
                grad[:, rows].transpose(1, 2), (here, keys, values), result
            ):
                of_q.add(at_q, [one])
                of_kv.add(at_k, two)
            for sums, results in zip(dkv, of_kv.of, strict=True):
                sums[:, rows_k] += results.transpose(1, 2)
        dq[:, rows] = of_q.of[0].transpose(1, 2).to(q.dtype)
    return [out, dq, *(x.to(k.dtype) for x in dkv)]


def operator(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by the operator."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(inputs[0], inputs[1], inputs[2])[0]
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by torch's flash kernel."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def windowed(device: str, window: int) -> dict[str, object]:
    """Time and memory of forward and backward by length, and how they grow with it."""
    core = AttentionCore(AttentionOptions(window=window))
    kind = torch.bfloat16 if device == "cuda" else torch.float32

    def run(length: int) -> None:
        q, k, v = (
            torch.randn(1, length, n, WIDTH, dtype=kind, device=device, requires_grad=True)
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        core(q, k, v).sum().backward()

    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for turn in range(TURNS + 1):  # the first warms up
        for length, took in times.items():
            synchronize(device)
            start = time.perf_counter()
            run(length)
            synchronize(device)
            if turn:
                took.append(time.perf_counter() - start)
    seconds = [statistics.median(took) for took in times.values()]
    bytes = [peak_of(lambda length=length: run(length), device) for length in LENGTHS]
    return {
        "benchmark": "context_window",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "window": window,
        "lengths": LENGTHS,
        "seconds": [round(x, 5) for x in seconds],
        "bytes": bytes,
        "slope_of_time": round(slope(LENGTHS, seconds), 3),
        "slope_of_memory": round(slope(LENGTHS, bytes), 3),
        "torch": torch.__version__,
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent of the power of x that fits y best; 1 is linear growth."""
    return statistics.linear_regression([math.log(a) for a in x], [math.log(b) for b in y]).slope


def one_process(device: str, length: int) -> dict[str, object]:
    """Ring of two against torch's kernel on ``device``, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    exact = [torch.randn(1, length, n, 64, generator=generator).to(device) for n in heads]
    half = [x.bfloat16() for x in exact]
    times: dict[str, list[float]] = {"ring": [], "operator": [], "flash": []}
    results: dict[str, list[Tensor]] = {}
    for turn in range(TURNS + 1):  # the first warms up
        for name, work in (("ring", ring_of_two), ("operator", operator), ("flash", flash)):
            synchronize(device)
            start = time.perf_counter()
            results[name] = work(*half)
            synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    exact = [x.double().requires_grad_() for x in half]
    q, k, v, grad = exact
    first = [x.transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(first[0], first[1], first[2], is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2)
    right = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    errors = {
        name: max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, right, strict=True))
        for name, got in results.items()
    }
    ratios = {name: [a / b for a, b in zip(times[name], times["flash"], strict=True)] for name in times}
    return {
        "benchmark": "context_one_process",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "length": length,
        "time_to_flash": round(statistics.median(ratios["ring"]), 3),
        "time_of_operator_to_flash": round(statistics.median(ratios["operator"]), 3),
        "error": errors["ring"],
        "error_of_operator": errors["operator"],
        "error_of_flash": errors["flash"],
        "torch": torch.__version__,
    }


def synchronize(device: str) -> None:
    """Wait for what was started on a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192, help="shorter of the two sequences")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="one process, on this device")
    parser.add_argument("--window", type=int, help="how time and memory grow with this window")
    options = parser.parse_args()
    length = options.length
    if options.window:
        print(json.dumps(windowed(options.device or "cpu", options.window)))
        return
    if options.device:
        print(json.dumps(one_process(options.device, length)))
        return
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
