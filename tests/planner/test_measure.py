"""python -m compose measure: a loadable file of what was timed, its fits, and refusals in one line."""

import dataclasses
import os
import random
from pathlib import Path

import pytest
import torch

from compose.planner.cluster import KINDS, Cluster, MeasuredCollective, cluster_names, load_cluster
from compose.planner.costs import (
    attention_seconds,
    collective_seconds,
    memory_seconds,
    processor_seconds,
    product_seconds,
)
from compose.planner.measure import Shape, _shapes, as_toml, measure
from compose.planner.sweep import fit, kinds_of, link_of
from tests.support.command_lines import answered, execute, launch
from tests.support.pool import Pool

CPU = torch.device("cpu")
# The command with less time than a person gives it. In the file stands how long it took.
SHORT = """\
from compose.cli.command_line import run
from compose.cli.commands import measure

run(lambda words: measure(words, seconds=1.0))
"""


def _values(cluster: Cluster) -> dict[str, object]:
    return {key: value for key, value in dataclasses.asdict(cluster).items() if key != "name"}


def _check_measured(cluster: Cluster) -> None:
    """Measured rows cost what was measured, and the host is this machine."""
    rows = cluster.measured
    assert cluster.host_memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.host_cores == len(os.sched_getaffinity(0))
    if cluster.backend == "gloo":  # the device is the host
        spread = dataclasses.replace(cluster, host_cores=0)  # whose cores do not limit it
        assert processor_seconds(spread, 1e9) == pytest.approx(1e9 / cluster.device.bandwidth)
    else:
        assert 0 < cluster.host_bandwidth < cluster.device.bandwidth
    assert cluster.host_power == 0  # unknown
    assert min(len(rows.products), len(rows.attention), len(rows.copies)) >= 2
    for row in rows.products:
        result = product_seconds(cluster, row.m, row.n, row.k, row.batch, row.dtype)
        assert result == pytest.approx(row.seconds)
    for each in rows.attention:
        result = attention_seconds(
            cluster, each.flops, each.bytes, each.dtype, each.head_dim, each.backward
        )
        assert result == pytest.approx(each.seconds)
    for copy in rows.copies:
        assert memory_seconds(cluster, copy.bytes) == pytest.approx(copy.seconds)
    for line in rows.collectives:
        for size, seconds in zip(line.bytes, line.seconds, strict=True):
            result = collective_seconds(cluster, line.kind, size, line.ranks, line.stride)
            assert result == pytest.approx(seconds)


@pytest.mark.slow
def test_command_under_torchrun(tmp_path: Path) -> None:
    """Two ranks measure, and the first writes a file that loads, whole and alone."""
    script, out = tmp_path / "short.py", tmp_path / "here.toml"
    script.write_text(SHORT)
    answer = execute(str(script), "--out", str(out), ranks=2)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"{out}: ")
    assert " TFLOP/s of float32" in answer.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.toml", "short.py"]
    cluster = load_cluster(str(out))
    assert (cluster.name, cluster.node, cluster.backend) == ("here", 2, "gloo")
    assert cluster.measured.ranks == 2
    assert {row.kind for row in cluster.measured.collectives} == set(KINDS)
    assert {(row.ranks, row.stride) for row in cluster.measured.collectives} == {(2, 1)}
    _check_measured(cluster)
    head = out.read_text().splitlines()[:4]
    assert head[0].startswith("# Measured on 20")
    assert head[1].startswith("# 2 ranks at the same time, 2 a node, ")
    assert head[2].startswith("# Lines fitted to 6 collectives: median error ")
    assert head[3] == "# [between] was not measured: there was one node. [within] stands there."


def test_command_alone(tmp_path: Path) -> None:
    script, out = tmp_path / "short.py", tmp_path / "here.toml"
    script.write_text(SHORT)
    out.write_text("what stood here before")
    answer = execute(str(script), "--out", str(out))
    assert answer.returncode == 0, answer.stderr
    cluster = load_cluster(str(out))
    assert (cluster.node, cluster.measured.ranks, cluster.measured.collectives) == (1, 1, ())
    _check_measured(cluster)
    assert "# [within] and [between] were not measured: there was one rank." in out.read_text()


def _axes_of_four() -> tuple[str, list[tuple[str, int, int]]]:
    cluster = measure(CPU, {}, seconds=1.0)
    rows = cluster.measured.collectives
    return as_toml(cluster), [(row.kind, row.ranks, row.stride) for row in rows]


def test_ranks_agree_on_axes_and_times(pool: Pool) -> None:
    """Four ranks measure the axis of all first, and hold the same figures, but for their own memory."""
    answers = pool.run(_axes_of_four, 4)
    texts = [[line for line in text.splitlines() if "context" not in line] for text, _ in answers]
    assert texts == [texts[0]] * 4
    axes = answers[0][1]
    assert axes[:5] == [(kind, 4, 1) for kind in KINDS if kind != "p2p"]
    assert {(ranks, stride) for _, ranks, stride in axes} <= {(4, 1), (2, 1), (2, 2)}


