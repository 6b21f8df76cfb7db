"""A small model with dropout, and drawn compositions of it."""

import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from compose import ActivationCheckpoint, Options, Parallel, Pipeline, Plan, Precision, Trial, verify
from compose.proof.report import Report
from tests.support.helpers import small_ones_move
from tests.support.pool import make_mesh


class _Layer(nn.Module):
    """A mixture of tokens and a network, each with dropout behind it."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.inner, self.last = (nn.Dropout(rate) for _ in range(3))

    def forward(self, x_BLD: Tensor) -> Tensor:
        mean = self.norm(x_BLD).cumsum(1) / x_BLD.shape[1]
        x_BLD = x_BLD + self.first(self.mix(mean))
        return x_BLD + self.last(self.down(self.inner(F.gelu(self.up(x_BLD)))))


class _Model(nn.Module):
    def __init__(self, layers: int, width: int, rate: float) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(37, width), nn.Dropout(rate)
        self.layers = nn.ModuleList(_Layer(width, rate) for _ in range(layers))
        self.head = nn.Linear(width, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BLD = self.drop(self.embed(tokens))
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return self.head(x_BLD)


PLAN = Plan(
    shard=["embed", "layers.*", "head"],
    checkpoint=["layers.*"],
    pipeline=Pipeline(["embed", "drop"], "layers", ["head"]),
)


def prove_drop(number: int) -> Report:
    """On every rank: the proof of the composition of a number, over two steps."""
    rng = random.Random(number)
    degrees: dict[str, Any] = {"dp_shard": 1, "dp_replicate": 1, "pp": 1}
    for _ in range(dist.get_world_size().bit_length() - 1):
        degrees[rng.choice(list(degrees))] *= 2
    mode: Any = rng.choice(["none", "full", "selective"])
    zero: Any = rng.choice([0, 1, 2, 3])
    param: Any = rng.choice(["float32", "float32", "bfloat16"])
    parallel = Parallel(**degrees, zero=zero)
    options = Options(
        parallel,
        activation_checkpoint=ActivationCheckpoint(mode, offload=rng.random() < 0.3),
        precision=Precision(param=param),
        seq_len=9,
    )
    torch.manual_seed(number)
    model = _Model(max(2, degrees["pp"]), rng.choice([6, 10]), rng.choice([0.1, 0.5]))
    batches = []
    for _ in range(2):
        tokens = torch.randint(37, (8, 10))
        batches.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    with small_ones_move():
        return verify(model, PLAN, make_mesh(parallel), batches, options, Trial(micro_batch=1))
