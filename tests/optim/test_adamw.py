"""AdamW of low precision: torch's where it is full, right on average where it is not."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from compose.ops.tensors import local_shard
from compose.optim.adamw import AdamW
from compose.optim.rounding import local
from compose.parallel.data_parallel import Sharding, apply_data_parallel
from compose.parallel.mesh import Parallel
from compose.parallel.tensor_parallel import apply_tensor_parallel
from tests.support.checkpoints import goes_on_from_a_state_dict
from tests.support.pool import Pool, make_mesh


def test_in_float32_it_is_torchs() -> None:
    torch.manual_seed(0)
    shapes = [(), (5,), (4, 7), (2, 3, 5)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.3}
    first = AdamW([{"params": [(str(i), p) for i, p in enumerate(ours)]}], **options)
    second = torch.optim.AdamW(theirs, **options)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        first.step()
        second.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(first.state[a][key], second.state[b][key], rtol=2e-6, atol=0)
        assert first.state[a]["step"] == second.state[b]["step"]


def _adamw(weight: torch.Tensor, **options: Any) -> tuple[nn.Parameter, AdamW]:
    parameter = nn.Parameter(weight)
    return parameter, AdamW([{"params": [("w", parameter)]}], weight_decay=0.0, **options)


def test_small_steps_are_not_lost() -> None:
    """60 steps of 1e-4 from 1, where neighbours in bfloat16 are 4e-3 and 8e-3 apart."""
    weight, optimizer = _adamw(torch.ones(100, 100, dtype=torch.bfloat16), lr=1e-4, betas=(0.0, 0.0))
    for _ in range(60):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = 1 - weight.detach().float()
    assert abs(float(moved.mean()) / 6e-3 - 1) < 0.03
    assert float(moved.max()) > 0.0  # a rounded one would never have moved


def test_a_mean_of_squares_goes_down_again() -> None:
    """By 0.1% a step, where the nearest bfloat16 is 0.4% or 0.8% away."""
    weight, optimizer = _adamw(torch.ones(100, 100), betas=(0.9, 0.999), state_dtype=torch.bfloat16)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = float(optimizer.state[weight]["exp_avg_sq"].float().mean())
    assert abs(before / 1e-3 - 1) < 1e-3
    weight.grad = torch.zeros_like(weight)
    for _ in range(200):
        optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.bfloat16
    assert abs(float(state["exp_avg_sq"].float().mean()) / (1e-3 * 0.999**200) - 1) < 3e-3
    assert abs(float(state["exp_avg"].float().mean()) / (0.1 * 0.9**200) - 1) < 3e-2


def _turned(kept: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return whether each element was rounded up, less how likely that was."""
    bits = exact.view(torch.int32)
    likely = (bits & 0xFFFF).float() / 2**16
    return (kept.float() != (bits & ~0xFFFF).view(torch.float32)).float() - likely


def test_the_two_means_are_rounded_independently() -> None:
    """By one set of bits both would go up together, and their ratio would be off."""
    torch.manual_seed(0)
    gradient = torch.randn(300, 300)
    weight, optimizer = _adamw(torch.ones(300, 300), state_dtype=torch.bfloat16, betas=(0.9, 0.99))
    weight.grad = gradient
    optimizer.step()
    state = optimizer.state[weight]
    zero = torch.zeros(300, 300)
    mean = zero.lerp(gradient, 1 - 0.9)
    square = (zero * 0.99).addcmul_(gradient, gradient, value=1 - 0.99)
    one, two = _turned(state["exp_avg"], mean), _turned(state["exp_avg_sq"], square)
    for each in (one, two):
        assert abs(float(each.mean())) < 5 * 0.41 / 300
    # Independent bits correlate by about a 300th, the same bits by a half.
    assert abs(float((one * two).mean() / (one.square().mean() * two.square().mean()).sqrt())) < 5 / 300


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_goes_on_from_a_state_dict(weights: torch.dtype, state: torch.dtype) -> None:
    """torch's own load_state_dict would give the state the type of the weights."""
    goes_on_from_a_state_dict(lambda named: AdamW(named, state_dtype=state, seed=3), weights)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(13, 257), nn.Linear(257, 5)
        for parameter in self.parameters():
            parameter.data = parameter.data.bfloat16()


def _train(parallel: Parallel) -> dict[str, torch.Tensor]:
    """Three steps by known gradients on whatever part of the weights a rank holds; those parts' places
    filled in a whole."""
    torch.manual_seed(0)
    model = Two()
    mesh = make_mesh(parallel)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    if mesh.size() > 1:
        apply_tensor_parallel(
            model, {"a": ColwiseParallel(), "b": RowwiseParallel()}.items(), mesh["tp"]
        )
        apply_data_parallel(model, [["a"], ["b"]], mesh, Sharding(zero=3))
    named = dict(model.named_parameters())
    optimizer = AdamW([{"params": list(named.items())}], lr=1e-2, state_dtype=torch.bfloat16, seed=3)
    for name, parameter in named.items():
        local(parameter.detach()).copy_(local_shard(whole[name], parameter))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in named.values():
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(local_shard(gradient, parameter))
        optimizer.step()
    results = {}
    for name, parameter in named.items():
        for key, tensor in {"weight": parameter, **optimizer.state[parameter]}.items():
            if tensor.ndim:
                full = torch.full(parameter.shape, math.nan)
                local_shard(full, parameter).copy_(local(tensor.detach()).float())
                results[f"{name} {key}"] = full
    return results


@pytest.mark.slow
def test_every_part_is_rounded_as_the_whole_is(pool: Pool) -> None:
    """Uneven strided shards and replicas: bit for bit."""
    expected = pool.run(_train, 1, Parallel())[0]
    for parallel in (Parallel(dp_shard=4, tp=2), Parallel(dp_replicate=2, dp_shard=2)):
        everyone = pool.run(_train, parallel.dp_replicate * parallel.dp_shard * parallel.tp, parallel)
        for key, value in expected.items():
            for rank, result in enumerate(everyone):
                held = ~result[key].isnan()
                assert torch.equal(result[key][held], value[held]), (rank, key)
            parts = torch.stack([~result[key].isnan() for result in everyone])
            assert bool(parts.any(0).all()), key
