"""Seconds of one thing on one device: a product, an attention, an elementwise kernel, a collective.

Each has a model of few constants that have a physical meaning, which stand in the cluster's file with
their source. Where the file has measured rows, a time is the model's, times what the nearest rows took
relative to the model. So a measured point costs what was measured, and the model leads from point to
point.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

from compose.errors import ConfigError, did_you_mean
from compose.ops.kernel_table import HOPPER_AND_BLACKWELL
from compose.parallel.mesh import group_in_nodes
from compose.planner.cluster import KINDS, Cluster, MeasuredCollective

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8": 1}
_NEAREST = 8  # measured rows of which a time is interpolated
# Sides of the tiles that cuBLAS's kernels have (CUTLASS profiler, Hopper and Ampere).
_SIDES = (16, 32, 64, 96, 128, 160, 192, 224, 256)
# A tile (a, b) reads (a + b) for 2ab FLOPs. Its rate grows with ab / (a + b) up to that of the
# multipliers; at this intensity it has half. Assumed: 128 x 128 then has 92% of 128 x 256, as cuBLAS's
# kernels do.
_HALF_INTENSITY = 30.0
_DEPTH = 16  # least k of an instruction of tensor cores in 16 bits (NVIDIA, PTX ISA: mma, wgmma)
_STEP = 64  # of k, by which a tile of a grouped product goes (the same file as grouped_seconds names)
_HOST_MEMORY = 50e9  # bytes per second of host memory that a rank has, if a file has none; assumed
HOST_SHARE = 0.8  # of host memory's bandwidth that simple loops of all cores reach; assumed
_CORE_MEMORY = 12e9  # bytes per second that one core moves from and to memory; assumed
_HEAD_DIM = 128  # of the heads for which the efficiencies of attention hold


class Protocol(NamedTuple):
    """A way in which a library sends messages."""

    start: float
    """Seconds of a collective's start."""
    within: float
    """Latency of a step in a node, as a multiple of the link's."""
    between: float
    """Latency of a step between nodes, as a multiple of the link's."""
    share: float
    """Part of the link's bandwidth."""


# NCCL's own model, src/graph/tuning.cc: baseLat and hwLat of rings, relative to LL's, and the
# part of the bandwidth that each has: LL, LL128, Simple. Gloo has one way.
PROTOCOLS = {
    "nccl": (
        Protocol(6.6e-6, 1.0, 1.0, 0.25),
        Protocol(14.0e-6, 3.2, 1.5, 0.92),
        Protocol(8.4e-6, 5.7, 5.2, 1.0),
    ),
    "gloo": (Protocol(0.0, 1.0, 1.0, 1.0),),
}
_TREE_SHARE = 0.9  # of a ring's bandwidth (NCCL, src/graph/tuning.cc)
_SWITCH_START = 23.0e-6  # of a sum in switches (the same, NVLS)


def power_factor(cluster: Cluster) -> float:
    """Return the clock that the power limit allows, relative to that of the measured efficiencies.

    The power that depends on the clock is C V² f. Near its limit a device is not far above its least
    voltage V, so V falls less than the clock f does. The clock is taken to go with the root of the
    power above that of an idle device: between f³ (V goes with f) and f (V stays).
    """
    device = cluster.device
    allowed = (device.power_limit - device.power_idle) / (device.power - device.power_idle)
    return min(1.0, math.sqrt(allowed))


@functools.lru_cache(maxsize=1024)
def slowest(cluster: Cluster, ranks: int) -> float:
    """Return how much longer the slowest of some devices computes than the mean of all.

    Equal devices differ in speed by what chips need of the power that all are allowed (Sinha et al.
    2022, arXiv:2208.11035). This is the expected largest of ``ranks`` normal numbers (Blom 1958).
    """
    if ranks <= 1:
        return 1.0
    return 1.0 + cluster.device.spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def peak_rate(cluster: Cluster, dtype: str) -> float:
    """Return the FLOP/s of a type. Raises ConfigError if the cluster has none."""
    rates = cluster.device.peak
    if dtype not in rates:
        raise ConfigError(
            f"cluster {cluster.name}: device.peak: has no rate for {dtype}"
            f"{did_you_mean(dtype, rates)} (known: {', '.join(rates)})"
        )
    return rates[dtype]


