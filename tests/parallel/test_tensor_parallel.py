"""The styles alone, in plain parallelize_module."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils.parametrizations import weight_norm

from compose import Options, Parallel, Plan, apply
from compose.config.composition_rules import check_setup
from compose.config.models import find_model
from compose.config.setup import Setup
from compose.ops.layers import RMSNorm
from compose.parallel.local_parallel import LocalNorm, LocalWideNorm
from compose.parallel.tensor_parallel import (
    HeadParallel,
    Replicated,
    apply_tensor_parallel,
    check_columns,
    check_heads,
    sequence_ranks,
)
from compose.parallel.vocabulary_parallel import LocalOutput
from compose.plan import resolve
from models.llama import Config, Model, plan
from tests.support.helpers import gradients_of, refused
from tests.support.pool import Pool, make_mesh


def _heads(n_heads: int, bias: bool) -> tuple[Any, ...]:
    """Run a projection on the pool's ranks; return what must equal one process, of this rank."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, x = nn.Linear(6, n_heads * 5, bias=bias), torch.randn(2, 3, 6)
    expected = whole(x)
    (expected**2).sum().backward()
    wanted = gradients_of(whole)
    whole.zero_grad()
    parallelize_module(whole, mesh, HeadParallel(n_heads))
    output = whole(x)
    rank, size = dist.get_rank(), dist.get_world_size()
    kept = max(1, n_heads // size)
    first = rank * n_heads // size
    mine = expected.unflatten(-1, (n_heads, 5))[..., first : first + kept, :].flatten(-2)
    # Ranks that share a head each give their part of its gradient.
    sharing = max(1, size // n_heads)
    ((output**2).sum() / sharing).backward()
    torch.testing.assert_close(output, mine)
    assert all(isinstance(p.grad, DTensor) for p in whole.parameters())
    torch.testing.assert_close(gradients_of(whole), wanted)
    return tuple(output.shape)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("ranks", "n_heads"), [(1, 3), (2, 4), (3, 3), (4, 2), (4, 1), (6, 2)])
def test_head_parallel(pool: Pool, ranks: int, n_heads: int, bias: bool) -> None:
    shapes = pool.run(_heads, ranks, n_heads, bias)
    assert shapes == [(2, 3, max(1, n_heads // ranks) * 5)] * ranks


def _misfit() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return refused(parallelize_module, nn.Linear(4, 6), mesh, HeadParallel(3))


def test_head_parallel_misfit(pool: Pool) -> None:
    assert pool.run(_misfit, 2) == [["HeadParallel: 3 heads cannot be split over 2 ranks"]] * 2


def test_check_heads() -> None:
    for n_heads, n_kv_heads, allowed in [
        (8, 2, [1, 2, 4, 8]),
        (24, 6, [1, 2, 3, 6, 12, 24]),
        (5, 5, [1, 5]),
    ]:
        listed = ", ".join(map(str, allowed))
        for tp in range(1, 2 * n_heads):
            if tp in allowed:
                check_heads(n_heads, n_kv_heads, tp)
                continue
            assert refused(check_heads, n_heads, n_kv_heads, tp) == [
                f"parallel.tp: {tp} does not divide {n_heads} query heads with {n_kv_heads} key/value"
                f" heads (allowed: {listed})"
            ]


def test_check_columns() -> None:
    served = lambda columns, tp: len(torch.empty(3, columns).chunk(tp, 1))  # noqa: E731
    for columns, tp in itertools.product(range(1, 30), range(1, 20)):
        model = nn.ModuleDict({"up": nn.Linear(3, columns), "down": nn.Linear(columns, 3)})
        styles = [("up", ColwiseParallel()), ("down", RowwiseParallel())]
        if (ranks := served(columns, tp)) == tp:
            check_columns(model, styles, tp)
            continue
        nearest = max(t for t in range(1, tp) if served(columns, t) == t)
        assert refused(check_columns, model, styles, tp) == [
            f"parallel.tp: {tp} leaves {tp - ranks} of the ranks without a column of down.weight,"
            f" which has {columns}; nearest: {nearest}"
        ]
    # The projection onto a vocabulary of 9: chunks of 3, 3, 3 and 0 of the logits, or whole ones.
    model = nn.ModuleDict({"output": nn.Linear(3, 9, bias=False)})
    check_columns(model, [("output", LocalOutput(Replicate(), sharded=False))], 4, "output")
    assert refused(check_columns, model, [("output", LocalOutput(Replicate()))], 4, "output") == [
        "parallel.tp: 4 leaves 1 of the ranks without a row of output.weight, which has 9; nearest: 3"
    ]


def test_sequences_are_shared_where_the_stream_is_cut() -> None:
    """Not where the width is, or the heads of attention's weights, (B, heads, L, L)."""
    model = nn.ModuleDict({"norm": RMSNorm(4), "drop": nn.Dropout(0.1)})
    drop = ("drop", SequenceParallel(sequence_dim=1, use_local_output=True))
    assert sequence_ranks(model, [drop, ("norm", LocalWideNorm(2))], 2) == 1
    assert sequence_ranks(model, [drop, ("norm", LocalNorm())], 2) == 2


def _plain_parallelize_module() -> float:
    """A plan's ``tensor`` handed to PyTorch as it is, on a materialised model."""
    torch.manual_seed(0)
    config = Config(n_layers=1, dim=32, n_heads=4, n_kv_heads=2, hidden_dim=48)
    model, tokens = Model(config), torch.randint(257, (2, 12))
    expected = model(tokens)
    cut = plan(config, Parallel(tp=dist.get_world_size(), loss=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, dict(cut.tensor))
    return float((model(tokens) - expected).abs().max())


@pytest.mark.parametrize("ranks", [2, 4])
def test_plan_in_plain_parallelize_module(pool: Pool, ranks: int) -> None:
    assert max(pool.run(_plain_parallelize_module, ranks)) < 1e-5


def _tied_apart() -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    cut = Plan(tensor={"0": ColwiseParallel(), "1": RowwiseParallel()})
    return refused(apply, model, cut, make_mesh(Parallel(tp=2)))


@pytest.mark.parametrize("style", ["tensor", "replicate"])
def test_weights_that_are_computed_from_others(style: str) -> None:
    layer = weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(nn.Sequential(layer), nn.Linear(4, 4))
    tensor = {"1": RowwiseParallel()} | ({"0.0": ColwiseParallel()} if style == "tensor" else {})
    resolved = resolve(Plan(tensor=tensor, replicate=["0"] if style == "replicate" else []), model)
    check_setup(Setup(model, resolved, Options(Parallel(dp_shard=2)), 2, "cpu"))
    assert refused(check_setup, Setup(model, resolved, Options(Parallel(tp=2)), 2, "cpu")) == [
        "plan.tensor: 0.0 computes its weight from others (weight_norm or the like), and PyTorch has no"
        " DTensor form of that; use parallel.tp = 1, or remove_parametrizations"
    ]


def test_tied_parameter_placed_two_ways(pool: Pool) -> None:
    assert pool.run(_tied_apart, 2)[0] == [
        "plan.tensor: 0.weight and 1.weight are one tied parameter but are placed differently:"
        " (Shard(dim=0),) and (Shard(dim=1),)"
    ]


def _replicated() -> bool:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"norm": nn.LayerNorm(6)}), torch.randn(2, 3, 6)
    (model["norm"](x) ** 3).sum().backward()
    wanted = gradients_of(model)
    model.zero_grad()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"norm": Replicated()})
    (model["norm"](x) ** 3).sum().backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    result = gradients_of(model)
    other = parallelize_module(nn.Linear(6, 6), init_device_mesh("cpu", (2,)), Replicated())
    assert refused(other, input=x) == [
        "plan.replicate: Linear is called by keyword; pass its input by position"
    ]
    return all(torch.equal(result[name], gradient) for name, gradient in wanted.items())


def test_replicated(pool: Pool) -> None:
    assert pool.run(_replicated, 2) == [True, True]


class _Several(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        y = super().forward(input)
        return y, {"twice": [2 * y, None]}


def _several() -> bool:
    """A module whole on every rank may return several tensors."""
    torch.manual_seed(0)
    model, x = _Several(3, 3), torch.randn(2, 3)
    wanted = model(x)[1]["twice"][0]
    parallelize_module(model, init_device_mesh("cpu", (2,)), Replicated())
    found = model(x)[1]["twice"][0]
    return type(found) is torch.Tensor and torch.equal(found, wanted)


def test_replicated_with_several_outputs(pool: Pool) -> None:
    assert pool.run(_several, 2) == [True, True]


def _redistributions(name: str, sequence: bool) -> int:
    """Those of one forward on an axis of one rank."""
    models = find_model(name)
    config = models.Config(n_layers=1, dim=32, n_heads=4, n_kv_heads=2, hidden_dim=48)
    model, mesh = models.Model(config), init_device_mesh("cpu", (1,))
    resolved = resolve(models.plan(config, Parallel(tp=1, sequence=sequence)), model)
    replicated = [(name, Replicated()) for name in resolved.replicate]
    apply_tensor_parallel(model, resolved.tensor + replicated, mesh)
    with mock.patch.object(DTensor, "redistribute") as seen:
        model(torch.randint(257, (2, 12)))
    return seen.call_count


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("sequence", [True, False])
def test_no_activation_is_redistributed(pool: Pool, name: str, sequence: bool) -> None:
    """A redistribution costs the host some microseconds each way."""
    assert pool.run(_redistributions, 1, name, sequence) == [0]
