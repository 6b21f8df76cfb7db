"""The proof sees whether it proves something, and in reduced precisions too."""

import copy
import importlib
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from compose import (
    ActivationCheckpoint,
    Comm,
    Compile,
    Options,
    Parallel,
    Plan,
    Precision,
    Trial,
    verify,
)
from compose.__main__ import main
from compose.data.samples import random_batch
from compose.optim.optimizers import Optimizer
from compose.parallel.expert_parallel import ExpertParallel
from compose.proof.comparison import Comparison, gradient_of
from compose.proof.one_process import OneProcess
from compose.proof.prove import proved_steps
from compose.proof.references import Expected
from compose.proof.report import FLOAT32, ComparisonRow, Report, Tolerance, tolerance_of
from models.layers.moe import MoE
from models.layers.router import MoEConfig
from tests.support.faults import Fault, reduce_scatter_keeps_own_part
from tests.support.helpers import refusal, small_ones_move, tiered
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh

SUM = nn.CrossEntropyLoss(reduction="sum")


def layers(*sizes: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for rows, columns in pairwise(sizes):
        parts += [nn.Linear(rows, columns), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def batch_of(shape: tuple[int, ...], classes: int, targets: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input": torch.randn(shape, generator=generator),
        "targets": torch.randint(classes, targets, generator=generator),
    }


BATCH = batch_of((8, 6), 5, (8,))
SEQUENCES = batch_of((8, 7, 8), 5, (8,))


def _refused(change: str) -> str:
    batch, trial = dict(BATCH), Trial(loss_function=SUM)
    if change == "ignored":
        batch["targets"] = torch.full((8,), -100)
    elif change == "lacking":
        del batch["targets"]
    elif change == "rows":  # the batch begins with the targets, whose rows would be the samples
        batch = {"targets": batch["targets"][:4], "input": batch["input"]}
    elif change == "others" and dist.get_rank():
        batch["input"] = batch["input"] + 1
    elif change == "infinite":
        batch["input"] = batch["input"] * math.inf
    elif change == "mean":
        trial = Trial(loss_function=nn.CrossEntropyLoss(), micro_batch=2)
    mesh = make_mesh(Parallel(dp_shard=-1))
    batches = [] if change == "nothing" else batch
    return refusal(verify, layers(6, 8, 5), Plan(), mesh, batches, trial=trial)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "ignored",
            "batch: no target is trained on, so that nothing can be proved; give targets other than"
            " -100, or floats other than NaN",
        ),
        ("lacking", 'batch: has no targets, only input; give what the loss takes as "targets"'),
        (
            "rows",
            "batch: targets has 4 rows and input has 8, and a forward takes the same rows of all; give"
            " each tensor one row for each sample",
        ),
        ("nothing", "batch: an empty list has no step to prove; give at least one batch"),
        ("others", "batch: ranks have different ones; give all the whole one, as of one seed"),
        ("infinite", "model: the loss of one process is nan; does the model run by itself?"),
        (
            "mean",
            "loss_function: samples in one forward give another loss than one by one, so that meshes"
            " differ: it has to return the sum over targets, not their mean (with PyTorch's losses,"
            ' reduction="sum"), and the model may compute nothing over samples',
        ),
    ],
)
def test_what_proves_nothing_is_refused(pool: Pool, change: str, message: str) -> None:
    assert pool.run(_refused, 2, change) == [message] * 2


def _without_gradient() -> tuple[str, str]:
    """The devices of the gradients of parameters that have none; only the first one is a DTensor."""
    mesh = make_mesh(Parallel(dp_shard=2))["dp_shard"]
    kept = torch.ones(2, 3, device="meta")
    placed = nn.Parameter(DTensor.from_local(kept, mesh, [Shard(0)], run_check=False))
    assert placed.device.type == "meta"
    gradient = gradient_of(placed)
    assert gradient.shape == (4, 3)
    return gradient.device.type, gradient_of(nn.Parameter(kept)).device.type


def test_a_gradient_that_is_none_is_where_messages_are(pool: Pool) -> None:
    """With parallel.offload a part is in host memory, which NCCL does not send; meta stands for it."""
    assert pool.run(_without_gradient, 2) == [("cpu", "meta")] * 2


def _mean_unseen() -> Report:
    """The check of samples one by one never fails: the other split is left."""
    with mutated("compose.proof.references:_check_alone", "if not abs(", "if False and abs("):
        trial = Trial(micro_batch=2, loss_function=lambda *given: F.cross_entropy(*given))
        return verify(layers(6, 8, 5), Plan(), make_mesh(Parallel()), BATCH, trial=trial)


def test_one_process_splits_the_batch_otherwise(pool: Pool) -> None:
    report = pool.run(_mean_unseen, 1)[0]
    assert {row.quantity for row in report.failed} >= {"loss", "gradient"}


