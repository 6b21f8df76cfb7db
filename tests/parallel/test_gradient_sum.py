"""Whole parameters: gradients are summed over ranks once a step, and add up as autograd's do."""

from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

from compose import Options, Parallel, Plan, apply, forward_backward
from compose.parallel import gradient_sum
from compose.parallel.data_parallel import DataParallel, Sharding, apply_data_parallel
from tests.support.helpers import gradients_of, refusal, refused
from tests.support.pool import Pool, make_mesh


class Parts(nn.Module):
    """Units of odd sizes; "frozen" takes no gradient, and "other" is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.frozen, self.b = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.other, self.scale = nn.Linear(2, 2), nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        return self.b(self.frozen(self.a(input).tanh())) * self.scale + self.empty.sum()


UNITS = [["a", "frozen"], ["b"]]


def _made() -> Parts:
    torch.manual_seed(0)
    return Parts()


def _wanted(batches: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of one process for all samples."""
    model = _made()
    for batch in batches:
        model(batch).square().sum().backward()
    return gradients_of(model)


def _assert_equal(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(gradients_of(model), wanted)


def test_a_code_needs_the_same_gradients_in_each_step(alone: None) -> None:
    """What it keeps of one parameter would be added to another one of the same size."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    sums = gradient_sum.GradientSum(model, (), [group], lambda *given, **named: lambda flat: None)

    def step(name: str) -> None:
        model.zero_grad()
        sums.begin(last=True)
        model[name](torch.ones(1, 2)).sum().backward()
        sums.finish()

    step("a")
    step("a")
    assert refused(step, "b") == [
        "model: a.weight has a gradient in some steps alone, and comm.gradients codes those of a unit"
        f" together; {gradient_sum.USE_ALL}"
    ]


def _applied(cp: int = 1, zero: int = 0) -> DataParallel:
    parallel = Parallel(cp=cp, zero=zero)  # type: ignore[arg-type]
    model = _made()
    data = apply_data_parallel(model, UNITS, make_mesh(parallel), Sharding(zero))
    assert any(isinstance(module, FSDPModule) for module in model.modules()) == (zero > 0)
    return data


def _steps(cp: int, zero: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    data = _applied(cp, zero)
    model = data.model
    torch.manual_seed(1)
    steps = [[torch.randn(2 * size + 1, 5) for _ in range(count)] for count in (1, 3, 2)]
    seen: list[Tensor] = []
    for step in steps:
        for i, batch in enumerate(step):
            data.prepare_micro_batch(last=i == len(step) - 1)
            model(batch.tensor_split(size)[rank]).square().sum().backward()
            data.end_micro_batch()
        # Gradients that were not set to zero count once, and are not summed over ranks again.
        seen += step
        _assert_equal(model, _wanted(seen))
    model.zero_grad()
    data.prepare_micro_batch(last=True)
    model(steps[0][0].tensor_split(size)[rank]).square().sum().backward()
    data.end_micro_batch()
    _assert_equal(model, _wanted(steps[0]))


@pytest.mark.parametrize(
    ("ranks", "cp", "zero"), [(1, 1, 0), (2, 1, 0), (3, 1, 0), (4, 2, 0), (4, 2, 3)]
)
def test_steps_and_micro_batches_add_up(pool: Pool, ranks: int, cp: int, zero: int) -> None:
    """With shards, of parameters without dims or elements."""
    pool.run(_steps, ranks, cp, zero)


def _inside_a_backward() -> list[str]:
    """Reentrant checkpoints have backwards of their own, each of which ends before the next begins."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data, batch = _applied(), torch.randn(2 * size, 5, generator=torch.Generator().manual_seed(1))
    model, part = data.model, batch.chunk(size)[rank].requires_grad_()
    assert isinstance(model, Parts)
    data.prepare_micro_batch(last=True)
    hidden = checkpoint(lambda x: model.frozen(model.a(x).tanh()), part, use_reentrant=True)
    output = checkpoint(lambda x: model.b(x) * model.scale, hidden, use_reentrant=True)
    output = output + model.empty.sum()
    output.square().sum().backward()
    data.end_micro_batch()
    _assert_equal(model, _wanted([batch]))
    data.prepare_micro_batch(last=True)
    output = hidden.detach().requires_grad_()
    for _ in range(2):
        output = checkpoint(lambda x: F.pad(model.b(x), (0, 4)), output, use_reentrant=True)
    return refused(output.sum().backward)


def test_backwards_inside_a_backward(pool: Pool) -> None:
    line = "model: a backward adds to a gradient again after it was complete, as checkpoint does with"
    line += " use_reentrant=True for a module that runs twice; use use_reentrant=False"
    assert pool.run(_inside_a_backward, 2) == [[line]] * 2


def _without_backward() -> None:
    """A pipeline computes gradients outside of ``backward()``, and says when it is done."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = _applied()
    model = data.model
    batch = torch.randn(2 * size, 5, generator=torch.Generator().manual_seed(1))
    data.gather()
    part = batch.chunk(size)[rank]
    trained = [p for p in model.parameters() if p.requires_grad]
    result = torch.autograd.grad(model(part).square().sum(), trained, allow_unused=True)
    for parameter, gradient in zip(trained, result, strict=True):
        parameter.grad = gradient
    data.finish_backward(last=True)
    _assert_equal(model, _wanted([batch]))
    data.finish_backward(last=True)  # nothing has begun since
    _assert_equal(model, _wanted([batch]))


def test_gradients_that_no_backward_made(pool: Pool) -> None:
    pool.run(_without_backward, 2)


def _inputs() -> None:
    """A model takes its parameters' type, as with FSDP2."""
    model = _made().double()
    apply_data_parallel(
        model,
        UNITS,
        make_mesh(Parallel(dp_replicate=2, zero=0)),
        Sharding(0, torch.float64, torch.float64, torch.float64),
    )
    assert model(torch.ones(2, 5)).dtype == model(input=torch.ones(2, 5)).dtype == torch.float64


def test_floats_of_the_input_are_cast(pool: Pool) -> None:
    pool.run(_inputs, 2)


def _on_equal_meshes() -> list[list[float]]:
    """The last rank has two objects of one mesh, as DTensor's caches may give them to it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)) for _ in range(2)]
    last = rank == size - 1
    parameters = []
    for count, mesh in ((3, meshes[0]), (5, meshes[last])):
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(count), mesh, [Replicate()]))
        part = torch.full((count,), float(rank + count))
        parameter.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        parameters.append(parameter)
    gradient_sum._complete(parameters)
    return [
        gradients.to_local().tolist() for p in parameters if isinstance(gradients := p.grad, DTensor)
    ]


def test_equal_meshes_are_one(pool: Pool) -> None:
    wanted = [[0 + 1 + 2 + 3 * count] * count for count in (3, 5)]
    assert pool.run(_on_equal_meshes, 3) == [wanted] * 3


class _Changing(nn.Module):
    """Forward keeps a mean, or draws a number."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(4, 6), nn.Linear(6, 4), draws
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, input: Tensor) -> Tensor:
        if self.draws:
            input = input + torch.randn_like(input)
        else:
            self.get_buffer("mean").lerp_(input.mean(0), 0.5)
        return self.down(self.up(input))


