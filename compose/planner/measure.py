"""Measures the machine at hand: what ``compose/planner/costs.py`` computes with, timed; and its file.

All ranks of the default process group measure the same thing at the same time, as they would work in
training, so what they share (cores, memory, links) is shared here too. Time is the only limit: a part
of the sweep that has used up its time leaves the rest out, and the model serves for that.
"""

import dataclasses
import datetime
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from compose.errors import docs, toml_value
from compose.planner.cluster import (
    GPU_ATTENTION_HALF,
    Cluster,
    Device,
    Efficiencies,
    Link,
    MeasuredAttention,
    MeasuredCopy,
    MeasuredProduct,
    Measurements,
)
from compose.planner.costs import BYTES, HOST_SHARE
from compose.planner.sweep import Sweep, cores, link_of, measure_collectives
from compose.train.metrics import peak_flops, peak_memory

SECONDS = 85.0  # that a sweep may take
_SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_MOST_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}  # of one operand
# Types of products, with their part of the time.
_DTYPES = {
    "cpu": {"float32": 0.75, "bfloat16": 0.25},
    "cuda": {"bfloat16": 0.5, "float16": 0.15, "float32": 0.15, "float8": 0.2},
}
_SHAPES = 48  # products of a type; a type with less time has fewer
_HEADS = 8
_HOST_BYTES = 256 << 20  # read and written by a kernel of the host
# Among 0, 10, 30 and the values of GPUs, 10 predicted 12 shapes on a busy CPU best, a shape from the
# others (2026-11). Measured times correct the model.
_CPU_ATTENTION_HALF = (10.0, 10.0)


class Shape(NamedTuple):
    """Sizes of a product."""

    m: int
    n: int
    k: int
    batch: int

    @property
    def flops(self) -> float:
        """FLOPs of the product."""
        return 2.0 * self.m * self.n * self.k * self.batch


def measure(device: torch.device, peaks: Mapping[str, float], seconds: float = SECONDS) -> Cluster:
    """Measure this machine, together with all ranks of the default process group."""
    context, gpu = _context(device), device.type == "cuda"
    sweep, ranks = Sweep(device, seconds), dist.get_world_size()
    node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    alone = ranks == 1
    launch = sweep.time(_adding(device, 1), 0.01 * seconds)
    copies = tuple(_copies(sweep, 0.08))
    products = tuple(_products(sweep, 0.08, 0.75 if alone else 0.45))
    rates: dict[str, float] = {}
    for row in products:
        rate = Shape(row.m, row.n, row.k, row.batch).flops / row.seconds
        rates[row.dtype] = max(rate, rates.get(row.dtype, 0.0))
    attention = tuple(_attention(sweep, rates, 0.95 if alone else 0.55))
    host = _host(sweep, copies)
    host_rate = copies[-1].bytes / copies[-1].seconds
    if gpu:
        host_rate = _HOST_BYTES / sweep.time(_adding(torch.device("cpu"), _HOST_BYTES // 8), 0.2)
    collectives = () if alone else tuple(measure_collectives(sweep))
    took = sweep.agreed(time.monotonic() - sweep.started)
    peak = {dtype: max(rate, peaks.get(dtype, 0.0)) for dtype, rate in rates.items()}
    forward, backward = (
        min(1.0, max(r.flops / r.seconds / peak[r.dtype] for r in attention if r.backward == back))
        for back in (False, True)
    )
    within = link_of([row for row in collectives if row.ranks * row.stride <= node], node)
    between = link_of([row for row in collectives if row.ranks * row.stride > node], node)
    return Cluster(
        name="measured",
        node=node,
        backend="nccl" if gpu else "gloo",
        nccl_bytes=315_000_000 if gpu else 0,
        device=Device(
            name=torch.cuda.get_device_name(device) if gpu else "CPU",
            memory=_memory(device) // (1 if gpu else node),
            context=context,
            bandwidth=copies[-1].bytes / copies[-1].seconds,
            launch=launch,
            sharing=1.0 if gpu else max(1.0, node * torch.get_num_threads() / cores()),
            units=torch.cuda.get_device_properties(device).multi_processor_count if gpu else 1,
            message_units=16 if gpu else 0,
            tile=(128, 256) if gpu else (16, 16),
            capability=torch.cuda.get_device_capability(device) if gpu else (8, 0),
            peak=peak,
        ),
        within=within or between or host,
        between=between or within or host,
        host=host,
        efficiencies=Efficiencies(
            memory=1.0,
            fill=2.5e-6 if gpu else 0.0,
            products={dtype: rate / peak[dtype] for dtype, rate in rates.items()},
            attention_forward=forward,
            attention_backward=backward,
            attention_half=GPU_ATTENTION_HALF if gpu else _CPU_ATTENTION_HALF,
        ),
        measured=Measurements(ranks, took, products, attention, copies, collectives),
        host_memory=_memory(torch.device("cpu")),
        host_cores=cores(),
        host_bandwidth=node * host_rate / HOST_SHARE,  # loops reach their share of it
    )


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _context(device: torch.device) -> int:
    """Return the bytes that this process has lost to its context and libraries."""
    if device.type == "cuda":
        (torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)).sum().item()
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device))
    return peak_memory(device)


