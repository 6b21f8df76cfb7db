"""Stages that run the whole forward of a model that does more than call its modules."""

import pytest
import torch
from torch import Tensor, nn

from compose import Options, Parallel, Pipeline, Plan, Trial, verify
from compose.proof.report import Report
from tests.support.helpers import proved, refusal
from tests.support.pool import Pool, make_mesh


class Layer(nn.Module):
    """It returns a tuple. The model's forward reads its factor, of whatever stage it is."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(6, 6)

    def forward(self, stream: Tensor, scale: Tensor) -> tuple[Tensor, None]:
        return stream + self.linear(stream * scale).tanh(), None


class Model(nn.Module):
    """Forward adds positions, scales each layer by its factor and caps the logits."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.rows, self.places = nn.Embedding(9, 6), nn.Embedding(5, 6)
        self.layers = nn.ModuleList(Layer(number + 1.0) for number in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 9)

    def forward(self, tokens: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.rows(tokens) * 2.0 + self.places(torch.arange(tokens.shape[1]))
        mean = x.mean()
        for layer in self.layers:
            scale = mean if self.reads == "embedding" else torch.tensor(layer.factor)
            x, _ = layer(x, scale=scale)
            if self.reads == "layers":
                x, _ = layer(x, scale=scale + self.layers[0].linear.weight.sum())  # type: ignore
            if self.reads == "twice":
                x, _ = layer(x, scale=scale)
        return 3.0 * (self.head(self.norm(x)) / 3.0).tanh()


PIPELINE = Pipeline(["rows", "places"], "layers", ["norm", "head"], whole_forward=True)


def _proof(layers: tuple[int, ...], schedule: str = "1F1B", reads: str = "") -> Report:
    torch.manual_seed(0)
    tokens = torch.randint(9, (4, 6))
    parallel = Parallel(pp=2, dp_shard=1, pp_layers=layers, pp_schedule=schedule)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    plan = Plan(pipeline=PIPELINE)
    return verify(
        Model(reads), plan, make_mesh(parallel), batch, Options(parallel), Trial(micro_batch=1)
    )


# The last stage may hold no layers, and a rank may hold several stages.
@pytest.mark.parametrize(
    ("layers", "schedule", "reads"),
    [
        ((2, 1), "1F1B", ""),
        ((3, 0), "1F1B", "twice"),
        pytest.param((3, 0), "GPipe", "", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 0), "ZBVZeroBubble", "", marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(pool: Pool, layers: tuple[int, ...], schedule: str, reads: str) -> None:
    proved(pool.run(_proof, 2, layers, schedule, reads))


def _reads(what: str) -> str:
    parallel = Parallel(pp=2, dp_shard=1)
    tokens = torch.ones(2, 5, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    plan = Plan(pipeline=PIPELINE)
    return refusal(verify, Model(what), plan, make_mesh(parallel), batch, Options(parallel))


def test_what_layers_get_may_not_depend_on_the_embedding(pool: Pool) -> None:
    said = set(pool.run(_reads, 2, "embedding"))
    assert len(said) == 1
    line = said.pop()
    assert line.startswith(
        "plan.pipeline: layers get scale = () in the first stage, and (), not the same"
    )
    assert line.endswith("or use parallel.pp = 1 (docs/plan.md, Pipeline parallel)")


def test_a_forward_that_reads_weights_of_layers_is_refused(pool: Pool) -> None:
    (said,) = set(pool.run(_reads, 2, "layers"))
    assert said.startswith(
        "plan.pipeline: AttributeError: 'OtherStageLayer' object has no attribute 'linear'"
    )
