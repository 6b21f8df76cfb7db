"""Host memory that offload takes, and the energy of a step."""

import functools
from dataclasses import replace
from typing import Any

import pytest

from compose.config.toml import load
from compose.parallel.mesh import group_in_nodes
from compose.planner.candidates import Candidate, Space, fits, lack_of_node
from compose.planner.cluster import Cluster, load_cluster
from compose.planner.costs import collective_seconds, for_ranks, host_seconds, processor_seconds
from compose.planner.estimate import Estimate, estimate, host_bytes, lack_of_host, step_kwh
from compose.planner.quick_estimate import quick
from compose.planner.quick_units import shape_of
from compose.planner.report import in_words, table
from tests.support.helpers import ROOT, make_job, parallel

H100 = load_cluster("h100_sxm")
RANKS = 2
# Sides that are powers of two, so that pinned tensors are not larger than what they hold.
WIDE: dict[str, Any] = {
    "model__dim": 1024,
    "model__hidden_dim": 4096,
    "model__n_heads": 8,
    "model__n_kv_heads": 8,
    "model__vocab_size": 1024,
    "model__n_layers": 4,
    "precision__param": "bfloat16",
    "train__seq_len": 256,
    "train__micro_batch": 1,
}


@functools.cache
def _moved(micro_batches: int = 1, cluster: Cluster = H100, **keys: object) -> tuple[int, Estimate]:
    """The trained numbers of a rank, and the estimate of a step."""
    own = {"train__global_batch": RANKS * micro_batches, **parallel(dp_shard=RANKS)}
    job = make_job(RANKS, **(WIDE | own | keys))
    return sum(p.numel() for p in job.model.parameters()) // RANKS, estimate(job, cluster)


def test_ranks_of_a_node_are_counted_together() -> None:
    assert host_bytes(H100, 8, [5]) == 40
    assert host_bytes(H100, 2, [5]) == 10
    assert host_bytes(H100, 16, [5, 7]) == 56  # each stage has a node of its own
    assert host_bytes(H100, 8, [5, 7]) == 48
    assert host_bytes(H100, 16, [1, 9, 2, 3]) == 40


def test_what_a_node_lacks() -> None:
    assert lack_of_host(H100, 2e12) == ""
    assert lack_of_host(H100, 6.5e12) == "needs 6,054 GiB of host memory, a node has 1,863"
    assert lack_of_host(replace(H100, host_memory=0), 1e18) == ""  # unknown


def test_offloaded_state_is_in_host_memory() -> None:
    none = _moved()[1]
    assert (none.host_bytes, none.exposed.get("copy", 0.0)) == (0, 0.0)
    count, result = _moved(parallel__offload="cpu")
    # Weights, gradients and two means, of float32. Norms are small.
    assert result.host_bytes == pytest.approx(RANKS * 16 * count, rel=0.01)
    count, result = _moved(optimizer__offload="cpu")
    assert result.host_bytes == pytest.approx(RANKS * 8 * count, rel=0.01)


@pytest.mark.slow
def test_all_layers_are_on_the_host() -> None:
    count, result = _moved(parallel__offload="cpu", model__n_layers=12)
    assert result.host_bytes == pytest.approx(RANKS * 16 * count, rel=0.01)


@pytest.mark.slow
def test_pinned_memory_is_rounded_up() -> None:
    count, result = _moved(parallel__offload="cpu", model__hidden_dim=4352)
    odd = 3 * 4 * 1024 * (8192 - 4352) * 4 // RANKS  # three weights of each layer take twice as much
    assert result.host_bytes == pytest.approx(RANKS * (16 * count + 2 * odd), rel=0.01)


def test_the_host_computes_at_the_speed_of_its_memory() -> None:
    issued = replace(H100, device=replace(H100.device, dispatch=0.0, hooks=(0.0, 0.0)))
    count, result = _moved(parallel__offload="cpu", cluster=issued)
    # AdamW moves 28 bytes; the norm reads 4, and clipping reads and writes 4 each.
    shared = for_ranks(issued, RANKS)
    assert result.work["optimizer"] == pytest.approx(processor_seconds(shared, 40 * count), rel=0.02)
    slow = replace(issued, host_bandwidth=issued.host_bandwidth / 4)
    again = _moved(parallel__offload="cpu", cluster=slow)[1]
    assert again.work["optimizer"] == pytest.approx(4 * result.work["optimizer"], rel=0.02)


