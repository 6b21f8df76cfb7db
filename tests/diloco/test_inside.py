"""What trains inside islands: with each option, islands that see the same samples are one run, bitwise.

The mean of equal weights is these weights, so with lr 1 and no momentum the exchanges change nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.parallel.islands import current
from compose.proof.comparison import whole
from compose.train import trainer as trainer_module
from compose.train.metrics import StepMetrics
from compose.train.trainer import Trainer
from tests.diloco.cases import INSIDE, outer
from tests.support.helpers import Keys, make_job, tier
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for

STEPS = 5
MEAN = outer(every=2, lr=1.0, momentum=0.0)
FP16: Keys = {"precision__param": "float16", "precision__reduce": "float32"}
OPTIONS: dict[str, tuple[str, Keys]] = {
    "streaming": ("tp x zero 3", {**outer(every=4, fragments=1, mix=0.5)}),
    "muon": ("zero 3", {"optimizer__name": "muon"}),
    "adamw in host memory": ("zero 3", {"parallel__offload": "cpu"}),
    "activation checkpointing": ("tp x zero 3", {"activation_checkpoint__mode": "full"}),
    "chunked loss": ("zero 3", {"train__loss_chunk": 8}),
    "compile": ("zero 3", {"compile__mode": "block"}),
    "bfloat16": ("pp x tp", {"precision__param": "bfloat16"}),
    "float16": ("zero 3", FP16),
    "coded messages": ("zero 3", {"comm__weights": "int8", "comm__gradients": "int8"}),
    "experts": ("experts", {}),
}


def trained(keys: Keys, skipped: bool) -> tuple[dict[str, Tensor], list[dict[str, Any]], int]:
    """Weights, lines of metrics and skipped steps of a run, whose samples depend on the step alone."""
    ranks, islands = dist.get_world_size(), current()
    job = make_job(ranks * islands.count, **{"parallel__dp_replicate": islands.count, **keys})
    mesh = make_mesh(job.degrees)
    trainer = Trainer(job, mesh, torch.device("cpu"))
    length, share = job.config.train.seq_len, job.global_batch
    of = job.degrees.dp_shard

    def batch(_: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(trainer.progress.step)
        tokens = torch.randint(256, (share, length + 1), generator=generator)
        place = mesh["dp_shard"].get_local_rank()
        mine = tokens[place * share // of : (place + 1) * share // of]
        return {"tokens": mine[:, :-1].contiguous(), "targets": mine[:, 1:].contiguous()}

    real, found = trainer_module.clip_grad_norm_, list[StepMetrics]()

    def norm(*arguments: Any) -> Tensor:
        value = real(*arguments)
        return value * torch.inf if skipped and trainer.progress.step in (1, 2) else value

    with (
        mock.patch.object(trainer.batches, "batch", batch),
        mock.patch.object(trainer_module, "clip_grad_norm_", norm),
    ):
        real_step = trainer.step

        def step() -> StepMetrics:
            found.append(real_step())
            return found[-1]

        with mock.patch.object(trainer, "step", step):
            trainer.run()
    weights = {name: whole(p) for name, p in trainer.composition.named_parameters()}
    return weights, [{"loss": m.loss, "scale": m.loss_scale} for m in found], trainer.skipped


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=tier(slow=True, full=n == "compile")) for n in OPTIONS]
)
def test_islands_that_see_the_same_are_one_run(pool: Pool, tmp_path: Path, name: str) -> None:
    inside, options = OPTIONS[name]
    ranks, mesh = INSIDE[inside]
    keys: Keys = {
        "train__steps": STEPS,
        "train__seq_len": 16,
        "train__micro_batch": 1,
        **mesh,
        **options,
    }
    skips = name == "float16"
    plain = {k: v for k, v in keys.items() if not k.startswith("outer__")}
    one = pool.run(trained, ranks, keys_for(tmp_path / "one", train__global_batch=4, **plain), skips)
    many_keys = keys_for(tmp_path / "many", train__global_batch=8, **(MEAN | keys))
    many = pool.run(trained, 2 * ranks, many_keys, skips, islands=2)
    for rank, (weights, steps, skipped) in enumerate(many):
        right, right_steps, right_skipped = one[rank % ranks]
        assert steps == right_steps
        assert skipped == right_skipped == (2 if skips else 0)
        for parameter, value in right.items():
            assert torch.equal(weights[parameter], value), parameter
