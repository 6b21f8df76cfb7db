"""Finer variants of what was recorded, and the choice between what takes equally long."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from compose.config.toml import load
from compose.errors import ConfigError
from compose.planner.candidates import (
    Candidate,
    Space,
    candidates,
    capacity,
    complexity,
    order,
    shape_for,
    with_keys,
)
from compose.planner.cluster import load_cluster
from compose.planner.estimate import Estimate, RankPeak
from compose.planner.quick_estimate import QuickEstimate, quick
from compose.planner.quick_memory import micro_batches
from compose.planner.search import _variants, fewest, ranked, refinements, search
from tests.support.helpers import ROOT, refusal

TRAIN = str(ROOT / "train.toml")


def space(**changes: Any) -> Space:
    config = load(str(ROOT / "train.toml"), [("train.global_batch", "64"), ("train.seq_len", "8192")])
    return replace(Space(config, load_cluster("h100_sxm"), 16), **changes)


def made(where: Space, step: float, full: float, **keys: Any) -> Candidate:
    """A candidate that was recorded: seconds, and its part of a device's memory."""
    named = {name.replace("__", "."): value for name, value in keys.items()}
    size = int(full * capacity(where.cluster))
    estimate = Estimate([RankPeak(size, size, {})], step, 1.0, 0.5, 0.0, {}, {}, [])
    rough = QuickEstimate({"compute": step}, {"weights": float(size)})
    return Candidate(with_keys(where.config, named), named, rough, estimate)


def test_a_simpler_one_wins_within_two_percent() -> None:
    where = space()
    simple = made(where, 1.015, 0.5)
    cut = made(where, 1.0, 0.5, parallel__tp=2, parallel__pp=2)
    assert ranked(where, [cut, simple]) == [simple, cut]
    slower = made(where, 1.03, 0.5)
    assert ranked(where, [cut, slower]) == [cut, slower]
    assert ranked(replace(where, objective="memory"), [simple, cut])[0] is cut


def test_what_fills_the_device_comes_after_what_leaves_room() -> None:
    where = space()
    full, roomy, large = (made(where, *of) for of in ((1.0, 0.97), (1.5, 0.94), (0.5, 1.01)))
    assert ranked(where, [large, full, roomy]) == [roomy, full, large]
    assert ranked(where, [large, full])[0] is full


@pytest.mark.parametrize(
    "keys",
    [
        {"parallel__pp": 2},
        {"parallel__ep": 2},
        {"parallel__dp_replicate": 2},
        {"parallel__offload": "cpu"},
        {"train__loss_chunk": 64},
        {"activation_checkpoint__mode": "budget"},
        {"activation_checkpoint__mode": "every_k"},
        {"activation_checkpoint__mode": "full", "activation_checkpoint__segment": 2},
        {"comm__gradients": "int8"},
    ],
)
def test_each_option_makes_a_composition_less_simple(keys: dict[str, Any]) -> None:
    where = space()
    assert complexity(made(where, 1.0, 0.5, **keys)) > complexity(made(where, 1.0, 0.5))


def test_refinements_are_better_by_corrected_estimates() -> None:
    keys = {"parallel__dp_shard": 16, "activation_checkpoint__mode": "full"}
    where, shape = space(), None
    shape = shape_for(where)
    base = made(where, 1.0, 0.5, **keys)
    base = replace(base, rough=quick(shape, base.config, where.cluster))
    assert base.estimate is not None
    slow = replace(base, estimate=replace(base.estimate, step_seconds=2 * base.rough.step))
    finer = refinements(where, shape, [slow])
    assert finer
    assert {c.config.activation_checkpoint.mode for c in finer} >= {"budget"}
    for one in finer:
        factor = slow.estimate.step_seconds / slow.rough.step if slow.estimate else 1.0
        assert order(where, one, slow.reserved / slow.rough.memory, factor) < order(where, slow)
    pinned = replace(
        where,
        fixed=frozenset(
            ("activation_checkpoint.mode", "activation_checkpoint.budget", "train.micro_batch")
        ),
    )
    assert not [c for c in refinements(pinned, shape, [slow]) if c.config.train.micro_batch != 2]
    freed = replace(pinned, freed=frozenset(("train.global_batch",)))
    batches = {c.config.train.global_batch for c in refinements(freed, shape, [slow])}
    assert batches - {64}


def test_every_way_to_recompute_is_tried() -> None:
    """A budget, every k-th layer, and segments; what another mode does not read is as it was."""
    where = space()
    mode, segment = "activation_checkpoint.mode", "activation_checkpoint.segment"
    base = made(where, 1.0, 0.5, activation_checkpoint__mode="full", activation_checkpoint__segment=2)
    tried = [{mode: "full", segment: 2} | keys for keys in _variants(where, shape_for(where), base)]
    modes = {(keys[mode], keys[segment], keys.get("activation_checkpoint.every")) for keys in tried}
    assert {("budget", 1, None), ("every_k", 1, 3), ("full", 2, None), ("full", 4, None)} <= modes
    assert not any(keys[segment] > 1 for keys in tried if keys[mode] != "full")
    deep = replace(where, fixed={mode})
    assert all(mode not in keys for keys in _variants(deep, shape_for(deep), base))


