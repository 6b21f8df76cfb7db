"""State of compose.apply is freed with the model."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from compose.build import build
from compose.data.samples import random_batch
from compose.train.step import forward_backward
from tests.support.helpers import make_job, share_of
from tests.support.pool import Pool, make_mesh


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
