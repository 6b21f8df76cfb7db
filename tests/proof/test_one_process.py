"""What one process computes by itself, without the code that a composition runs."""

import copy

import pytest
import torch
import torch.nn.functional as F

from compose.memory.precision import Precision
from compose.ops.cross_entropy import cross_entropy
from compose.parallel.expert_parallel import routers
from compose.proof.one_process import OneProcess
from tests.support.mutation import mutated
from tests.support.small_models import Tiny


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [("count_targets", "~ignored(targets)", "targets"), ("count_places", ">= 0", ">= -1")],
)
def test_it_counts_targets_and_places_by_itself(function: str, old: str, new: str) -> None:
    torch.manual_seed(0)
    model = Tiny()
    batch = {"input": torch.randn(2, 3, 5), "targets": torch.tensor([[1, 2, 3], [4, 5, -100]])}
    mean = F.cross_entropy(copy.deepcopy(model)(batch["input"]).mT, batch["targets"]).item()
    one = OneProcess(
        model,
        Precision(),
        cross_entropy,
        lambda _, named: torch.optim.SGD([parameter for _, parameter in named]),
    )
    with mutated(f"compose.ops.batch:{function}", old, new):
        one.begin({**batch, "positions": torch.tensor([[0, 1, 2], [0, 1, -1]])})
        assert [int(router.tokens_per_step or 0) for router in routers(one.model).values()] == [5]
        one.step(batch, {})
    assert one.losses[0].item() == pytest.approx(mean)
