"""Learning rates at the points that matter; which parameters decay."""

import math

import pytest
from torch import nn

from compose.config import Optimizer
from compose.optimizer import build_optimizer, learning_rate, set_learning_rate


def rates(steps: int, **keys: object) -> list[float]:
    options = Optimizer(**{"lr": 2.0, "warmup": 4, "min_lr": 0.25} | keys)  # type: ignore[arg-type]
    return [learning_rate(step, steps, options) for step in range(steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warmup_is_linear_and_never_zero(schedule: str) -> None:
    assert rates(20, schedule=schedule)[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates(20, schedule=schedule, warmup=0)[0] == 2.0


def test_cosine() -> None:
    found = rates(20)
    assert found[12] == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert found[8] == pytest.approx(2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi / 4)) / 2))
    assert found[20] == pytest.approx(0.5)


def test_linear() -> None:
    assert rates(20, schedule="linear")[4::4] == pytest.approx([2.0, 1.625, 1.25, 0.875, 0.5])


def test_constant_with_decay() -> None:
    found = rates(20, schedule="constant", decay=10)
    assert found[4:11] == [2.0] * 7
    assert found[15] == pytest.approx(1.25)
    assert found[20] == pytest.approx(0.5)
    assert rates(20, schedule="constant")[4:20] == [2.0] * 16


def test_decay_longer_than_what_warmup_leaves_begins_after_it() -> None:
    for decay in (16, 20, 40):
        found = rates(20, schedule="constant", decay=decay)
        assert found[4] == 2.0
        assert found[12] == pytest.approx(1.25)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    optimizer = build_optimizer(model.parameters(), Optimizer(weight_decay=0.5, lr=0.1, beta2=0.9))
    shapes = [[p.ndim for p in group["params"]] for group in optimizer.param_groups]
    assert shapes == [[2], [1, 1, 1]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert all(group["betas"] == (0.9, 0.9) for group in optimizer.param_groups)
    set_learning_rate(optimizer, 0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.7]
    assert len(build_optimizer(nn.LayerNorm(3).parameters(), Optimizer()).param_groups) == 1
