"""Quick estimates: they rank as records do, and their memory is near that of records."""

import json
from dataclasses import replace
from functools import cache
from statistics import correlation, mean
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.planner_questions import recorded_space
from compose.config.rules import check
from compose.config.toml import load
from compose.parallel.mesh import Parallel
from compose.pipeline.schedules import build_table, stages_per_rank
from compose.pipeline.timeline import simulate
from compose.planner import quick_estimate
from compose.planner.candidates import Space, shape_for, with_keys
from compose.planner.cluster import load_cluster
from compose.planner.costs import collective_seconds, host_seconds
from compose.planner.estimate import estimate
from compose.planner.layer_probe import FigureName, Figures
from compose.planner.probe_scaling import combined
from compose.planner.quick_estimate import QuickEstimate, quick
from compose.planner.quick_memory import sizes_of
from compose.planner.quick_units import shards
from tests.support.helpers import ROOT, keys_in, tiered

TRAIN = str(ROOT / "train.toml")
# `python benchmarks/planner_questions.py records --out benchmarks/results/planner_records.json`
RECORDS = json.loads((ROOT / "benchmarks/results/planner_records.json").read_text())
FAMILIES = {" ".join(row["model"][:2]): tuple(row["model"]) for row in RECORDS}


@cache
def beside(family: str) -> list[tuple[QuickEstimate, dict[str, Any]]]:
    """The quick estimates of a family's compositions, each with its record."""
    space = recorded_space(*FAMILIES[family])
    shape, rows = shape_for(space), [row for row in RECORDS if tuple(row["model"]) == FAMILIES[family]]
    return [(quick(shape, with_keys(space.config, row["keys"]), space.cluster), row) for row in rows]


def error(rough: QuickEstimate, row: dict[str, Any]) -> float:
    return abs(rough.memory / row["allocated"] - 1)


# The aim is 5%. GPT-2 of 774M misses it: the fixed buffers of FSDP outweigh what 1,024 tokens keep.
ERROR = dict.fromkeys(FAMILIES, 0.05) | {"gpt2 774m": 0.09}


@pytest.mark.parametrize("family", tiered(FAMILIES, slow=[f for f in FAMILIES if f != "qwen3 1.7b"]))
def test_a_family_has_the_recorded_memory(family: str) -> None:
    assert mean(error(*pair) for pair in beside(family)) <= ERROR[family]


def test_a_rank_of_ep_has_the_rows_of_more_ranks() -> None:
    """With ep 8 a rank has one of eight experts, and the rows that eight ranks send to it."""
    part = FigureName(
        "0", "F", "op", 1, ("aten._grouped_mm", "product", "bfloat16"), (True,) * 2 + (False,) * 4
    )

    def made(tp: int, cp: int, ep: int) -> Figures:
        return {part: (1e12, 2e9 + 1e9 / ep, 8 / ep, 510.0 * ep, 4096.0, 1024.0)}

    assert combined(1, 1, 8, made)[part][2:] == (1, 8 * 510, 4096, 1024)


@pytest.mark.parametrize(
    ("ranks", "ep", "padded", "moved"),
    [(8, 1, 1, 0), (64, 1, 1, 1), (64, 8, 1, 1), (64, 64, 1, 0), (24, 1, 3, 0), (24, 8, 3, 0)],
)
def test_experts_are_cut_as_fsdp_cuts_them(ranks: int, ep: int, padded: int, moved: int) -> None:
    """24 ranks divide no dim of a stack of experts, and pad; 64 cut another dim than the first."""
    number = 64 if ep == 64 else 8
    unit: Any = SimpleNamespace(dense=1e6, experts=1e9 / ep, trained=1.0)
    shape: Any = SimpleNamespace(stacks={(number, 4096, 14336): 64})
    config: Any = SimpleNamespace(parallel=Parallel(dp_shard=ranks, ep=ep))
    size = sizes_of(shape, {"0": unit}, config)["0"]
    assert size.own == pytest.approx((1e6 + 1e9 * padded) / ranks)
    assert size.whole == pytest.approx(1e6 + 1e9 / ep * padded)
    assert size.moved == moved * 1e9 / ep


