"""A proof sees recomputation and offload in a user's own models."""

import torch
from torch import Tensor, nn

from compose import ActivationCheckpoint, Compile, Options, Parallel, Plan, Trial, verify
from compose.proof.report import Report
from tests.support.helpers import small_ones_move
from tests.support.pool import Pool, make_mesh

NOT_WATCHED = "activation_checkpoint.mode: not watched in compiled units or units without parts"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """Three layers, and the weights of the first are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.last = nn.Linear(6, 5)

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = layer(input)
        return self.last(input)


def _proof(units: list[str], options: Options) -> Report:
    torch.manual_seed(0)
    batch = {"input": torch.randn(8, 6), "targets": torch.randint(5, (8,))}
    trial = Trial(loss_function=nn.CrossEntropyLoss(reduction="sum"), micro_batch=2)
    plan = Plan(checkpoint=units, compile=["layers.*"])
    with small_ones_move():
        return verify(Model(), plan, make_mesh(options.parallel), batch, options, trial)


def _rows(report: Report, quantity: str) -> list[str]:
    assert report.ok, str(report)
    return [row.name for row in report.rows if row.quantity == quantity]


def test_units_that_get_no_gradient_have_nothing_to_recompute(pool: Pool) -> None:
    asked = Options(Parallel(dp_shard=2), activation_checkpoint=ActivationCheckpoint("full"))
    report = pool.run(_proof, 2, ["layers.*"], asked)[0]
    assert _rows(report, "runs again") == ["layers.1", "layers.2"]
    assert not report.notes


def test_each_second_unit_with_what_it_saves_on_the_host(pool: Pool) -> None:
    asked = Options(activation_checkpoint=ActivationCheckpoint("every_k", 2, offload=True))
    report = pool.run(_proof, 1, ["layers.*"], asked)[0]
    assert _rows(report, "runs again") == ["layers.1", "layers.2"]
    assert _rows(report, "kept in place") == ["layers.0", "layers.1", "layers.2"]


def test_units_without_parts_are_not_watched(pool: Pool) -> None:
    asked = Options(activation_checkpoint=ActivationCheckpoint("full"))
    report = pool.run(_proof, 1, ["last"], asked)[0]
    assert not _rows(report, "runs again")
    assert report.notes == (NOT_WATCHED,)
    assert str(report).splitlines()[-2] == report.notes[0]


def test_compiled_units_are_not_watched(pool: Pool) -> None:
    asked = Options(
        activation_checkpoint=ActivationCheckpoint("full"), compile=Compile("block", backend="eager")
    )
    report = pool.run(_proof, 1, ["layers.*"], asked)[0]
    assert report.notes == (NOT_WATCHED,)
