"""The proof can fail: each fault is put in on purpose, and the report names what it harmed."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from compose import Parallel, Plan, apply
from compose.proof.one_process import Arithmetic
from compose.proof.report import Report
from compose.proof.verify import ProofRun, Setup, Trial, compare
from tests.support.faults import (
    EVERYTHING,
    Fault,
    a_block_is_skipped,
    a_gradient_is_not_a_number_on_the_last_rank,
    a_later_stage_sees_another_micro_batch,
    a_parameter_is_on_no_rank,
    a_stage_averages_over_micro_batches,
    a_tied_weight_counts_twice_in_the_norm,
    a_tied_weight_is_not_summed,
    a_tied_weight_is_summed_once_too_often,
    all_reduce_of_gradients_is_skipped,
    an_edge_between_ranks_is_off_by_one,
    assert_named,
    blocks_are_merged_without_rescaling,
    copies_of_a_tied_weight_are_rounded_differently,
    gradients_are_averaged_over_ranks,
    gradients_are_reduced_on_the_first_micro_batch,
    inputs_gradients_stay_parts,
    loss_is_averaged_per_rank,
    norm_is_not_summed_over_pp,
    norm_is_not_summed_over_tp,
    one_replica_starts_elsewhere,
    partial_gradients_are_taken_as_whole,
    positions_are_counted_anew_on_each_rank,
    reduce_scatter_keeps_own_part,
    shared_heads_are_taken_as_whole,
    with_fault,
    wo_shards_are_in_reverse_order,
)
from tests.support.pool import Pool, make_mesh

TIED: dict[str, object] = {"parallel__pp": 2, "model__tie_embeddings": True}
NORMS = {"layers.*.attention_norm.weight", "layers.*.ffn_norm.weight", "norm.weight"}


# fault, keys, ranks, quantity, patterns of what it must name: all that match, and nothing else.
FAULTS: list[tuple[Fault, dict[str, object], int, str, set[str]]] = [
    (reduce_scatter_keeps_own_part, {"parallel__dp_shard": 2}, 2, "gradient", EVERYTHING),
    (
        all_reduce_of_gradients_is_skipped,
        {"parallel__dp_replicate": 2},
        2,
        "gradient",
        EVERYTHING,
    ),
    (partial_gradients_are_taken_as_whole, {"parallel__tp": 2}, 2, "gradient", NORMS),
    (
        shared_heads_are_taken_as_whole,
        {"parallel__tp": 4},
        4,
        "gradient",
        {"layers.*.attention.w[kv].weight"},  # the input's gradient is summed elsewhere
    ),
    (
        inputs_gradients_stay_parts,
        {"parallel__tp": 2},
        2,
        "gradient",
        # All that lies before the output.
        {"tok_embeddings.weight", "layers.*", "norm.weight"},
    ),
    (norm_is_not_summed_over_tp, {"parallel__tp": 2}, 2, "grad_norm", {"step *"}),
    (loss_is_averaged_per_rank, {"parallel__dp_shard": 2}, 2, "gradient", EVERYTHING),
    (loss_is_averaged_per_rank, {"parallel__dp_shard": 2}, 2, "loss", {"step *"}),
    (
        gradients_are_reduced_on_the_first_micro_batch,
        {"parallel__dp_shard": 2, "parallel__zero": 1},
        2,
        "gradient",
        EVERYTHING,
    ),
    (gradients_are_averaged_over_ranks, {"parallel__dp_shard": 2}, 2, "gradient", EVERYTHING),
    (
        wo_shards_are_in_reverse_order,
        {"parallel__tp": 2},
        2,
        "initial weight",
        {"layers.*.attention.wo.weight"},
    ),
    (a_block_is_skipped, {"parallel__cp": 2}, 2, "gradient", EVERYTHING),
    (an_edge_between_ranks_is_off_by_one, {"parallel__cp": 2}, 2, "gradient", EVERYTHING),
    (blocks_are_merged_without_rescaling, {"parallel__cp": 2}, 2, "gradient", EVERYTHING),
    (positions_are_counted_anew_on_each_rank, {"parallel__cp": 2}, 2, "gradient", EVERYTHING),
    (
        a_stage_averages_over_micro_batches,
        {"parallel__pp": 2, "parallel__pp_layers": "[1,1]"},
        2,
        "gradient",
        {"layers.1.*", "norm.weight", "output.weight"},
    ),
    (a_tied_weight_is_summed_once_too_often, TIED, 2, "gradient", {"tok_embeddings.weight"}),
    (a_tied_weight_is_not_summed, TIED, 2, "gradient", {"tok_embeddings.weight"}),
    (a_tied_weight_is_not_summed, TIED, 2, "tied copies", {"tok_embeddings.weight"}),
    (
        copies_of_a_tied_weight_are_rounded_differently,
        TIED,
        2,
        "tied copies",
        {"tok_embeddings.weight"},
    ),
    (a_later_stage_sees_another_micro_batch, {"parallel__pp": 2}, 2, "gradient", EVERYTHING),
    (norm_is_not_summed_over_pp, {"parallel__pp": 2}, 2, "grad_norm", {"step *"}),
    (a_tied_weight_counts_twice_in_the_norm, TIED, 2, "grad_norm", {"step *"}),
    (a_parameter_is_on_no_rank, {"parallel__dp_shard": 2}, 2, "gradient", {"norm.weight"}),
    (one_replica_starts_elsewhere, {"parallel__dp_replicate": 2}, 2, "initial weight", NORMS),
]


@pytest.mark.parametrize(
    ("fault", "keys", "ranks", "quantity", "names"),
    FAULTS,
    ids=[f"{f[0].__name__}-{f[3]}" for f in FAULTS],
)
def test_fault_is_named(
    pool: Pool,
    fault: Fault,
    keys: dict[str, object],
    ranks: int,
    quantity: str,
    names: set[str],
) -> None:
    assert_named(pool.run(with_fault, ranks, fault, keys)[0], quantity, names)


class Table(nn.Module):
    """Two layers and a fixed table between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("table", torch.linspace(0, 1, 8))

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.first(input) * self.table)


