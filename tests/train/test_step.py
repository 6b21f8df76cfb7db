"""Communication only where a ZeRO stage needs it; clipping that a mesh cannot change."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode

from compose import (
    AttentionOptions,
    Composition,
    Options,
    Parallel,
    Pipeline,
    Plan,
    Precision,
    apply,
    clip_grad_norm_,
    evaluate,
    forward_backward,
)
from compose.build import build
from compose.data.samples import random_batch
from compose.ops.batch import IGNORE, empty
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.data_parallel import DataParallel
from compose.parallel.gradient_sum import check_gradients
from compose.parallel.local_parallel import LocalNorm
from compose.parallel.mesh import AXES, batch_share
from compose.parallel.output_projection import StepLoss
from compose.proof.comparison import whole
from compose.train.step import local_batch
from models.layers.attention import AttentionCore
from models.llama import Config as ShapeOfLlama
from models.llama import Model as Llama
from models.llama import plan as llama_plan
from tests.support.collectives import counted_collectives
from tests.support.helpers import make_job, refusal
from tests.support.pool import Pool, make_mesh


def _collectives(parallel: Parallel, micro_batches: int) -> dict[str, int]:
    """How often one optimizer step of a two-unit model gathers, scatters and reduces."""
    torch.manual_seed(0)
    mesh = make_mesh(parallel)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    composition = apply(model, Plan(shard=["0", "2"]), mesh, Options(parallel))
    batch = {"input": torch.randn(micro_batches, 4), "targets": torch.zeros(micro_batches).long()}
    loss = nn.CrossEntropyLoss(reduction="sum")
    with counted_collectives() as counts:
        forward_backward(composition, batch, micro_batch=1, loss_function=loss)
    return dict(counts)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        # The last of two units keeps its parameters from forward to backward.
        (0, {"reduce": 2}),
        (1, {"gather": 2, "scatter": 2}),
        (2, {"gather": 2, "scatter": 6}),
        (3, {"gather": 9, "scatter": 6}),
    ],
)
def test_collectives_of_a_step(pool: Pool, zero: int, expected: dict[str, int]) -> None:
    result = pool.run(_collectives, 2, Parallel(dp_shard=2, zero=zero), 3)  # type: ignore[arg-type]
    assert result == [expected] * 2


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_reduce_once_a_step(pool: Pool, zero: int) -> None:
    parallel = Parallel(dp_replicate=2, dp_shard=2, zero=zero)  # type: ignore[arg-type]
    assert all(result["reduce"] == 2 for result in pool.run(_collectives, 4, parallel, 3))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            input = torch.tanh(layer(input))
        return input


def _collectives_of_stage(parallel: Parallel, schedule: str, micro_batches: int) -> dict[str, int]:
    """How often each rank of a pipeline gathers, scatters and reduces in a step after the first."""
    torch.manual_seed(0)
    mesh = make_mesh(parallel)
    plan = Plan(shard=["layers.*"], pipeline=Pipeline([], "layers", []))
    layers = (2, 2) if schedule == "1F1B" else (1, 1, 1, 1)
    parallel = replace(parallel, pp_schedule=schedule, pp_layers=layers)
    composition = apply(_Layers(), plan, mesh, Options(parallel))
    batch = {"input": torch.randn(micro_batches, 4), "targets": torch.zeros(micro_batches).long()}
    loss = nn.CrossEntropyLoss(reduction="sum")
    forward_backward(composition, batch, micro_batch=1, loss_function=loss)
    with counted_collectives() as counts:
        forward_backward(composition, batch, micro_batch=1, loss_function=loss)
    return dict(counts)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    ("zero", "expected"),
    # Every rank has two units, as without a pipeline.
    [(0, {"reduce": 2}), (1, {"gather": 2, "scatter": 2}), (2, {"gather": 2, "scatter": 6})],
)
def test_collectives_of_a_pipeline(
    pool: Pool, schedule: str, zero: int, expected: dict[str, int]
) -> None:
    parallel = Parallel(pp=2, dp_shard=2, zero=zero)  # type: ignore[arg-type]
    assert pool.run(_collectives_of_stage, 4, parallel, schedule, 3) == [expected] * 4


def test_zero_3_in_a_pipeline(pool: Pool) -> None:
    """Gathered for every forward and backward, and reduced after each."""
    parallel = Parallel(pp=2, dp_shard=2)
    result = pool.run(_collectives_of_stage, 4, parallel, "1F1B", 3)
    # Two units, three micro-batches, forward and backward, but for the model's last unit, which its
    # backward follows at once. Once more on the first stage: with two micro-batches in flight, what
    # FSDP prefetches by the order of the last forwards is one time the wrong unit.
    assert result == [{"gather": 13, "scatter": 6}] * 2 + [{"gather": 9, "scatter": 6}] * 2


def _clip(max_norm: float) -> tuple[float, float, float]:
    """The norm before and after clipping, and by hand, of gradients placed in several ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    mesh = make_mesh(Parallel(dp_replicate=2, dp_shard=2))
    composition = apply(model, Plan(), mesh)
    expected = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 10
        expected += (parameter.detach().full_tensor().double() * 10).square().sum()  # type: ignore[attr-defined]
    before = clip_grad_norm_(composition, max_norm)
    after = clip_grad_norm_(composition, 0.0)
    return float(before), float(after), float(expected.sqrt())


