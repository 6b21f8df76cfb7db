"""The loss that never holds the logits: equal to the one that does, alone and in any composition."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compose import Parallel, Plan, apply, forward_backward
from compose.build import loss_function
from compose.data.samples import random_batch
from compose.ops import cross_entropy as passes
from compose.ops import operators
from compose.ops.batch import IGNORE
from compose.ops.cross_entropy import chunked_cross_entropy, cross_entropy, token_losses
from compose.parallel.output_projection import CrossEntropy, Output, step_loss
from compose.proof.one_process import PlainAttention
from compose.proof.report import Report
from models.llama import plan as llama_plan
from tests.support.faults import assert_named, with_fault
from tests.support.helpers import (
    Keys,
    built,
    make_config,
    parallel,
    prove_step,
    proved,
    ranks_in,
    refused,
    tier,
)
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, lines, train

GRADIENT = 0.37  # of the loss: what divides it is not known to the projection


def _case(
    shape: tuple[int, ...], rows: int, ignored: float, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Hidden states (*shape, 5), a weight (rows, 5), and targets of which a fraction is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, 5, dtype=dtype, generator=generator)
    weight = torch.randn(rows, 5, dtype=dtype, generator=generator)
    targets = torch.randint(rows, shape, generator=generator)
    return [
        hidden,
        weight,
        targets.masked_fill(torch.rand(shape, generator=generator) < ignored, IGNORE),
    ]


def _by_hand(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> list[Tensor]:
    """Loss, sum of squares, and the gradients of hidden and weight, from whole logits."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (hidden @ weight.T).flatten(0, -2)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORE)
    squares = (logits.exp().sum(-1).log().square() * (targets.flatten() != IGNORE)).sum()
    ((loss + z_loss * squares) * GRADIENT).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), squares.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("chunk", [1, 4, 26, 100])
@pytest.mark.parametrize(("shape", "rows"), [((1, 1), 257), ((2, 13), 7), ((26,), 1)])
def test_equals_whole_logits(
    shape: tuple[int, ...], rows: int, chunk: int, ignored: float, z_loss: float
) -> None:
    hidden, weight, targets = _case(shape, rows, ignored)
    expected = _by_hand(hidden, weight, targets, z_loss)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss, squares = chunked_cross_entropy(hidden, weight, targets, chunk, z_loss)
    (loss * GRADIENT).backward()
    torch.testing.assert_close([loss, squares, hidden.grad, weight.grad], expected)


def test_frozen_weight_and_no_gradient() -> None:
    hidden, weight, targets = _case((2, 13), 7, 0.3)
    expected = _by_hand(hidden, weight, targets, 0.0)
    loss, _ = chunked_cross_entropy(hidden.requires_grad_(), weight, targets, 4)
    (loss * GRADIENT).backward()
    torch.testing.assert_close(hidden.grad, expected[2])
    with torch.no_grad(), _Largest() as largest:
        loss, _ = chunked_cross_entropy(hidden, weight, targets, 4)
    torch.testing.assert_close(loss, expected[0])
    assert largest.bytes <= hidden.nbytes


def test_bfloat16_is_as_good_as_whole_logits() -> None:
    """Gradients against float64, over many chunks: summed in bfloat16 the weight's would be far off."""
    hidden, weight, targets = _case((512,), 31, 0.0, torch.bfloat16)
    exact = _by_hand(hidden.double(), weight.double(), targets, 0.0)
    given = [x.clone().requires_grad_() for x in (hidden, weight)]
    (cross_entropy((given[0] @ given[1].T)[None], targets[None]) * GRADIENT).backward()
    whole = [_error(x.grad, y) for x, y in zip(given, exact[2:], strict=True)]
    given = [x.clone().requires_grad_() for x in (hidden, weight)]
    (chunked_cross_entropy(given[0], given[1], targets, 4)[0] * GRADIENT).backward()
    chunked = [_error(x.grad, y) for x, y in zip(given, exact[2:], strict=True)]
    assert all(error < 1.5 * before for error, before in zip(chunked, whole, strict=True)), (
        chunked,
        whole,
    )


