"""The answer in sentences: what they say is what the records hold."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from compose.errors import ConfigError
from compose.planner import answer
from compose.planner.answer import (
    Alternative,
    _twice_as_fast,
    batch_table,
    composition_in_words,
    expected,
    kwh_of,
    legend,
    sentences,
    span,
)
from compose.planner.candidates import Candidate, Space, capacity, shape_for
from compose.planner.cluster import MeasuredCollective, Measurements, load_cluster
from compose.planner.costs import collective_seconds
from tests.support.planned import GIB, Records, recorded, space_of

SPACE = space_of()
BEST = recorded(SPACE, 2.0, 20.0)
TOKENS = (1e12, "1T tokens")


def told(
    best: Candidate, others: Sequence[Alternative] = (), changed: Sequence[Alternative] = ()
) -> list[str]:
    """The three sentences."""
    return sentences(SPACE, best, others, changed, TOKENS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "FSDP (ZeRO-3) over 16 devices; no recomputation, micro-batches of 2"),
        (
            {"parallel__tp": 8, "parallel__zero": 1, "activation_checkpoint__mode": "full"},
            "ZeRO-1 over 2 devices, tensor parallel 8 in the node; full recomputation,"
            " micro-batches of 2",
        ),
        (
            {"parallel__tp": 16, "train__micro_batch": 1},
            "tensor parallel 16 over nodes; no recomputation, micro-batches of 1",
        ),
        (
            {"parallel__pp": 2, "parallel__dp_replicate": 2, "parallel__offload": "cpu"},
            "FSDP (ZeRO-3) over 4 devices, 2 replicas, a pipeline of 2 (1F1B); no recomputation,"
            " micro-batches of 2, with parameters and optimizer in host memory",
        ),
        (
            {"train__global_batch": 128, "comm__gradients": "int8"},  # which --free may change
            "FSDP (ZeRO-3) over 16 devices; no recomputation, micro-batches of 2, train.global_batch"
            " 128, comm.gradients int8",
        ),
    ],
)
def test_a_composition_in_words(keys: dict[str, Any], words: str) -> None:
    assert composition_in_words(SPACE, recorded(SPACE, 1.0, 1.0, **keys)) == words


def test_the_first_sentence_has_the_figures_of_the_record() -> None:
    first, *_ = told(BEST)
    assert BEST.estimate
    rate = re.search(r"at ([\d,]+) tokens/s a device and ([\d.]+)% MFU", first)
    held = re.search(r"holds ([\d.]+) of ([\d.]+) GiB", first)
    assert rate
    assert held
    assert first.startswith(f"Run {composition_in_words(SPACE, BEST)}: a step takes 2.00 s, ")
    assert int(rate[1].replace(",", "")) == round(BEST.estimate.tokens_per_second_per_device)
    assert float(rate[2]) == 50.0
    assert (float(held[1]), float(held[2])) == (20.0, round(capacity(SPACE.cluster) / GIB, 1))


def test_the_second_says_why_not() -> None:
    others = [
        Alternative("Plain FSDP", BEST),
        Alternative("One mesh", recorded(SPACE, 3.0, 30.0, parallel__zero=2)),
        Alternative("Another", recorded(SPACE, 1.0, 40.0, parallel__tp=4)),
        Alternative("A third", note="it is too odd"),
        Alternative("A full one", recorded(SPACE, 1.9, 38.0, parallel__tp=2)),
    ]
    assert told(BEST, others)[1] == (
        "Plain FSDP is this composition; One mesh takes 3.00 s (+50.0%); Another lacks 1.3 GiB a"
        " device; A third is not possible: it is too odd; A full one takes 1.90 s (-5.0%), but fills"
        " 98% of a device."
    )


def test_the_third_says_what_it_costs_and_what_helps() -> None:
    changed = [
        Alternative("twice the devices", recorded(SPACE, 1.25, 10.0), "more devices are"),
        Alternative("twice the memory", recorded(SPACE, 1.0, 40.0), "more memory is"),
        Alternative("links twice as fast", None, "faster links are"),
        Alternative('compile.mode = "block"', recorded(SPACE, 0.5, 10.0)),
    ]
    third = told(BEST, changed=changed)[-1]
    assert BEST.estimate
    seconds = 1e12 / (BEST.estimate.tokens_per_second_per_device * 16)
    assert third == (
        f"1T tokens take {span(seconds)}, {seconds * 16 / 3600:,.0f} device-hours; with compile.mode"
        ' = "block" a step takes 500 ms; a step is 1.60'
        " times as fast with twice the devices, 2.00 times with twice the memory, so more memory is the"
        " next thing to buy."
    )


def test_energy_and_host_memory_are_told() -> None:
    assert BEST.estimate
    train = BEST.config.train
    measured = replace(BEST, estimate=replace(BEST.estimate, kwh=0.5))
    hours = 1e12 / BEST.estimate.tokens_per_second_per_device / 3600
    kwh = 0.5 * 1e12 / (train.global_batch * train.seq_len)
    assert kwh_of(SPACE, measured, 1e12) == pytest.approx(kwh)
    assert kwh_of(SPACE, BEST, 1e12) is None
    assert told(measured)[-1].endswith(f"{hours:,.0f} device-hours and {kwh:,.0f} kWh.")
    unknown = replace(SPACE, cluster=replace(SPACE.cluster, host_power=0.0))
    (*_, last) = sentences(unknown, measured, (), (), TOKENS)
    assert last.endswith(" kWh of devices alone, as host_power is unknown.")
    moved = replace(BEST, estimate=replace(BEST.estimate, host_bytes=10 * 2**40))
    assert told(moved)[0].endswith(": it needs 10,240 GiB of host memory, a node has 931.")
    others = [
        Alternative("Offload", replace(moved, config=recorded(SPACE, 1.0, 9.0, parallel__tp=4).config))
    ]
    assert told(BEST, others)[1] == "Offload needs 10,240 GiB of host memory, a node has 931."


def test_where_nothing_fits_the_sentences_say_what_would() -> None:
    best = recorded(SPACE, 2.0, 40.0)
    first, third = told(best, changed=[Alternative("twice the memory", BEST, "more memory is")])
    assert first.startswith("Nearest to fit is FSDP")
    assert first.endswith(f"it needs 40.0 of {capacity(SPACE.cluster) / GIB:.1f} GiB of a device.")
    assert third == "It fits with twice the memory."
    third = told(best, changed=[Alternative("twice the memory", None, "more memory is")])[-1]
    assert third == "Neither twice the devices nor twice the memory makes it fit."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3600, "1 hours"),
        (86400 * 12.34, "12.3 days"),
        (86400 * 365.25 * 4, "4 years"),
        (86400 * 365.25 * 12_345, "12,345 years"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_what_is_expected_is_recorded_where_the_search_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Records(3.0, 10.0)
    monkeypatch.setattr(answer, "record_all", made)
    plain, textbook = expected(SPACE, [BEST])
    assert (plain.candidate, textbook.step) == (BEST, 3.0)
    [(_, config)] = made.asked
    assert (config.parallel.tp, config.parallel.cp, config.parallel.dp_replicate) == (8, 1, 1)


def test_what_is_expected_has_the_batch_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the batch is free, a step of fewer samples would look faster."""
    made = Records(3.0, 10.0)
    monkeypatch.setattr(answer, "record_all", made)
    best = recorded(SPACE, 2.0, 20.0, parallel__tp=2, train__global_batch=128)
    plain, textbook = expected(SPACE, [best, BEST])
    assert (plain.step, textbook.step) == (3.0, 3.0)
    assert [config.train.global_batch for _, config in made.asked] == [128, 128]


