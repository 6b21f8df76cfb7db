"""Communication only where a ZeRO stage needs it; clipping that a mesh cannot change."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
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


@pytest.mark.parametrize(
    ("value", "form"), [((torch.ones(()), {}), "a tuple"), (torch.ones(2), "a tensor (2,)")]
)
def test_a_loss_that_is_no_number_is_refused(value: Any, form: str) -> None:
    loss = StepLoss(lambda output, targets: value, torch.ones(()), None)
    assert refusal(loss, torch.ones(2), torch.ones(2)) == (
        f"loss_function: it returned {form}; return one number, the sum over targets, and keep others"
        " elsewhere"
    )


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