def test_float16_takes_what_the_scale_brings_back() -> None:
    """A sum over tokens that is more than float16 holds, until what the loss is divided by is known."""
    hidden, weight = torch.full((512, 5), 300.0).half(), torch.zeros(7, 5).half().requires_grad_()
    targets = torch.zeros(512, dtype=torch.int64)
    (chunked_cross_entropy(hidden, weight, targets, 64)[0] / 512).backward()
    expected = torch.full((7, 5), 300 / 7)
    expected[0] -= 300
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-3, atol=0)


class _Products(TorchDispatchMode):
    """Notes in which types products with a given result are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.out:
            self.types.append(torch.result_type(*args[:2]))
        return func(*args, **(kwargs or {}))


def test_a_device_does_not_round_the_factor() -> None:
    """One over the number of targets would be up to 0.2% off in bfloat16, and gradients with it."""
    hidden, weight = (torch.zeros(n, 5, dtype=torch.bfloat16, device="meta") for n in (26, 7))
    targets = torch.zeros(26, dtype=torch.int64, device="meta")
    loss, _ = chunked_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets, 4)
    with _Products() as products:
        (loss / 26).backward()
    assert products.types == [torch.float32] * 2


def _error(found: Tensor | None, exact: Tensor) -> float:
    assert found is not None
    return float((found.double() - exact).norm() / exact.norm())


def _by_passes(case: list[Tensor], chunk: int, of: passes.Passes) -> list[Tensor]:
    """Loss, sum of squares and gradients of a case in chunks, by the given passes."""
    hidden, weight = (x.clone().requires_grad_() for x in case[:2])
    with mock.patch.object(passes, "passes_for", return_value=of):
        loss, squares = chunked_cross_entropy(hidden, weight, case[2], chunk, 0.3)
        (loss * GRADIENT).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), squares.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_passes_of_a_gpu(dtype: torch.dtype) -> None:
    """Uncompiled; the logits stay narrow, so a gradient is rounded as often as in place."""
    case = _case((2, 13), 70, 0.3, dtype)
    result = _by_passes(case, 5, passes.Passes(passes.fused_sums, passes.fused_gradient))
    torch.testing.assert_close(result, _by_passes(case, 5, passes.IN_PLACE))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_compiled_passes_are_two_graphs(dtype: torch.dtype) -> None:
    """For chunks of 8 tokens, and for a last one of 2; they are as good as PyTorch's operators."""
    case = _case((2, 13), 70, 0.3, dtype)
    torch._dynamo.reset()
    counters.clear()
    result = _by_passes(case, 8, passes.COMPILED)
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (2, {})
    torch.testing.assert_close(result, _by_passes(case, 8, passes.IN_PLACE))


def test_a_mode_sees_operators() -> None:
    """Under a mode, as a count of FLOPs, PyTorch compiles nothing and refuses a whole graph."""
    logits = mock.Mock(is_cuda=True)
    assert passes.passes_for(logits) is passes.COMPILED
    with _Largest():
        assert passes.passes_for(logits) is passes.IN_PLACE
    with PlainAttention():
        assert passes.passes_for(logits) is passes.IN_PLACE


def test_no_compiler_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """And the loss is what it is without one."""
    case = _case((2, 13), 70, 0.3)

    def fails(function: Any) -> Any:
        raise TorchDynamoException("Failed to find C compiler.\nSet CC.")

    failed = mock.patch.object(operators._Compiler, "missing", False)
    with mock.patch.object(operators, "_compiled", fails), failed:
        result = _by_passes(case, 5, passes.COMPILED)
        assert passes.passes_for(mock.Mock(is_cuda=True)) is passes.IN_PLACE
    torch.testing.assert_close(result, _by_passes(case, 5, passes.IN_PLACE))
    assert capsys.readouterr().out == (
        "the loss and rounding to bfloat16 run uncompiled, and slower: Failed to find C compiler.\n"
    )


