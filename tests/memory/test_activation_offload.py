"""Activations in host memory: the same gradients, and nothing is left behind on the device."""

import contextlib
import copy
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from compose.memory.activation_offload import ActivationOffload
from compose.proof.report import Report
from tests.support.helpers import (
    Keys,
    make_job,
    parallel,
    prove_step,
    proved,
    refused,
    small_ones_move,
    tiered,
)
from tests.support.pool import Pool


class Unit(nn.Module):
    """Saves its input twice, a product, and views of weights and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(12, 20)
        self.out = nn.Linear(20, 12)
        self.scale = nn.Buffer(torch.rand(20))
        self.product: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        product = self.a(x) * self.b(x)
        self.product = weakref.ref(product)
        return x + self.out(product * self.scale[None, :])


def test_gradients_are_the_same_and_each_tensor_moves_once() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Unit() for _ in range(3)))
    model: Any = copy.deepcopy(plain)
    moved = ActivationOffload(model)
    for unit in model:
        moved.wrap(unit)
    x = torch.randn(7, 12)
    with small_ones_move():
        # Two forwards before their backwards, as a pipeline has them, and one graph used twice.
        outputs = [model(x), model(2 * x)]
        assert all(unit.product() is None for unit in model)
        outputs[0].square().sum().backward(retain_graph=True)
        outputs[0].square().sum().backward()
        outputs[1].square().sum().backward()
    for given in (x, x, 2 * x):
        plain(given).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    # A unit saves its input (12 wide), two factors and what out takes (20 wide each).
    each = 3 * 7 * (12 + 2 * 20 + 20) * 4
    result = moved.metrics()
    assert result["activation_bytes"] == each * (2 + 3)
    assert result["activation_waited"] > 0
    assert moved.metrics() == {"activation_bytes": 0, "activation_waited": 0.0}


class Changes(nn.Module):
    """Saves one memory twice, changed in place in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(7, 12)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        buffer = x.clone()
        first = buffer * self.a
        buffer += 1
        return first + buffer * self.b


def test_what_was_changed_in_place_is_saved_anew() -> None:
    unit, x = Changes(), torch.randn(7, 12)
    ActivationOffload(unit).wrap(unit)
    with small_ones_move():
        unit(x).sum().backward()
    assert unit.a.grad is not None
    assert unit.b.grad is not None
    assert torch.equal(unit.a.grad, x)
    assert torch.equal(unit.b.grad, x + 1)


class Views(nn.Module):
    """Saves views of one memory, and then tensors that have the same memory one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(6, 6) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        output = torch.zeros(6, 6)
        for view, weight in zip((x[:, :6], x[:, 6:], x[:, 6:].T), self.weights, strict=False):
            output = output + view * weight
        products = []
        for i in range(3, 6):
            sum_ = x[:, :6] + i
            products.append(sum_ * self.weights[i])
            self.seen = StorageWeakRef(sum_.untyped_storage())
            del sum_
            self.held = not self.seen.expired()  # or the next one could be where it was
        return output + sum(products)


def test_views_and_what_follows_in_one_memory_are_not_taken_for_each_other() -> None:
    unit, x = Views(), torch.randn(6, 12)
    ActivationOffload(unit).wrap(unit)
    with small_ones_move():
        output = unit(x)
    assert unit.held
    assert unit.seen.expired()
    output.sum().backward()
    left, right = x[:, :6], x[:, 6:]
    expected = [left, right, right.T, left + 3, left + 4, left + 5]
    for weight, value in zip(unit.weights, expected, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, value)


def test_small_tensors_stay() -> None:
    unit = Unit()
    moved = ActivationOffload(unit)
    moved.wrap(unit)
    unit(torch.randn(7, 12)).sum().backward()
    with torch.no_grad(), small_ones_move():
        unit(torch.randn(7, 12))
    assert moved.metrics()["activation_bytes"] == 0


MESHES: dict[str, Keys] = {
    "data and tensor": parallel(dp_shard=2, tp=2) | {"train__micro_batch": 4},
    "pipeline": parallel(pp=2, pp_schedule="ZBVZeroBubble", dp_shard=2) | {"model__n_layers": 4},
    "context": parallel(cp=2, dp_shard=2) | {"activation_checkpoint__mode": "full"},
}


class Stream:
    """A GPU's, that notes what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self, event: object = None) -> str:
        self.events += event is None  # not those that only take the time
        return f"{self.name} {self.events}"


class OnGpu:
    """A tensor there."""

    nbytes, device = 2**20, torch.device("cuda", 0)

    def copy_(self, source: object, non_blocking: bool) -> None:
        assert non_blocking

    def record_stream(self, stream: Stream) -> None:
        assert stream.name == "into"  # what only the computing stream has is freed at once


def test_a_gpu_waits_before_memory_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams that only note what they wait for: of what was saved two units stay, and none in
    backward."""
    log: list[str] = []
    own, names = Stream("own", log), iter(("out", "into"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: "a time")
    monkeypatch.setattr(torch, "empty_like", lambda like, **how: OnGpu())
    unit: Any = nn.Identity()
    offload: Any = ActivationOffload(unit)
    saved: list[weakref.ref[OnGpu]] = []
    copies: list[tuple[Any, Any]] = []

    def saves() -> None:
        tensor = OnGpu()
        copies.append(offload.out_of(tensor))
        saved.append(weakref.ref(tensor))

    unit.forward = saves
    offload.wrap(unit)
    for _ in range(4):
        unit()
    assert log == ["out waits for own"] * 2 + [
        "own waits for out 1",
        "out waits for own",
        "own waits for out 2",
        "out waits for own",
    ]
    assert [reference() is None for reference in saved] == [True, True, False, False]
    log.clear()
    copy, there = offload.back(*copies[-1], OnGpu.device)
    offload.wait(copy, there)
    assert log == [
        "into waits for own",
        "into waits for out 4",
        "own waits for out 3",
        "own waits for out 4",
        "own waits for into 1",
    ]
    assert [reference() for reference in saved] == [None] * 4


def test_weights_that_tensorwise_gathers_would_move_too() -> None:
    line = (
        "activation_checkpoint.offload: true would move weights too, which precision.float8 ="
        ' "tensorwise" has gathered; use "rowwise", or activation_checkpoint.offload = false'
    )
    keys = {"activation_checkpoint__offload": True} | parallel(dp_shard=2)
    assert refused(make_job, 2, **keys, precision__float8="tensorwise") == [line]
    assert refused(make_job, 2, **keys, precision__float8="rowwise") == []


def _prove(keys: Keys) -> tuple[Report, bool]:
    real = ActivationOffload.back
    with mock.patch.object(ActivationOffload, "back", autospec=True, side_effect=real) as back:
        return prove_step(keys), back.called


@pytest.mark.parametrize("mesh", tiered(MESHES, MESHES.keys() - {"data and tensor"}))
def test_as_one_process(pool: Pool, mesh: str) -> None:
    keys = MESHES[mesh] | {"activation_checkpoint__offload": True}
    result = pool.run(_prove, 4, keys)
    proved([report for report, _ in result])
    assert all(used for _, used in result)
