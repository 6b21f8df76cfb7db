"""State of compose.apply is freed with the model."""

import gc
import weakref
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from compose import Options, Parallel, Plan, apply
from compose.build import build
from compose.data.samples import random_batch
from compose.proof.comparison import whole
from compose.train.step import forward_backward
from tests.support.helpers import make_job, refusal, share_of
from tests.support.pool import Pool, make_mesh


class Odd(nn.Module):
    """Weights that lie with gaps, and buffers of types that messages do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8)[:, ::2])
        self.turned = nn.Parameter(torch.randn(4, 5).t())
        self.same = nn.Parameter(torch.randn(1).expand(3))
        self.register_buffer("short", torch.randint(9, (3,), dtype=torch.int16)[::2])
        self.register_buffer("complex", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("flag", torch.rand(()) > 0.5)


def _of_the_first_rank(zero: Literal[0, 3]) -> bool:
    """Whether each rank has what the first had, of another seed."""
    torch.manual_seed(dist.get_rank())
    model = Odd()
    torch.manual_seed(0)
    wanted = Odd().state_dict()
    apply(
        model,
        Plan(),
        make_mesh(Parallel(dp_shard=2, zero=zero)),
        Options(Parallel(dp_shard=2, zero=zero)),
    )
    return all(torch.equal(whole(tensor), wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("zero", [0, 3])
def test_weights_are_those_of_the_first_rank(pool: Pool, zero: int) -> None:
    assert pool.run(_of_the_first_rank, 2, zero) == [True, True]


def _other_models() -> list[str]:
    """What is said of models that differ on the second of three ranks, and on none."""
    second, said = dist.get_rank() == 1, []
    parts = nn.Linear(3, 2, bias=False), nn.Linear(3, 4), nn.BatchNorm1d(2), nn.Linear(3, 2)
    for part in parts:
        model = nn.Sequential(part if second else nn.Linear(3, 2))
        parallel = Parallel(dp_replicate=3, dp_shard=1)
        said.append(refusal(apply, model, Plan(), make_mesh(parallel), Options(parallel)))
    return said


def test_ranks_with_other_models(pool: Pool) -> None:
    """It was an error of gloo's about sizes, or a wait for ever."""
    line = "model: rank 0 has {} where rank 1 has {}; make one model on all ranks"
    weight, bias = "0.weight (2, 3) torch.float32", "0.bias (2,) torch.float32"
    assert pool.run(_other_models, 3) == 3 * [
        [
            line.format(bias, "none"),
            line.format(weight, "0.weight (4, 3) torch.float32"),
            line.format(weight, "0.weight (2,) torch.float32"),
            "",
        ]
    ]


class Closed(nn.Module):
    """Forward has a weight in a function too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        weight = self.linear.weight
        self.function = lambda x: F.linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.function(x)


def _held_by_a_closure() -> str:
    parallel = Parallel(dp_shard=2, zero=1)
    composition = apply(Closed(), Plan(), make_mesh(parallel), Options(parallel))
    batch = {"x": torch.ones(1, 4), "targets": torch.ones(1, 4)}
    return refusal(forward_backward, composition, batch, loss_function=nn.MSELoss(reduction="sum"))


def test_a_weight_that_a_closure_holds_is_refused(pool: Pool) -> None:
    line = (
        "model: forward uses linear.weight as it was before the model was cut, as a closure holds it,"
    )
    assert pool.run(_held_by_a_closure, 2) == 2 * [
        f"{line} and so it is not trained; look it up in its module"
    ]


def _is_let_go(keys: dict[str, object]) -> bool:
    job = make_job(dist.get_world_size(), train__global_batch=4, **keys)
    config, mesh = job.config, make_mesh(job.degrees)
    composition = build(job, mesh, torch.device("cpu"))
    batch = random_batch(4, config.train.seq_len, config.model.config.vocab_size, seed=0)
    forward_backward(composition, share_of(batch, mesh), micro_batch=2)
    held = weakref.ref(composition.model)
    del composition
    gc.collect()
    return held() is None


@pytest.mark.parametrize(
    "keys",
    [
        {"parallel__dp_shard": 2, "activation_checkpoint__offload": True},
        {"parallel__pp": 2, "parallel__dp_shard": 1},
    ],
    ids=["shards", "stages"],
)
def test_a_model_is_let_go_with_its_process_groups(pool: Pool, keys: dict[str, object]) -> None:
    """Threads of a group that is kept spin when its peers are gone, and slow down all that follows."""
    assert pool.run(_is_let_go, 2, keys) == [True, True]


def _applied_twice() -> str:
    parallel, layer = Parallel(dp_shard=2), nn.Linear(3, 3)
    apply(layer, Plan(), make_mesh(parallel), Options(parallel))
    again = nn.Sequential(layer, nn.Linear(3, 3))
    return refusal(apply, again, Plan(), make_mesh(parallel), Options(parallel))


def test_a_part_that_was_cut_before_is_refused(pool: Pool) -> None:
    """It was an error about messages of DTensors."""
    assert pool.run(_applied_twice, 2) == 2 * [
        "parameter 0.weight is a DTensor: the model, or a part of it, was cut before; give"
        " compose.apply a new one"
    ]