def test_bad_targets() -> None:
    hidden, weight, targets = _case((2, 13), 7, 0.0)
    targets[1, 2] = 7
    assert chunked_cross_entropy(hidden, weight, targets, 4)[0] == math.inf
    with pytest.raises(ValueError, match=r"hidden \[2, 13, 5\] is not for targets \[13, 2\]"):
        chunked_cross_entropy(hidden, weight, targets.T, 4)


def _sharded(rows: int, z_loss: float) -> None:
    """Over all ranks: a weight sharded over the vocabulary, and a whole one."""
    hidden, weight, targets = _case((2, 13), rows, 0.3)
    expected = _by_hand(hidden, weight, targets, z_loss)
    mesh = make_mesh(Parallel(tp=dist.get_world_size()))["tp"]
    for placement in (Shard(0), Replicate()):
        x = hidden.clone().requires_grad_()
        w = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
        loss, squares = chunked_cross_entropy(x, w, targets, 4, z_loss)
        (loss * GRADIENT).backward()
        assert isinstance(w.grad, DTensor)
        assert w.grad.placements == (placement,)
        torch.testing.assert_close([loss, squares, x.grad, w.grad.full_tensor()], expected)
    assert refused(
        chunked_cross_entropy, hidden, distribute_tensor(weight, mesh, [Shard(1)]), targets, 4
    ) == [
        "plan.output: a tensor placed (Shard(dim=1),) is neither whole nor sharded over the vocabulary"
    ]


@pytest.mark.parametrize(("ranks", "rows"), [(2, 257), (3, 8), (4, 7)])
def test_vocabulary_over_ranks(pool: Pool, ranks: int, rows: int) -> None:
    pool.run(_sharded, ranks, rows, 0.3)


# 24 of the 64 tokens of a micro-batch, 2 samples: neither divides the other.
CHUNKED: Keys = {"train__loss_chunk": 24, "train__global_batch": 8, "train__z_loss": 0.1}
TIED: Keys = {"model__tie_embeddings": True}
TP = parallel(tp=2)
CASES: dict[int, list[Keys]] = {
    1: [{}, TIED | {"precision__param": "bfloat16"}],
    2: [
        parallel(zero=3) | {"train__global_batch": 12},  # three micro-batches
        parallel(zero=0) | TIED,
        TP | TIED | {"train__global_batch": 6},
        TP | parallel(loss=False) | {"activation_checkpoint__mode": "full"},
        TP | parallel(sequence=False) | TIED | {"train__seq_len": 31},
        parallel(cp=2) | {"train__seq_len": 37},
        parallel(pp=2) | TIED | {"train__loss_chunk": 1000, "train__z_loss": 0.0},
        parallel(pp=2, pp_schedule="ZBVZeroBubble") | TIED | {"model__n_layers": 4},
        TP | {"precision__param": "bfloat16", "precision__reduce": "bfloat16"},
        TP | {"precision__param": "float16", "precision__reduce": "float32"},
        TP | {"train__loss_chunk": 0},  # the z-loss alone
    ],
    4: [parallel(tp=2, pp=2) | TIED, parallel(tp=4, loss=False) | {"model__name": "qwen3"}],
}
MOE: Keys = {"model__name": "deepseek_v3"} | parallel(tp=2, ep=2)


def _prove_all(cases: list[Keys]) -> list[Report]:
    return [prove_step(CHUNKED | keys) for keys in cases]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [pytest.param(n, cases, id=str(n), marks=tier(slow=n > 1)) for n, cases in CASES.items()]
    + [pytest.param(2, [MOE], id="experts", marks=tier(slow=True))],
)
def test_equals_one_process(pool: Pool, ranks: int, cases: list[Keys]) -> None:
    for keys, *reports in zip(cases, *pool.run(_prove_all, ranks, cases), strict=True):
        proved(reports, keys)