def _stale_buffer() -> Report:
    torch.manual_seed(0)
    batch = {"input": torch.randn(4, 6), "targets": torch.tensor([0, 1, 2, 3])}
    model, mesh = Table(), make_mesh(Parallel(tp=2))
    # The table's columns meet the whole of the first layer's output.
    plan = Plan(
        tensor={
            "first": ColwiseParallel(output_layouts=Replicate()),
            "last": RowwiseParallel(input_layouts=Replicate()),
        }
    )
    composition = apply(copy.deepcopy(model), plan, mesh)
    composition.model.get_buffer("table").mul_(0.5)
    setup = Setup(
        lambda _: composition,
        optimizer=lambda _, composition: torch.optim.AdamW(composition.model.parameters()),
        reference_optimizer=lambda _, named: torch.optim.AdamW(named),
    )
    trial = Trial(loss_function=nn.CrossEntropyLoss(reduction="sum"))
    return compare(model, composition, [batch], ProofRun(Arithmetic(), setup), trial)


def test_stale_buffer_is_named(pool: Pool) -> None:
    report = pool.run(_stale_buffer, 2)[0]
    assert [row.name for row in report.failed if row.quantity == "buffer"] == ["table"]
    assert {row.name for row in report.failed if row.quantity == "gradient"} >= {
        "first.weight",
        "last.weight",
    }


def test_what_is_no_number_on_another_rank_is_named(pool: Pool) -> None:
    keys: dict[str, object] = {"parallel__dp_replicate": 2, "model__n_layers": 1}
    report = pool.run(with_fault, 2, a_gradient_is_not_a_number_on_the_last_rank, keys)[0]
    assert not report.ok
    found = {(row.name, row.rank) for row in report.failed if "gradient" in row.quantity}
    assert found == {("norm.weight", 1)}