@pytest.mark.gpu
def test_gpu(tmp_path: Path) -> None:
    script, out = tmp_path / "short.py", tmp_path / "here.toml"
    script.write_text(SHORT.replace("1.0", "20.0"))
    answer = launch(str(script), "--out", str(out))
    assert answer.returncode == 0, answer.stderr
    cluster = load_cluster(str(out))
    assert cluster.device.memory == torch.cuda.get_device_properties(0).total_memory
    assert cluster.device.peak["bfloat16"] > cluster.device.peak["float32"]
    _check_measured(cluster)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "command line: measure: needs --out FILE.toml, the file to write"),
        (["--out="], "command line: measure: needs --out FILE.toml, the file to write"),
        (["--out"], "command line: --out: needs a value: --out=value"),
        (["--uot=x.toml"], "command line: --uot: unknown option; did you mean --out?"),
        (["x.toml"], "command line: measure: takes no x.toml; --out names the file"),
        (["--out=x"], "command line: --out: x is no .toml file"),
        (
            ["--out=none/x.toml"],
            "command line: --out: cannot write none/x.toml: No such file or directory",
        ),
        (["--out=FOLDER"], "command line: --out: FOLDER is a folder"),
    ],
)
def test_refusals(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before anything is measured."""
    monkeypatch.delattr("compose.cli.commands.process_group")
    folder = tmp_path / "some.toml"
    folder.mkdir()
    words = [word.replace("FOLDER", str(folder)) for word in words]
    answer = answered("-m", "compose", "measure", *words)
    message = message.replace("FOLDER", str(folder))
    assert (answer.returncode, answer.stderr, answer.stdout) == (2, message + "\n", "")


def test_help() -> None:
    answer = answered("-m", "compose", "measure", "--help")
    assert answer.returncode == 0
    assert "--out FILE.toml" in answer.stdout


@pytest.mark.parametrize("name", cluster_names())
def test_a_written_cluster_is_the_same(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    file = tmp_path / "again.toml"
    file.write_text(as_toml(cluster, ["one line", "another"]))
    assert _values(load_cluster(str(file))) == _values(cluster)


def test_fit_finds_a_line() -> None:
    sizes = [1024.0 * 4**i for i in range(8)]
    latency, inverse, error = fit(sizes, [3e-5 + 2e-10 * size for size in sizes])
    assert (latency, inverse) == pytest.approx((3e-5, 2e-10))
    assert error < 1e-9


def test_fit_weighs_relative_errors() -> None:
    """Times that are off by up to 10% give a line whose values are off by no more, small sizes too."""
    sizes = [1024.0 * 4**i for i in range(10)]
    noise = random.Random(1)
    seconds = [(3e-5 + 2e-10 * size) * noise.uniform(0.9, 1.1) for size in sizes]
    latency, inverse, error = fit(sizes, seconds)
    assert latency == pytest.approx(3e-5, rel=0.1)
    assert inverse == pytest.approx(2e-10, rel=0.1)
    assert 0.01 < error < 0.1


@pytest.mark.parametrize("seconds", [[3.0, 2.0, 1.0], [1e-6, 1e-5, 1e-3], [1.0, 1.0, 1.0], [1.0]])
def test_fit_is_never_negative(seconds: list[float]) -> None:
    sizes = [10.0, 100.0, 1000.0][: len(seconds)]
    latency, inverse, error = fit(sizes, seconds)
    assert latency >= 0
    assert inverse >= 0
    # No other such line is nearer.
    for base, slope in [
        (latency * 1.01 + 1e-9, inverse),
        (latency * 0.99, inverse),
        (latency, inverse * 1.01 + 1e-9),
    ]:
        squares = [((base + slope * s) / t - 1) ** 2 for s, t in zip(sizes, seconds, strict=True)]
        assert (sum(squares) / len(squares)) ** 0.5 >= error - 1e-12


def test_link_of_a_ring() -> None:
    """The link of which a ring's formula makes the measured all-gather."""
    row = MeasuredCollective("all_gather", 4, 1, 6e-5, 1.5e-9, 0.0, (1e3, 1e6), (1e-3, 1e-3))
    rows = [row, dataclasses.replace(row, ranks=2), dataclasses.replace(row, kind="p2p", ranks=8)]
    link = link_of(rows, 8)
    assert link is not None
    assert (link.latency, link.usable) == pytest.approx((2e-5, 0.75 / 1.5e-9))
    assert link_of([dataclasses.replace(row, kind="broadcast")], 8) is None
    # Over nodes of two devices the ring has two cards of each; with stride 2 it has one.
    for stride, cards in ((1, 2), (2, 1)):
        between = link_of([dataclasses.replace(row, stride=stride)], 2)
        assert between is not None
        assert between.usable == pytest.approx(0.75 / 1.5e-9 / cards)


def test_shapes_and_kinds() -> None:
    shapes = _shapes(1e9, "float32", "cpu", 40)
    assert shapes == _shapes(1e9, "float32", "cpu", 40)
    assert shapes[0] == Shape(512, 512, 512, 1)
    assert all(1e5 <= shape.flops <= 1e9 for shape in shapes)
    assert 1 <= sum(shape.batch > 1 for shape in shapes) <= 40 // 6
    assert len(set(shapes)) == len(shapes) >= 39
    assert _shapes(1.0, "float32", "cpu", 40) == [Shape(32, 32, 32, 1)]
    assert "p2p" in kinds_of(2)
    assert "p2p" not in kinds_of(4)
