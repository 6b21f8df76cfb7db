"""Why other compositions lose: the figures are of records, and no line names a key that is pinned."""

import re
from dataclasses import replace

import pytest

from compose.planner.candidates import DEGREES, TRIED
from compose.planner.explain import against_best, differences, explain, neighbours, seconds_by_part
from tests.support.planned import Records, recorded, space_of

SPACE = space_of()
BEST = recorded(SPACE, 10.0, 20.0, {"tp": 1.0, "dp_shard": 1.0}, parallel__tp=2)


@pytest.mark.parametrize(
    ("step", "size", "exposed", "line"),
    [
        (12.0, 20.0, {"tp": 3.0, "dp_shard": 1.0}, "+2.00 s a step (+20.0%): messages of tp +2.00 s"),
        (12.0, 20.0, {"dp_shard": 1.0}, "+2.00 s a step (+20.0%): computation +3.00 s"),
        (9.0, 20.0, {"tp": 1.0}, "-1.00 s a step (-10.0%): messages of data parallel -1.00 s"),
        (10.0, 20.0, {"tp": 1.0, "dp_shard": 1.0}, "+0 s a step (+0.0%)"),
        (9.0, 40.0, {"tp": 1.0}, "does not fit by 1.3 GiB (activations +18.0 GiB)"),
    ],
)
def test_a_difference_is_told_by_what_goes_the_same_way(
    step: float, size: float, exposed: dict[str, float], line: str
) -> None:
    other = recorded(SPACE, step, size, exposed, parallel__tp=4)
    assert against_best(SPACE, BEST, other) == line


def test_parts_are_the_whole_step() -> None:
    """A rank that waits in the pipeline does so for what is left."""
    assert BEST.estimate
    late = replace(BEST.estimate, step_seconds=13.0)
    parts = seconds_by_part(late)
    assert sum(parts.values()) == pytest.approx(13.0)
    assert parts["waiting in the pipeline"] == pytest.approx(3.0)


def test_names_are_the_keys_that_differ() -> None:
    other = recorded(SPACE, 1.0, 1.0, parallel__pp=2, parallel__zero=1, train__micro_batch=4)
    assert differences(BEST, other) == "pp 2, no tp, zero 1, micro_batch 4"
    assert differences(BEST, BEST) == "the same keys"


def test_two_neighbours_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Records(11.0, 15.0)
    monkeypatch.setattr("compose.planner.explain.record_all", made)
    other = recorded(SPACE, 12.0, 20.0, parallel__tp=4)
    first, *rest = explain(SPACE, [BEST, other])
    assert first.startswith("tp 4: +2.00 s a step (+20.0%)")
    assert len(rest) == len(made.asked) == 2
    for line, (_, config) in zip(rest, made.asked, strict=True):
        assert ": +1.00 s a step (+10.0%)" in line
        assert config not in (BEST.config, other.config)
    names = [re.sub("^no ", "", line.partition(":")[0]).split()[0] for line in rest]
    assert len(set(names)) == 2


def test_a_neighbour_that_is_not_legal_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compose.planner.explain.record_all", Records(refused="parallel.tp: no"))
    said = [line.partition(": ")[2] for line in explain(SPACE, [BEST])]
    assert said == ["not legal: parallel.tp: no"] * 2


@pytest.mark.parametrize("pinned", [*DEGREES, *TRIED, "parallel.offload"])
def test_no_pinned_key_is_named(pinned: str) -> None:
    keys = [set(keys) for _, keys in neighbours(space_of(pinned=[pinned]), BEST.config)]
    assert keys
    assert not [one for one in keys if pinned in one]
    free = [set(keys) for _, keys in neighbours(SPACE, BEST.config)]
    assert len(free) >= len(keys)


@pytest.mark.parametrize(
    ("tp", "names"),
    [(4, ["tp 8", "tp 2", "no tp"]), (3, ["tp 6", "no tp"]), (8, ["tp 16", "tp 4", "no tp"])],
)
def test_even_degrees_alone_are_halved(tp: int, names: list[str]) -> None:
    best = recorded(space_of(2 * tp), 1.0, 1.0, parallel__tp=tp)
    lines = [name for name, _ in neighbours(space_of(2 * tp), best.config)]
    assert [" ".join(line.split()[:2]) for line in lines if "tp" in line.split()] == names
    assert [line for line in lines if "leaves the node" in line] == ["tp 16 leaves the node"] * (
        tp == 8
    )