def test_ranks_share_memory_and_cores() -> None:
    small = load_cluster("rtx4090")
    assert processor_seconds(small, 28 * 4e9) == pytest.approx(28 * 4e9 / (0.8 * 89.6e9 / 2))
    assert processor_seconds(replace(small, host_cores=2), 12e9) == pytest.approx(1.0)
    # Two ranks of a node of eight have a half of its host each.
    assert for_ranks(H100, 8) is for_ranks(H100, 16) is H100
    eighth, half = (processor_seconds(for_ranks(H100, ranks), 1e9) for ranks in (8, 2))
    assert eighth == pytest.approx(4 * half)
    rack = load_cluster("gb200")  # of 18 machines, with 4 devices each
    two, whole = for_ranks(rack, 6), (rack.host_memory, rack.host_cores, rack.host_bandwidth)
    assert (two.machines, (two.host_memory, two.host_cores, two.host_bandwidth)) == (
        2,
        tuple(pytest.approx(n / 9) for n in whole),
    )
    assert processor_seconds(for_ranks(rack, 4), 1e9) == pytest.approx(processor_seconds(rack, 1e9))
    unknown = replace(small, host_cores=0, host_bandwidth=0.0)
    assert processor_seconds(unknown, 50e9) == pytest.approx(1.0)


@pytest.mark.slow
def test_later_gradients_are_added_by_the_host() -> None:
    count, one = _moved(parallel__offload="cpu")
    two = _moved(2, parallel__offload="cpu")[1]
    assert one.exposed.get("host", 0.0) == 0
    assert two.exposed["host"] >= processor_seconds(for_ranks(H100, RANKS), 12 * count)
    assert two.host_bytes < 1.1 * one.host_bytes


def test_copies_take_the_link() -> None:
    # The seconds of issuing kernels are left out: copies of small weights take hardly longer.
    swift = replace(H100, device=replace(H100.device, dispatch=1e-9))
    count, result = _moved(optimizer__offload="cpu", cluster=swift)
    here = _moved(cluster=swift)[1]
    passed = host_seconds(H100, 8 * count)  # in and out at the same time
    assert result.work["optimizer"] - here.work["optimizer"] == pytest.approx(passed, rel=0.2)
    slow = replace(H100, host=replace(H100.host, bandwidth=H100.host.bandwidth / 100))
    keys = {"parallel__offload": "cpu", "activation_checkpoint__mode": "full"}
    fast, slowed = (_moved(cluster=each, **keys)[1] for each in (H100, slow))
    more = slowed.step_seconds - fast.step_seconds
    # Weights come in for forward and for backward, and gradients go out meanwhile.
    once = 100 * 4 * count / H100.host.usable
    assert 2 * once < more < 3 * once


@pytest.mark.slow
def test_activations_pass_the_link_too() -> None:
    keys = {"activation_checkpoint__mode": "none", "train__micro_batch": 4, "train__global_batch": 8}
    kept, moved = (_moved(**keys, activation_checkpoint__offload=word)[1] for word in ("false", "true"))
    assert moved.host_bytes > kept.host_bytes == 0
    slow = replace(H100, host=replace(H100.host, bandwidth=H100.host.bandwidth / 100))
    slowed = _moved(cluster=slow, **keys, activation_checkpoint__offload="true")[1]
    assert slowed.exposed["copy"] > 10 * moved.exposed.get("copy", 0.0)


def _candidate(space: Space, result: Estimate) -> Candidate:
    job = make_job(RANKS, **WIDE, **parallel(dp_shard=RANKS), parallel__offload="cpu")
    return Candidate(job.config, {}, quick(shape_of(job.config), job.config, space.cluster), result)