def test_clip_grad_norm(pool: Pool) -> None:
    for before, after, expected in pool.run(_clip, 4, 0.5):
        assert before == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)
    for before, after, expected in pool.run(_clip, 4, 1e6):
        assert before == after == pytest.approx(expected, rel=1e-6)


def _scaled() -> tuple[float, list[float]]:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([12.0, 16.0])
    composition = Composition(nn.ParameterList([parameter]), make_mesh(Parallel()))
    norm = clip_grad_norm_(composition, 0.0, loss_scale=4.0)
    return float(norm), parameter.grad.tolist()


def test_a_loss_scale_is_taken_away_without_clipping_too(pool: Pool) -> None:
    assert pool.run(_scaled, 1) == [(5.0, [3.0, 4.0])]


def _norm_of_narrow_ones() -> float:
    parameter = nn.Parameter(torch.ones(257, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    return float(
        clip_grad_norm_(Composition(nn.ParameterList([parameter]), make_mesh(Parallel())), 0.0)
    )


def test_a_norm_is_added_up_in_float32(pool: Pool) -> None:
    """In bfloat16 it would be 16."""
    assert pool.run(_norm_of_narrow_ones, 1) == [pytest.approx(257**0.5, rel=1e-6)]


class _Chosen(nn.Module):
    """Each sample goes to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(1, 3) for _ in range(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        positive = input[:, 0] > 0
        result = input.new_zeros(len(input), 3)
        for part, mine in zip(self.parts, (positive, ~positive), strict=True):
            if mine.any():
                result[mine] = part(input[mine])
        return result


UNLIKE = (
    "model: {} has a gradient on some ranks and not on others, or they run units of plan.shard in"
    " another order, so that their sums are wrong; let each forward use every parameter, as by adding"
    " 0.0 * parameter.sum() to its output, and in one order"
)


def _choose(
    parallel: Parallel, inputs: list[list[float]], micro_batch: int | None = None, first: bool = False
) -> str:
    composition = apply(_Chosen(), Plan(), make_mesh(parallel), Options(parallel))
    if first:
        composition.data[0].on_first = lambda model: None
    input = torch.tensor(inputs[dist.get_rank()])[:, None]
    batch = {"input": input, "targets": torch.zeros(len(input), dtype=torch.int64)}
    loss = nn.CrossEntropyLoss(reduction="sum")
    return refusal(forward_backward, composition, batch, micro_batch=micro_batch, loss_function=loss)


@pytest.mark.parametrize(
    "parallel",
    [*(Parallel(dp_shard=2, zero=zero) for zero in (3, 2, 1)), Parallel(dp_shard=1, dp_replicate=2)],
    ids=["zero 3", "zero 2", "zero 1", "replicas"],
)
def test_ranks_with_gradients_of_different_parameters(pool: Pool, parallel: Parallel) -> None:
    """A rank's gradient of one layer was added to the other's of another layer."""
    line = UNLIKE.format("parts.{}.weight")
    assert pool.run(_choose, 2, parallel, [[1.0], [-1.0]]) == [line.format(1), line.format(0)]
    assert pool.run(_choose, 2, parallel, [[1.0], [1.0]]) == [""] * 2
    # Each micro-batch has a message of its own with ZeRO 2 and 3; at the end no gradient is lacking.
    refused = (
        [line.format(1), line.format(0)] if parallel.zero >= 2 and parallel.dp_shard == 2 else [""] * 2
    )
    assert pool.run(_choose, 2, parallel, [[1.0, -1.0], [-1.0, 1.0]], 1) == refused
    later = [[1.0, -1.0, 1.0, 1.0], [1.0, -1.0, -1.0, -1.0]]
    assert pool.run(_choose, 2, parallel, later, 2) == refused
    # So has the first micro-batch, if its sums are asked for.
    refused = [line.format(1), line.format(0)]
    assert pool.run(_choose, 2, parallel, [[1.0, -1.0], [-1.0, 1.0]], 1, True) == refused


class _PartsBySequence(nn.Module):
    """A rank's part of a sequence chooses the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.RMSNorm(3) for _ in range(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.parts[dist.get_rank()](input)


def _choose_in_a_sequence(zero: Literal[0, 3]) -> str:
    parallel, plan = Parallel(tp=2, zero=zero), Plan(tensor={"parts.*": LocalNorm()})
    composition = apply(_PartsBySequence(), plan, make_mesh(parallel), Options(parallel))
    batch = {"input": torch.ones(1, 3), "targets": torch.zeros(1, dtype=torch.int64)}
    loss = nn.CrossEntropyLoss(reduction="sum")
    return refusal(forward_backward, composition, batch, loss_function=loss)


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_of_tp_with_gradients_of_different_parameters(pool: Pool, zero: Literal[0, 3]) -> None:
    """The gradient of one norm was added to the other's, and the weights of the ranks drifted apart."""
    expected = [UNLIKE.format(f"parts.{other}.weight") for other in (1, 0)]
    assert pool.run(_choose_in_a_sequence, 2, zero) == expected


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_with_other_gradients_in_each_micro_batch(pool: Pool, zero: Literal[2, 3]) -> None:
    """They sum in the last micro-batch alone, and the ranks of a replica in each.

    FSDP keeps the sum until then. It added one layer's to another's, and lost it if the last
    micro-batch had none.
    """
    parallel = Parallel(dp_shard=2, dp_replicate=2, zero=zero)
    line = (
        "model: parts.0.weight has a gradient in some micro-batches of a step alone, and with"
        f" parallel.dp_replicate and parallel.zero = {zero} it would be lost; use parallel.zero = 1, or"
        " let each forward use every parameter, as by adding 0.0 * parameter.sum() to its output"
    )
    assert pool.run(_choose, 4, parallel, [[1.0, -1.0]] * 4, 1) == [line] * 4
    assert pool.run(_choose, 4, parallel, [[1.0, -1.0], [-1.0, 1.0]] * 2, 1) == [line] * 4
    assert pool.run(_choose, 4, replace(parallel, zero=1), [[1.0, -1.0]] * 4, 1) == [""] * 4
    assert pool.run(_choose, 4, parallel, [[1.0, 1.0]] * 4, 1) == [""] * 4


@pytest.mark.parametrize(
    ("value", "form"), [((torch.ones(()), {}), "a tuple"), (torch.ones(2), "a tensor (2,)")]
)
def test_a_loss_that_is_no_number_is_refused(value: Any, form: str) -> None:
    loss = StepLoss(lambda output, targets: value, torch.ones(()), None)
    assert refusal(loss, torch.ones(2), torch.ones(2)) == (
        f"loss_function: it returned {form}; return one number, the sum over targets, and keep others"
        " elsewhere"
    )


class _Ordered(nn.Module):
    """The sign of the first number chooses the order of its layers."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.parts = by, nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parts = [*self.parts][:: 1 if self.by != "order" or input[0, 0] > 0 else -1]
        if self.by == "weights":
            input = input @ self.parts.get_submodule("0").get_parameter("weight")
        for part in parts:
            input = part(input).tanh()
        return input


def _order(by: str, zero: Literal[1, 2, 3]) -> str:
    parallel = Parallel(dp_shard=2, zero=zero)
    plan = Plan(shard=["parts.*"])
    composition = apply(_Ordered(by), plan, make_mesh(parallel), Options(parallel))
    input = torch.full((1, 3), 1.0 - 2 * dist.get_rank())
    batch = {"input": input, "targets": torch.zeros(1, dtype=torch.int64)}
    loss = nn.CrossEntropyLoss(reduction="sum")
    return refusal(forward_backward, composition, batch, loss_function=loss)


@pytest.mark.parametrize("zero", [1, 3])
def test_ranks_that_run_units_in_different_orders(pool: Pool, zero: Literal[1, 3]) -> None:
    """A rank ran the other rank's layer in place of its own."""
    assert pool.run(_order, 2, "order", zero) == [UNLIKE.format("some parameter")] * 2
    assert pool.run(_order, 2, "none", zero) == [""] * 2


def test_a_weight_outside_of_its_module_is_said_plainly(pool: Pool) -> None:
    line = "model: forward uses a weight outside of its module, where a rank has a part of it; let its"
    line += " module do that, or a unit of plan.shard that holds it"
    assert pool.run(_order, 2, "weights", 3) == [line] * 2


class _InAnObject(nn.Module):
    """Its output is in an object of which PyTorch knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, input: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.linear(input))


def _from_an_object(zero: Literal[0, 1, 2, 3]) -> torch.Tensor:
    torch.manual_seed(0)
    parallel = Parallel(dp_shard=2, zero=zero)
    composition = apply(_InAnObject(), Plan(), make_mesh(parallel), Options(parallel))
    weight = composition.model.get_parameter("linear.weight")
    targets = torch.tensor([0, 1, 2])
    batch = {"input": torch.eye(3) + dist.get_rank(), "targets": targets}
    loss: Any = lambda output, targets: F.cross_entropy(output.logits, targets, reduction="sum")  # noqa: E731
    forward_backward(composition, batch, micro_batch=1, loss_function=loss)
    assert composition.model.get_parameter("linear.weight") is weight
    assert weight.grad is not None
    return whole(weight.grad)


def test_an_output_in_an_object(pool: Pool) -> None:
    """FSDP saw no backward there: no weight had a gradient, and none was ever trained."""
    wanted = pool.run(_from_an_object, 2, 0)
    for zero in (1, 2, 3):
        for one, other in zip(pool.run(_from_an_object, 2, zero), wanted, strict=True):
            torch.testing.assert_close(one, other)


class _LayersInAnObject(_Layers):
    def forward(self, input: torch.Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(input))


def _stages_from_an_object(zero: Literal[0, 1, 3]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parallel = Parallel(pp=2, dp_shard=2, zero=zero)
    plan = Plan(pipeline=Pipeline([], "layers", []))
    composition = apply(_LayersInAnObject(), plan, make_mesh(parallel), Options(parallel))
    batch = {"input": torch.randn(3, 4), "targets": torch.tensor([0, 1, 2])}
    loss: Any = lambda output, targets: F.cross_entropy(output.logits, targets, reduction="sum")  # noqa: E731
    forward_backward(composition, batch, micro_batch=1, loss_function=loss)
    return [whole(cast(Any, parameter.grad)) for _, parameter in composition.named_parameters()]


@pytest.mark.parametrize("zero", [1, 3])
def test_stages_whose_output_is_in_an_object(pool: Pool, zero: Literal[1, 3]) -> None:
    """Those of the first stage were lost where several micro-batches were under way."""
    wanted, found = (pool.run(_stages_from_an_object, 4, each) for each in (0, zero))
    torch.testing.assert_close(found, wanted)


def _after_a_forward(zero: Literal[0, 1, 3]) -> list[float]:
    """The loss, the one after weights have changed since a forward of one's own, and one evaluated."""
    torch.manual_seed(0)
    parallel = Parallel(dp_shard=2, zero=zero)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    composition = apply(model, Plan(shard=["0", "1"]), make_mesh(parallel), Options(parallel))
    weights = [*model.parameters()]
    batch = {"input": torch.eye(3), "targets": torch.tensor([0, 1, 2])}
    run: dict[str, Any] = {"composition": composition, "batch": batch}
    run["loss_function"] = nn.CrossEntropyLoss(reduction="sum")
    first = forward_backward(**run)
    model(torch.eye(3))
    for weight in weights:
        weight.data *= 2
    second = forward_backward(**run)
    model(torch.eye(3))
    for weight in weights:
        weight.data *= 2
    return [float(first), float(second), float(evaluate(**run)[0])]


def test_weights_that_changed_since_a_forward_of_ones_own(pool: Pool) -> None:
    """What the forward had gathered, the next step took in place of what the shards had become."""
    wanted = pool.run(_after_a_forward, 2, 0)
    for zero in (1, 3):
        assert pool.run(_after_a_forward, 2, zero) == [pytest.approx(each) for each in wanted]


def _own_forward_between(zero: Literal[0, 1, 2, 3]) -> list[float]:
    """Norms and a loss of steps between which a caller runs the model."""
    torch.manual_seed(0)
    parallel = Parallel(dp_shard=2, zero=zero)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    composition = apply(model, Plan(shard=["0", "1"]), make_mesh(parallel), Options(parallel))
    batch = {"input": torch.eye(3), "targets": torch.tensor([0, 1, 2])}
    run: dict[str, Any] = {"composition": composition, "batch": batch}
    run["loss_function"] = nn.CrossEntropyLoss(reduction="sum")

    def norm(step: bool = True) -> float:
        if step:
            forward_backward(**run)
        with torch.no_grad():
            model(torch.eye(3))
        return float(clip_grad_norm_(composition, 0.0))

    results = [norm(), norm(step=False)]
    model.zero_grad()
    results.append(norm())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()
    optimizer.zero_grad()
    model[1].requires_grad_(False)
    return [*results, norm(), float(forward_backward(**run))]


def test_a_forward_of_ones_own_leaves_the_shards(pool: Pool) -> None:
    """Gradients were not clipped nor cleared, and optimizers and flags were those of whole weights."""
    wanted = pool.run(_own_forward_between, 2, 0)
    for zero in (1, 2, 3):
        found = pool.run(_own_forward_between, 2, zero)
        assert found == [pytest.approx(each) for each in wanted]


class _Replaced(nn.Module):
    """Forward runs a layer with another bias, by torch.func.functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = self.bias(torch.ones(3))
        return torch.func.functional_call(self.layer, {"bias": bias}, (input,))


def _with_another_weight(zero: Literal[0, 2, 3], shard: list[str]) -> str:
    parallel = Parallel(dp_shard=2, zero=zero)
    composition = apply(_Replaced(), Plan(shard=shard), make_mesh(parallel), Options(parallel))
    batch = {"input": torch.eye(3), "targets": torch.tensor([0, 1, 2])}
    loss = nn.CrossEntropyLoss(reduction="sum")
    said = refusal(forward_backward, composition, batch, loss_function=loss)
    bias = composition.model.get_submodule("bias")
    return said or str(all(p.grad is not None for p in bias.parameters()))


def test_a_functional_call_of_a_unit(pool: Pool) -> None:
    """FSDP put its own weight in place of the given one, which got no gradient."""
    for zero in (0, 3):
        assert pool.run(_with_another_weight, 2, zero, []) == ["True", "True"]
    for zero in (2, 3):
        assert pool.run(_with_another_weight, 2, zero, ["layer", "bias"]) == 2 * [
            "model: forward runs with another tensor in place of layer.bias, as"
            " torch.func.functional_call puts it there, and FSDP would take its own; do so inside of a"
            " unit of plan.shard, or use parallel.zero = 0"
        ]


def _first_in_inference(zero: Literal[0, 1, 3]) -> list[float]:
    """Losses after the model ran under inference_mode, by itself and in ``evaluate``."""
    losses = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        parallel = Parallel(dp_shard=2, zero=zero)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        composition = apply(model, Plan(shard=["0", "1"]), make_mesh(parallel), Options(parallel))
        batch = {"input": torch.eye(3), "targets": torch.tensor([0, 1, 2])}
        run: dict[str, Any] = {"composition": composition, "batch": batch}
        run["loss_function"] = nn.CrossEntropyLoss(reduction="sum")
        with torch.inference_mode():
            losses.append(float(evaluate(**run)[0] if evaluates else model(torch.eye(3)).sum()))
        losses += [float(forward_backward(**run)), float(clip_grad_norm_(composition, 0.0))]
    return losses


def test_training_after_inference_mode(pool: Pool) -> None:
    """What FSDP had gathered in that mode could not be used in training."""
    wanted = pool.run(_first_in_inference, 2, 0)
    for zero in (1, 3):
        assert pool.run(_first_in_inference, 2, zero) == [pytest.approx(each) for each in wanted]


def _after_an_error(zero: Literal[0, 2, 3]) -> list[str]:
    """What steps say of which the first ends with an error in its second micro-batch."""
    parallel, calls = Parallel(dp_shard=2, zero=zero), list[int]()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    composition = apply(model, Plan(shard=["0", "1"]), make_mesh(parallel), Options(parallel))
    batch = {"input": torch.eye(3), "targets": torch.eye(3)}

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no loss")
        return (output - targets).square().sum()

    with pytest.raises(ValueError, match="no loss"):
        forward_backward(composition, batch, micro_batch=1, loss_function=loss)
    model.zero_grad()
    return [refusal(forward_backward, composition, batch, loss_function=loss) for _ in range(2)]


def test_a_step_after_one_that_failed(pool: Pool) -> None:
    """Its gradients had those of the failed one, which no optimizer sees, in them."""
    assert pool.run(_after_an_error, 2, 0) == 2 * [["", ""]]
    line = (
        "composition: an error has ended an earlier step midway, and its gradients and gathered weights"
        " would be a part of this one; make a new one by compose.apply"
    )
    for zero in (2, 3):
        assert pool.run(_after_an_error, 2, zero) == 2 * [[line, line]]


def _new_parameter(name: str, shape: tuple[int, ...]) -> str:
    parallel = Parallel(dp_shard=2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    composition = apply(model, Plan(shard=["0", "1"]), make_mesh(parallel), Options(parallel))
    batch = {"input": torch.eye(3), "targets": torch.tensor([0, 1, 2])}
    model[0].register_parameter(name, nn.Parameter(torch.zeros(shape)))
    loss = nn.CrossEntropyLoss(reduction="sum")
    return refusal(forward_backward, composition, batch, loss_function=loss)


@pytest.mark.parametrize(("name", "shape"), [("weight", (3, 3)), ("adapter", (3, 3)), ("scale", ())])
def test_a_parameter_that_is_new_since_apply(pool: Pool, name: str, shape: tuple[int, ...]) -> None:
    """Ranks did not sum its gradient, and its values drifted apart."""
    assert pool.run(_new_parameter, 2, name, shape) == 2 * [
        f"model: the parameter 0.{name} is new since compose.apply, and ranks would not sum its"
        " gradient; add it before, or copy its values into the one that was there"
    ]


class _ChosenLayer(nn.Module):
    """The first element of each sample chooses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        positive = input[:, :1] > 0
        for part, mine in zip(self.parts, (positive, ~positive), strict=True):
            if mine.any():
                input = input + mine * part(input) * torch.tensor([0.0, 1.0, 1.0, 1.0])
        return input


def _choose_in_stages(parallel: Parallel) -> str:
    """Two data ranks choose otherwise in the first two of three micro-batches."""
    mesh, model = make_mesh(parallel), _Layers()
    model.layers = nn.ModuleList(_ChosenLayer() for _ in range(4))
    plan = Plan(shard=["layers.*"], pipeline=Pipeline([], "layers", []))
    composition = apply(model, plan, mesh, Options(parallel))
    signs = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]])[batch_share(mesh)[0]]
    batch = {"input": signs[:, None].repeat(1, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    loss = nn.CrossEntropyLoss(reduction="sum")
    return refusal(forward_backward, composition, batch, micro_batch=1, loss_function=loss)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_stages_with_gradients_of_different_parameters(pool: Pool, schedule: str) -> None:
    """With ZeRO 2 each micro-batch has a message of its own; in the end no gradient is lacking."""
    layers = (2, 2) if schedule == "1F1B" else (1, 1, 1, 1)
    parallel = Parallel(pp=2, dp_shard=2, zero=2, pp_schedule=schedule, pp_layers=layers)
    first = 2 if schedule == "1F1B" else 1  # layer of the second rank
    assert pool.run(_choose_in_stages, 4, parallel) == [
        UNLIKE.format(f"layers.{layer}.parts.{part}.weight") for layer in (0, first) for part in (1, 0)
    ]
    assert pool.run(_choose_in_stages, 4, replace(parallel, zero=1)) == [""] * 4


def _lacks(parallel: Parallel) -> str:
    """The second of two ranks alone has gradients."""
    mesh, model = make_mesh(parallel), nn.Linear(2, 2)
    for parameter in model.parameters() if dist.get_rank() else ():
        parameter.grad = torch.ones_like(parameter)
    return refusal(check_gradients, model, [], mesh, torch.device("cpu"))


@pytest.mark.parametrize("axis", AXES)
def test_axes_whose_ranks_need_like_gradients(pool: Pool, axis: str) -> None:
    degrees: dict[str, Any] = {"dp_shard": 1, axis: 2}
    expected = [UNLIKE.format(name) if axis != "pp" else "" for name in ("weight", "some parameter")]
    assert pool.run(_lacks, 2, Parallel(**degrees)) == expected


class _Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operators(parameters: int) -> int:
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(parameters))
    for parameter in model:
        parameter.grad = torch.ones(2)
    with _Operators() as seen:
        norm = clip_grad_norm_(Composition(model, make_mesh(Parallel())), 1.0)
    assert float(norm) == pytest.approx((2 * parameters) ** 0.5)
    assert all(p.grad[0].item() == pytest.approx(1 / float(norm)) for p in model)
    return seen.count


def test_clipping_is_a_few_operators_for_any_number_of_parameters(pool: Pool) -> None:
    assert pool.run(_operators, 1, 3) == pool.run(_operators, 1, 30)


def _clip_a_part() -> str:
    mesh = make_mesh(Parallel(dp_shard=2))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh["dp_shard"], [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(4), mesh["dp_shard"], [Partial()])
    try:
        clip_grad_norm_(Composition(nn.ParameterList([parameter]), mesh), 1.0)
    except ValueError as error:
        return str(error)
    return ""


def test_a_gradient_that_is_still_to_be_summed_has_no_norm(pool: Pool) -> None:
    for said in pool.run(_clip_a_part, 2):
        assert said.startswith("a gradient is still to be summed: ")


def _no_targets() -> tuple[float, float]:
    model = nn.Linear(3, 2)
    composition = Composition(model, make_mesh(Parallel()), data=[DataParallel(model, 3)])
    batch = {"input": torch.randn(2, 4, 3), "targets": torch.full((2, 4), IGNORE)}
    loss = forward_backward(composition, batch)
    return float(loss), float(clip_grad_norm_(composition, 1.0))


def test_batch_without_targets_is_no_nan(pool: Pool) -> None:
    assert pool.run(_no_targets, 1) == [(0.0, 0.0)]


@pytest.mark.parametrize("run", [forward_backward, evaluate])
def test_a_batch_has_targets(run: Any) -> None:
    composition = Composition(nn.Linear(2, 2), mock.Mock())
    batch = {"input": torch.ones(2, 2), "mask": torch.ones(2)}
    assert refusal(run, composition, batch) == (
        'batch: has no targets, only input, mask; give what the loss takes as "targets"'
    )


@pytest.mark.parametrize("run", [forward_backward, evaluate])
@pytest.mark.parametrize("micro_batch", [2, None])
def test_a_batch_has_a_row_for_each_sample(run: Any, micro_batch: int | None) -> None:
    """Rows were left out, or a mask that all samples share was cut as they are."""
    composition = Composition(nn.Linear(2, 2), mock.Mock())
    batch = {"offsets": torch.arange(4), "input": torch.ones(9), "targets": torch.arange(4)}
    assert refusal(run, composition, batch, micro_batch=micro_batch) == (
        "batch: targets has 4 rows and input has 9, and a forward takes the same rows of all; give each"
        " tensor one row for each sample"
    )


@pytest.mark.parametrize("value", [None, 3, {"a": torch.ones(4)}, "text"])
def test_what_has_no_rows_is_refused(value: Any) -> None:
    """It was a TypeError of a slice."""
    composition = Composition(nn.Linear(2, 2), mock.Mock())
    batch = {"mask": value, "input": torch.ones(4), "targets": torch.arange(4)}
    assert refusal(forward_backward, composition, batch) == (
        f"batch: mask is of the type {type(value).__name__}, and a forward takes some rows of all;"
        " leave it out, or give a tensor with one row for each sample"
    )


class Learns(nn.CrossEntropyLoss):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("run", [forward_backward, evaluate])
@pytest.mark.parametrize(
    ("loss", "line"),
    [
        *(
            (
                loss,
                "it ignores the target 0, and the sum is divided by the count of all targets but -100;"
                " put -100 there, which ignore_index is by default",
            )
            for loss in (
                nn.CrossEntropyLoss(ignore_index=0, reduction="sum"),
                partial(F.cross_entropy, ignore_index=0, reduction="sum"),
            )
        ),
        *(
            (
                loss,
                "it returns a mean, which is divided by the count of targets once more; give it"
                ' reduction="sum"',
            )
            for loss in (
                nn.CrossEntropyLoss(),
                F.cross_entropy,
                partial(F.mse_loss, reduction="mean"),
                partial(F.cross_entropy, label_smoothing=0.1),
            )
        ),
    ],
)
def test_losses_that_are_refused(run: Any, loss: Any, line: str) -> None:
    composition = Composition(nn.Linear(2, 2), mock.Mock())
    batch = {"input": torch.ones(2, 2), "targets": torch.zeros(2).long()}
    assert refusal(run, composition, batch, loss_function=loss) == f"loss_function: {line}"


def test_a_loss_that_learns_is_refused() -> None:
    composition = Composition(nn.Linear(2, 2), mock.Mock())
    batch = {"input": torch.ones(2, 2), "targets": torch.zeros(2).long()}
    assert refusal(forward_backward, composition, batch, loss_function=Learns()) == (
        "loss_function: Learns has parameters that are trained, whose gradients are not summed over"
        " ranks; make them the model's"
    )


class Scaled(nn.Module):
    """Its weight's gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.weight


def _reduced(zero: int, reduce: Literal["float32", "bfloat16"], inputs: list[float]) -> float:
    """The gradient of rank 0's ``inputs`` one after another, and of the other's, which are twice so."""
    parallel = Parallel(dp_shard=1 if zero == 0 else 2, dp_replicate=2 if zero == 0 else 1, zero=zero)  # type: ignore[arg-type]
    mesh = make_mesh(parallel)
    model = Scaled()
    options = Options(parallel, Precision(param="bfloat16", reduce=reduce))
    composition = apply(model, Plan(), mesh, options)
    share = torch.tensor(inputs)[:, None].expand(-1, 4) * (1 + dist.get_rank())
    batch = {"input": share, "targets": torch.zeros(len(inputs)).long()}
    forward_backward(
        composition,
        batch,
        micro_batch=1,
        loss_function=lambda out, targets: 2 * len(inputs) * out.sum(),
    )
    assert model.weight.grad is not None
    return float(model.weight.grad.full_tensor()[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_added_up_in_the_type_of_reduce(pool: Pool, zero: int) -> None:
    """They are of micro-batches and ranks; forward and backward are in bfloat16, which keeps 8 bits."""
    exact = 3 + 3 * 2.0**-7  # of two neighbours in bfloat16 it is in the middle
    assert pool.run(_reduced, 2, zero, "float32", [exact / 3]) == [exact] * 2
    for result in pool.run(_reduced, 2, zero, "bfloat16", [exact / 3]):
        assert abs(result - exact) == 2.0**-7
    small = 2.0**-9
    assert pool.run(_reduced, 2, zero, "float32", [1.0, small]) == [3 + 3 * small] * 2
    # From stage 2 on, what was reduced is added up in float32.
    expected = 3.0 if zero < 2 else 3 + 3 * small
    assert pool.run(_reduced, 2, zero, "bfloat16", [1.0, small]) == [expected] * 2


def _unequal_parts(work: str) -> str:
    parallel, config = Parallel(tp=2), ShapeOfLlama(dim=32, n_heads=4, n_kv_heads=2, n_layers=1)
    composition = apply(Llama(config), llama_plan(config, parallel), make_mesh(parallel))
    batch = random_batch(2, 13, config.vocab_size, seed=0)
    return refusal({"train": forward_backward, "evaluate": evaluate}[work], composition, batch)


@pytest.mark.parametrize("work", ["train", "evaluate"])
def test_sequences_that_tp_cannot_share(pool: Pool, work: str) -> None:
    """Their parts would be taken for equal ones: messages of other sizes than the receiver expects."""
    assert pool.run(_unequal_parts, 2, work)[0] == (
        "batch: sequences of 13 tokens cannot be shared by the 2 ranks of tp, as SequenceParallel in"
        " the plan has them; nearest: 14, padded"
    )


class _Encoder(nn.Module):
    """Attention that is not causal, and knows no documents."""

    def __init__(self) -> None:
        super().__init__()
        self.core = AttentionCore(AttentionOptions(causal=False))
        self.head = nn.Linear(4, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        heads = input[:, :, None]
        return self.head(self.core(heads, heads, heads)[:, :, 0])


def _padding_is_seen(length: int) -> str:
    mesh = make_mesh(Parallel(cp=2, dp_shard=1))
    composition = apply(_Encoder(), Plan(context={"core": ContextParallel()}), mesh)
    batch = {"input": torch.ones(2, length, 4), "targets": torch.zeros(2, length, dtype=torch.int64)}
    return refusal(forward_backward, composition, batch)


def test_padding_that_attention_would_see(pool: Pool) -> None:
    line = "batch: attention that is not causal sees the padding of 6 tokens for parallel.cp, since"
    line += " forward takes no documents; nearest: 8"
    assert pool.run(_padding_is_seen, 2, 8) == [""] * 2
    assert pool.run(_padding_is_seen, 2, 6) == [line] * 2


def _targets_of_samples() -> str:
    mesh = make_mesh(Parallel(cp=2, dp_shard=1))
    composition = apply(_Encoder(), Plan(context={"core": ContextParallel()}), mesh)
    batch = {"input": torch.ones(2, 8, 4), "targets": torch.zeros(2, dtype=torch.int64)}
    loss: Any = lambda output, targets: F.cross_entropy(output.mean(1), targets, reduction="sum")  # noqa: E731
    return refusal(forward_backward, composition, batch, loss_function=loss)


def test_targets_that_each_rank_of_a_sequence_would_count(pool: Pool) -> None:
    """The loss was twice what it is, and so were the gradients."""
    line = "batch: targets are one for each sample, and with parallel.cp each rank of a sequence counts"
    line += " them; give one for each token, -100 for none, or use parallel.cp = 1"
    assert pool.run(_targets_of_samples, 2) == [line] * 2


def _without_positions(parallel: Parallel) -> tuple[float, float, float]:
    """Loss and norm of a batch with positions, and the greatest difference without them."""
    shape = ShapeOfLlama(vocab_size=33, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48)
    results = []
    for names in (("tokens", "targets", "positions"), ("tokens", "targets")):
        torch.manual_seed(0)
        model = Llama(shape)
        composition = apply(model, llama_plan(shape, parallel), make_mesh(parallel), Options(parallel))
        batch = random_batch(2, 16, 33, seed=0)
        batch["positions"] = torch.arange(16).repeat(2, 1)
        loss = forward_backward(composition, {name: batch[name] for name in names}, micro_batch=1)
        results.append((float(loss), float(clip_grad_norm_(composition, 1e9))))
    (loss, norm), (other, another) = results
    return loss, norm, abs(loss - other) + abs(norm - another)


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(cp=2, zero=0),
        Parallel(cp=2, zero=0, cp_method="ulysses", cp_balance="none"),
        Parallel(pp=2, tp=2, zero=0),
    ],
)
def test_positions_are_counted_where_a_rank_sees_a_part(pool: Pool, parallel: Parallel) -> None:
    for loss, norm, difference in pool.run(
        _without_positions, parallel.pp * parallel.cp * parallel.tp, parallel
    ):
        assert loss > 0
        assert norm > 0
        assert difference == 0


def _norms_beside_padding() -> list[float]:
    """The norms of the same tokens alone, and with as many places of padding in each row."""
    keys = {"model__name": "qwen3", "model__preset": "debug_moe", "model__z_weight": 1.0}
    job, results = make_job(2, parallel__dp_shard=2, train__seq_len=32, **keys), []
    for padding in (0, 16):
        composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
        rows = random_batch(4, 16, 33, seed=dist.get_rank())
        more = empty({name: value[:, :padding] for name, value in rows.items()})
        more["document_ids"] = more["document_ids"] + 99
        batch = {name: torch.cat([value, more[name]], 1) for name, value in rows.items()}
        forward_backward(composition, batch, micro_batch=2)
        results.append(float(clip_grad_norm_(composition, 0.0)))
    return results


def test_a_routers_losses_are_means_over_tokens_without_padding(pool: Pool) -> None:
    (plain, padded), _ = pool.run(_norms_beside_padding, 2)
    assert padded == pytest.approx(plain, rel=1e-5)


class _Placed(nn.Module):
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return tokens + positions


def _counted() -> list[list[int]]:
    """The positions of sequences whose targets are fewer, and come first in the batch."""
    composition = Composition(_Placed(), make_mesh(Parallel()), pipeline=mock.Mock())
    return local_batch(composition, {"targets": torch.ones(2, 3), "tokens": torch.ones(2, 5)})[
        "positions"
    ].tolist()


def test_positions_are_not_those_of_targets(pool: Pool) -> None:
    assert pool.run(_counted, 1) == [[[0, 1, 2, 3, 4]] * 2]


def _other_rows(parallel: Parallel) -> list[str]:
    """What a first step says of equal batches on all ranks, and of one for each rank."""
    plan = Plan(tensor={"0": ColwiseParallel(), "1": RowwiseParallel()})
    said = []
    for other in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        composition = apply(model, plan, make_mesh(parallel), Options(parallel))
        batch = {"input": torch.eye(3) + other * dist.get_rank(), "targets": torch.eye(3)}
        loss = nn.MSELoss(reduction="sum")
        said.append(refusal(forward_backward, composition, batch, loss_function=loss))
    return said


def test_ranks_of_one_share_with_other_batches(pool: Pool) -> None:
    """Each rank of tp computed its part of another sample."""
    assert pool.run(_other_rows, 2, Parallel(tp=2, dp_shard=1)) == 2 * [
        [
            "",
            "batch: ranks that differ in tp alone run the same samples, and were given others; give"
            " each rank of one share the same batch (compose.parallel.mesh.batch_share)",
        ]
    ]