def test_what_is_expected_is_tried_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is far above its quick estimate makes the next one lean."""
    short = recorded(SPACE, 1.0, 60.0, parallel__tp=8)
    made = Records(3.0, 50.0)
    monkeypatch.setattr(answer, "record_all", made)
    _, textbook = expected(SPACE, [BEST, short])
    assert textbook.candidate
    assert textbook.candidate.reserved == 50 * GIB
    assert len(made.asked) == 3
    assert made.asked[0][1].train.micro_batch == 1
    made.size = 20.0
    _, textbook = expected(SPACE, [BEST, short])
    assert textbook.candidate
    assert textbook.candidate.reserved == 20 * GIB


@pytest.mark.parametrize(
    ("pinned", "batch", "notes"),
    [
        (["parallel.tp"], 64, ["", "parallel.tp is pinned to 1"]),
        ([], 24, ["24 samples a step cannot be dealt to 16 devices", ""]),
        (
            ["train.micro_batch"],
            63,
            [
                "63 samples a step cannot be dealt to 16 devices in micro-batches of 2",
                "63 samples a step cannot be dealt in micro-batches of 2",
            ],
        ),
        (
            ["parallel.pp"],
            1,
            [
                "1 samples a step cannot be dealt to 16 devices",
                "no mesh of it divides 1 samples a step and the model's layers",
            ],
        ),
    ],
)
def test_what_is_expected_may_not_be_possible(
    monkeypatch: pytest.MonkeyPatch, pinned: list[str], batch: int, notes: list[str]
) -> None:
    monkeypatch.setattr(answer, "record_all", Records())
    where = space_of(pinned=pinned)
    keys = {"train.global_batch": batch}
    where = Space(answer.with_keys(where.config, keys), where.cluster, 16, where.fixed)
    result = expected(where, [])
    assert [one.note for one in result] == notes
    assert [one.step is None for one in result] == [bool(note) for note in notes]


def test_why_what_is_expected_is_not_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(space: Space, configs: Sequence[object]) -> list[ConfigError]:
        return [ConfigError("model.n_heads: 6 is not what tp 8 divides") for _ in configs]

    monkeypatch.setattr(answer, "record_all", refused)
    assert expected(SPACE, [])[1].note == "model.n_heads: 6 is not what tp 8 divides"
    twelve = space_of(12)
    assert expected(twelve, [])[1].note == "tp 8 does not divide 12 devices"
    pinned = space_of(pinned=["parallel.pp"])
    pinned = replace(pinned, config=answer.with_keys(pinned.config, {"parallel.pp": 4}))
    assert expected(pinned, [])[1].note == "pp 4 x tp 8 does not divide 16 devices"
    heads = "parallel.tp: 3 does not divide 8 query heads with 2 key/value heads"
    assert expected(space_of(3), [])[1].note == f"{heads} (allowed: 1, 2, 4, 8)"
    uncut = replace(shape_for(SPACE), axes=frozenset({"pp"}))
    monkeypatch.setattr(answer, "shape_for", lambda space: uncut)
    assert expected(SPACE, [])[1].note == "the plan of llama cannot cut tp"


def test_half_a_batch_may_not_be_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "record_all", Records())
    best = recorded(SPACE, 2.0, 20.0, train__global_batch=16, train__micro_batch=1)
    half, *_ = answer.further(SPACE, best)
    problem = "8 samples cannot be dealt to these devices"
    assert answer.further_in_words(best, half) == f"with half the batch: {problem}"


def test_more_memory_is_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that looks faster by its quick estimate may be slower by its record."""
    monkeypatch.setattr(answer, "record_all", Records(2.5, 10.0))
    results = {one.name: one.step for one in answer.sensitivities(SPACE, BEST)}
    assert (results["twice the devices"], results["twice the memory"]) == (2.5, 2.0)


