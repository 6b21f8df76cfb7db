"""Styles with plain activations: outputs and every gradient equal to the whole module's."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from compose import Parallel, Plan
from compose.ops.layers import RMSNorm
from compose.parallel.local_parallel import (
    LocalColwise,
    LocalHeads,
    LocalInput,
    LocalNorm,
    LocalPositions,
    LocalRowwise,
    LocalWideNorm,
)
from compose.parallel.tensor_parallel import Replicated
from compose.plan import resolve
from models.llama import Config, Model, plan
from tests.support.helpers import gradients_of, refused
from tests.support.pool import Pool


class Branch(nn.Module):
    """Heads that are normed, and a hidden layer of ``hidden``, which axes need not divide."""

    def __init__(self, heads: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.heads = nn.Linear(6, heads * 4, bias=bias)
        self.norm = nn.RMSNorm(4, eps=1e-6)
        self.up = nn.Linear(6, hidden, bias=bias)
        self.down = nn.Linear(hidden, 6, bias=bias)

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads = self.norm(self.heads(x).unflatten(-1, (-1, 4)))
        return self.down(self.up(x).sigmoid() * scale), heads


class Layer(nn.Module):
    """A branch after a norm, with biases of a LayerNorm and a table of positions."""

    def __init__(self, heads: int, hidden: int, bias: bool, length: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(length, 6)
        self.norm = nn.LayerNorm(6, eps=1e-6) if bias else nn.RMSNorm(6, eps=1e-6)
        self.branch = Branch(heads, hidden, bias)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.positions(places)
        change, heads = self.branch(self.norm(x), 2.0)
        return x + change, heads


def _equals_the_whole(heads: int, hidden: int, bias: bool, sequence: bool, batch: int) -> None:
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    stream = Shard(1) if sequence else Replicate()
    layer, places = Layer(heads, hidden, bias, 3 * size), torch.arange(3 * size).flip(0)[None]
    with torch.no_grad():
        for parameter in layer.parameters():  # a norm's ones would hide much
            parameter.add_(torch.randn_like(parameter) / 4)
    x = torch.randn(batch, 3 * size, 6, requires_grad=True)
    weights = torch.randn(batch, 3 * size, 6), torch.randn(batch, 3 * size, heads, 4)
    out, normed = layer(x, places)
    ((out * weights[0]).sum() + (normed * weights[1]).sum()).backward()
    assert x.grad is not None
    wanted = gradients_of(layer)
    layer.zero_grad()
    styles: dict[str, Any] = {
        "positions": LocalPositions() if sequence else Replicated(),
        "norm": LocalNorm() if sequence else Replicated(),
        "branch": LocalInput(stream, inputs=2),
        "branch.heads": LocalHeads(heads),
        "branch.norm": LocalNorm(sequence_dim=2),
        "branch.up": LocalColwise(),
        "branch.down": LocalRowwise(stream),
    }
    parallelize_module(layer, mesh, styles)
    mine = slice(3 * rank, 3 * rank + 3) if sequence else slice(None)
    here = x.detach()[:, mine].clone().requires_grad_()
    result, own = layer(here, places)
    kept, sharing = max(1, heads // size), max(1, size // heads)
    first = rank * heads // size
    assert type(result) is type(own) is Tensor
    torch.testing.assert_close(result, out[:, mine])
    torch.testing.assert_close(own, normed[:, :, first : first + kept])
    # Ranks that share a head, or have the whole stream, each find its part or all of the gradient.
    stream_loss = (result * weights[0][:, mine]).sum()
    (stream_loss + (own * weights[1][:, :, first : first + kept]).sum() / sharing).backward()
    assert here.grad is not None
    torch.testing.assert_close(here.grad, x.grad[:, mine])
    torch.testing.assert_close(gradients_of(layer), wanted)


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(
    ("ranks", "heads", "hidden", "bias", "batch"),
    [
        (1, 3, 5, True, 2),
        (2, 4, 8, False, 1),
        (3, 3, 7, True, 2),
        (4, 2, 9, True, 1),
        (4, 1, 3, False, 2),
    ],
)
def test_equals_the_whole(
    pool: Pool, ranks: int, heads: int, hidden: int, bias: bool, sequence: bool, batch: int
) -> None:
    pool.run(_equals_the_whole, ranks, heads, hidden, bias, sequence, batch)


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pairs = [
        (nn.Embedding(4, 4), LocalRowwise(Replicate())),
        (nn.Embedding(4, 4), LocalColwise()),
        (nn.GroupNorm(2, 4), LocalNorm()),
        (nn.Linear(4, 4), LocalPositions()),
        (nn.Embedding(4, 4, padding_idx=0), LocalPositions()),
        (nn.Linear(4, 12), LocalHeads(3)),
    ]
    return [line for pair in pairs for line in refused(parallelize_module, pair[0], mesh, pair[1])]


def test_what_does_not_fit_is_refused(pool: Pool) -> None:
    expected = [
        "LocalRowwise: Embedding(4, 4) is no nn.Linear",
        "LocalColwise: Embedding(4, 4) is no nn.Linear",
        f"LocalNorm: {nn.GroupNorm(2, 4)} is no nn.RMSNorm or nn.LayerNorm",
        f"LocalPositions: {nn.Linear(4, 4)} is no nn.Embedding",
        "LocalPositions: Embedding(4, 4, padding_idx=0) has options; put it into replicate",
        "LocalHeads: 3 heads cannot be split over 2 ranks",
    ]
    assert pool.run(_refusals, 2) == [expected] * 2


def _wide_norm_differs(heads: int) -> float:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, x = RMSNorm(8, offset=1.0), torch.randn(2, 3, 8)
    nn.init.normal_(whole.weight)
    part = parallelize_module(copy.deepcopy(whole), mesh, LocalWideNorm(heads))
    first = 4 * (dist.get_rank() * 2 // dist.get_world_size())
    columns = slice(first, first + 4)
    return float((part(x[..., columns]) - whole(x)[..., columns]).abs().max())


@pytest.mark.parametrize(("ranks", "heads"), [(2, 4), (4, 2)])
def test_a_wide_norm_keeps_its_offset_and_its_usual_epsilon(pool: Pool, ranks: int, heads: int) -> None:
    """Also where two ranks share a head."""
    assert max(pool.run(_wide_norm_differs, ranks, heads)) < 1e-6


def test_a_gradient_that_nobody_sums_is_refused() -> None:
    config = Config(n_layers=2)
    right = plan(config, Parallel(tp=2))
    tensor = {name: style for name, style in right.tensor.items() if name != "layers.*.attention"}
    with torch.device("meta"):
        model = Model(config)
    kinds = {"wq": "LocalColwise", "wk": "LocalHeads", "wv": "LocalHeads"}
    assert refused(resolve, Plan(tensor=tensor), model) == [
        f"plan.tensor: layers.*.attention.{name} has {kind}, and is in no module with LocalInput, which"
        " sums the gradient of its input"
        for name, kind in kinds.items()
    ]