def _adding(device: torch.device, numbers: int) -> Callable[[], object]:
    """Return a function that runs one kernel which reads and writes ``numbers`` of float32."""
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    return lambda: torch.add(source, 1.0, out=target)


def _copies(sweep: Sweep, until: float) -> Iterator[MeasuredCopy]:
    """Time elementwise kernels, from 2 KiB on, each eight times as large."""
    sizes = [2048 * 8**i for i in range(8) if 2048 * 8**i <= 4 * _MOST_BYTES[sweep.device.type]]
    for size, share in sweep.shared_out(sizes, until, least=2):
        yield MeasuredCopy(size, sweep.time(_adding(sweep.device, size // 8), share))


def _host(sweep: Sweep, copies: Sequence[MeasuredCopy]) -> Link:
    """Return the link to host memory; that of a CPU is its memory."""
    if sweep.device.type == "cpu":
        return Link(copies[-1].bytes / copies[-1].seconds, 0.0)
    times = []
    for size in (1024, 256 << 20):
        there = torch.empty(size, dtype=torch.uint8, device=sweep.device)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        times.append(sweep.time(lambda a=there, b=here: a.copy_(b, non_blocking=True), 0.2))
    return Link((256 << 20) / max(1e-9, times[1] - times[0]), times[0])


def _products(sweep: Sweep, begins: float, until: float) -> Iterator[MeasuredProduct]:
    """Time products of each type that the device computes, in a fixed random order."""
    shares = _DTYPES[sweep.device.type]
    if sweep.device.type == "cuda" and torch.cuda.get_device_capability(sweep.device) < (8, 9):
        shares = {dtype: share for dtype, share in shares.items() if dtype != "float8"}
    begun, whole = begins, sum(shares.values())
    for dtype, share in shares.items():
        end = begun + (until - begins) * share / whole
        count = max(8, round(_SHAPES * share / max(shares.values())))
        rate = _first_rate(sweep, dtype)
        most = rate * (end - begun) * sweep.seconds / count / 4
        shapes = _shapes(most, dtype, sweep.device.type, count)
        for shape, part in sweep.shared_out(shapes, end):
            seconds = sweep.time(_multiplying(sweep.device, dtype, shape), part)
            yield MeasuredProduct(cast(Any, dtype), *shape, seconds)
        begun = end


def _first_rate(sweep: Sweep, dtype: str) -> float:
    """Return the FLOP/s of one product that takes a few milliseconds."""
    for side in (64, 256, 512, 1024, 2048, 4096, 8192):
        shape = Shape(side, side, side, 1)
        seconds = sweep.time(_multiplying(sweep.device, dtype, shape), 0.0)
        if seconds > 2e-3:
            break
    return shape.flops / seconds


def _shapes(most: float, dtype: str, device: str, count: int) -> list[Shape]:
    """Return ``count`` shapes of at most so many FLOPs, the first near to that: a cube."""
    side = max(side for side in _SIDES if 2.0 * side**3 <= max(most, 2.0 * _SIDES[0] ** 3))
    largest = _MOST_BYTES[device] // BYTES[dtype]
    shapes = [
        shape
        for shape in itertools.starmap(Shape, itertools.product(_SIDES, _SIDES, _SIDES, (1, 8)))
        if most / 1e4 <= shape.flops <= most
        and shape.batch * max(shape.m * shape.k, shape.k * shape.n, shape.m * shape.n) <= largest
        and (shape.batch == 1 or dtype != "float8")
    ]
    # Most products of a model are single ones.
    batched = [shape for shape in shapes if shape.batch > 1]
    single = [shape for shape in shapes if shape.batch == 1]
    drawn = random.Random(0)
    few = drawn.sample(batched, min(count // 6, len(batched)))
    chosen = [*few, *drawn.sample(single, min(count - len(few) - 1, len(single)))]
    drawn.shuffle(chosen)
    return list(dict.fromkeys([Shape(side, side, side, 1), *chosen]))


def _multiplying(device: torch.device, dtype: str, shape: Shape) -> Callable[[], object]:
    m, n, k, batch = shape
    lead = (batch,) if batch > 1 else ()
    if dtype == "float8":
        one = torch.ones((), device=device)
        left = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    kind = getattr(torch, dtype)
    left = torch.randn(*lead, m, k, device=device).to(kind)
    right = torch.randn(*lead, k, n, device=device).to(kind)
    return lambda: left @ right


def _attention(sweep: Sweep, rates: Mapping[str, float], until: float) -> Iterator[MeasuredAttention]:
    """Time causal attention, forward and backward, in the first type of the device."""
    dtype = next(iter(rates))
    dims = (64, 128) if sweep.device.type == "cuda" else (16, 32, 64)
    most = rates[dtype] * sweep.left(until) / 12 / 16  # at a quarter of the products' rate, 4 calls
    choices = [
        (length, dim, samples)
        for length, dim, samples in itertools.product(_SIDES[2:], dims, (1, 8))
        if 2.0 * samples * _HEADS * length**2 * dim * 2.5 <= most
        and samples * _HEADS * length * dim * BYTES[dtype] <= _MOST_BYTES[sweep.device.type]
    ] or [(_SIDES[2], dims[0], 1)]
    chosen = random.Random(0).sample(choices, min(12, len(choices)))
    for (length, dim, samples), share in sweep.shared_out(chosen, until):
        forward = 2.0 * samples * _HEADS * length**2 * dim  # half of the scores are masked
        size = samples * _HEADS * length * dim * BYTES[dtype]
        qkv = [
            torch.randn(samples, _HEADS, length, dim, device=sweep.device, requires_grad=True)
            for _ in range(3)
        ]
        q, k, v = (each.detach().to(getattr(torch, dtype)).requires_grad_() for each in qkv)
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        out = attend()
        gradient = torch.randn_like(out)
        back = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        for backward, run, part in ((False, attend, 0.3), (True, back, 0.7)):
            flops = forward * (2.5 if backward else 1)
            seconds = sweep.time(run, share * part)
            moved = size * (8 if backward else 4)
            yield MeasuredAttention(cast(Any, dtype), dim, backward, flops, moved, seconds)


def makers_peaks(device: torch.device) -> dict[str, float]:
    """Return the maker's FLOP/s by type, for the types that are known."""
    if device.type != "cuda":
        return {}
    name = torch.cuda.get_device_name(device)
    results = {dtype: peak_flops(name, dtype) for dtype in ("bfloat16", "float8")}
    results["float16"] = results["bfloat16"]
    return {dtype: rate for dtype, rate in results.items() if rate}


def notes_of(cluster: Cluster) -> list[str]:
    """Return the lines for the head of the file of a measured cluster."""
    measured = cluster.measured
    day = datetime.datetime.now(datetime.timezone.utc).date()
    notes = [
        f"Measured on {day} by python -m compose measure, with torch {torch.__version__}:",
        f"{measured.ranks} ranks at the same time, {cluster.node} a node, {measured.seconds:.0f} s.",
    ]
    rows = measured.collectives
    if rows:
        worst = max(rows, key=lambda row: row.error)
        middle = sorted(row.error for row in rows)[len(rows) // 2]
        notes.append(
            f"Lines fitted to {len(rows)} collectives: median error {middle:.0%}, largest"
            f" {worst.error:.0%} ({worst.kind}, {worst.ranks} ranks, stride {worst.stride})."
        )
    if measured.ranks == 1:
        notes.append(
            "[within] and [between] were not measured: there was one rank. [host] stands there."
        )
    elif measured.ranks <= cluster.node:
        notes.append("[between] was not measured: there was one node. [within] stands there.")
    if cluster.nccl_bytes:
        notes.append(
            "nccl_bytes, message_units and fill were not measured: they are those of"
            " clusters/h100_sxm.toml."
        )
    return notes


def in_words(cluster: Cluster) -> str:
    """Return the rates of a measured cluster, and what was timed."""
    measured = cluster.measured
    rates = ", ".join(
        f"{cluster.device.peak[dtype] * share / 1e12:.3g} TFLOP/s of {dtype}"
        for dtype, share in cluster.efficiencies.products.items()
    )
    return (
        f"{rates}; {cluster.device.bandwidth / 1e9:.3g} GB/s of memory; {len(measured.products)}"
        f" products, {len(measured.attention)} attentions and {len(measured.collectives)} collectives"
        f" in {measured.seconds:.0f} s"
    )


def as_toml(cluster: Cluster, notes: Sequence[str] = ()) -> str:
    """Return a cluster as the text of a file that ``load_cluster`` reads as the same values.

    ``notes`` are lines for the head of the file. Each key has its description as a comment.
    """
    lines = [f"# {note}" for note in notes]
    own = {key: value for key, value in vars(cluster).items() if key != "name"}
    tables = {key: value for key, value in own.items() if dataclasses.is_dataclass(value)}
    lines += ["", *_keys({k: v for k, v in own.items() if k not in tables}, docs(Cluster))]
    for key, value in tables.items():
        lines += ["", f"[{key}]", *_keys(vars(value), docs(type(value)))]
    return "\n".join(lines) + "\n"


def _keys(values: Mapping[str, Any], words: Mapping[str, str]) -> Iterator[str]:
    for key, value in values.items():
        if key in words:
            yield f"# {words[key]}"
        if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            yield f"{key} = ["
            yield from (f"  {toml_value(vars(row))}," for row in value)
            yield "]"
        else:
            yield f"{key} = {toml_value(value)}"
