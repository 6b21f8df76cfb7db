"""Learning rates at the points that matter."""

import math

import pytest
import torch

from compose.optim.lr_schedule import SCHEDULES, learning_rate, set_learning_rate, short_of_warmup
from compose.optim.optimizers import Optimizer
from compose.proof.optimizers import stated_rate
from tests.support.helpers import Keys, make_job, refusals


def rates(steps: int, **keys: object) -> list[float]:
    options = Optimizer(**{"lr": 2.0, "warmup": 4, "min_lr": 0.25} | keys)  # type: ignore[arg-type]
    return [learning_rate(step, steps, options) for step in range(steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warmup_is_linear_and_never_zero(schedule: str) -> None:
    assert rates(20, schedule=schedule)[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates(20, schedule=schedule, warmup=0)[0] == 2.0


def test_a_warmup_beyond_the_last_step_is_said() -> None:
    options = Optimizer(lr=2.0, warmup=4)
    assert short_of_warmup(5, options) == ""
    assert learning_rate(4, 5, options) == 2.0
    assert short_of_warmup(4, options) == (
        "optimizer.warmup = 4 is not over after train.steps = 4: the learning rate ends at 1.6 and"
        " never reaches optimizer.lr = 2"
    )


CONSTANT: dict[str, object] = {"schedule": "constant"}
# Keys, and the rates of some steps.
RATES: list[tuple[dict[str, object], dict[int, float]]] = [
    ({}, {8: 2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi / 4)) / 2), 12: 1.25, 20: 0.5}),
    ({"schedule": "linear"}, {4: 2.0, 8: 1.625, 12: 1.25, 16: 0.875, 20: 0.5}),
    (CONSTANT, dict.fromkeys(range(4, 20), 2.0)),
    (CONSTANT | {"decay": 10}, dict.fromkeys(range(4, 11), 2.0) | {15: 1.25, 20: 0.5}),
    # A decay longer than what warm-up leaves begins after it.
    *((CONSTANT | {"decay": decay}, {4: 2.0, 12: 1.25}) for decay in (16, 20, 40)),
    # Warm-up from 0 at the first step, or at the one after it, as other trainers have it.
    ({"warmup_from": 0}, {0: 0.0, 1: 0.5, 3: 1.5, 4: 2.0}),
    ({"warmup_from": 1, "warmup": 5}, {0: 0.0, 1: 0.0, 2: 0.5, 4: 1.5, 5: 2.0}),
    ({"warmup_from": 4}, {0: 0.0, 3: 0.0, 4: 2.0}),
    # The other curves over the last steps, and an end before the last step.
    ({"decay": 10}, dict.fromkeys(range(4, 11), 2.0) | {15: 1.25, 20: 0.5}),
    ({"schedule": "linear", "decay": 10}, {10: 2.0, 12: 1.7, 15: 1.25, 20: 0.5}),
    ({"decay": 18}, {3: 1.6, 4: 2.0, 12: 1.25, 20: 0.5}),
    ({"schedule": "linear", "decay": 40}, {3: 1.6, 4: 2.0, 8: 1.625, 12: 1.25, 20: 0.5}),
    ({"decay_end": 12}, {8: 1.25, 12: 0.5, 16: 0.5, 20: 0.5}),
    (CONSTANT | {"decay_end": 12}, dict.fromkeys(range(4, 20), 2.0)),
    (CONSTANT | {"decay": 4, "decay_end": 12}, {8: 2.0, 10: 1.25, 12: 0.5, 20: 0.5}),
]


@pytest.mark.parametrize(("keys", "expected"), RATES)
def test_rates(keys: dict[str, object], expected: dict[int, float]) -> None:
    result = rates(20, **keys)
    for step, rate in expected.items():
        assert result[step] == (rate if rate == 2.0 else pytest.approx(rate)), step
        options = Optimizer(**{"lr": 2.0, "warmup": 4, "min_lr": 0.25} | keys)  # type: ignore[arg-type]
        assert stated_rate(step, 20, options) == pytest.approx(rate), step


def test_every_group_has_its_share() -> None:
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(1))], **more} for more in ({}, {"lr_scale": 0.5})
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_learning_rate(optimizer, 0.6)
    assert [group["lr"] for group in optimizer.param_groups] == [0.6, 0.3]


def test_a_schedule_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(step: int, steps: int, options: Optimizer) -> float:
        return float(step < steps / 2)

    monkeypatch.setitem(SCHEDULES, "halves", halves)
    assert rates(20, schedule="halves")[4:] == [2.0] * 6 + [0.5] * 11


def from_step(start: int, warmup: int) -> Keys:
    return {"optimizer__warmup_from": start, "optimizer__warmup": warmup}


NOT_BELOW = "optimizer.warmup_from: {} is not below optimizer.warmup = {}, "
ALL_ZERO = "which leaves a learning rate of 0 in all of warmup; nearest: {}"
test_a_warmup_that_never_rises = refusals(
    [
        (from_step(4, 4), NOT_BELOW.format(4, 4) + ALL_ZERO.format(3)),
        (from_step(9, 4), NOT_BELOW.format(9, 4) + ALL_ZERO.format(3)),
        (from_step(0, 0), NOT_BELOW.format(0, 0) + "where nothing reads it; nearest: -1"),
    ]
)


test_a_decay_that_ends_in_warmup = refusals(
    [
        (
            {"optimizer__warmup": 4, "optimizer__decay_end": end},
            f"optimizer.decay_end: {end} is not above optimizer.warmup = 4, and the learning rate would"
            " fall in one step; nearest: 5, or 0 for train.steps",
        )
        for end in (3, 4)
    ]
)


@pytest.mark.parametrize(("start", "warmup"), [(-1, 0), (-1, 20), (0, 1), (19, 20)])
def test_a_warmup_that_rises(start: int, warmup: int) -> None:
    make_job(1, **from_step(start, warmup))
