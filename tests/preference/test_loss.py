"""The loss of pairs against a plain one, and every mesh against one process."""

from unittest import mock

import pytest
import torch

from compose.preference import loss as module
from compose.preference.loss import PairLoss
from tests.preference.cases import BASE, MESHES, batch_of, dpo, keys_of
from tests.support.helpers import Keys, prove_case, proved, tiered
from tests.support.pool import Pool

NAN = float("nan")


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_equals_the_formula(beta: float) -> None:
    targets = batch_of(6, train__seq_len=19)["targets"].double()
    targets[2] = NAN
    logits = torch.randn(6, 19, 256, dtype=torch.float64).requires_grad_()
    loss = PairLoss(beta)
    assert loss.count(targets) == 5
    results = []
    for function in (loss, lambda logits, targets: dpo(logits, targets, beta)):
        value = function(logits, targets)
        results.append((value.detach(), *torch.autograd.grad(value, logits)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-15)


def test_is_log_2_where_the_model_is_its_reference() -> None:
    """A batch of one pair; rewards are zero, and so is the accuracy: neither reward is the greater."""
    targets = batch_of(1)["targets"]
    logits = torch.randn(1, 27, 256, requires_grad=True)
    known = module.log_probabilities(logits.detach(), targets)
    targets[..., 2] = known.where(~targets[..., 0].isnan(), NAN)
    loss = PairLoss(0.5)
    value = loss(logits, targets)
    torch.testing.assert_close(value, torch.tensor(2.0).log())
    torch.testing.assert_close(
        loss.rewards[0], torch.tensor([0.0, 0, 0, 1]).double(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    "case", tiered(MESHES, slow=set(MESHES) - {"cp"}, full={"zero 1", "ulysses x tp"})
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    keys, ranks = keys_of(case)
    proved(pool.run(prove_case, ranks, keys), case)


def _broken(keys: Keys, fault: str) -> str:
    """On every rank: the report of a proof with a fault, by the rows that fail."""
    real = module.PairLoss.begin

    def swapped(self: PairLoss, composition, batch, micro_batch):  # type: ignore[no-untyped-def]
        function, batch = real(self, composition, batch, micro_batch)
        if torch.distributed.get_rank() == 1:
            batch = {**batch, "targets": batch["targets"] * torch.tensor([1.0, -1.0, 1.0])}
        return function, batch

    if fault == "swapped on one rank":
        patch = mock.patch.object(module.PairLoss, "begin", swapped)
    else:
        patch = mock.patch.object(module, "sum_over", lambda tensor, mesh, axes: tensor.detach())
    with patch:
        report = prove_case(keys, 1)
    assert not report.ok
    return "\n".join(str(report).splitlines()[:8])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["not reduced over cp", "swapped on one rank"])
def test_faults_are_named(pool: Pool, fault: str) -> None:
    mesh = {"parallel__cp": 2} if "cp" in fault else {"parallel__dp_shard": 2}
    for lines in pool.run(_broken, 2, BASE | mesh, fault):
        assert "gradient" in lines
        assert "loss" in lines