class ByFrequency(nn.Module):
    """The gradient of a row depends on how often a forward has it; the loss does not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(3, 6), nn.Linear(6, 5)

    def forward(self, input: Tensor) -> Tensor:
        rows, part = self.table(input), 1 / input.bincount()[input][:, None]
        return self.last(rows * part + (rows * (1 - part)).detach())


def test_one_process_never_cuts_as_the_ranks_do(pool: Pool) -> None:
    """Each of two ranks has half of the batch in one forward."""
    batch = {**BATCH, "input": torch.tensor([0, 1, 2, 0, 0, 1, 1, 2])}
    report = pool.run(_proof, 2, ByFrequency, nullcontext, batch)[0]
    assert "float64 gradient" in {row.quantity for row in report.failed}


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, input: Tensor) -> Tensor:
        return self.used(input)


def _proof(
    make: Callable[[], nn.Module],
    fault: Fault,
    batch: dict[str, Tensor],
    plan: Plan = Plan(),  # noqa: B008
    options: Options = Options(),  # noqa: B008
    trial: Trial = Trial(loss_function=SUM),  # noqa: B008
) -> Report:
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    with fault(), small_ones_move():
        report = verify(model, plan, make_mesh(options.parallel), batch, options, trial)
    same = [torch.equal(value, before[name]) for name, value in model.state_dict().items()]
    assert all(same), "verify changed the model"
    return report


def test_an_unused_parameter_is_not_proved(pool: Pool) -> None:
    report = pool.run(_proof, 2, Unused, nullcontext, BATCH)[0]
    assert not report.ok
    assert not report.failed
    assert {row.name for row in report.not_proved} == {"unused.weight", "unused.bias"}
    assert str(report).endswith(
        "NOT PROVED: 2 parameters whose gradient is zero on one process (unused.bias, unused.weight)"
    )


def test_a_learning_rate_of_0_is_no_lack(pool: Pool) -> None:
    """Weights that stay on both sides are exercised: their gradients say so."""
    proof = partial(_proof, trial=Trial(loss_function=SUM, optimizer=partial(torch.optim.SGD, lr=0.0)))
    report = pool.run(proof, 1, partial(layers, 6, 8, 5), nullcontext, BATCH)[0]
    assert report.ok, str(report)


def zero_output() -> nn.Module:
    model = layers(6, 8, 5)
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    return model


def test_weights_of_zero_hide_nothing(pool: Pool) -> None:
    report = pool.run(_proof, 2, zero_output, nullcontext, BATCH)[0]
    assert report.ok, str(report)
    report = pool.run(_proof, 2, zero_output, reduce_scatter_keeps_own_part, BATCH)[0]
    named = {row.name for row in report.failed if row.quantity == "gradient"}
    assert named == {"0.weight", "0.bias", "2.weight", "2.bias"}


class Attend(nn.Module):
    """Attention whose keys have a bias, of which the scores' softmax knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 5)

    def forward(self, input: Tensor) -> Tensor:
        q, k, v = (w(input).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(heads.flatten(2)).mean(1)


ATTEND = Plan(
    tensor={"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel()}
    | {"out": RowwiseParallel()}
)
TYPES = {
    "float32": Precision(),
    "bfloat16": Precision(param="bfloat16"),
    "pure bfloat16": Precision(param="bfloat16", reduce="bfloat16", master="bfloat16"),
}


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(
    "parallel", [Parallel(dp_shard=2), Parallel(dp_shard=1, tp=2)], ids=["dp", "tp"]
)
def test_a_gradient_that_cancels_is_compared_with_zero(
    pool: Pool, parallel: Parallel, types: str
) -> None:
    proof = partial(_proof, plan=ATTEND, options=Options(parallel, TYPES[types]))
    report = pool.run(proof, 2, Attend, nullcontext, SEQUENCES)[0]
    assert report.ok, str(report)
    assert {row.name for row in report.not_proved} == {"wk.bias"}
    assert report.verdict.endswith(
        "; not proved: 1 parameters whose gradient is zero on one process (wk.bias)"
    )


def the_keys_bias_moves() -> Any:
    """Something is added to the gradient that should be zero."""
    add = "[p.grad.add_(1e-4) for n, p in model.named_parameters() if n == 'wk.bias']"
    return mutated("compose.train.step:_run", "value.backward()", f"value.backward(); {add}")


def test_a_fault_in_what_cancels_is_seen(pool: Pool) -> None:
    options = Options(Parallel(dp_shard=2))
    proof = partial(_proof, plan=ATTEND, options=options, trial=Trial(loss_function=SUM, max_norm=0.0))
    report = pool.run(proof, 2, Attend, the_keys_bias_moves, SEQUENCES)[0]
    assert {row.name for row in report.failed if row.quantity == "gradient"} == {"wk.bias"}


def _parts_that_cancel() -> Report:
    """Sums of 1 and -0.971, which bfloat16 has as -0.969."""
    inputs, targets = torch.ones(2, 1), torch.tensor([[1.0], [-0.96875 - 2.0**-9]])
    batch = {"input": inputs, "targets": targets}
    options = Options(precision=Precision(reduce="bfloat16"))
    trial = Trial(1, lambda output, targets: (output * targets).sum())
    mesh = make_mesh(Parallel(dp_shard=-1))
    return verify(nn.Linear(1, 1, bias=False), Plan(), mesh, batch, options, trial)


def test_parts_that_cancel_may_be_rounded(pool: Pool) -> None:
    """One process rounds each part too, or its sum would be exact and that of two ranks accused."""
    report = pool.run(_parts_that_cancel, 2)[0]
    (row,) = (row for row in report.rows if row.quantity == "gradient")
    assert not report.failed, str(report)
    assert row.tolerance > 0.05


def _small_gradient() -> Report:
    """The second weight's gradient is 2^-25, without rounding whatever the order of the sum."""
    batch = {
        "input": torch.tensor([[0.1, 1.0], [0.7, 1.0]]),
        "targets": torch.tensor([[1.0], [-1.0 + 2.0**-24]]),
    }
    trial = Trial(1, lambda output, targets: (output * targets).sum())
    mesh = make_mesh(Parallel(dp_shard=-1))
    return verify(nn.Linear(2, 1, bias=False), Plan(), mesh, batch, Options(), trial)


def test_an_update_that_rounding_decides(pool: Pool) -> None:
    """One process makes no error there by chance. AdamW takes a whole step if another one makes one."""
    report = pool.run(_small_gradient, 1)[0]
    (row,) = (row for row in report.rows if row.quantity == "update")
    assert report.ok, str(report)
    assert row.state == "coarse"
    assert row.tolerance > 0.1
    (row,) = (row for row in report.rows if row.quantity == "float64 update")
    assert row.tolerance < 1e-8


def _allowed() -> dict[str, float]:
    """Return the tolerances of two values of like rounding; one is the sum of parts that cancel."""
    torch.manual_seed(0)
    one = OneProcess(
        nn.Linear(1, 1, bias=False),
        Precision("float16"),
        lambda output, targets: (output * targets).sum(),
        lambda _, named: torch.optim.SGD([p for _, p in named], 0.0),
        micro_batch=1,
        loss_scale=4.0,
    )
    one.step({"input": torch.ones(2, 1), "targets": torch.tensor([[1.0], [-0.75]])}, {})
    gradient, parts = one.gradients["weight"], float(one.parts["weight"]) ** 0.5
    assert (gradient.item(), parts) == (0.125, 0.625)  # over two targets
    comparison = Comparison(torch.device("cpu"), tolerance_of(one.precision))
    for name, rounding, norm in (("plain", 1e-3, 0.0), ("cancels", 1e-3, parts)):
        result = Expected(gradient, rounding, gradient, parts=norm)
        comparison.tensor("gradient", name, [gradient], gradient.shape, result, 1e-4)
    return {row.name: row.tolerance for row in comparison.report([], 0.0).rows}


def test_what_parts_that_cancel_are_allowed(pool: Pool) -> None:
    """Their rounding is of their own size, and one process's may be small by chance."""
    allowed = pool.run(_allowed, 1)[0]
    assert allowed["cancels"] == pytest.approx(5 * allowed["plain"])


class TopOne(nn.Module):
    """Experts of which each token goes to one, with a weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.moe = MoE(6, MoEConfig(n_experts=4, top_k=1, expert_dim=3))
        self.last = nn.Linear(6, 7)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.moe(self.first(input)))


@pytest.mark.parametrize("types", ["float32", "bfloat16"])
def test_a_router_that_cannot_learn(pool: Pool, types: str) -> None:
    proof = partial(
        _proof,
        plan=Plan(expert={"moe.experts": ExpertParallel()}),
        options=Options(Parallel(dp_shard=2, ep=2), TYPES[types]),
        trial=Trial(loss_function=token_loss),
    )
    report = pool.run(proof, 2, TopOne, nullcontext, batch_of((4, 6, 5), 7, (4, 6)))[0]
    assert not report.failed, str(report)
    assert {row.name for row in report.not_proved} == {"moe.router.gate.weight"}


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Deep(nn.Module):
    """Layers that a plan can name, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(16, 16, 16) for _ in range(3))
        self.last = nn.Linear(16, 5)

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = input + layer(input)
        return self.last(input)


DEEP = Plan(
    shard=["layers.*", "last"],
    checkpoint=["layers.*"],
    compile=["layers.*"],
    float8=["layers.*.[02]"],
)
BFLOAT16 = Precision(param="bfloat16", reduce="float32")
OPTIONS = {
    "precision.master": Options(precision=replace(BFLOAT16, master="bfloat16")),
    "compile": Options(compile=Compile("block", backend="aot_eager")),
    "parallel.offload": Options(Parallel(offload="cpu"), BFLOAT16),
    "activation_checkpoint.offload": Options(activation_checkpoint=ActivationCheckpoint(offload=True)),
    "parallel.zero3_reshard": Options(Parallel(zero3_reshard=2)),
    "comm.prefetch": Options(comm=Comm(prefetch=2)),
    "activation_checkpoint": Options(activation_checkpoint=ActivationCheckpoint("full")),
    "precision.float8": Options(precision=Precision(float8="tensorwise")),
}


@pytest.mark.parametrize("option", tiered(OPTIONS, slow=["compile"]))
def test_options_of_apply_take_part(pool: Pool, option: str) -> None:
    """A user's own model is proved. Leaving the option out of ``apply`` shows that it is used."""
    ranks = 4 if option == "parallel.zero3_reshard" else 2
    results = pool.run(_proof_with, ranks, option, batch_of((8, 16), 5, (8,)))
    report = results[0][0]
    assert report.ok, str(report)
    assert [reached for _, reached in results] == [True] * ranks


def _proof_with(option: str, batch: dict[str, Tensor]) -> tuple[Report, bool]:
    """The proof, and whether ``apply`` is given what ``verify`` is."""
    module = importlib.import_module("compose.proof.verify")  # the package has a function of this name
    with mock.patch.object(module, "apply", side_effect=module.apply) as spy:
        report = _proof(Deep, nullcontext, batch, DEEP, OPTIONS[option])
    given = attrgetter(option)
    return report, given(spy.call_args.args[-1]) == given(OPTIONS[option])


def test_random_batch_reaches_from_end_to_end() -> None:
    batch = random_batch(4, 512, 257, seed=3)
    documents = batch["document_ids"]
    longest = [int(row.bincount().max()) for row in documents]
    assert min(longest[::2]) >= 512 - 2 * 8 - 1
    assert max(longest[1::2]) < 100
    assert all(len(row.unique()) > 1 for row in documents)


def test_a_failed_verify_without_islands_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    failed = Report([ComparisonRow("loss", "step 1", 1.0, 1e-6, 0)])
    with mock.patch("compose.proof.prove.prove", return_value=failed):
        assert main(["verify", "train.toml"]) == 1
    assert capsys.readouterr().out == f"{failed}\n"


def test_a_value_that_is_no_number_is_no_error_of_0() -> None:
    """On whichever rank it is."""
    comparison = Comparison(torch.device("cpu"), Tolerance(0.0, 0.0, 0.0))
    comparison.value("quantity", "name", math.nan, 1.0)
    assert comparison.compared[0].error == math.inf


def _errors_of_infinities() -> list[float]:
    right, comparison = (
        torch.tensor([-math.inf, math.nan, 1.0]),
        Comparison(torch.device("cpu"), FLOAT32),
    )
    for quantity, value in (("buffer", right), ("buffer", -right), ("loss", right)):
        comparison.tensor(quantity, "name", [value], right.shape, Expected(right), 0.0)
    return [each.error for each in comparison.compared]


def test_a_mask_may_hold_infinities_and_a_loss_may_not(pool: Pool) -> None:
    assert pool.run(_errors_of_infinities, 1) == [[0.0, math.inf, math.inf]]


def _errors_of_copies() -> list[float]:
    right, comparison = torch.ones(3), Comparison(torch.device("cpu"), Tolerance(0.0, 0.0, 0.0))
    for copies in ([right, 2 * right], [2 * right, right]):
        comparison.tensor("gradient", "name", copies, right.shape, Expected(right), 0.0)
    return [each.error for each in comparison.compared]


def test_the_worst_copy_of_a_rank_counts(pool: Pool) -> None:
    """Two stages of a rank may hold one weight."""
    assert pool.run(_errors_of_copies, 1) == [[1.0, 1.0]]


def test_steps_of_a_proof() -> None:
    """One in warmup, where the rate is above 0, and one after the decay, if the run goes on then."""
    assert proved_steps(Optimizer(warmup=20), 250, 2) == [10, 96]
    assert proved_steps(Optimizer(warmup=150, warmup_from=100), 250, 2) == [125, 183]
    assert proved_steps(Optimizer(warmup=20, decay_end=100), 250, 2) == [10, 101]
    assert proved_steps(Optimizer(warmup=0), 250, 2) == [0, 83]
