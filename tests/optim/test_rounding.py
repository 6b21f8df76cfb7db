"""Stochastic rounding: right on average, and a function of an element's place."""

import math
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from compose.optim import adamw, muon, rounding
from compose.optim.rounding import chunks, lengths, random_bits, store, within

SHAPE = (7, 30, 50)
WHOLE = [slice(0, n) for n in SHAPE]
BFLOAT16 = torch.empty(0, dtype=torch.bfloat16)


def bits(purpose: str, region: list[slice] = WHOLE, seed: int = 0) -> Tensor:
    return random_bits(seed, purpose, region, SHAPE, BFLOAT16)


def test_bits_of_a_box_are_those_of_the_whole() -> None:
    whole = bits("a")
    for region in (
        [slice(2, 5), slice(0, 30), slice(7, 50)],
        [slice(6, 7), slice(29, 30), slice(0, 1)],
    ):
        assert torch.equal(bits("a", region), whole[tuple(region)])
    with mock.patch.object(rounding, "CHUNK", 130):
        parts = list(chunks(WHOLE))
        elsewhere = list(chunks([slice(3, 7), slice(5, 30), slice(20, 50)]))
    seen = torch.zeros(SHAPE)
    for part in elsewhere:
        seen[part] += 1
    assert bool((seen[3:7, 5:30, 20:50] == 1).all())
    assert float(seen.sum()) == 4 * 25 * 30
    assert max(math.prod(lengths(part)) for part in parts) <= 130
    together = torch.zeros(SHAPE, dtype=torch.int32)
    count = torch.zeros(SHAPE)
    for part in parts:
        together[part] = bits("a", list(part))
        count[part] += 1
    assert torch.equal(together, whole)
    assert bool((count == 1).all())
    assert within((slice(3, 5), slice(2, 4)), (slice(3, 9), slice(0, 4))) == (slice(0, 2), slice(2, 4))


def test_bits_are_fair_and_independent() -> None:
    """All 32 are within 5 sigma, over places, steps, seeds and neighbours in every dim."""
    samples = {"one": bits("w/1"), "next step": bits("w/2"), "other seed": bits("w/1", seed=1)}
    noise = 5 * 0.5 / math.sqrt(math.prod(SHAPE))

    def signs(x: Tensor) -> Tensor:
        return torch.stack([((x >> bit) & 1).float() - 0.5 for bit in range(32)])

    one = signs(samples["one"])
    assert float(one.mean((1, 2, 3)).abs().max()) < noise
    pairs = [one.roll(1, dim) for dim in (1, 2, 3)] + [one.roll(16, 0)]
    pairs += [signs(samples[name]) for name in ("next step", "other seed")]
    for other in pairs:
        assert float((one * other * 2).mean((1, 2, 3)).abs().max()) < noise


@pytest.mark.parametrize("value", [1.0 + 2**-9, -(1.0 + 2**-10), 3e-40, 7.1e33, -0.3])
def test_right_on_average(value: float) -> None:
    target = torch.empty(200, 1000, dtype=torch.bfloat16)
    drawn = random_bits(0, "x", [slice(0, 200), slice(0, 1000)], (200, 1000), target)
    store(target, torch.full(target.shape, value), drawn)
    seen = target.unique().tolist()
    assert len(seen) == 2
    low, high = sorted(seen)
    assert low < value < high
    # The mean is within 5 standard errors of a toss with the right odds.
    odds = (value - low) / (high - low)
    error = abs(float((target.double() == high).double().mean()) - odds)
    assert error < 5 * math.sqrt(odds * (1 - odds) / target.numel())


def test_what_fits_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, 3.0e38]).bfloat16()
    for drawn in (0, 1, 0xFFFF, -1):
        target = torch.empty_like(values)
        store(target, values.float(), torch.full(values.shape, drawn, dtype=torch.int32))
        assert torch.equal(target, values)
    nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(
        torch.float32
    )  # CUDA's, a CPU's
    for drawn in (0, 1, 0xFFFF, -1):
        target = torch.zeros(3, dtype=torch.bfloat16)
        store(target, nan, torch.full((3,), drawn, dtype=torch.int32))
        assert target.isnan().all()
    exact = torch.randn(9)
    target = torch.empty(9)
    store(target, exact, random_bits(0, "x", [slice(0, 9)], (9,), target))
    assert torch.equal(target, exact)


@pytest.mark.slow
def test_compiled_for_any_shape_bitwise() -> None:
    """There is one graph of a function for all sizes, and one for a single row, as on a GPU."""
    torch._dynamo.reset()
    counters.clear()
    for shape in ((40, 30), (7, 30, 50), (130,)):
        region = [slice(0, size) for size in shape]
        value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        results = []
        for compiles in (False, True):
            target = torch.empty(shape, dtype=torch.bfloat16)
            with mock.patch.object(rounding, "compiles", return_value=compiles):
                drawn = random_bits(0, "a", region, shape, target)
                store(target, value, drawn)
            results.append((target, drawn))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (3, {})


OPTIMIZERS = {
    "adamw": (adamw, adamw.AdamW, ("exp_avg", "exp_avg_sq")),
    "muon": (muon, muon.Muon, ("momentum_buffer",)),
}


@pytest.mark.parametrize(("module", "kind", "state"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizers_bits(module: ModuleType, kind: Any, state: tuple[str, ...]) -> None:
    """Those of the seed and the name; others in each step, and for weight and state, or what is lost
    once is lost again."""

    def after(seed: int, name: str = "w") -> Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(50, 40, dtype=torch.bfloat16))
        optimizer = kind([(name, weight)], state_dtype=torch.bfloat16, seed=seed)
        for _ in range(2):
            weight.grad = torch.randn(50, 40).bfloat16()
            optimizer.step()
        return torch.stack([weight.detach(), *(optimizer.state[weight][key] for key in state)])

    purposes: list[str] = []

    def spy(seed: int, purpose: str, *rest: Any) -> Tensor:
        purposes.append(purpose)
        return random_bits(seed, purpose, *rest)

    with mock.patch.object(module, "random_bits", spy):
        first = after(0)
    assert len(purposes) == len(set(purposes)) == 4
    assert torch.equal(after(0), first)
    for other in (after(1), after(0, "v")):
        assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