@functools.lru_cache(maxsize=65536)
def product_seconds(cluster: Cluster, m: int, n: int, k: int, batch: int, dtype: str) -> float:
    """Return the seconds of ``batch`` products of matrices (m, k) and (k, n).

    The units of a device (streaming multiprocessors) each compute one tile of the result at a time, so
    that products come in waves of as many tiles as there are units (NVIDIA, Matrix Multiplication
    Background User's Guide: tile and wave quantization). A tile takes its multiplications, at a rate
    that is lower for small tiles, and a time to fill and to drain, which short k cannot hide. The best
    tile is taken. The memory's bandwidth is a lower bound (roofline: Williams et al. 2009). All
    matrices of a batch, or all experts of a grouped product, share the waves.
    """
    if min(m, n, k, batch) < 1:
        return 0.0
    rows = [
        ((row.m, row.n, row.k, row.batch), row.seconds)
        for row in cluster.measured.products
        if row.dtype == dtype
    ]
    return _corrected(lambda *sizes: _product(cluster, *sizes, dtype), (m, n, k, batch), rows)


@functools.lru_cache(maxsize=65536)
def _product(cluster: Cluster, m: int, n: int, k: int, batch: int, dtype: str) -> float:
    device = cluster.device
    known, best, largest = cluster.efficiencies, math.inf, math.prod(device.tile)
    rate = peak_rate(cluster, dtype) * known.products[dtype] * power_factor(cluster) / device.units
    deep = max(k, min(_DEPTH, *device.tile))
    for rows, columns, slowness in _tiles(device.tile):
        of_one = -(-m // rows) * -(-n // columns)
        waves = -(-of_one * batch // device.units)
        # A unit holds several small tiles at once. While one fills or drains, others multiply. What is
        # left is to move the results, and the first fill.
        used = rows * columns / largest * min(1.0, m * n / (of_one * rows * columns))
        fills = waves if rows * columns == largest else max(1.0, waves * used)
        best = min(best, waves * 2.0 * rows * columns * deep / rate * slowness + fills * known.fill)
    moved = batch * (m * k + k * n + m * n) * BYTES[dtype]
    return device.launch + max(best, moved / (device.bandwidth * known.memory))


@functools.lru_cache(maxsize=65536)
def grouped_seconds(
    cluster: Cluster, shape: tuple[int, int, int, int], dtype: str, rows_of: str
) -> float:
    """Return the seconds of a product for each expert, (experts, m, n, k), by PyTorch's kernel for it.

    On Hopper and Blackwell it has tiles of one size, of which two lie one above the other (128 x 256 in
    clusters of 2: ATen/native/cuda/GroupMM.cu). Experts have different loads, so that each wastes half
    of such a pair where its rows are rows of the result (``rows_of`` is "m"), and half a step where
    they are what is summed ("k"). On other devices, AMD's too, and in other types than bfloat16 and
    float8, PyTorch multiplies for one expert after the other (ATen/native/cuda/GroupedBlas.cpp). A
    CPU's figures are those of equal products.
    """
    experts, m, n, k = shape
    if min(shape) < 1:
        return 0.0
    if cluster.backend != "nccl":
        return product_seconds(cluster, m, n, k, experts, dtype)
    device, known = cluster.device, cluster.efficiencies
    if device.capability not in HOPPER_AND_BLACKWELL or dtype not in ("bfloat16", "float8"):
        return experts * product_seconds(cluster, m, n, k, 1, dtype)
    rows, columns = device.tile
    pairs, deep = math.ceil(m / (2 * rows)), k + _STEP / 2
    if rows_of == "m":
        pairs, deep = max(1.0, m / (2 * rows) + 0.5), k
    waves = math.ceil(2 * pairs * -(-n // columns) * experts / device.units)
    rate = peak_rate(cluster, dtype) * known.products[dtype] * power_factor(cluster) / device.units
    computed = waves * (2.0 * rows * columns * deep / rate + known.fill)
    moved = experts * (m * k + k * n + m * n) * BYTES[dtype]
    return device.launch + max(computed, moved / (device.bandwidth * known.memory))


@functools.cache
def _tiles(largest: tuple[int, ...]) -> list[tuple[int, int, float]]:
    """Return the tiles as (rows, columns, time of a multiplication relative to the largest tile's)."""
    area, longest, least = math.prod(largest), max(largest), min(16, *largest)
    sides = [side for side in _SIDES if least <= side <= longest] or [least]

    def slowness(a: int, b: int) -> float:
        return 1 + _HALF_INTENSITY * (a + b) / (a * b)

    fastest = slowness(*largest)
    return [
        (a, b, max(1.0, slowness(a, b) / fastest))
        for a, b in itertools.product(sides, sides)
        if a * b <= area
    ]


@functools.lru_cache(maxsize=65536)
def attention_seconds(
    cluster: Cluster, flops: float, bytes: float, dtype: str, head_dim: int, backward: bool
) -> float:
    """Return the seconds of one fused attention, by the kernel of ``attention_forward``.

    Its products and the exponentials of its softmax take turns: 4 head_dim FLOPs forward and 10
    head_dim backward for each exponential (Shah et al. 2024, arXiv:2407.08608, section 2.2), which is
    why narrow heads are slower. The efficiencies of the file hold for heads of 128. Short sequences do
    fewer FLOPs per byte and are slower, as published times show.
    """
    if flops <= 0:
        return 0.0
    rows = [
        ((row.flops, row.bytes, row.head_dim), row.seconds)
        for row in cluster.measured.attention
        if row.dtype == dtype and row.backward == backward
    ]
    model = functools.partial(_attention, cluster, dtype, backward)
    return _corrected(model, (flops, bytes, head_dim), rows)


def _attention(
    cluster: Cluster, dtype: str, backward: bool, flops: float, bytes: float, head_dim: int
) -> float:
    device, known = cluster.device, cluster.efficiencies
    share = known.attention_backward if backward else known.attention_forward
    of_flop = 1 / (peak_rate(cluster, dtype) * share)  # of heads of 128, the exponentials included
    if device.exponentials:
        of_exponential = 1 / (device.exponentials * (10 if backward else 4))
        # More than half of the time the exponentials cannot take, or the file contradicts itself.
        of_128 = min(of_exponential / _HEAD_DIM, of_flop / 2)
        of_flop += of_128 * (_HEAD_DIM / head_dim - 1)
    computed = (flops + known.attention_half[backward] * bytes) * of_flop / power_factor(cluster)
    return device.launch + max(computed, bytes / (device.bandwidth * known.memory))


def memory_seconds(cluster: Cluster, bytes_moved: float) -> float:
    """Return the seconds of a kernel that does little but read and write."""
    device, copies = cluster.device, cluster.measured.copies
    if copies:
        sizes, seconds = [row.bytes for row in copies], [row.seconds for row in copies]
        return _between(sizes, seconds, bytes_moved, seconds[-1] / sizes[-1])
    return device.launch + bytes_moved / (device.bandwidth * cluster.efficiencies.memory)


def processor_seconds(cluster: Cluster, bytes: float) -> float:
    """Return the seconds of one rank's host to read and write ``bytes``, while all ranks of a node do.

    An optimizer's step moves 28 bytes for each parameter and computes little, so that memory limits it.
    The ranks of a node share its memory and its cores: each may use the cores of its share.
    """
    rates = [_HOST_MEMORY]
    if cluster.host_bandwidth:
        rates = [HOST_SHARE * cluster.host_bandwidth / cluster.node]
    if cluster.host_cores:
        rates.append(_CORE_MEMORY * max(1.0, cluster.host_cores / cluster.node))
    return bytes / min(rates)


@functools.lru_cache(maxsize=1024)
def for_ranks(cluster: Cluster, world_size: int) -> Cluster:
    """Return the cluster whose node has no more devices than a job, which has its machines alone."""
    if world_size >= cluster.node:
        return cluster
    within, used = cluster.within, max(1, world_size - 1) / (cluster.node - 1)
    if within.direct:
        within = replace(within, bandwidth=within.bandwidth * used)
    machines = math.ceil(world_size * cluster.machines / cluster.node)
    part = machines / cluster.machines
    return replace(
        cluster,
        node=world_size,
        within=within,
        machines=machines,
        host_memory=round(cluster.host_memory * part),
        host_cores=round(cluster.host_cores * part),
        host_bandwidth=cluster.host_bandwidth * part,
        host_power=cluster.host_power * part,
    )


def host_seconds(cluster: Cluster, bytes: float) -> float:
    """Return the seconds of one copy of ``bytes`` between a device and host memory."""
    return cluster.host.latency + bytes / cluster.host.usable


@functools.lru_cache(1 << 20)
def collective_seconds(
    cluster: Cluster, kind: str, bytes: float, ranks: int, stride: int, world_size: int = 0
) -> float:
    """Return the seconds of one collective.

    Rings send (n - 1)/n of the bytes over each link in n - 1 steps, an all-reduce twice that (Thakur,
    Rabenseifner, Gropp 2005; the bus bandwidth of NCCL's tests is defined by the same factors). A group
    in several nodes has a ring through each of its devices' network cards, as NCCL makes them, so that
    the slower of the two decides: a device's link in the node, or the cards of the group's devices in a
    node together. An all-reduce takes a tree where that is faster, with log2 of the nodes as its steps
    (Sanders et al. 2009; NCCL's double binary trees), or in one node the switches' own sum where they
    have one: each device sends its bytes once and receives (n + 1)/n of them in all (NVLink SHARP). In
    an all-to-all each device sends what leaves the node by its own card, and the rest within the node
    meanwhile.

    ``bytes`` are those of the whole result (all_gather), of the whole input (reduce_scatter,
    all_reduce, broadcast), or of what one rank sends, its own part included (all_to_all, p2p).
    ``stride`` is the distance of neighbours of the group in ranks of the job, which has
    ``world_size``; 0: so many that groups begin at each place of a node.
    """
    if kind not in KINDS:
        raise ConfigError(f"collective: unknown kind {kind!r}{did_you_mean(kind, KINDS)}")
    if ranks <= 1:
        return 0.0
    row = _measured(cluster, kind, ranks, stride)
    if row is not None:
        return _between(row.bytes, row.seconds, bytes, row.inverse_bandwidth)
    if world_size < ranks * stride:
        world_size = math.lcm(cluster.node, ranks * stride)
    nodes, local = group_in_nodes(cluster.node, ranks, stride, world_size)
    group, in_switch = (ranks, nodes, local), cluster.within.in_switch
    times = [_by_protocol(cluster, kind, bytes, group, each) for each in PROTOCOLS[cluster.backend]]
    if kind == "all_reduce" and nodes == 1 and in_switch:
        times.append(_SWITCH_START + bytes * (ranks + 1) / ranks / in_switch)
    return min(times)


def stage_seconds(cluster: Cluster, bytes: float, ranks: int, one: int, other: int) -> float:
    """Return the seconds of a message between two pipeline ranks, each of ``ranks`` devices."""
    low, high = sorted((one, other))
    inside = low * ranks // cluster.node == ((high + 1) * ranks - 1) // cluster.node
    group = (cluster.node, 1) if inside else (2, cluster.node)
    return collective_seconds(cluster, "p2p", bytes, *group)


def _by_protocol(
    cluster: Cluster, kind: str, bytes: float, group: tuple[int, int, int], protocol: Protocol
) -> float:
    """Return the seconds of a collective by one of a library's protocols.

    ``group``: its ranks, the nodes that they are in, and its ranks in one node.
    """
    ranks, nodes, local = group
    inner = cluster.within.latency * protocol.within
    outer = max(inner, cluster.between.latency * protocol.between)
    within, between = (link.usable * protocol.share for link in (cluster.within, cluster.between))
    if cluster.within.direct and local > 1:  # some links alone join the devices of the group
        within *= (1 if kind == "p2p" else min(local, cluster.node) - 1) / (cluster.node - 1)
    bus = within if nodes == 1 else min(within, local * between)  # of a ring, for each device
    one, ring = bytes * (ranks - 1) / ranks / bus, (ranks - nodes) * inner + (nodes - 1) * outer
    if kind in ("all_gather", "reduce_scatter"):
        return protocol.start + ring + one
    if kind == "broadcast":
        return protocol.start + ring + bytes / bus
    if kind == "p2p":
        link = within if nodes == 1 else min(within, between)
        return protocol.start + (inner if nodes == 1 else outer) + bytes / link
    if kind == "all_to_all":
        # NCCL sends bytes that leave the node to the card's own device first (PXN). So they take the
        # links within the node too.
        leaves = bytes * (ranks - local) / ranks / between
        steps = (local - 1) * inner + (ranks - local) * outer
        return protocol.start + steps + max(bytes * (ranks - 1) / ranks / within, leaves)
    results = [2 * ring + 2 * one]
    if cluster.backend == "nccl":
        steps = (-(-ranks // nodes) - 1) * inner + math.ceil(math.log2(nodes)) * outer
        results.append(2 * steps + 2 * bytes / (_TREE_SHARE * bus))
    return protocol.start + min(results)


def _measured(cluster: Cluster, kind: str, ranks: int, stride: int) -> MeasuredCollective | None:
    """Return the measured collective of as many ranks on the same level, with the nearest stride."""
    many = 2 if kind == "p2p" else ranks  # a ring's messages are each between two
    rows = [row for row in cluster.measured.collectives if (row.kind, row.ranks) == (kind, many)]
    across = bool(cluster.node % (ranks * stride))
    rows = [row for row in rows if bool(cluster.node % (row.ranks * row.stride)) == across]
    return min(rows, key=lambda row: abs(math.log(row.stride / stride)), default=None)


def _corrected(
    model: Callable[..., float],
    sizes: tuple[float, ...],
    rows: Sequence[tuple[tuple[float, ...], float]],
) -> float:
    """Return a model's seconds, times what the nearest rows took relative to it (Shepard 1968).

    ``rows`` are measured sizes, and the seconds of each.
    """
    if not rows:
        return model(*sizes)
    at = tuple(map(math.log2, sizes))
    order = sorted((math.dist(at, tuple(map(math.log2, row))), i) for i, (row, _) in enumerate(rows))
    weights = logarithms = 0.0
    for distance, number in order[:_NEAREST]:
        row, seconds = rows[number]
        logarithm = math.log(seconds / model(*row))
        if distance == 0:
            return model(*sizes) * math.exp(logarithm)
        weights, logarithms = weights + distance**-2, logarithms + logarithm * distance**-2
    return model(*sizes) * math.exp(logarithms / weights)


def _between(sizes: Sequence[float], seconds: Sequence[float], size: float, slope: float) -> float:
    """Return the time of ``size`` between measured ones, in logarithms.

    Smaller sizes take the time of the smallest. Larger ones take ``slope`` seconds more for each byte.
    """
    if size <= sizes[0]:
        return seconds[0]
    if size >= sizes[-1]:
        return seconds[-1] + (size - sizes[-1]) * slope
    at = bisect.bisect_right(sizes, size)
    way = math.log(size / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
    return seconds[at - 1] * (seconds[at] / seconds[at - 1]) ** way
