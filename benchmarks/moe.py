"""Measure a mixture-of-experts layer against the matrix multiplications that it is for.

    python benchmarks/moe.py [--device cuda] [--small]

prints, of one process, one JSON line per shape and dtype: time of the layer's forward and backward over
that of a dense feed-forward of the same activated FLOPs (the router's come on top). On a GPU, or with
--small, one line per count of experts follows: throughput of the experts alone, in bfloat16 and on rows
already sorted, as a fraction of that of a dense feed-forward on the same rows.

    torchrun --nproc-per-node 4 benchmarks/moe.py [--small]

prints one JSON line per degree of expert parallel, of a training step on CPUs: the time that rows take
to their experts and back, forward and backward, and its share of the step. Counted are sorting and
permuting them, exchanging counts, and all-to-alls until they have arrived; not the router, nor the sum
by its weights. ``dispatch_ms`` includes waiting for slower ranks in all-to-alls; ``waiting_ms`` is how
much of it that was, if in each the rank that spent least did not wait.
"""

import argparse
import json
import os
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from compose import Options, Parallel, apply, forward_backward, init_mesh
from compose.optim.adamw import AdamW
from compose.parallel import expert_parallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # models/ is of the checkout

import models.qwen3 as qwen3
from models.layers import moe
from models.layers.feed_forward import FeedForward

TURNS = 7
Shape = namedtuple("Shape", "tokens dim n_experts top_k expert_dim")
LAYERS = {
    "small": [Shape(64, 32, 8, 2, 16)],
    "cpu": [Shape(2048, 512, 8, 2, 512), Shape(2048, 512, 32, 4, 256)],
    "cuda": [Shape(16_384, 2048, 8, 2, 3072), Shape(16_384, 2048, 128, 8, 768)],
}
EXPERTS = {"small": Shape(64, 32, 0, 2, 16), "cuda": Shape(16_384, 2048, 0, 8, 768)}


def milliseconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def in_turn(device: str, *works: Callable[[], object]) -> list[tuple[float, ...]]:
    """Milliseconds of each of ``works``, which take turns: a machine's drift slows all alike."""
    turns = [[milliseconds(work, device) for work in works] for _ in range(TURNS + 1)]
    return list(zip(*turns[1:], strict=True))  # the first warms up


def train(module: nn.Module, grad: Tensor, x: Tensor, *more: Tensor) -> None:
    torch.autograd.grad(module(x, *more), [x, *module.parameters()], grad)


def show(benchmark: str, **result: Any) -> None:
    rounded = {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in result.items()}
    made_by = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps({"benchmark": benchmark, **rounded, **made_by}), flush=True)


def layer(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, float]:
    sparse = moe.MoE(shape.dim, moe.MoEConfig(*shape[2:], balance_weight=1e-3)).to(device)
    dense = FeedForward(shape.dim, shape.top_k * shape.expert_dim)
    for parameter in (*sparse.parameters(), *dense.parameters()):  # not buffers, as in training
        parameter.data = parameter.data.to(dtype)
    x, grad = torch.randn(2, 1, shape.tokens, shape.dim, dtype=dtype)
    x.requires_grad_()
    a, b = in_turn(device, partial(train, sparse, grad, x), partial(train, dense, grad, x))
    return {"moe_ms": median(a), "dense_ms": median(b), "ratio": median(map(truediv, a, b))}


def experts(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, float]:
    rows = shape.tokens * shape.top_k
    grouped = moe.Experts(shape.n_experts, shape.dim, shape.expert_dim).to(dtype)
    dense = FeedForward(shape.dim, shape.expert_dim).to(dtype)
    # By chance, as a router would: loads are uneven, and no multiples of a kernel's tile.
    counts = torch.randint(shape.n_experts, (rows,)).bincount(minlength=shape.n_experts)
    x, grad = torch.randn(2, rows, shape.dim, dtype=dtype)
    x.requires_grad_()
    flops = 2 * rows * sum(weight.numel() for weight in dense.parameters())
    a, b = in_turn(device, partial(grouped, x, counts), partial(dense, x))
    c, d = in_turn(device, partial(train, grouped, grad, x, counts), partial(train, dense, grad, x))
    results = {"forward_fraction": median(map(truediv, b, a)), "fraction": median(map(truediv, d, c))}
    return results | {"forward_tflops": flops / median(a) / 1e9, "tflops": 3 * flops / median(c) / 1e9}


