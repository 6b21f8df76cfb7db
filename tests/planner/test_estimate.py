"""Estimates do not depend on the GPU of the machine that makes them."""

from unittest import mock

import pytest
import torch

from compose.planner.cluster import load_cluster
from compose.planner.estimate import estimate
from tests.support.helpers import make_job, parallel


def _gpu(*args: object, **named: object) -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_where_a_gpu_is_in_use(pp: int) -> None:
    job = make_job(2, **parallel(pp=pp, dp_shard=2 // pp), model__n_layers=2)
    cluster = load_cluster("h100_sxm")
    without = estimate(job, cluster)
    with mock.patch.object(torch.accelerator, "current_accelerator", _gpu):
        assert estimate(job, cluster) == without
        # A forked copy of this process could not call CUDA.
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            assert estimate(job, cluster) == without
