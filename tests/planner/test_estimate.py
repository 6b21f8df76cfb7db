"""Estimates do not depend on the GPU of the machine that makes them; few layers stand for all."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from compose.config.rules import check
from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import ASYNCHRONOUS
from compose.planner.candidates import TRIED, capacity
from compose.planner.cluster import load_cluster
from compose.planner.estimate import (
    Estimate,
    _estimate,
    estimate,
    estimate_of_kinds,
    speeds_of,
    weakest,
)
from compose.planner.memory import STEP, RankMemory
from compose.planner.quick_estimate import quick
from compose.planner.quick_units import _shape_of, shape_of
from compose.planner.rank_costs import RankCosts
from compose.planner.record_pool import RecordPool, RecordRequest, _recorded
from compose.planner.trace import sent_bytes
from tests.support.helpers import make_job, parallel, refusal

SLOW = pytest.mark.slow


def _gpu(*args: object, **named: object) -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=SLOW)])
def test_where_a_gpu_is_in_use(pp: int) -> None:
    job = make_job(2, **parallel(pp=pp, dp_shard=2 // pp), model__n_layers=2)
    cluster = load_cluster("h100_sxm")
    without = estimate(job, cluster)
    with mock.patch.object(torch.accelerator, "current_accelerator", _gpu):
        assert estimate(job, cluster) == without
        # A forked copy of this process could not call CUDA.
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            assert estimate(job, cluster) == without


@pytest.mark.parametrize(
    "mode", ["full", pytest.param("none", marks=SLOW), pytest.param("selective", marks=SLOW)]
)
def test_reserved_bytes_are_those_of_all_layers(mode: str) -> None:
    sizes = {"dim": 1024, "hidden_dim": 3584, "n_layers": 14, "n_heads": 8, "vocab_size": 1024}
    job = make_job(
        8,
        **parallel(dp_shard=8),
        **{f"model__{key}": value for key, value in sizes.items()},
        precision__param="bfloat16",
        activation_checkpoint__mode=mode,
        train__seq_len=2048,
        train__micro_batch=4,
        train__global_batch=32,
    )
    cluster = load_cluster("h100_sxm")
    whole, _ = _recorded(RecordRequest(job, cluster, None, 0, None, None), None)
    (one,) = estimate(job, cluster).peaks
    assert one.reserved == pytest.approx(one.allocated + whole.surplus, rel=0.03)


def test_what_was_worked_out_is_not_worked_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two clusters with equal devices records are shared, and prices are not."""
    keys = {"model__n_layers": 4, "train__global_batch": 8, "train__micro_batch": 2}
    job = make_job(2, **parallel(pp=2), **keys, activation_checkpoint__mode="full")
    fast = replace(load_cluster("h100_sxm"), node=1)
    slow = replace(fast, between=replace(fast.between, latency=0.5))

    def made() -> list[object]:
        _shape_of.cache_clear()
        shape = shape_of(job.config, tmp_path)
        of_clusters = (estimate(job, cluster, cache=tmp_path) for cluster in (fast, slow, fast))
        return [*of_clusters, quick(shape, job.config, fast)]

    first = made()
    assert first[0] != first[1]
    assert first[0] == first[2]
    monkeypatch.setattr(RecordPool, "submit", None)
    monkeypatch.setattr("compose.planner.quick_units.probe", None)
    assert made() == first
    for path in tmp_path.glob("*.costs"):
        path.unlink()
    assert made() == first