@pytest.mark.parametrize(
    ("replicas", "ranks", "tp", "ep", "of_experts"),
    [(1, 8, 1, 4, 2), (2, 8, 1, 16, 1), (2, 24, 1, 16, 3), (4, 6, 2, 8, 3)],
)
def test_ranks_share_experts_within_their_replica(
    replicas: int, ranks: int, tp: int, ep: int, of_experts: int
) -> None:
    """As in expert_mesh: what ep takes of the replicas shares nothing."""
    parallel = Parallel(dp_replicate=replicas, dp_shard=ranks, tp=tp, ep=ep)
    config: Any = SimpleNamespace(parallel=parallel)
    assert shards(config) == (ranks, of_experts)


def test_muon_keeps_one_state_of_matrices() -> None:
    cluster = load_cluster("h100_sxm")
    config = load(TRAIN, [("train.global_batch", "16"), ("parallel.dp_shard", "8")])
    shape = shape_for(Space(config, cluster, 8))
    muon = with_keys(config, {"optimizer.name": "muon"})
    one, other = (quick(shape, each, cluster).bytes["optimizer"] for each in (config, muon))
    model = shape.job.model
    layers = sum(p.numel() for p in model.get_submodule("layers").parameters() if p.ndim == 2)
    assert one - other == pytest.approx(4 * layers / 8)


def test_the_state_of_an_offloaded_optimizer_is_not_on_the_device() -> None:
    """Its two means come over the link and go back at the same time, 4 bytes each for a number."""
    cluster = load_cluster("rtx4090")
    config = load(TRAIN, [("train.global_batch", "16"), ("parallel.dp_shard", "2")])
    shape = shape_for(Space(config, cluster, 2))
    where = ("none", "cpu", "nvme")
    here, host, files = (
        quick(shape, with_keys(config, {"optimizer.offload": each}), cluster) for each in where
    )
    state = here.bytes["optimizer"]
    assert here.memory - host.memory == here.memory - files.memory == state > 0
    assert (here.host, files.host) == (0, 0)
    assert host.host >= state
    passed = host_seconds(cluster, state)
    assert host.seconds["optimizer"] == files.seconds["optimizer"] == passed > here.seconds["optimizer"]


