"""Estimates do not depend on the GPU of the machine that makes them; few layers stand for all."""

from unittest import mock

import pytest
import torch

from compose.planner.cluster import load_cluster
from compose.planner.estimate import estimate, recorded
from tests.support.helpers import make_job, parallel

SLOW = pytest.mark.slow


def _gpu(*args: object, **named: object) -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=SLOW)])
def test_where_a_gpu_is_in_use(pp: int) -> None:
    job = make_job(2, **parallel(pp=pp, dp_shard=2 // pp), model__n_layers=2)
    cluster = load_cluster("h100_sxm")
    without = estimate(job, cluster)
    with mock.patch.object(torch.accelerator, "current_accelerator", _gpu):
        assert estimate(job, cluster) == without
        # A forked copy of this process could not call CUDA.
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            assert estimate(job, cluster) == without


@pytest.mark.parametrize(
    "mode", ["full", pytest.param("none", marks=SLOW), pytest.param("selective", marks=SLOW)]
)
def test_reserved_bytes_are_those_of_all_layers(mode: str) -> None:
    sizes = {"dim": 1024, "hidden_dim": 3584, "n_layers": 14, "n_heads": 8, "vocab_size": 1024}
    job = make_job(
        8,
        **parallel(dp_shard=8),
        **{f"model__{key}": value for key, value in sizes.items()},
        precision__param="bfloat16",
        activation_checkpoint__mode=mode,
        train__seq_len=2048,
        train__micro_batch=4,
        train__global_batch=32,
    )
    cluster = load_cluster("h100_sxm")
    whole, _ = recorded(job, cluster, None, 0, None, None)
    (one,) = estimate(job, cluster).peaks
    assert one.reserved == pytest.approx(one.allocated + whole.surplus, rel=0.03)