def _changed(parallel: Parallel, other: int) -> str:
    """What a step says whose ranks see inputs and seeds that are ``other`` apart."""
    torch.manual_seed(0)
    plan = Plan(tensor={"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = _Changing(parallel.tp > 1)
    composition = apply(model, plan, make_mesh(parallel), Options(parallel))
    torch.manual_seed(other * dist.get_rank())
    shift = 0 if parallel.tp > 1 else other * dist.get_rank()
    batch = {"input": torch.ones(2, 4) + shift, "targets": torch.zeros(2, 4)}
    return refusal(forward_backward, composition, batch, loss_function=nn.MSELoss(reduction="sum"))


@pytest.mark.parametrize("zero", [0, 3])
def test_buffers_that_ranks_change_otherwise(pool: Pool, zero: Literal[0, 3]) -> None:
    """Each rank went on with its own, as running means of BatchNorm."""
    parallel = Parallel(dp_shard=2, zero=zero)
    assert pool.run(_changed, 2, parallel, 0) == ["", ""]
    assert pool.run(_changed, 2, parallel, 1) == 2 * [
        "model: forward changes mean, and ranks of data change buffers otherwise, so that each has a"
        " model of its own; use GroupNorm in place of BatchNorm, nn.SyncBatchNorm, or eval() of that"
        " module"
    ]


def _batch_norm(zero: Literal[0, 3]) -> str:
    torch.manual_seed(0)
    model, parallel = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Parallel(dp_shard=2, zero=zero)
    composition = apply(model, Plan(), make_mesh(parallel), Options(parallel))
    batch = {"input": torch.eye(3) + dist.get_rank(), "targets": torch.eye(3)}
    return refusal(forward_backward, composition, batch, loss_function=nn.MSELoss(reduction="sum"))


def test_means_that_a_kernel_writes_without_a_count(pool: Pool) -> None:
    """The means of a BatchNorm differed, of which PyTorch counts no changes."""
    for line in pool.run(_batch_norm, 2, 3):
        assert line.startswith("model: forward changes 1.running_mean, 1.running_var, 1.num_batches")


def test_random_numbers_that_ranks_of_tp_draw(pool: Pool) -> None:
    """Each computed its part of another sample."""
    parallel = Parallel(dp_shard=1, tp=2)
    assert pool.run(_changed, 2, parallel, 0) == ["", ""]
    assert pool.run(_changed, 2, parallel, 1) == 2 * [
        "model: forward draws random numbers, and ranks of tp would draw others, each for its part of"
        " one sample; give them one seed (torch.manual_seed) before the first step"
    ]


def _made_before(zero: Literal[0, 1, 3]) -> list[str]:
    """What a first step says of an optimizer made before ``apply``, and of one that is gone."""
    parallel, said = Parallel(dp_shard=2, zero=zero), list[str]()
    for kept in (True, False):
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters())
        composition = apply(model, Plan(), make_mesh(parallel), Options(parallel))
        if not kept:
            optimizer = torch.optim.SGD(model.parameters())
        batch = {"input": torch.eye(3), "targets": torch.eye(3)}
        loss = nn.MSELoss(reduction="sum")
        said.append(refusal(forward_backward, composition, batch, loss_function=loss))
        del optimizer
    return said


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_optimizer_of_weights_as_they_were(pool: Pool, zero: Literal[0, 1, 3]) -> None:
    """It trained nothing, since the gradients are those of shards."""
    line = (
        "optimizer: it has weight as it was before compose.apply, and so would not train it; make it"
        " afterwards, of model.parameters()"
    )
    assert pool.run(_made_before, 2, zero) == 2 * [[line if zero else "", ""]]


class _Follows(nn.Module):
    """Forward moves one layer, which is not trained, toward another one."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.layer, self.slow, self.assigns = nn.Linear(3, 3), nn.Linear(3, 3), assigns
        self.slow.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        slow, layer = self.slow.weight, self.layer.weight
        if self.assigns:
            slow.data = 0.5 * slow.data + 0.5 * layer.data
        else:
            slow.lerp_(layer.detach(), 0.5)
        return self.layer(input) - self.slow(input)


def _follow(zero: Literal[0, 1, 3], assigns: bool) -> list[str]:
    """What two steps say."""
    parallel = Parallel(dp_shard=2, zero=zero)
    composition = apply(_Follows(assigns), Plan(), make_mesh(parallel), Options(parallel))
    batch = {"input": torch.eye(3), "targets": torch.eye(3)}
    loss = nn.MSELoss(reduction="sum")
    return [refusal(forward_backward, composition, batch, loss_function=loss) for _ in range(2)]


@pytest.mark.parametrize("assigns", [False, True])
def test_a_weight_that_forward_changes(pool: Pool, assigns: bool) -> None:
    """Each step began with it as it was at first."""
    assert pool.run(_follow, 2, 0, assigns) == 2 * [["", ""]]
    line = (
        "model: forward changes the parameter slow.weight where FSDP has gathered it, and the change is"
        " lost; make it between two steps, or use parallel.zero = 0"
    )
    for zero in (1, 3):
        assert pool.run(_follow, 2, zero, assigns) == 2 * [["", line]]