def test_ddp_sends_all_gradients() -> None:
    cluster = load_cluster("ethernet_25g")
    config = load(TRAIN, [("parallel.zero", "0"), ("train.global_batch", "32")])
    shape = shape_for(Space(config, cluster, 16))
    meshes = [{"parallel.dp_shard": n, "parallel.dp_replicate": 16 // n} for n in (16, 1)]
    ddp, same = (quick(shape, with_keys(config, m), cluster).seconds["dp"] for m in meshes)
    assert ddp == same > collective_seconds(cluster, "all_reduce", 4 * shape.active, 16, 1) / 2


@pytest.mark.slow
def test_all_families_together() -> None:
    pairs = [pair for family in FAMILIES for pair in beside(family)]
    assert mean(error(*pair) for pair in pairs) <= 0.05
    assert mean(abs(rough.step / row["step"] - 1) for rough, row in pairs) <= 0.05
    assert spearman([rough.step for rough, _ in pairs], [row["step"] for _, row in pairs]) >= 0.99


def spearman(one: list[float], other: list[float]) -> float:
    return correlation(*([sorted(values).index(v) for v in values] for values in (one, other)))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_a_bubble_is_that_of_the_simulator(
    monkeypatch: pytest.MonkeyPatch, schedule: str, pp: int, count: int
) -> None:
    """Equal stages of 1 s forward and 2 s backward on each rank; messages of 10 ms."""
    share = 1 / stages_per_rank(schedule, 0)
    took = {"F": share, "B": 2 * share, "I": share, "W": share}
    table = build_table(schedule, pp, 0, count)
    config: Any = SimpleNamespace(
        parallel=Parallel(pp=pp, dp_shard=1, pp_schedule=schedule),  # type: ignore[arg-type]
        train=SimpleNamespace(global_batch=count, micro_batch=1),
    )
    monkeypatch.setattr(quick_estimate, "stream_bytes", lambda *of: 0.0)
    for message in (0.0, 0.01):
        monkeypatch.setattr(quick_estimate, "stage_seconds", lambda *of, m=message: m)
        waits = quick_estimate._bubble(config, load_cluster("h100_sxm"), 3.0)
        slots = simulate(table, lambda action: took[action.kind], lambda *ranks, m=message: m)
        length = max(slot.end for slot in slots)
        assert waits == pytest.approx(length - 3 * count)


def test_the_hooks_of_fsdp_keep_the_host() -> None:
    """If they take longer than the device, a step takes their time; FSDP may have nothing to do."""
    cluster = load_cluster("h100_sxm")
    slow = replace(cluster, device=replace(cluster.device, hooks=(1.0, 3.0)))
    config = load(TRAIN, [("train.global_batch", "16"), ("train.micro_batch", "2")])
    shape = shape_for(Space(config, cluster, 8))
    whole = {"parallel.dp_shard": 1, "parallel.dp_replicate": 8, "parallel.zero": 0}
    # FSDP gives whole weights another type before they are summed.
    cast = whole | {"precision.param": "bfloat16", "precision.master": "bfloat16"}
    units = config.model.config.n_layers + 2  # one micro-batch of them on each rank
    for keys, seconds in (
        ({"parallel.dp_shard": 8}, 4.0 * units),
        (cast, 4.0 * units),
        (whole, 0.0),
    ):
        sharded = with_keys(config, keys)
        before, after = (quick(shape, sharded, one).step for one in (cluster, slow))
        assert 0 <= after - seconds <= before


EIGHT_B = {
    16: "train.micro_batch=2 parallel.dp_shard=8 activation_checkpoint.mode=selective",
    32: "train.micro_batch=1 parallel.dp_shard=4 parallel.pp=4 parallel.pp_schedule=ZBVZeroBubble",
}


@pytest.mark.full
@pytest.mark.parametrize("ranks", EIGHT_B)
def test_an_8b_has_the_recorded_memory(ranks: int) -> None:
    """A split backward keeps the gradients that those of weights wait for. (Of llama 1b, whose ends are
    large, the quick estimate is 6% too much with ZBV, and 22% with InterleavedZeroBubble.)"""
    same = "model.preset=8b precision.param=bfloat16 train.seq_len=4096 train.global_batch=64"
    words = f"{same} parallel.tp=2 {EIGHT_B[ranks]}".split()
    config = load(TRAIN, [(key, value) for key, value in (word.split("=") for word in words)])
    cluster = load_cluster("h100_sxm")
    job = check(config, ranks, cluster.target)
    rough = quick(shape_for(Space(config, cluster, ranks)), job.config, cluster)
    recorded = estimate(job, cluster)
    assert rough.memory == pytest.approx(max(peak.allocated for peak in recorded.peaks), rel=0.05)
    if ranks == 16:
        assert rough.step == pytest.approx(recorded.step_seconds, rel=0.1)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_frozen_weights_have_no_master(offload: str) -> None:
    """They are in the type of the products; adapters and what is trained are in float32."""
    cluster = load_cluster("h100_sxm")
    words = "train.global_batch=16 parallel.dp_shard=8 precision.param=bfloat16 model.lora.rank=4"
    keys = keys_in(f"{words} parallel.offload={offload}") | {"model__lora__targets": "all-linear"}
    config = load(TRAIN, [(name.replace("__", "."), str(value)) for name, value in keys.items()])
    shape = shape_for(Space(config, cluster, 8))
    numbers = [(p.numel(), p.requires_grad) for p in shape.job.model.parameters()]
    adapters, frozen = (sum(n for n, trained in numbers if trained is kind) for kind in (True, False))
    rough, weights = quick(shape, config, cluster), (2 * frozen + 4 * adapters) / 8
    if offload == "none":
        assert rough.bytes["weights"] == pytest.approx(weights, rel=0.01)
    else:  # gradients and the two means too
        assert rough.host == pytest.approx(4 / 3 * (weights + adapters / 2) + adapters, rel=0.01)
        passed = 2 * host_seconds(cluster, weights) + host_seconds(cluster, adapters / 2)
        assert rough.seconds["offload"] == pytest.approx(passed, rel=0.01)
