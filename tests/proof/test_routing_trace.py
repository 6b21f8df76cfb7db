"""Faults of routing and of expert parallel: each is put in on purpose, and named by what it harmed."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import compose.parallel.expert_parallel
import compose.parallel.tensor_parallel
import compose.proof.prove
import compose.train.step
from compose import Composition, Options, Parallel, Plan, Trial, apply
from compose.memory.precision import Precision
from compose.parallel.expert_parallel import ExpertParallel, begin_step, finish_step, routers
from compose.proof.report import Report
from compose.proof.verify import PrecisionSetup, ProofRun, compare
from models.layers.moe import Experts, MoE
from models.layers.router import count_rows
from tests.support.faults import (
    Fault,
    assert_named,
    partial_gradients_are_taken_as_whole,
    replaces,
    with_fault,
)
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import DEEPSEEK, QWEN, Tiny, keys_of

# The last layer's router (the second) influences these.
BEFORE_ROUTERS = (
    "tok_embeddings.weight layers.0.* layers.1.attention* layers.1.ffn_norm.weight"
    " layers.1.moe.router.*"
)


@replaces(compose.train.step, "finish_step")
def an_experts_gradient_is_summed_over_too_many_ranks(_: Any, model: nn.Module, mesh: Any) -> None:
    """Over the ranks that hold other experts too."""
    for module in model.modules():
        for parameter in module.parameters() if isinstance(module, Experts) else ():
            assert isinstance(parameter.grad, DTensor)
            dist.all_reduce(parameter.grad.to_local())
    finish_step(model, mesh)


@replaces(compose.parallel.expert_parallel, "_run_on_owners")
def rows_come_back_in_another_order(real: Any, *args: Any) -> Tensor:
    return real(*args).roll(1, 0)


@replaces(compose.parallel.expert_parallel, "_gather_sequence")
def a_sequence_is_balanced_in_parts(_: Any, group: Any, inner: Any, tensor: Tensor) -> Tensor:
    """The balancing loss of a sequence is the mean of those of the ranks' parts."""
    return inner(tensor)