def test_what_a_node_cannot_hold_does_not_fit() -> None:
    count, result = _moved(parallel__offload="cpu")
    config = load(str(ROOT / "train.toml"), [])
    small = replace(H100, host_memory=2**30)
    for cluster, whole in ((H100, True), (small, False), (replace(H100, host_memory=0), True)):
        space = Space(config, cluster, RANKS)
        one = _candidate(space, result)
        assert fits(space, one) == whole
        assert one.rough.host == pytest.approx((8 * 4 / 3 + 8) * count, rel=0.01)
        assert ("does not fit" in table(space, [one])) != whole
    space = Space(config, replace(H100, host_memory=10**9), RANKS)
    tray = Space(config, load_cluster("gb200"), RANKS)  # one of 18 machines
    much = _candidate(tray, replace(result, host_bytes=900 * 2**30))
    assert lack_of_node(tray, much) == "needs 900 GiB of host memory, a node has 894"
    assert "  host memory of a node: 900.0 of 894.1 GiB\n" in in_words(tray, much)
    big = _candidate(space, replace(result, host_bytes=6 * 2**30))
    assert lack_of_node(space, big) == "needs 6 GiB of host memory, a node has 1"
    assert table(space, [big]).endswith("does not fit; needs 6 GiB of host memory, a node has 1")
    assert "  host memory of a node: 6.0 of 0.9 GiB\n" in in_words(space, big)
    unknown = replace(space, cluster=replace(H100, host_memory=0))
    assert "  host memory of a node: 6.0 GiB; what it has is unknown\n" in in_words(unknown, big)


def test_energy_of_a_step() -> None:
    # Two of four seconds at 700 W and two at 70 W, on 16 devices of two nodes.
    joules = 16 * (700 * 2 + 70 * 2) + 2 * 2800 * 4
    assert step_kwh(H100, 16, 4.0, [2.0]) == pytest.approx(joules / 3.6e6)
    assert step_kwh(H100, 16, 4.0, [1.0, 3.0]) == pytest.approx(joules / 3.6e6)
    rack = load_cluster("gb200")
    joules = [n * 1200 + used * 33_600 / 18 for n, used in ((1, 1), (6, 2), (80, 20))]
    kwh = [step_kwh(rack, n, 1.0, [1.0]) for n in (1, 6, 80)]
    assert kwh == [pytest.approx(one / 3.6e6) for one in joules]
    limited = replace(H100, device=replace(H100.device, power_limit=400.0), host_power=0.0)
    assert step_kwh(limited, 1, 1.0, [1.0]) == pytest.approx(400 / 3.6e6)
    unknown = replace(H100, device=replace(H100.device, power=1.0, power_limit=1.0, power_idle=0.0))
    assert step_kwh(unknown, 8, 4.0, [2.0]) is None
    result = _moved()[1]
    most = (RANKS * 700 + 2800) * result.step_seconds / 3.6e6
    assert result.kwh is not None
    assert 0.6 * most < result.kwh < most


def test_a_group_has_the_nodes_of_its_job() -> None:
    """A whole job on racks of 72 has 56 ranks in the last one, and of groups of 64 one has eight."""
    gb200, size = load_cluster("gb200"), 1e11
    whole = collective_seconds(gb200, "all_gather", size, 128, 1, 128)
    assert whole == pytest.approx(127 / 128 * size / gb200.within.usable, rel=0.01)
    parts = collective_seconds(gb200, "all_gather", size, 64, 1, 128)
    assert parts == pytest.approx(63 / 64 * size / (8 * gb200.between.usable), rel=0.01)
    # By hand: 0 to 7 and 8 to 15; 1, 4, 7 and 10, 13 and 16; 7 and 8 to 13; 8, 9 after 0 to 7.
    for node, ranks, stride, world_size, places in (
        (8, 16, 1, 16, (2, 8)),
        (8, 8, 1, 16, (1, 8)),
        (8, 6, 3, 18, (3, 1)),
        (8, 7, 1, 14, (2, 1)),
        (8, 10, 1, 40, (2, 2)),
    ):
        assert group_in_nodes(node, ranks, stride, world_size) == places