def watch(calls: list[tuple[float, bool]], owner: Any, name: str, collective: bool = False) -> None:
    """Add each call of ``owner.name``, and what backward does for it, to ``calls``. For CPUs only."""
    real = getattr(owner, name)

    def add(start: float) -> None:
        calls.append((1e3 * (time.perf_counter() - start), collective))

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        out = real(*args, **options)
        if isinstance(out, AsyncCollectiveTensor):  # else whoever reads it first waits, unseen
            out.trigger_wait()
        add(start)
        if (node := getattr(getattr(out, "elem", out), "grad_fn", None)) is not None:
            starts: list[float] = []
            node.register_prehook(lambda _: starts.append(time.perf_counter()))
            node.register_hook(lambda *_: add(starts.pop()))
        return out

    setattr(owner, name, timed)


def training(ep: int, small: bool) -> Callable[[], None]:
    """A step of a new model on every rank."""
    tiny = qwen3.Config(dim=32, n_layers=1, n_experts=8, expert_dim=16)
    config, length = (tiny, 16) if small else (qwen3.PRESETS["debug_moe"], 256)
    parallel = Parallel(ep=ep)
    mesh = init_mesh(parallel)
    torch.manual_seed(dist.get_rank())  # of the tokens; the weights become those of rank 0
    composition = apply(qwen3.Model(config), qwen3.plan(config, parallel), mesh, Options(parallel))
    optimizer = AdamW(composition.named_parameters())
    tokens = torch.randint(config.vocab_size, (4, length + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def step() -> None:
        forward_backward(composition, batch)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    return step


def shares(small: bool) -> None:
    dist.init_process_group("gloo")
    calls: list[tuple[float, bool]] = []  # milliseconds; whether other ranks take part
    for name in ("argsort", "index_copy"):
        watch(calls, torch.Tensor, name)
    watch(calls, moe._Dispatch, "apply")
    watch(calls, expert_parallel._Permute, "apply")
    watch(calls, expert_parallel, "all_to_all_single_autograd", collective=True)
    watch(calls, dist, "all_to_all_single", collective=True)
    ranks = dist.get_world_size()
    steps = {ep: training(ep, small) for ep in (1, 2, 4) if ranks % ep == 0}
    turns: dict[int, list[tuple[float, float, float]]] = {ep: [] for ep in steps}
    for ep, step in [*steps.items()] * (TURNS + 1):  # the first of each warms up
        dist.barrier()
        calls.clear()
        whole = milliseconds(step, "cpu")
        # All ranks made the same calls, in one order; a collective is one of ep neighbours.
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, calls)
        ms, collective = torch.tensor(everyone).unbind(-1)
        met = (ms * collective).unflatten(0, (-1, ep))
        waited = met - met.amin(1, keepdim=True)
        turns[ep].append((whole, float(ms.sum()) / ranks, float(waited.sum()) / ranks))
    for ep in steps if dist.get_rank() == 0 else ():
        a, b, c = zip(*turns[ep][1:], strict=True)
        times = {"step_ms": median(a), "dispatch_ms": median(b), "waiting_ms": median(c)}
        show("moe", ep=ep, ranks=ranks, **times, share=median(map(truediv, b, a)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs")
    options = parser.parse_args()
    if "RANK" in os.environ:
        shares(options.small)
        return
    device, size = options.device, "small" if options.small else options.device
    chip = torch.cuda.get_device_name() if device == "cuda" else device
    torch.set_default_device(device)  # a CPU would take long to draw so many weights
    jobs = [(layer, s, dtype) for s in LAYERS[size] for dtype in (torch.float32, torch.bfloat16)]
    for n in (8, 16, 32, 64, 128) if size in EXPERTS else ():
        jobs.append((experts, EXPERTS[size]._replace(n_experts=n), torch.bfloat16))
    for work, shape, dtype in jobs:
        what = {**shape._asdict(), "dtype": str(dtype).removeprefix("torch."), "device": chip}
        show(f"moe_{work.__name__}", **what, **work(shape, dtype, device))


if __name__ == "__main__":
    main()
