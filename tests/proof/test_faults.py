"""The proof can fail: each fault is put in on purpose, and the report names what it harmed."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from compose import Parallel, Plan, apply
from compose.memory.precision import Precision
from compose.proof.report import Report
from compose.proof.verify import PrecisionSetup, ProofRun, Trial, compare
from tests.support import faults
from tests.support.faults import Fault, assert_named, with_fault
from tests.support.helpers import keys_in, ranks_in
from tests.support.pool import Pool, make_mesh

TIED = "pp=2 model.tie_embeddings=true"
NORMS = "layers.*.attention_norm.weight layers.*.ffn_norm.weight norm.weight"
# A fault, keys, and by quantity the patterns of what it must name: all that match, and nothing else.
FAULTS: list[tuple[Fault, str, dict[str, str]]] = [
    (faults.reduce_scatter_keeps_own_part, "dp_shard=2", {"gradient": "*"}),
    (faults.all_reduce_of_gradients_is_skipped, "dp_replicate=2", {"gradient": "*"}),
    (faults.partial_gradients_are_taken_as_whole, "tp=2", {"gradient": NORMS}),
    # The input's gradient is summed elsewhere.
    (faults.shared_heads_are_taken_as_whole, "tp=4", {"gradient": "layers.*.attention.w[kv].weight"}),
    # All that lies before the output.
    (
        faults.inputs_gradients_stay_parts,
        "tp=2",
        {"gradient": "tok_embeddings.weight layers.* norm.weight"},
    ),
    (faults.norm_is_not_summed_over_tp, "tp=2", {"grad_norm": "step*"}),
    (faults.loss_is_averaged_per_rank, "dp_shard=2", {"gradient": "*", "loss": "step*"}),
    (faults.gradients_are_reduced_on_the_first_micro_batch, "dp_shard=2 zero=1", {"gradient": "*"}),
    (faults.gradients_are_averaged_over_ranks, "dp_shard=2", {"gradient": "*"}),
    (faults.wo_shards_are_in_reverse_order, "tp=2", {"initial weight": "layers.*.attention.wo.weight"}),
    (faults.a_block_is_skipped, "cp=2", {"gradient": "*"}),
    (faults.an_edge_between_ranks_is_off_by_one, "cp=2", {"gradient": "*"}),
    (faults.blocks_are_merged_without_rescaling, "cp=2", {"gradient": "*"}),
    (faults.positions_are_counted_anew_on_each_rank, "cp=2", {"gradient": "*"}),
    (
        faults.a_stage_averages_over_micro_batches,
        "pp=2 pp_layers=[1,1]",
        {"gradient": "layers.1.* norm.weight output.weight"},
    ),
    (faults.a_tied_weight_is_summed_once_too_often, TIED, {"gradient": "tok_embeddings.weight"}),
    (
        faults.a_tied_weight_is_not_summed,
        TIED,
        {"gradient": "tok_embeddings.weight", "tied copies": "tok_embeddings.weight"},
    ),
    (
        faults.copies_of_a_tied_weight_are_rounded_differently,
        TIED,
        {"tied copies": "tok_embeddings.weight"},
    ),
    (faults.a_later_stage_sees_another_micro_batch, "pp=2", {"gradient": "*"}),
    (faults.norm_is_not_summed_over_pp, "pp=2", {"grad_norm": "step*"}),
    (faults.a_tied_weight_counts_twice_in_the_norm, TIED, {"grad_norm": "step*"}),
    (faults.a_parameter_is_on_no_rank, "dp_shard=2", {"gradient": "norm.weight"}),
    (faults.one_replica_starts_elsewhere, "dp_replicate=2", {"initial weight": NORMS}),
]


@pytest.mark.parametrize(("fault", "line", "named"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_fault_is_named(pool: Pool, fault: Fault, line: str, named: dict[str, str]) -> None:
    keys = keys_in(line)
    result = pool.run(with_fault, ranks_in(keys), fault, keys)[0]
    for quantity, names in named.items():
        assert_named(result, quantity, set(names.split()))


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
    setup = PrecisionSetup(
        lambda _: composition,
        optimizer=lambda _, composition: torch.optim.AdamW(composition.model.parameters()),
        reference_optimizer=lambda _, named: torch.optim.AdamW(named),
    )
    trial = Trial(loss_function=nn.CrossEntropyLoss(reduction="sum"))
    return compare(model, composition, [batch], ProofRun(Precision(), setup), trial)


def test_stale_buffer_is_named(pool: Pool) -> None:
    report = pool.run(_stale_buffer, 2)[0]
    assert [row.name for row in report.failed if row.quantity == "buffer"] == ["table"]
    assert {row.name for row in report.failed if row.quantity == "gradient"} >= {
        "first.weight",
        "last.weight",
    }


def test_what_is_no_number_on_another_rank_is_named(pool: Pool) -> None:
    keys = keys_in("dp_replicate=2 model.n_layers=1")
    report = pool.run(with_fault, 2, faults.a_gradient_is_not_a_number_on_the_last_rank, keys)[0]
    assert not report.ok
    results = {(row.name, row.rank) for row in report.failed if "gradient" in row.quantity}
    assert results == {("norm.weight", 1)}
