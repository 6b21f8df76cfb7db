"""Faults in what a diffusion transformer uses: the proof names each, and noise shows its own."""

from contextlib import nullcontext
from fnmatch import fnmatchcase

import pytest
import torch
import torch.distributed as dist

from compose.data.datasets import open_data, training_batches
from tests.models.dit.shapes import DIT
from tests.proof.sensitivity.row import Row
from tests.support.helpers import Keys, make_config, prove_case, tier
from tests.support.mutation import mutated
from tests.support.pool import Pool

SMALL: Keys = DIT | {"train__global_batch": 4}
CP: Keys = SMALL | {"parallel__cp": 2, "parallel__dp_shard": 1}
TP: Keys = SMALL | {
    "parallel__tp": 3,
    "parallel__dp_shard": 1,
    "model__n_heads": 3,
}
ROWS = [
    Row(
        "the mean of a rank's own targets, not of all",
        SMALL | {"parallel__dp_shard": 2},
        "compose.train.step:forward_backward",
        "sum_over(count_targets(targets), mesh, BATCH_AXES).clamp(min=1)",
        "count_targets(targets).clamp(min=1) * 2",
        "loss",
        "step 1",
    ),
    Row(
        "a patch is lost at each border of cp",
        CP | {"model__image_size": 8, "train__seq_len": 16},
        "compose.parallel.context_parallel:shard_sequence",
        "pieces = value.chunk(count, 1)",
        "pieces = [piece[:, :-1] for piece in value.chunk(count, 1)]",
        "gradient",
        "layers.*.attention.w?.weight",
    ),
    Row(
        "patches attend to padding",
        CP,
        "compose.train.step:_padded",
        "takes and",
        "not takes and",
        "gradient",
        "layers.*.attention.w?.weight",
    ),
    Row(
        "a sample's time is cut with its patches",
        CP | {"model__image_size": 8, "train__seq_len": 16},
        "compose.parallel.context_parallel:shard_sequence",
        "result[name] = value\n",
        "result[name] = value.roll(rank)\n",
        "gradient",
        "layers.*.condition.*",
    ),
    Row(
        "LocalLinear: its gradient stays a part",
        TP,
        "compose.parallel.local_parallel:_TokenLinear.forward",
        "_whole(self.weight, summed=True)",
        "_whole(self.weight, summed=False)",
        "gradient",
        "*.projection.weight",
        untouched=("gradient", "layers.*.attention.w?.weight"),
        ranks=3,
    ),
    Row(
        "the modulation's gradient stays a part",
        TP,
        "compose.parallel.tensor_parallel:_summed_gradient",
        "[Partial()]",
        "[Replicate()]",
        "gradient",
        "layers.*.condition.*",
        untouched=("gradient", "layers.*.attention.w?.weight"),
        ranks=3,
    ),
]
QUICK = ROWS[:2]


def _proved(row: Row) -> tuple[list[tuple[str, str, bool]], str]:
    with row.fault():
        report = prove_case(dict(row.keys))
    return [(found.quantity, found.name, found.ok) for found in report.rows], str(report)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=tier(slow=row not in QUICK)) for row in ROWS]
)
def test_fault_is_named(pool: Pool, row: Row) -> None:
    found, report = pool.run(_proved, row.ranks, row)[0]
    of_row = [ok for what, name, ok in found if what == row.quantity and fnmatchcase(name, row.names)]
    assert False in of_row, report
    if row.untouched:
        what, names = row.untouched
        right = [ok for quantity, name, ok in found if quantity == what and fnmatchcase(name, names)]
        assert right, report
        assert all(right), report


def _shares(fault: bool) -> torch.Tensor:
    """The noisy patches of the whole batch, put together of the ranks' shares."""
    config = make_config(1, **(SMALL | {"data__path": "shapes"}))
    place = "models.dit.flow:NoisyImages.read"
    by_rank = mutated(place, "named_generator(", "torch.Generator().manual_seed(dist.get_rank()) or (")
    import models.dit.flow as flow

    flow.dist = dist  # type: ignore[attr-defined]
    with by_rank if fault else nullcontext():
        ranks = dist.get_world_size()
        batches = training_batches(config, open_data(config), (dist.get_rank(), ranks))
        mine = batches.batch(0)["patches"].contiguous()
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def test_noise_of_a_rank_would_be_seen(pool: Pool) -> None:
    whole = pool.run(_shares, 1, False)[0]
    assert torch.equal(pool.run(_shares, 2, False)[0], whole)
    assert not torch.equal(pool.run(_shares, 2, True)[0], pool.run(_shares, 1, True)[0])