def test_experts_go_over_any_ranks_that_divide_them() -> None:
    """Of twelve experts three ranks may hold four each."""
    keys = [("model.name", "mixtral"), ("model.n_experts", "12"), ("train.global_batch", "24")]
    config = load(TRAIN, keys)
    where = space(config=config, world_size=6)
    every = candidates(where, shape_for(where), anyway=True)
    assert {one.config.parallel.ep for one in every} == {1, 2, 3, 6}


def test_micro_batches_divide_a_share_that_is_no_power_of_two() -> None:
    """Of 60 samples a rank, 8 are no part: 6 are, and 15, 30 and 60."""
    keys = [("train.global_batch", "120"), ("parallel.dp_shard", "2")]
    where = space(config=load(TRAIN, keys), world_size=2, fixed={"parallel.dp_shard"})
    every = candidates(where, shape_for(where), anyway=True)
    assert {one.config.train.micro_batch for one in every} == {1, 2, 4, 6, 15, 30, 60}


def as_estimated(where: Space, chosen: Sequence[Candidate]) -> Iterator[tuple[int, Candidate]]:
    """Stands for the records: each composition is as its quick estimate says."""
    for place, one in enumerate(chosen):
        size = int(one.rough.memory)
        peaks = [RankPeak(size, size, {})]
        yield place, replace(one, estimate=Estimate(peaks, one.rough.step, 1.0, 0.5, 0.0, {}, {}, []))


def test_what_is_nearest_to_fit_may_be_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 405B on one device of 24 GB lacks least with its weights on the host."""
    monkeypatch.setattr("compose.planner.search._recorded", as_estimated)
    keys = [("model.preset", "405b"), ("train.global_batch", "1"), ("precision.param", "bfloat16")]
    config = load(TRAIN, [*keys, ("train.seq_len", "131072")])
    where = space(config=config, cluster=load_cluster("rtx4090"), world_size=1)
    result = search(where)
    assert result.let_through == 0
    assert result.candidates[0].config.parallel.offload == "cpu"


def test_the_fewest_devices_are_looked_for_beyond_a_number_that_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one rank is with messages of 8 bits, since it sends none."""

    def recorded(where: Space, chosen: Sequence[Candidate]) -> Iterator[tuple[int, Any]]:
        refused = ConfigError("comm.weights: one rank sends no weights")
        for place, one in as_estimated(where, chosen):
            yield place, refused if where.world_size == 1 else one

    monkeypatch.setattr("compose.planner.search._recorded", recorded)
    config = load(TRAIN, [("train.global_batch", "8")])
    found, result = fewest(space(config=config, world_size=2), tokens=1.0, days=1.0)
    assert (found.world_size, bool(result)) == (2, True)
    with pytest.raises(ConfigError, match=r"comm\.weights: one rank"):
        fewest(space(config=config, world_size=1), tokens=1.0, days=1.0)


def test_the_fewest_devices_may_keep_weights_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compose.planner.search._recorded", as_estimated)
    words = [("precision.param", "bfloat16"), ("train.global_batch", "8")]
    config = load(TRAIN, [*words, ("model.preset", "8b")])
    where = space(config=config, cluster=load_cluster("rtx4090"), world_size=2)
    found, result = fewest(where, tokens=1.0, days=1.0)
    assert (found.world_size, [one.config.parallel.offload for one in result[:1]]) == (1, ["cpu"])
    pinned = replace(where, fixed={"parallel.offload"})
    text = "2 devices of rtx4090 do not hold the model; give more of --world-size"
    assert refusal(fewest, pinned, 1.0, 1.0) == text


def test_few_micro_batches_are_a_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples keep four pinned stages busy for less than half of the time, and are legal."""
    monkeypatch.setattr("compose.planner.search._recorded", as_estimated)
    config = load(TRAIN, [("train.global_batch", "2"), ("parallel.pp", "4")])
    results = search(space(config=config, world_size=4, fixed={"parallel.pp"})).candidates
    assert {one.config.parallel.pp for one in results} == {4}
    assert max(micro_batches(one.config) for one in results) == 2


@pytest.mark.parametrize(("param", "stages"), [("float32", {3}), ("bfloat16", {1, 2, 3})])
def test_one_device_may_keep_its_cast_weights(param: str, stages: set[int]) -> None:
    """With zero 3 they are cast again for each forward and backward."""
    where = space(config=load(TRAIN, [("precision.param", param)]), world_size=1)
    found = {one.config.parallel.zero for one in candidates(where, shape_for(where))}
    assert found == stages
