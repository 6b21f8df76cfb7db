"""Context parallel's attention on the ranks of one machine: peak memory and time, by method.

    torchrun --nproc-per-node 4 benchmarks/context.py [--length N]

prints one JSON line per method: bytes of live tensors at the peak of one rank's forward and backward at
two lengths, and time as a ratio to the ring's, the methods taking turns.

    python benchmarks/context.py --device cuda [--length N]

prints one JSON line of one process: the blocks and merges of both ranks of a ring of two, one after the
other, against torch's own flash attention: time as a ratio, and the error of each against float64.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from compose.parallel.attention_blocks import Gradients, Merged, blocks
from compose.parallel.context_parallel import ContextParallel, Method, chunks_of
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


def ring_of_two(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of causal attention, (1, H, S, K), in the parts a ring of two would have."""
    size = q.shape[2] // 4
    parts = [
        torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks_of(r, 2, "headtail")])
        for r in range(2)
    ]
    out, dq, dk, dv = (torch.empty_like(x) for x in (q, q, k, v))
    dkv = torch.zeros((2, *k.shape), dtype=torch.float32, device=k.device)
    for mine, rows in enumerate(parts):
        rows = rows.to(q.device)
        merged = Merged(q[:, :, rows])
        # A rank's own keys first, then what the ring brings.
        pairs = [
            (
                k[:, :, parts[s]],
                v[:, :, parts[s]],
                parts[s],
                blocks(chunks_of(mine, 2, "headtail"), chunks_of(s, 2, "headtail"), size, [[0]]),
            )
            for s in (mine, 1 - mine)
        ]
        for keys, values, _, found in pairs:
            merged.add(keys, values, found)
        whole = merged.out.to(q.dtype)
        out[:, :, rows] = whole
        gradients = Gradients(grad[:, :, rows], q[:, :, rows], whole, merged.lse)
        for keys, values, places, found in pairs:
            dkv[:, :, :, places] += gradients.add(keys, values, found)
        dq[:, :, rows] = gradients.dq.to(q.dtype)
    dk.copy_(dkv[0])
    dv.copy_(dkv[1])
    return [out, dq, dk, dv]


def flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by torch's flash kernel."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            inputs[0], inputs[1], inputs[2], is_causal=True, enable_gqa=True
        )
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def one_process(device: str, length: int) -> dict[str, object]:
    """Ring of two against torch's kernel on ``device``, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    exact = [torch.randn(1, n, length, 64, generator=generator).to(device) for n in heads]
    half = [x.bfloat16() for x in exact]
    times: dict[str, list[float]] = {"ring": [], "flash": []}
    found: dict[str, list[Tensor]] = {}
    for turn in range(TURNS + 1):  # the first warms up
        for name, work in (("ring", ring_of_two), ("flash", flash)):
            synchronize(device)
            start = time.perf_counter()
            found[name] = work(*half)
            synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    exact = [x.double().requires_grad_() for x in half]
    q, k, v, grad = exact
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    right = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    errors = {
        name: max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, right, strict=True))
        for name, got in found.items()
    }
    ratios = [a / b for a, b in zip(times["ring"], times["flash"], strict=True)]
    return {
        "benchmark": "context_one_process",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "length": length,
        "time_to_flash": round(statistics.median(ratios), 3),
        "error": errors["ring"],
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
    options = parser.parse_args()
    length = options.length
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