def test_messages_of_a_pipeline_are_no_bubble() -> None:
    """A forward of 1 s and a backward of 2 s: the bubble is the schedule's, however slow the link."""
    job = make_job(2, **parallel(pp=2), model__n_layers=2, train__global_batch=8, train__micro_batch=2)
    keys = [
        (stage, kind, place)
        for stage in (0, 1)
        for kind in "FB"
        for place in ("first", "middle", "last")
    ]
    times = {key: {"all": 1.0 if key[1] == "F" else 2.0} for key in keys}
    ranks = [RankCosts(RankMemory(), 0, times | {STEP: {"all": 0.0}})] * 2
    fast = replace(load_cluster("h100_sxm"), node=1)
    slow = replace(fast, between=replace(fast.between, latency=0.5))
    with mock.patch("compose.planner.estimate.peak", return_value=(0, {})):
        one, other = (_estimate(job, cluster, ranks, None) for cluster in (fast, slow))
    assert one.bubble == pytest.approx(1 / 5, rel=1e-3)  # (p - 1) / (m + p - 1)
    assert other.step_seconds > 1.1 * one.step_seconds
    assert other.exposed["pp"] == pytest.approx(other.step_seconds - 15)
    assert other.bubble == pytest.approx(3 / other.step_seconds, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100_sxm", "a100_80gb"])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_float8_of_any_number_of_tokens(name: str, recipe: str) -> None:
    """Operands are padded where tokens are no multiple of 16; an A100 emulates float8."""
    pytest.importorskip("torchao")
    cluster = load_cluster(name)
    keys = {"model__dim": 2048, "model__hidden_dim": 8192, "model__n_layers": 3}
    keys |= {"precision__float8": recipe, "precision__param": "bfloat16"}
    keys |= {"train__seq_len": 101, "train__micro_batch": 1, "train__global_batch": 1}
    config = make_job(1, **parallel(dp_shard=1), **keys).config
    result = estimate(check(config, 1, cluster.target), cluster)
    assert result.step_seconds > 0


def test_a_table_may_begin_on_any_rank(tmp_path: Path) -> None:
    """Stage 0 tells the others what they receive, from wherever it is."""
    rows, results, sent = ["0F0,0F1,,0B0,0B1", ",1F0,1B0,1F1,1B1"], [], []
    for number, table in enumerate((rows, rows[::-1])):
        file = tmp_path / f"{number}.csv"
        file.write_text("\n".join(table) + "\n")
        keys = {**parallel(pp=2, dp_shard=2), "parallel__pp_schedule": str(file)}
        keys |= {"train__micro_batch": 1, "train__global_batch": 4, "comm__gradients": "int8"}
        job = make_job(4, **keys, model__n_layers=2)
        results.append(estimate(job, load_cluster("cpu")))
        sent.append([sent_bytes(job, rank) for rank in (0, 2)])
    one, other = results
    assert one.step_seconds == other.step_seconds
    assert [peak.allocated for peak in one.peaks] == [peak.allocated for peak in other.peaks[::-1]]
    assert sent[0] == sent[1][::-1]


def test_without_a_flush() -> None:
    """No rank waits but for a slower one; versions and what is in flight take memory. The search offers
    no such schedule by itself: its gradients are others."""
    cluster, keys = load_cluster("h100_sxm"), {"model__n_layers": 4, "train__max_norm": 0.0}
    keys |= parallel(pp=2, dp_shard=1) | {"train__global_batch": 4, "train__micro_batch": 2}
    jobs = [make_job(2, **keys, parallel__pp_schedule=name) for name in ("1F1B", "PipeDream2BW")]
    flushed, two = (estimate(job, cluster) for job in jobs)
    one = estimate(
        make_job(2, **keys | {"train__micro_batch": 4}, parallel__pp_schedule="PipeDream"), cluster
    )
    assert two.bubble < flushed.bubble / 4
    assert two.step_seconds < flushed.step_seconds
    assert one.bubble < flushed.bubble / 4
    for peak, other in zip(two.peaks, flushed.peaks, strict=True):
        assert peak.by_category["weights"] == 2 * other.by_category["weights"]
    weights = [peak.by_category["weights"] for peak in one.peaks]
    assert weights == [peak.by_category["weights"] // (1 + rank) for rank, peak in enumerate(two.peaks)]
    assert one.peaks[0].by_category["activations"] > one.peaks[1].by_category["activations"]
    rough = [quick(shape_of(job.config, None), job.config, cluster) for job in jobs]
    assert rough[1].bytes["weights"] == 2 * rough[0].bytes["weights"]
    assert rough[1].seconds["bubble"] == 0 < rough[0].seconds["bubble"]
    assert not ASYNCHRONOUS.keys() & {*TRIED["parallel.pp_schedule"]}


@pytest.mark.parametrize("dispatch", [0.0, 1e-3])
def test_the_parts_of_a_step_are_the_whole(dispatch: float) -> None:
    """Small kernels wait for the host, which is a part too."""
    cluster = load_cluster("h100_sxm")
    cluster = replace(cluster, device=replace(cluster.device, dispatch=dispatch))
    job = make_job(2, **parallel(dp_shard=2), model__n_layers=2)
    result = estimate(job, cluster)
    kinds = ("product", "attention", "memory")
    parts = sum(result.work[kind] for kind in kinds) + sum(result.exposed.values())
    assert parts == pytest.approx(result.step_seconds, rel=1e-3)
    assert (result.exposed.get("issue", 0.0) > 0.9 * result.step_seconds) == (dispatch > 0)


def test_kinds_of_device_have_the_type_that_computes() -> None:
    kinds = [(load_cluster(name), 8) for name in ("h100_sxm", "a100_80gb")]
    assert "a100_80gb: device.peak: has no rate for float8" in refusal(
        speeds_of, Parallel(), kinds, "float8"
    )


WIDE = {"dim": 4096, "hidden_dim": 14_336, "n_layers": 8, "n_heads": 32, "vocab_size": 1024}


def _of_kinds(first: str, second: str, **keys: object) -> tuple[Estimate, tuple[float, ...]]:
    """The estimate of 8 devices of each of two clusters, with shares by their speeds."""
    kinds = [(load_cluster(name), 8) for name in (first, second)]
    sizes = {f"model__{key}": value for key, value in WIDE.items()}
    sizes |= {"precision__param": "bfloat16", "train__seq_len": 2048, "train__global_batch": 1024}
    job = make_job(16, **sizes | keys)
    speeds = speeds_of(job.degrees, kinds, "bfloat16")
    parallel = replace(job.config.parallel, speeds=speeds, pp_layers=())
    dealt = check(replace(job.config, parallel=parallel), 16, kinds[0][0].target)
    return estimate_of_kinds(dealt, kinds), speeds


@pytest.mark.parametrize("zero", [1, 3])
def test_two_kinds_of_device_that_share_samples(zero: int) -> None:
    """The faster ones have more of them, so that a step takes little longer than it could at best."""
    keys = {**parallel(dp_shard=16), "parallel__zero": zero, "train__micro_batch": 4}
    equal, of_equal = _of_kinds("a100_80gb", "a100_80gb", **keys)
    mixed, speeds = _of_kinds("h100_sxm", "a100_80gb", **keys)
    fast, _ = _of_kinds("h100_sxm", "h100_sxm", **keys)
    assert not of_equal
    assert speeds[0] > 2.5
    assert speeds == 8 * (speeds[0],) + 8 * (1.0,)
    best = 2 / (1 / equal.step_seconds + 1 / fast.step_seconds)
    assert best < mixed.step_seconds < 1.25 * best
    rates = [one.tokens_per_second_per_device * one.step_seconds for one in (equal, mixed, fast)]
    assert rates == pytest.approx([1024 * 2048 / 16] * 3)
    figures = [load_cluster(name).device.peak["bfloat16"] for name in ("h100_sxm", "a100_80gb")]
    of_h100 = fast.mfu * fast.step_seconds * figures[0]
    assert mixed.mfu * mixed.step_seconds * sum(figures) / 2 == pytest.approx(of_h100)
    assert mixed.kwh is None


def test_two_kinds_of_device_in_a_pipeline() -> None:
    """The faster one's stage has more layers, and its times are those of its own device."""
    keys = {**parallel(pp=2, dp_shard=8), "train__micro_batch": 2}
    equal, _ = _of_kinds("a100_80gb", "a100_80gb", **keys)
    mixed, speeds = _of_kinds("h100_sxm", "a100_80gb", **keys)
    fast, _ = _of_kinds("h100_sxm", "h100_sxm", **keys)
    assert speeds[0] == speeds[7] > speeds[8] == speeds[15] == 1
    assert fast.step_seconds < mixed.step_seconds < 0.75 * equal.step_seconds
    assert mixed.peaks[0].by_category["weights"] > 2 * mixed.peaks[1].by_category["weights"]


def test_a_part_with_two_kinds_of_device_is_as_slow_as_the_slower() -> None:
    """Ranks of tp wait for each other at each layer, so no part is faster than another."""
    kinds = [(load_cluster(name), 8) for name in ("h100_sxm", "a100_80gb")]
    job = make_job(16, **parallel(dp_shard=1, tp=16), model__n_heads=16, model__dim=64)
    assert speeds_of(job.degrees, kinds, "float32") == ()
    slow = estimate(job, weakest(kinds))
    assert estimate_of_kinds(job, kinds).step_seconds == pytest.approx(slow.step_seconds, rel=1e-3)


def test_the_weakest_of_two_kinds() -> None:
    a100, cards = load_cluster("a100_40gb"), load_cluster("rtx4090")
    both = weakest([(cards, 8), (a100, 16)])
    assert both.name == "8xrtx4090+16xa100_40gb"
    assert capacity(both) == min(map(capacity, (a100, cards)))
    assert both.device.peak["bfloat16"] == min(c.device.peak["bfloat16"] for c in (a100, cards))
    assert "float8" not in both.device.peak
    assert both.between.usable == min(a100.between.usable, cards.between.usable)


def test_the_slowest_kind_is_that_of_products() -> None:
    """An L40S states a higher peak than an A100, and holds less of it."""
    a100, l40s = (load_cluster(name) for name in ("a100_80gb", "l40s"))
    whole = weakest([(a100, 8), (l40s, 8)])
    assert (whole.within, whole.device.units) == (l40s.within, l40s.device.units)
