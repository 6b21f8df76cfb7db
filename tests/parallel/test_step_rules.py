"""Models, losses, batches and loops that break a rule of steps are refused, and named."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from compose import (
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
from compose.data.samples import random_batch
from compose.parallel.local_parallel import LocalNorm
from compose.parallel.mesh import AXES, batch_share
from compose.parallel.step_rules import check_gradients
from models.qwen3 import PRESETS as QWEN3
from models.qwen3 import Model as Qwen3
from models.qwen3 import plan as qwen3_plan
from tests.support.helpers import refusal
from tests.support.pool import Pool, make_mesh


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


def _two_layers(zero: Literal[0, 1, 2, 3]) -> tuple[nn.Sequential, dict[str, Any]]:
    """A model on two ranks of data, and the arguments of a step of it."""
    torch.manual_seed(0)
    parallel = Parallel(dp_shard=2, zero=zero)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    composition = apply(model, Plan(shard=["0", "1"]), make_mesh(parallel), Options(parallel))
    batch = {"input": torch.eye(3), "targets": torch.tensor([0, 1, 2])}
    loss = nn.CrossEntropyLoss(reduction="sum")
    return model, {"composition": composition, "batch": batch, "loss_function": loss}


def _after_a_forward(zero: Literal[0, 1, 3]) -> list[float]:
    """The loss, the one after weights have changed since a forward of one's own, and one evaluated."""
    model, run = _two_layers(zero)
    weights = [*model.parameters()]
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
    model, run = _two_layers(zero)
    composition = run["composition"]

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
        model, run = _two_layers(zero)
        with torch.inference_mode():
            losses.append(float(evaluate(**run)[0] if evaluates else model(torch.eye(3)).sum()))
        losses += [float(forward_backward(**run)), float(clip_grad_norm_(run["composition"], 0.0))]
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


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_ChosenLayer() for _ in range(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            input = torch.tanh(layer(input))
        return input


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


def _unequal_shares(parallel: Parallel, run: Any) -> list[str]:
    """What is said where a rank has one sample more, in its last micro-batch and in a further one."""
    torch.manual_seed(0)
    config = replace(QWEN3["debug_moe"], n_layers=2)
    composition = apply(
        Qwen3(config), qwen3_plan(config, parallel), make_mesh(parallel), Options(parallel)
    )
    said = []
    for samples in (3, 4):
        batch = random_batch(samples + dist.get_rank(), 8, config.vocab_size, seed=dist.get_rank())
        said.append(refusal(run, composition, batch, micro_batch=2))
    return said


@pytest.mark.parametrize(
    ("parallel", "cures"),
    [
        (Parallel(dp_shard=2, zero=3), {"train": "zero = 1", "evaluate": "zero = 2"}),
        (Parallel(dp_shard=2, zero=2), {"train": "zero = 1"}),
        (Parallel(dp_shard=2, zero=1), {}),
        (Parallel(dp_shard=1, dp_replicate=2), {}),
        (Parallel(dp_shard=2, zero=1, ep=2), {"train": "ep = 1", "evaluate": "ep = 1"}),
    ],
    ids=["zero 3", "zero 2", "zero 1", "replicas", "experts"],
)
def test_unequal_numbers_of_micro_batches(
    pool: Pool, parallel: Parallel, cures: dict[str, str]
) -> None:
    """The ranks waited for one another until the timeout; unequal micro-batches alone do no harm."""
    for name, run in (("train", forward_backward), ("evaluate", evaluate)):
        for rank, said in enumerate(pool.run(_unequal_shares, 2, parallel, run)):
            line = (
                f"batch: this rank's samples make {2 + rank} micro-batches, and other ranks' another"
                " number, so that ranks would wait for messages for ever; give each as many, or use"
                f" parallel.{cures.get(name)}"
            )
            assert said == ["", line if name in cures else ""]


def _thawed(before: bool) -> list[str]:
    """Refusals of two steps; a weight is trained in the second, and was frozen ``before`` or later."""
    parallel, precision = Parallel(dp_shard=1), Precision(param="bfloat16")
    model, plan = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), Plan()
    model[0].weight.requires_grad_(not before)
    composition = apply(model, plan, make_mesh(parallel), Options(parallel, precision))
    batch = {"input": torch.eye(3), "targets": torch.eye(3)}
    said = []
    for trained in (False, True):
        model[0].weight.requires_grad_(trained)
        loss = nn.MSELoss(reduction="sum")
        said.append(refusal(forward_backward, composition, batch, loss_function=loss))
    return said


def test_a_weight_that_was_frozen_in_apply(pool: Pool) -> None:
    """PyTorch failed in backward, at the type of its gradient."""
    assert pool.run(_thawed, 1, False) == [["", ""]]
    line = "model: 0.weight was frozen in compose.apply, and so is kept in torch.bfloat16; let it be"
    assert pool.run(_thawed, 1, True) == [["", f"{line} trained there, and freeze it afterwards"]]