# By name: the place and the change, the keys, and the rows that fail by their quantity.
FAULTS: dict[str, tuple[tuple[str, str, str], Keys, dict[str, set[str]]]] = {
    # The sum of exponentials is not reduced over tp; the target's logit is.
    "each rank normalises by its own rows": (
        (
            "compose.ops.cross_entropy:_one_chunk",
            "log_zs, target = parts[:, 0].logsumexp(0), parts",
            "target = parts",
        ),
        TP,
        {"loss": {"step *"}, "gradient": {"*"}},
    ),
    "the target's logit is not subtracted from the gradient": (
        ("compose.ops.cross_entropy:_one_chunk", "0.0), at, here)", "0.0), at, here & False)"),
        {},
        {"gradient": {"*"}},
    ),
    "backward forgets what the loss is divided by": (
        (
            "compose.ops.cross_entropy:_KnownGradient.backward",
            "torch.mul(gradient, factor, out=scaled)",
            "scaled.copy_(gradient)",
        ),
        {},
        {"gradient": {"*"}},
    ),
    # The parts from tp ranks' rows are not summed.
    "gradients of hidden states are taken as whole": (
        ("compose.ops.cross_entropy:chunked_cross_entropy", "Partial() if", "Replicate() if"),
        TP,
        {"gradient": {"tok_embeddings.weight", "layers.*", "norm.weight"}},
    ),
    "targets are those of the first micro-batch": (
        (
            "compose.parallel.output_projection:StepLoss.expect",
            "self.output.targets = targets",
            "self.output.targets = self.__dict__.setdefault('first', targets)",
        ),
        parallel(pp=2),
        {"gradient": {"*"}},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(pool: Pool, fault: str) -> None:
    change, keys, named = FAULTS[fault]
    report = pool.run(with_fault, ranks_in(keys), partial(mutated, *change), CHUNKED | keys)[0]
    for quantity, names in named.items():
        assert_named(report, quantity, names)


def test_a_model_may_return_an_object_with_the_loss_as_its_logits() -> None:
    """Models of transformers return one."""
    head, hidden, targets = nn.Linear(6, 9, bias=False), torch.randn(2, 5, 6), torch.arange(10) % 9
    count, output = torch.tensor(10.0), Output(head)
    with step_loss(CrossEntropy(chunk=2), count, output) as loss:
        loss.expect(targets.view(2, 5))
        result = loss(SimpleNamespace(logits=head(hidden)), targets.view(2, 5))  # type: ignore[arg-type]
    torch.testing.assert_close(result, F.cross_entropy(head(hidden).flatten(0, 1), targets))


@pytest.mark.parametrize(
    "change", [lambda y: 0.5 * y, lambda y: 3 * (y / 3).tanh(), lambda y: y[:, 1:]]
)
def test_a_model_that_changes_its_logits_has_no_loss_in_chunks(
    change: Callable[[Tensor], Tensor],
) -> None:
    """The loss itself was halved, capped or left out."""
    head, hidden, targets = nn.Linear(6, 9, bias=False), torch.randn(2, 5, 6), torch.arange(10) % 9
    with step_loss(CrossEntropy(chunk=2), torch.tensor(10.0), Output(head)) as loss:
        loss.expect(targets.view(2, 5))
        loss(head(hidden).bfloat16().float(), targets)
        assert refused(loss, change(head(hidden)), targets) == [
            "plan.output: forward changes what that projection returns, and with a loss in chunks this"
            " is the loss; return it as it is, or use a loss without chunk (train.loss_chunk)"
        ]


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returned, under DTensors too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return result


def _largest(keys: Keys) -> int:
    job, composition = built(keys)
    config, train = job.config, job.config.train
    batch = random_batch(train.global_batch, train.seq_len, config.model.config.vocab_size, seed=0)
    with _Largest() as largest:
        forward_backward(
            composition, batch, micro_batch=train.micro_batch, loss_function=loss_function(config)
        )
    return largest.bytes


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [({}, 1), (TP, 2), ({**TP, "parallel__loss": False}, 2), ({"parallel__pp": 2}, 2)],
    ids=["alone", "tp", "tp, logits gathered", "pp"],
)
def test_no_tensor_is_as_large_as_the_logits(pool: Pool, keys: Keys, ranks: int) -> None:
    tokens, rows = 32 * 16, 257
    keys = {
        "train__seq_len": 16,
        "train__micro_batch": 32,
        "train__global_batch": 64,
        "model__dim": 32,
        "model__hidden_dim": 48,
        **keys,
    }
    logits = tokens * rows if keys.get("parallel__loss") is False else tokens * -(-rows // ranks)
    logits = tokens * rows if "parallel__pp" in keys else logits
    assert max(pool.run(_largest, ranks, keys)) >= 4 * logits  # float32
    chunked = pool.run(_largest, ranks, {**keys, "train__loss_chunk": 32, "train__z_loss": 0.1})
    assert max(chunked) < 4 * (tokens * rows // 2 - tokens)


def _logits_again(keys: Keys) -> None:
    """Outside of a step the model returns logits, as before it was cut."""
    job, composition = built(keys)
    config, vocabulary = job.config, job.config.model.config.vocab_size
    batch = random_batch(2, config.train.seq_len, vocabulary, seed=0)
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    before = composition.model(**inputs)
    forward_backward(composition, batch, loss_function=CrossEntropy(24))
    after = composition.model(**inputs)
    assert before.shape == (2, config.train.seq_len, vocabulary)
    torch.testing.assert_close(after, before)


def test_logits_outside_of_a_step(pool: Pool) -> None:
    pool.run(_logits_again, 2, TP)


def test_run_reports_cross_entropy_and_log_z_apart(pool: Pool, tmp_path: Path) -> None:
    whole: Keys = {"train__steps": 2, "train__z_loss": 0.01, "train__global_batch": 4}
    cut = {**whole, "train__loss_chunk": 24, "parallel__pp": 2}
    pool.run(train, 1, keys_for(tmp_path / "whole", **whole))
    pool.run(train, 2, keys_for(tmp_path / "chunked", **cut))
    pool.run(train, 1, keys_for(tmp_path / "without", **{**whole, "train__z_loss": 0.0}))
    a, b, without = (lines(tmp_path / name) for name in ("whole", "chunked", "without"))
    for x, y in zip(a, b, strict=True):
        for key in ("loss", "z_loss", "grad_norm"):
            assert y[key] == pytest.approx(x[key], rel=1e-4)
    # At first every row is as likely: Z is 257.
    assert a[0]["z_loss"] == pytest.approx(math.log(257) ** 2, rel=0.01)
    assert a[0]["loss"] == without[0]["loss"]
    assert a[0]["grad_norm"] != without[0]["grad_norm"]
    assert "z_loss" not in without[0]


def _mean_square(parallel: Parallel) -> float:
    """The mean of two ranks' squares: the first has 0 of one target, the second 3 of two."""
    function, rank = CrossEntropy(z_loss=0.1), dist.get_rank()
    function.tally = torch.tensor([3.0 * rank, 1.0 + rank], dtype=torch.float64)
    return float(function.mean_square(make_mesh(parallel)))


@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp"])
def test_log_z_is_the_mean_over_all_targets(pool: Pool, axis: str) -> None:
    degrees: dict[str, Any] = {"dp_shard": 1, axis: 2}
    assert pool.run(_mean_square, 2, Parallel(**degrees)) == [1.0] * 2


def test_an_evaluation_counts_no_log_z() -> None:
    hidden, weight, targets = _case((2, 13), 7, 0.3)
    function = CrossEntropy(chunk=4, z_loss=0.3)
    with torch.no_grad():
        function(hidden @ weight.T, targets)
        function.of_hidden(hidden, weight, targets)
    assert function.tally is None
    *_, squares, _, _ = _by_hand(hidden, weight, targets, 0.0)
    counted = torch.stack([squares, (targets != IGNORE).sum()]).double()
    function(hidden @ weight.T, targets)
    torch.testing.assert_close(function.tally, counted)
    function.of_hidden(hidden, weight, targets)
    torch.testing.assert_close(function.tally, 2 * counted)


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_z_loss_of_whole_logits(ignored: float) -> None:
    hidden, weight, targets = _case((2, 13), 7, ignored)
    loss, _, *expected = _by_hand(hidden, weight, targets, 0.3)
    result = CrossEntropy(z_loss=0.3)(hidden.requires_grad_() @ weight.requires_grad_().T, targets)
    (result * GRADIENT).backward()
    torch.testing.assert_close([result.detach(), hidden.grad, weight.grad], [loss, *expected])


def _without_output() -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    mesh = make_mesh(Parallel())
    batch = {"input": torch.randn(1, 2, 4), "targets": torch.tensor([[0, 1]])}
    composition = apply(model, Plan(), mesh)
    return refused(forward_backward, composition, batch, loss_function=CrossEntropy(2))


def test_plan_without_output(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.run(_without_output, 1) == [
        ["plan.output: names no projection, which a loss in chunks needs"]
    ]
    monkeypatch.setattr("models.llama.plan", _plan_without_output)
    assert refused(make_config, 1, train__loss_chunk=8) == [
        "train.loss_chunk: 8 needs a projection whose output are the logits, and the model's plan names"
        " none (plan.output); use train.loss_chunk = 0"
    ]


def _plan_without_output(model: Any, parallel: Parallel) -> Plan:
    whole = llama_plan(model, parallel)
    return Plan(shard=whole.shard)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_logits_are_two_graphs(dtype: torch.dtype) -> None:
    """For any number of tokens, and as good as PyTorch's operators."""
    torch._dynamo.reset()
    counters.clear()
    for tokens in (26, 10):
        logits = torch.randn(tokens, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
        targets = torch.arange(tokens).masked_fill(torch.arange(tokens) % 3 == 0, IGNORE)
        results = []
        for compiles in (False, True):
            given = logits.clone().requires_grad_()
            with mock.patch.object(passes, "compiles", return_value=compiles):
                loss = token_losses(given, targets).sum()
                (loss * 0.37).backward()
            results.append((loss.detach(), given.grad))
        torch.testing.assert_close(results[1], results[0])
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (2, {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (7, 5), (301, 1009)])
def test_losses_of_whole_logits(dtype: torch.dtype, tokens: int, vocabulary: int) -> None:
    """Logits may need several pieces; some are -inf, and some targets are IGNORE."""
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocabulary).to(dtype)
    targets = torch.randint(vocabulary, (tokens,))
    targets[::3] = IGNORE
    hidden = torch.rand(tokens, vocabulary) < 0.2
    hidden.scatter_(1, targets.clamp(0)[:, None], False)
    logits = logits.masked_fill(hidden, -torch.inf).requires_grad_()
    whole = logits.detach().double().requires_grad_()
    loss, reference = token_losses(logits, targets), F.cross_entropy(whole, targets, reduction="none")
    wide = torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss, reference.to(wide))
    weights = torch.linspace(-1, 3, tokens)
    (weights * loss).sum().backward()
    (weights * reference).sum().backward()
    assert logits.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(logits.grad, whole.grad.to(dtype))


def test_a_target_that_is_no_row() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_losses(torch.zeros(2, 3), torch.tensor([0, 3]))
