"""Clusters as data, and what one thing costs on them: messages, bounds, and published figures."""

import dataclasses
import itertools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compose.errors import ConfigError
from compose.planner.cluster import (
    FOLDER,
    KINDS,
    Cluster,
    MeasuredAttention,
    MeasuredCollective,
    MeasuredCopy,
    MeasuredProduct,
    Measurements,
    cluster_names,
    load_cluster,
)
from compose.planner.costs import (
    attention_seconds,
    collective_seconds,
    for_ranks,
    grouped_seconds,
    host_seconds,
    memory_seconds,
    product_seconds,
    stage_seconds,
)
from compose.planner.step_time import by_kernel
from tests.support.helpers import refusal

NAMES = [
    "a100_40gb",
    "a100_80gb",
    "b200",
    "cpu",
    "ethernet_25g",
    "gb200",
    "h100_sxm",
    "h200",
    "internet_1g",
    "l40s",
    "mi300x",
    "rtx3090",
    "rtx4090",
]
H100 = (FOLDER / "h100_sxm.toml").read_text()
SIZES = [0, 1, 1e3, 1e4, 3e5, 1e6, 2e7, 1e9, 1e10]


def test_all_names() -> None:
    assert cluster_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_shipped_clusters_load(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.device.context + cluster.nccl_bytes < cluster.device.memory
    assert dataclasses.asdict(cluster.measured) == dataclasses.asdict(Measurements())


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    """A key has a comment in its line, before it, or over its table; or the file is assumed."""
    text = (FOLDER / f"{name}.toml").read_text()
    bare = []
    if "All figures are assumed" in text:
        return
    block = False  # whether a comment stands over the keys
    for line in text.splitlines():
        if not line.strip():
            block = False
        elif line.startswith("#") or (line.startswith("[") and "#" in line):
            block = True
        elif "=" in line and "#" not in line and not block:
            bare.append(line)
    # Three are no figures; the limit is the power itself.
    allowed = ("node =", "backend =", "name =", "power_limit =")
    assert [line for line in bare if not line.startswith(allowed)] == []


def test_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_cluster("h200").device.name == "NVIDIA H200"
    (tmp_path / "mine.toml").write_text(H100)
    assert load_cluster("mine.toml").name == "mine"
    assert load_cluster(os.path.join(".", "mine.toml")).node == 8


def test_unknown_cluster() -> None:
    assert refusal(load_cluster, "h100") == (
        "--cluster: unknown cluster 'h100'; did you mean h100_sxm? (known: a100_40gb, a100_80gb, b200,"
        " cpu, ethernet_25g, gb200, h100_sxm, h200, internet_1g, l40s, mi300x, rtx3090, rtx4090; or the"
        " path of a .toml file)"
    )


def test_missing_file(tmp_path: Path) -> None:
    for name in ("none.toml", "some/none", str(tmp_path / "none.toml")):
        with pytest.raises(ConfigError, match=re.escape(f"{name}: no such file")):
            load_cluster(name)
    with pytest.raises(ConfigError, match=r": cannot read it: Is a directory$"):
        load_cluster(f"{tmp_path}/")


WRONG = {
    ("node = 8", "nodes = 8"): ["nodes: unknown key; did you mean node?", "node: missing key"],
    ("launch = 2.5e-6", "lunch = 2.5e-6"): [
        "device.lunch: unknown key; did you mean device.launch?",
        "device.launch: missing key",
    ],
    ("node = 8", "node = 8\nlatency = 1.0"): ["latency: unknown key; did you mean within.latency?"],
    ("node = 8", 'node = "8"'): ['node: expected int, got "8"'],
    ("node = 8", "node = 8\nmachines = 3"): ["machines: 3 do not divide 8 devices of a node"],
    ("node = 8", "node = 0"): ["node: 0 should be greater than or equal to 1"],
    ("node = 8", "node = 8.5"): ["node: expected int, got 8.5"],
    ("node = 8", 'node = 8\nname = "x"'): [
        "name: unknown key; the name of a cluster is that of its file"
    ],
    ('backend = "nccl"', 'backend = "mpi"'): ['backend: expected "nccl" | "gloo", got "mpi"'],
    ("share = 0.822", "share = 82.2"): ["within.share: 82.2 should be less than or equal to 1"],
    ("latency = 0.6e-6", "latency = nan"): ["within.latency: nan should be a finite number"],
    ("bandwidth = 450e9", "bandwidth = 5e-324"): [
        "within.bandwidth: 5e-324 should be from 1e-18 to 1e+24"
    ],
    ("bandwidth = 450e9", "bandwidth = 1e300"): [
        "within.bandwidth: 1e+300 should be from 1e-18 to 1e+24"
    ],
    ("share = 0.822", "share = 1e-300"): ["within.share: 1e-300 should be from 1e-18 to 1e+24"],
    ("exponentials = 3.9e12", "exponentials = 1e-300"): [
        "device.exponentials: 1e-300 should be from 1e-18 to 1e+24"
    ],
    ("launch = 2.5e-6", "launch = 1e300"): ["device.launch: 1e+300 should be from 1e-18 to 1e+24"],
    ("node = 8", "node = 8\nmeasured = {copies = [{bytes = 3.0, seconds = 1e-300}]}"): [
        "measured.copies[0].seconds: 1e-300 should be from 1e-18 to 1e+24"
    ],
    ("tile = [128, 256]", "tile = [128]"): ["device.tile: expected two numbers, got [128]"],
    ("float8 = 1978.9e12", "fp8 = 1978.9e12"): [
        "device.peak.fp8: unknown type (known: bfloat16, float16, float32, float64, float8)"
    ],
    ("float8 = 1978.9e12", "flaot8 = 1978.9e12"): [
        "device.peak.flaot8: unknown type; did you mean float8? (known: bfloat16, float16, float32,"
        " float64, float8)"
    ],
    ("float8 = 0.71", ""): ["efficiencies.products.float8: missing; device.peak has it"],
    ("cudnn = [0.60, 0.475]", "cudn = [0.60, 0.475]"): [
        "efficiencies.attention.cudn: is no kernel; did you mean cudnn? (known: cudnn, flash2, flash3,"
        " flash4, efficient)"
    ],
    ("cudnn = [0.60, 0.475]", "cudnn = 0.60"): [
        "efficiencies.attention.cudnn: expected a list, got 0.6"
    ],
    ("memory = 84_943_716_352", "memory = 80"): [
        "device.memory: 80 is not above context + nccl_bytes, 915000000"
    ],
    ("message_units = 21", "message_units = 132"): ["device.message_units: 132 leaves none of 132"],
    ("power_limit = 700.0", "power_limit = 50.0"): ["device.power_limit: 50.0 is not above power_idle"],
    ("[host]", "[hosts]"): ["hosts: unknown key; did you mean host?", "host: missing table"],
    ("node = 8", "node = 8\nmeasured = 3"): ["measured: expected a table, got 3"],
    ("node = 8", "node = 8\nmeasured = {copies = 3}"): [
        "measured.copies: expected a list of tables, got 3"
    ],
    ("node = 8", "node = 8\nmeasured = {copies = [{bytes = 3.0, second = 1.0}]}"): [
        "measured.copies[0].second: unknown key; did you mean measured.copies[0].seconds?",
        "measured.copies[0].seconds: missing key",
    ],
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change[1][:30])
def test_messages(change: tuple[str, str], tmp_path: Path) -> None:
    assert change[0] in H100
    file = tmp_path / "mine.toml"
    file.write_text(H100.replace(*change, 1))
    result = refusal(load_cluster, str(file)).splitlines()
    assert result == [f"{file}: {problem}" for problem in WRONG[change]]


def test_all_problems_at_once_and_syntax(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(H100.replace("node = 8", "node = -1").replace("units = 132", 'units = "x"'))
    assert len(refusal(load_cluster, str(file)).splitlines()) == 2
    file.write_text("node = \n")
    with pytest.raises(ConfigError, match=r"mine\.toml: TOML syntax: Invalid value \(at line 1, col"):
        load_cluster(str(file))
    file.write_text(H100.replace("node = 8", f"node = 0x{'f' * 4000}"))
    with pytest.raises(ConfigError, match=r"mine\.toml: cannot read it: Exceeds the limit"):
        load_cluster(str(file))
    file.write_bytes(b"node = '\xff'")
    with pytest.raises(ConfigError, match=r"mine\.toml: is not UTF-8 \(byte 8\); save it as UTF-8$"):
        load_cluster(str(file))


def test_unknown_type_and_kind() -> None:
    with pytest.raises(ConfigError, match=r"^cluster a100_80gb: device\.peak: has no rate for float8"):
        product_seconds(load_cluster("a100_80gb"), 64, 64, 64, 1, "float8")
    with pytest.raises(ConfigError, match=r"unknown kind 'allreduce'; did you mean all_reduce\?"):
        collective_seconds(load_cluster("cpu"), "allreduce", 1.0, 2, 1)


@pytest.mark.parametrize("name", NAMES)
def test_more_takes_longer(name: str) -> None:
    """No time falls when bytes or FLOPs grow."""
    cluster = load_cluster(name)
    for kind, (ranks, stride) in itertools.product(KINDS, [(2, 1), (8, 1), (64, 1), (16, 4), (512, 8)]):
        times = [collective_seconds(cluster, kind, size, ranks, stride) for size in SIZES]
        assert times == sorted(times)
        assert times[0] > 0
    times = [memory_seconds(cluster, size) for size in SIZES]
    assert times == sorted(times)
    times = [host_seconds(cluster, size) for size in SIZES]
    assert times == sorted(times)
    sides = [1, 16, 100, 128, 129, 256, 1000, 2048, 4097, 8192]
    for at, fixed in itertools.product(range(4), [16, 384, 4096]):
        shapes = [[fixed, fixed, fixed, 1] for _ in sides]
        for shape, side in zip(shapes, sides, strict=True):
            shape[at] = side
        times = [product_seconds(cluster, m, n, k, b, "bfloat16") for m, n, k, b in shapes]
        assert times == sorted(times)
    for backward in (False, True):
        times = [attention_seconds(cluster, size, 1e6, "bfloat16", 128, backward) for size in SIZES[1:]]
        assert times == sorted(times)
        times = [attention_seconds(cluster, 1e9, size, "bfloat16", 128, backward) for size in SIZES]
        assert times == sorted(times)
        narrow, wide = (
            attention_seconds(cluster, 1e12, 1e6, "bfloat16", dim, backward) for dim in (64, 128)
        )
        assert narrow >= wide


def test_links_of_pairs_join_some_devices_less() -> None:
    """Of eight MI300X two have one of seven links, and four have three; a switch gives all to each."""
    mi300x, size = load_cluster("mi300x"), 1e10
    whole = collective_seconds(mi300x, "all_gather", size, 8, 1) * 8 / 7
    for ranks, links in ((2, 1), (4, 3), (8, 7)):
        part = collective_seconds(mi300x, "all_gather", size, ranks, 1) * ranks / (ranks - 1)
        assert part == pytest.approx(whole * 7 / links, rel=1e-2)  # latencies
    one = collective_seconds(mi300x, "p2p", size, 8, 1)
    assert one == pytest.approx(whole * 7, rel=1e-2)
    h200 = load_cluster("h200")
    pair, all_ = (collective_seconds(h200, "all_gather", size, n, 1) for n in (2, 8))
    assert pair * 2 == pytest.approx(all_ * 8 / 7, rel=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_in_several_nodes_is_never_faster(name: str) -> None:
    cluster = load_cluster(name)
    every = max(1, cluster.node // 8)
    # A chain through a node has more steps than a tree of as many nodes, which small messages prefer.
    sizes = SIZES if cluster.node <= 8 else [size for size in SIZES if size >= 2e7]
    for kind, ranks, size in itertools.product(KINDS, range(2, cluster.node + 1, every), sizes):
        if cluster.within.direct and (ranks == 2 or kind == "p2p"):
            continue  # one link may be slower than a network card
        inside = collective_seconds(for_ranks(cluster, ranks), kind, size, ranks, 1)
        for stride in range(1, 2 * cluster.node, every):
            time = collective_seconds(cluster, kind, size, ranks, stride)
            if cluster.node % (ranks * stride) == 0:
                assert time == pytest.approx(inside)
            else:
                assert time >= inside, (kind, ranks, stride, size)


def test_some_group_of_three_is_in_two_nodes() -> None:
    """Groups follow one another: of nodes of eight, the third group of three has ranks in two.

    In one node it is not so. Stages of a rank each send from node to node once in eight times.
    """
    h100, size = load_cluster("h100_sxm"), 1e9
    alone = collective_seconds(for_ranks(h100, 6), "all_gather", size, 3, 1)
    card = 2 / 3 * size / h100.between.usable
    assert collective_seconds(h100, "all_gather", size, 3, 1) == pytest.approx(card, rel=0.01)
    assert alone == pytest.approx(2 / 3 * size / h100.within.usable, rel=0.01)
    near, far = (stage_seconds(h100, size, 1, one, one + 1) for one in (6, 7))
    assert near == pytest.approx(size / h100.within.usable, rel=0.01)
    assert (
        far == stage_seconds(h100, size, 1, 8, 7) == pytest.approx(size / h100.between.usable, rel=0.01)
    )
    assert near == stage_seconds(for_ranks(h100, 7), size, 1, 0, 1)
    # A ring of 16 waits for its slowest message; one of eight stays in the node.
    ring, whole = (collective_seconds(h100, "p2p", size, ranks, 1) for ranks in (8, 16))
    assert (ring, whole) == (near, far)


def test_one_rank_and_nothing_cost_nothing() -> None:
    cluster = load_cluster("h100_sxm")
    assert collective_seconds(cluster, "all_reduce", 1e9, 1, 1) == 0
    assert product_seconds(cluster, 0, 8, 8, 1, "bfloat16") == 0
    assert attention_seconds(cluster, 0, 0, "bfloat16", 128, False) == 0


# (m, n, k) and the published TFLOP/s of long runs; the B200's is the best of short runs. Those of
# the H200 in bfloat16 are of benchmarks/results/nvidia-h200-2026-11-26.json, the others of Azure's
# benchmarking guide.
PUBLISHED = [
    ("h100_sxm", "bfloat16", (8192, 8192, 8192), 720, 0.10),
    ("h100_sxm", "float8", (8192, 8192, 8192), 1290.1, 0.05),
    ("h100_sxm", "float8", (6144, 12288, 12288), 1351.4, 0.05),
    ("h200", "bfloat16", (8192, 8192, 8192), 688.7, 0.05),
    ("h200", "bfloat16", (8192, 8192, 3072), 636.5, 0.05),
    ("h200", "float8", (16384, 16384, 16384), 1366.3, 0.05),
    ("a100_80gb", "float16", (4096, 4096, 4096), 228.0, 0.05),
    ("a100_80gb", "float16", (8192, 8192, 8192), 253.7, 0.05),
    ("a100_80gb", "float16", (6144, 12288, 12288), 250.8, 0.05),
    ("b200", "bfloat16", (1792, 16128, 3072), 1745, 0.10),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "rate", "near"), PUBLISHED)
def test_published_products(
    name: str, dtype: str, shape: tuple[int, int, int], rate: float, near: float
) -> None:
    m, n, k = shape
    seconds = product_seconds(load_cluster(name), m, n, k, 1, dtype)
    assert 2 * m * n * k / seconds / 1e12 == pytest.approx(rate, rel=near)


@pytest.mark.parametrize(
    ("name", "kind", "size", "published"),
    [
        ("h100_sxm", "all_reduce", 1e9, 480e9),
        ("h100_sxm", "all_gather", 1e9, 370e9),
        ("h200", "all_reduce", 4e9, 475e9),
        ("a100_80gb", "all_reduce", 1e9, 230e9),
        ("b200", "all_reduce", 8e9, 830e9),
    ],
)
def test_published_bus_bandwidth(name: str, kind: str, size: float, published: float) -> None:
    """8 devices of one node, in the measure of NCCL's tests."""
    factor = (2 if kind == "all_reduce" else 1) * 7 / 8
    seconds = collective_seconds(load_cluster(name), kind, size, 8, 1)
    assert factor * size / seconds == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(
    ("length", "backward", "measured"),
    [(8192, False, 541), (8192, True, 430), (4096, False, 579), (4096, True, 449)],
)
def test_attention_of_training_steps(length: int, backward: bool, measured: float) -> None:
    """cuDNN's kernels in steps of Llama 8B, mixtral and qwen3 (the last two's mean) on one H200."""
    flops = 4 * 32 * length**2 * 128 * (1.25 if backward else 0.5)
    size = (4 if backward else 2) * (32 + 8) * length * 128 * 2  # heads of queries, of keys and values
    cluster = by_kernel(load_cluster("h200"), "cudnn")
    seconds = attention_seconds(cluster, flops, size, "bfloat16", 128, backward)
    assert flops / seconds / 1e12 == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(
    ("kernel", "backward", "length", "published"),
    [
        ("flash2", False, 2048, 298),
        ("flash2", False, 16384, 335),
        ("flash2", True, 2048, 291),
        ("flash2", True, 16384, 322),
        ("flash3", False, 16384, 616),
        ("flash3", True, 16384, 561),
    ],
)
def test_published_kernels(kernel: str, backward: bool, length: int, published: float) -> None:
    """Shah et al. 2024, figures 5 and 6: 16,384 tokens in all, 16 heads of 128, on an H100.

    Forward is causal, so that half of the scores count; backward is not.
    """
    rows = 16384 // length
    flops = 4 * rows * 16 * length**2 * 128 * (2.5 if backward else 0.5)
    size = (8 if backward else 4) * rows * 16 * length * 128 * 2
    cluster = by_kernel(load_cluster("h100_sxm"), kernel)
    seconds = attention_seconds(cluster, flops, size, "bfloat16", 128, backward)
    assert flops / seconds / 1e12 == pytest.approx(published, rel=0.08)


def test_waves_of_tiles() -> None:
    """One tile more than the units of a device takes a second wave."""
    cluster = load_cluster("h100_sxm")
    whole = product_seconds(cluster, 132 * 128, 256, 16384, 1, "bfloat16")
    assert product_seconds(cluster, 264 * 128, 256, 16384, 1, "bfloat16") > 1.9 * whole
    assert product_seconds(cluster, 133 * 128, 256, 16384, 1, "bfloat16") > 1.2 * whole


@pytest.mark.parametrize(
    "shape", [(4096, 1, 4096, 2), (4096, 1, 2, 4096), (64, 1024, 1024, 64), (128, 64, 768, 2048)]
)
def test_many_small_products_are_near_the_roofline(shape: tuple[int, int, int, int]) -> None:
    """Their tiles share units and waves: one tile for each wave would be 10 to 40 times as long."""
    cluster, (batch, m, n, k) = load_cluster("h100_sxm"), shape
    moved = 2 * batch * (m * k + k * n + m * n) / cluster.device.bandwidth
    roof = max(moved, 2 * batch * m * n * k / cluster.device.peak["bfloat16"])
    assert roof < product_seconds(cluster, m, n, k, batch, "bfloat16") < 2 * roof


# Rows, outputs, inputs, experts, and TFLOP/s of forward, of forward with transposed weights, and of the
# gradient of weights, with random loads (one H200, 2026-11, torch 2.11).
GROUPED = [
    (16384, 14336, 4096, 8, 659, 648, 631),
    (65536, 768, 2048, 128, 462, 510, 461),
    (49152, 1408, 2048, 64, 536, 522, 500),
    (32768, 2880, 2880, 32, 590, 564, 531),
    (131072, 7168, 2048, 32, 648, 626, 660),
]


@pytest.mark.parametrize("row", GROUPED)
def test_measured_grouped_products(row: tuple[int, ...]) -> None:
    rows, n, k, experts, *rates = row
    cluster, each = load_cluster("h200"), rows // experts
    took = [
        grouped_seconds(cluster, (experts, each, n, k), "bfloat16", "m"),
        grouped_seconds(cluster, (experts, each, k, n), "bfloat16", "m"),
        grouped_seconds(cluster, (experts, n, k, each), "bfloat16", "k"),
    ]
    found = [2 * rows * n * k / seconds / 1e12 for seconds in took]
    assert found == pytest.approx(rates, rel=0.14)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("a100_80gb", "bfloat16"),
        ("mi300x", "bfloat16"),
        ("h100_sxm", "float16"),
        ("h100_sxm", "float32"),
    ],
)
def test_experts_without_a_kernel_of_theirs_run_in_turn(name: str, dtype: str) -> None:
    """PyTorch's kernel is for bfloat16 on Hopper and Blackwell (ATen/native/cuda/GroupedBlas.cpp)."""
    cluster = load_cluster(name)
    one = product_seconds(cluster, 1024, 14336, 4096, 1, dtype)
    assert grouped_seconds(cluster, (8, 1024, 14336, 4096), dtype, "m") == 8 * one


def test_less_power_is_slower() -> None:
    cluster = load_cluster("h100_sxm")
    capped = replace(cluster, device=replace(cluster.device, power_limit=500.0))
    factor = ((500 - 70) / (700 - 70)) ** (1 / 2)
    for of in (_product_of, _attention_of):
        assert of(cluster) / of(capped) == pytest.approx(factor, rel=0.03)


def _product_of(cluster: Cluster) -> float:
    return product_seconds(cluster, 8192, 8192, 8192, 1, "bfloat16")


def _attention_of(cluster: Cluster) -> float:
    return attention_seconds(cluster, 1e12, 1e8, "bfloat16", 128, True)


def _measured(**tables: Any) -> Cluster:
    return replace(load_cluster("cpu"), measured=Measurements(ranks=8, seconds=1.0, **tables))


def test_measured_points_cost_what_was_measured() -> None:
    products = tuple(
        MeasuredProduct("float32", m, n, k, b, 1e-4 * (1 + i))
        for i, (m, n, k, b) in enumerate(itertools.product([32, 512], [64, 777], [128], [1, 4]))
    )
    attention = tuple(
        MeasuredAttention("float32", dim, backward, flops, 1e5, flops / 1e9)
        for dim, backward, flops in itertools.product([32, 64], [False, True], [1e7, 1e9])
    )
    cluster = _measured(products=products, attention=attention)
    for row in products:
        assert product_seconds(cluster, row.m, row.n, row.k, row.batch, "float32") == pytest.approx(
            row.seconds, rel=1e-12
        )
    for row in attention:
        result = attention_seconds(cluster, row.flops, row.bytes, "float32", row.head_dim, row.backward)
        assert result == pytest.approx(row.seconds, rel=1e-12)
    # Between points that are all twice the model's time, everything is.
    plain = load_cluster("cpu")
    twice = [
        replace(p, seconds=2 * product_seconds(plain, p.m, p.n, p.k, p.batch, p.dtype))
        for p in products
    ]
    slow = _measured(products=tuple(twice))
    for shape in [(100, 100, 100, 1), (4096, 4096, 512, 1), (8, 8, 8, 2)]:
        assert product_seconds(slow, *shape, "float32") == pytest.approx(
            2 * product_seconds(plain, *shape, "float32")
        )
    # A type that was not measured is modelled.
    assert product_seconds(slow, 64, 64, 64, 1, "bfloat16") == product_seconds(
        plain, 64, 64, 64, 1, "bfloat16"
    )


def test_measured_collectives_and_copies() -> None:
    row = MeasuredCollective("all_reduce", 4, 1, 1e-4, 1e-9, 0.1, (1e3, 1e5, 1e7), (1e-4, 3e-4, 9e-3))
    far = replace(row, stride=2, seconds=(1e-3, 3e-3, 9e-2))
    copies = (MeasuredCopy(1e3, 1e-5), MeasuredCopy(1e6, 1e-3))
    cluster = _measured(collectives=(row, far), copies=copies)

    def time(size: float, stride: int = 1, ranks: int = 4, kind: str = "all_reduce") -> float:
        return collective_seconds(cluster, kind, size, ranks, stride)

    assert [time(size) for size in row.bytes] == pytest.approx(row.seconds)
    assert [time(size, 2) for size in row.bytes] == pytest.approx(far.seconds)
    assert time(1e4) == pytest.approx((1e-4 * 3e-4) ** 0.5)  # halfway, in logarithms
    assert time(10) == pytest.approx(1e-4)
    assert time(2e7) == pytest.approx(9e-3 + 1e7 * 1e-9)
    plain = load_cluster("cpu")
    # The last is in several nodes.
    unmeasured = [("all_reduce", 2, 1), ("all_gather", 4, 1), ("all_reduce", 4, 8)]
    for kind, ranks, stride in unmeasured:
        expected = collective_seconds(plain, kind, 1e5, ranks, stride)
        assert time(1e5, stride, ranks, kind) == expected
    assert memory_seconds(cluster, 1e6) == pytest.approx(1e-3)
    assert memory_seconds(cluster, 4e6) == pytest.approx(4e-3)


def test_measured_collectives_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    row = 'kind = "p2p", ranks = 2, stride = 1, latency = 0.0, inverse_bandwidth = 0.0, error = 0.0'
    for rest in ("bytes = [2.0, 1.0], seconds = [1.0, 1.0]", "bytes = [], seconds = []"):
        file.write_text(f"measured = {{collectives = [{{{row}, {rest}}}]}}\n{H100}")
        needs = "measured.collectives[0]: needs ascending bytes, a time for each"
        assert refusal(load_cluster, str(file)) == f"{file}: {needs}"
    copies = ", ".join(f"{{bytes = {size}, seconds = 1.0}}" for size in (2.0, 1.0))
    file.write_text(f"measured = {{copies = [{copies}]}}\n{H100}")
    assert (
        refusal(load_cluster, str(file)) == f"{file}: measured.copies: needs rows with ascending bytes"
    )


@pytest.mark.parametrize("name", NAMES)
def test_hosts_of_shipped_clusters_are_known(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.host_memory >= cluster.node * min(24e9, cluster.device.memory) * (name != "cpu")
    assert cluster.host_cores >= cluster.node
    # Links of all devices together do not outrun the memory that they read.
    assert cluster.node * cluster.host.usable <= cluster.host_bandwidth
    assert cluster.host_power > 0 or name == "cpu"


def test_a_file_without_the_host_is_read(tmp_path: Path) -> None:
    kept = [line for line in H100.splitlines() if not line.startswith("host_")]
    (tmp_path / "old.toml").write_text("\n".join(kept))
    old = load_cluster(str(tmp_path / "old.toml"))
    assert (old.host_memory, old.host_cores, old.host_bandwidth, old.host_power) == (0, 0, 0.0, 0.0)
    (tmp_path / "odd.toml").write_text(f"host_memori = 1\nhost_cores = -1\n{chr(10).join(kept)}")
    odd = refusal(load_cluster, str(tmp_path / "odd.toml"))
    assert "odd.toml: host_memori: unknown key; did you mean host_memory?" in odd
    assert "odd.toml: host_cores: -1 should be greater than or equal to 0" in odd