@replaces(compose.train.step, "begin_step")
def the_auxiliary_loss_is_a_mean_of_each_rank(_: Any, model: Any, tokens: int, scale: float) -> None:
    """Divided by the tokens of the rank, and summed over ranks."""
    begin_step(model, tokens // dist.get_world_size(), scale)


def _weights_first(moe: MoE, x_BLD: Tensor, real_BL: Tensor | None = None) -> Tensor:
    routing = moe.router(x_BLD, real_BL)
    rows_N, k = routing.experts.flatten(), routing.experts.shape[-1]
    order = rows_N.argsort(stable=True)
    weighed = x_BLD.flatten(0, 1)[order // k] * routing.weights.flatten()[order, None]
    out = moe.experts(weighed, count_rows(rows_N, moe.router.config.n_experts))
    y = torch.zeros_like(out).index_copy(0, order, out).unflatten(0, (-1, k)).sum(1)
    return y.view_as(x_BLD) + (0 if moe.shared is None else moe.shared(x_BLD))


@replaces(compose.proof.prove, "build")
def weights_are_applied_before_the_experts(real: Any, *args: Any) -> Composition:
    composition = real(*args)
    for module in composition.model.modules():
        if isinstance(module, MoE):
            module.forward = partial(_weights_first, module)
    return composition


@replaces(compose.train.step, "finish_step")
def routers_act_on_their_own_counts(_: Any, model: nn.Module, mesh: Any) -> None:
    """The bias is updated, and the load remembered, from each rank's own tokens."""
    for router in routers(model).values():
        router.finish_step(router.tally)


@replaces(compose.parallel.tensor_parallel, "_summed_gradient")
def what_heads_share_is_summed_over_this_ranks_alone(_: Any, *args: Any) -> Any:
    return args[-1]


FAULTS: list[tuple[Fault, dict[str, object], str, str, str]] = [
    (
        an_experts_gradient_is_summed_over_too_many_ranks,
        QWEN,
        "ds 2 ep 2",
        "gradient",
        "layers.*.moe.experts.*",
    ),
    (rows_come_back_in_another_order, QWEN, "ds 2 ep 2", "gradient", "*"),
    (a_sequence_is_balanced_in_parts, DEEPSEEK, "cp 2", "gradient", BEFORE_ROUTERS),
    (a_sequence_is_balanced_in_parts, DEEPSEEK, "tp 2", "gradient", BEFORE_ROUTERS),
    (the_auxiliary_loss_is_a_mean_of_each_rank, DEEPSEEK, "ds 2", "gradient", BEFORE_ROUTERS),
    (weights_are_applied_before_the_experts, QWEN, "ds 2 ep 2", "gradient", "*"),
    (
        routers_act_on_their_own_counts,
        DEEPSEEK,
        "ds 2 ep 2",
        "buffer after",
        "layers.*.moe.router.bias layers.*.moe.router.load",
    ),
    (
        what_heads_share_is_summed_over_this_ranks_alone,
        DEEPSEEK,
        "tp 2",
        "gradient",
        # Its own weight, and all that lies before the last layer's.
        "tok_embeddings.weight layers.0.* layers.1.attention_norm.weight"
        " layers.1.attention.wkv_a.weight",
    ),
    (
        partial_gradients_are_taken_as_whole,
        QWEN,
        "tp 2",
        "gradient",
        "layers.*_norm.weight layers.*.moe.router.gate.weight norm.weight",
    ),
]


@pytest.mark.parametrize(
    ("fault", "model", "case", "quantity", "names"),
    FAULTS,
    ids=[f"{fault.__name__}-{case}" for fault, _, case, _, _ in FAULTS],
)
def test_fault_is_named(
    pool: Pool, fault: Fault, model: dict[str, object], case: str, quantity: str, names: str
) -> None:
    ranks, keys = keys_of(model, case)
    assert_named(pool.run(with_fault, ranks, fault, keys)[0], quantity, set(names.split()))


def _routes_elsewhere(change: float, gate_rows_alike: bool) -> Report:
    """A bias that one process has not, for one expert; with its like, it decides a tie."""
    torch.manual_seed(3)
    model = Tiny()
    if gate_rows_alike:
        with torch.no_grad():
            model.moe.router.gate.weight[1] = model.moe.router.gate.weight[0]
    batch = {"input": torch.randn(4, 6, 5), "targets": torch.randint(7, (4, 6))}

    def change_bias(composed: nn.Module) -> None:
        composed.get_buffer("moe.router.bias")[1] += change

    return _compare_changed(model, batch, change_bias)


def _drops_elsewhere(change: float, tokens_alike: bool) -> Report:
    """Scores in reverse order are a little higher where rows are dropped, alone in the composition."""
    torch.manual_seed(3)
    model = Tiny(capacity_factor=0.7)
    batch = {"input": torch.randn(4, 6, 5), "targets": torch.randint(7, (4, 6))}
    if tokens_alike:
        batch["input"][:] = batch["input"][:, :1]

    def change_scores(composed: nn.Module) -> None:
        router: Any = composed.get_submodule("moe.router")
        own = router.keep

        def keep(chosen: Tensor, scores: Tensor, everyone: Tensor) -> tuple[Tensor, Tensor]:
            places = torch.arange(scores.shape[1])[:, None]
            return own(chosen, scores * (1 + change * places), everyone)

        router.keep = keep

    return _compare_changed(model, batch, change_scores)


def _compare_changed(
    model: Tiny, batch: dict[str, Tensor], change: Callable[[nn.Module], None]
) -> Report:
    plan, parallel = Plan(expert={"moe.experts": ExpertParallel()}), Parallel(dp_shard=2, ep=2)
    composition = apply(copy.deepcopy(model), plan, make_mesh(parallel), Options(parallel))
    change(composition.model)
    setup = PrecisionSetup(
        lambda _: composition,
        lambda _, made: torch.optim.AdamW(made.model.parameters(), foreach=False),
        lambda _, named: torch.optim.AdamW(named, foreach=False),
    )
    trial = Trial(
        loss_function=lambda output, targets: nn.functional.cross_entropy(
            output.flatten(0, 1), targets.flatten(), reduction="sum"
        )
    )
    return compare(model, composition, [batch], ProofRun(Precision(), setup), trial)


def _proof(
    pool: Pool, changed: Callable[..., Report], change: float, alike: bool
) -> tuple[Report, str]:
    """A proof where the composition differs, and its one note."""
    report = pool.run(changed, 2, change, alike)[0]
    (note,) = report.notes
    return report, note


@pytest.mark.parametrize(
    ("changed", "change", "quantity", "words"),
    [
        (_routes_elsewhere, 0.05, "routing", "chose other experts than one process would"),
        (_drops_elsewhere, 0.2, "capacity", "had other rows dropped than one process would"),
    ],
)
def test_routing_that_differs_is_reported(
    pool: Pool, changed: Callable[..., Report], change: float, quantity: str, words: str
) -> None:
    report, note = _proof(pool, changed, change, False)
    (row,) = (row for row in report.failed if row.quantity == quantity)
    assert row.name == "moe.router, step 1"
    assert 0.001 < row.error < 0.3
    assert note.startswith("moe.router, step 1: ")
    assert note.endswith(f" of 24 tokens {words}, for a margin of at most {row.error:.1e}")
    assert note in str(report)
    assert quantity == "routing" or "moe.experts.w1" in {row.name for row in report.failed}


def test_a_tie_is_told_from_a_fault(pool: Pool) -> None:
    """Two experts that score alike: which one runs is chance, and the one process then follows."""
    report, note = _proof(pool, _routes_elsewhere, -1e-7, True)
    (row,) = (row for row in report.rows if row.quantity == "routing")
    assert row.error <= 1e-6
    assert note.endswith(": a tie")
    # All but the bias that was moved to break it.
    assert {(row.quantity, row.name) for row in report.failed} == {
        ("buffer", "moe.router.bias"),
        ("buffer after", "moe.router.bias"),
    }


def test_a_tie_at_the_capacity_is_told_from_a_fault(pool: Pool) -> None:
    """Tokens that score alike, of which an expert drops some: the one process drops the same ones."""
    report, note = _proof(pool, _drops_elsewhere, 1e-6, True)
    assert report.ok, str(report)
    (row,) = (row for row in report.rows if row.quantity == "capacity")
    assert row.error <= 1e-5
    assert note.endswith(": a tie")