@pytest.mark.parametrize(("size", "step"), [(30.0, 2.0), (38.0, 1.0), (60.0, 1.0)])
def test_more_memory_gains_what_todays_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, size: float, step: float
) -> None:
    """A faster neighbour that leaves 5% of today's 38.7 GiB free needs no other device."""
    monkeypatch.setattr(answer, "record_all", Records(1.0, size))
    results = {one.name: one.step for one in answer.sensitivities(SPACE, BEST)}
    assert results["twice the memory"] == step


@pytest.mark.parametrize("pinned", [[], ["train.micro_batch", "activation_checkpoint.mode"]])
def test_what_could_be_bought(monkeypatch: pytest.MonkeyPatch, pinned: list[str]) -> None:
    made = Records(1.0, 10.0)
    monkeypatch.setattr(answer, "record_all", made)
    where = space_of(pinned=pinned)
    best = recorded(where, 2.0, 20.0, activation_checkpoint__mode="full")
    results = [*answer.sensitivities(where, best), *answer.further(where, best)]
    assert [(one.name, one.step) for one in results] == [
        ("twice the devices", 1.0),
        ("twice the memory", 2.0),  # the record of 1.0 fits today's too
        ("links between nodes twice as fast", 1.0),
        ('compile.mode = "block"', 1.0),
        ("half the batch", 1.0),
        ("as many of a100_80gb", 1.0),
    ]
    spaces = [space for space, _ in made.asked]
    assert spaces[0].world_size == 32
    assert spaces[1].cluster.device.memory == 2 * where.cluster.device.memory
    assert spaces[2].cluster.between.bandwidth == 2 * where.cluster.between.bandwidth
    assert made.asked[3][1].compile.mode == "block"
    assert made.asked[4][1].train.global_batch == 32
    assert len(answer.sensitivities(space_of(pinned=[*pinned, "compile.mode"]), best)) == 3
    if pinned:
        kept = {(c.train.micro_batch, c.activation_checkpoint.mode) for _, c in made.asked}
        assert kept == {(2, "full")}


def test_the_legend_explains_the_columns() -> None:
    text = legend(SPACE)
    for column in ("step s", "tokens/s", "MFU", "bubble", "GiB", "micro"):
        assert f"{column}: " in text
    assert "312 TFLOP/s of bfloat16" in text
    assert max(map(len, text.splitlines())) <= 120
    kinds = tuple((load_cluster(name), ranks) for name, ranks in (("a100_40gb", 8), ("h100_sxm", 24)))
    text = legend(replace(SPACE, kinds=kinds))
    assert "820 TFLOP/s of bfloat16 on average" in text  # by which MFU is counted
    assert max(map(len, text.splitlines())) <= 120


def test_islands_see_tokens_together() -> None:
    """Two islands of 16 devices need half of one's days, and as many device-hours."""
    one, two = (
        in_cells(batch_table([(replace(SPACE, islands=count), BEST)], 1e12)) for count in (1, 2)
    )
    days, hours = 3, 4
    assert float(two[days].replace(",", "")) == pytest.approx(
        float(one[days].replace(",", "")) / 2, rel=1e-2
    )
    assert one[hours] == two[hours]


def in_cells(table: str) -> list[str]:
    return re.split(r"  +", table.splitlines()[-1].strip())


def test_links_that_were_measured_are_twice_as_fast_too() -> None:
    row = MeasuredCollective("all_gather", 4, 1, 1e-6, 1e-9, 0.0, (1e6, 1e9), (1e-3, 1.0))
    cluster = replace(load_cluster("h100_sxm"), measured=Measurements(collectives=(row,)))
    faster = replace(cluster, measured=Measurements(collectives=(_twice_as_fast(row),)))
    for size in (5e6, 4e9):
        before, after = (collective_seconds(c, "all_gather", size, 4, 1) for c in (cluster, faster))
        assert after == pytest.approx(before / 2, rel=1e-3)
