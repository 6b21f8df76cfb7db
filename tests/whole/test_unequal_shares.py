"""Unequal shares of a global batch: each composition still equals one process."""

from pathlib import Path

import pytest
import torch
from torch import nn

from compose import Options, Parallel, Plan, apply, forward_backward
from compose.ops.dropout import DropoutKey
from compose.parallel.mesh import Share, deal
from tests.support import training
from tests.support.helpers import (
    Keys,
    gradients_of,
    keys_in,
    make_job,
    parallel,
    prove_on,
    refusals,
    tier,
)
from tests.support.pool import Pool, make_mesh

EXPERTS = "model.name=qwen3 model.preset=debug_moe model.balance_weight=0.1 model.z_weight=0.01"
# Keys of two to six ranks. With two samples, one of three ranks has padding alone.
CASES = {
    "zero 3, 8 samples": "dp_shard=3 zero=3 speeds=[1,1,1] train.global_batch=8",
    "zero 3, 2 samples": "dp_shard=3 zero=3 speeds=[1,1,1] train.global_batch=2",
    "zero 2, 5 samples": "dp_shard=3 zero=2 speeds=[1,1,1] train.global_batch=5",
    "zero 1, 2 samples": "dp_shard=3 zero=1 speeds=[1,1,1] train.global_batch=2",
    "zero 0, 5 samples": "dp_shard=3 zero=0 speeds=[1,1,1] train.global_batch=5",
    "zero 3, slow rank": "dp_shard=2 zero=3 speeds=[1,0.5] train.global_batch=11 train.micro_batch=4",
    "zero 1, slow rank": "dp_shard=2 zero=1 speeds=[1,0.5] train.global_batch=6",
    "tp": "dp_shard=2 tp=2 zero=3 speeds=[1,1] train.global_batch=3 train.micro_batch=2",
    "cp": "dp_shard=2 cp=2 zero=3 speeds=[1,1] train.global_batch=3",
    "cp, zero 0": "dp_replicate=2 cp=2 zero=0 speeds=[2,1] train.global_batch=6 train.micro_batch=2"
    " train.z_loss=1e-3",
    "stages by speed": "dp_shard=2 pp=2 zero=3 speeds=[4,2,2,1] train.global_batch=6"
    " train.micro_batch=2 model.n_layers=4",
    "pp": "dp_shard=2 pp=2 zero=2 speeds=[1,1,1,1] train.global_batch=3",
    "pp, zero 1, tied": "dp_shard=2 pp=2 zero=1 speeds=[1,0.5,1,0.5] train.global_batch=6"
    " model.tie_embeddings=true",
    "experts": f"dp_shard=3 zero=3 ep=3 speeds=[1,1,1] train.global_batch=5 {EXPERTS}"
    " model.n_experts=6 model.bias_rate=0.01",
    "experts with a capacity": f"dp_shard=3 zero=1 speeds=[1,1,1] train.global_batch=5 {EXPERTS}"
    " model.capacity_factor=1.0 model.balance_loss=sequence",
    "experts of two data ranks": "dp_replicate=2 cp=3 ep=2 zero=1 speeds=[2,1] train.global_batch=6"
    f" train.micro_batch=2 train.seq_len=24 {EXPERTS}",
    "an interleaved schedule": "dp_shard=2 pp=2 zero=3 pp_schedule=Interleaved1F1B speeds=[2,1,2,1]"
    " train.global_batch=13 train.micro_batch=4 model.n_layers=4",
    "bf16, recomputed": "dp_shard=2 zero=3 speeds=[2,1] train.global_batch=5 train.micro_batch=2"
    " precision.param=bfloat16 activation_checkpoint.mode=full",
}
QUICK = ("zero 3, 2 samples", "zero 1, slow rank")
ONE: Keys = {"train__micro_batch": 1}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=tier(slow=name not in QUICK)) for name in CASES]
)
def test_equals_one_process(pool: Pool, name: str) -> None:
    prove_on(pool, ONE | keys_in(CASES[name]))


def _dropped(speeds: tuple[float, ...]) -> list[torch.Tensor]:
    """Gradients of a model with dropout, on this rank's share of 5 samples."""
    torch.manual_seed(0)
    options = Parallel(dp_shard=len(speeds), zero=3)
    mesh = make_mesh(options)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 3))
    composition = apply(model, Plan(shard=["0", "2"]), mesh, Options(options))
    batch = {"input": torch.randn(5, 4, 6), "targets": torch.randint(3, (5, 4))}
    share = deal(5, speeds, 2)[mesh.get_local_rank("dp_shard")]
    mine = {name: value[share.rows] for name, value in batch.items()}
    forward_backward(composition, mine, micro_batch=share, dropout=DropoutKey(3))
    return list(gradients_of(composition.model).values())


def test_dropout_goes_by_the_sample(pool: Pool) -> None:
    """One rank has 4 samples and one has 1; the masks are those of one rank with all."""
    alone = pool.run(_dropped, 1, (1.0,))[0]
    for gradients in pool.run(_dropped, 2, (1.0, 0.3)):
        for gradient, right in zip(gradients, alone, strict=True):
            torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_shares_are_a_partition(micro_batch: int, together: bool) -> None:
    for speeds in ([1.0], [1.0, 1.0, 1.0], [1.0, 0.5], [3.0, 1.0, 2.0, 0.1]):
        for samples in range(1, 40):
            shares = deal(samples, speeds, micro_batch, together)
            places = [place for share in shares for place in range(samples)[share.rows]]
            assert places == list(range(samples))
            assert all(share.padding >= 0 for share in shares)
            assert all(1 <= share.micro_batch <= micro_batch for share in shares)
            assert not together or len({share.micro_batches for share in shares}) == 1


def test_a_slow_rank_gets_less() -> None:
    """Together it has half the rows of each micro-batch, and alone half of the micro-batches."""
    assert deal(28, (1.0, 0.5), 10**9) == deal(28, (1.0, 0.5), 28)  # at once
    fast, slow = deal(28, (1.0, 1.0, 1.0, 0.5), 2)[2:]
    assert (fast, slow) == (Share(16, 8, 2, 4, 28), Share(24, 4, 1, 4, 28))
    assert deal(28, (1.0, 1.0, 1.0, 0.5), 2, together=False)[3] == Share(24, 4, 2, 2, 28)


def test_counts_that_a_schedule_can_run_come_first() -> None:
    speeds = (1.0, 0.5)
    assert {share.micro_batches for share in deal(13, speeds, 4)} == {5}
    even = deal(13, speeds, 4, can_run=lambda count: count % 2 == 0)
    assert even == (Share(0, 10, 3, 4, 13), Share(10, 3, 1, 4, 13))
    assert deal(13, speeds, 4, can_run=lambda count: False) == deal(13, speeds, 4)
    job = make_job(4, **keys_in(CASES["an interleaved schedule"]))
    assert [(share.samples, share.micro_batches) for share in job.shares] == [(9, 3), (4, 3)]


def test_ranks_that_share_experts_run_equally_often() -> None:
    """With cp 3 and ep 2 every second group of experts has ranks of both data ranks."""
    job = make_job(6, **keys_in(CASES["experts of two data ranks"]))
    assert [(share.samples, share.micro_batches) for share in job.shares] == [(4, 2), (2, 2)]
    whole = make_job(2, **keys_in("dp_shard=2 speeds=[2,2] train.global_batch=4"))
    assert whole.shares == ()


@pytest.mark.slow
def test_a_run_has_the_losses_of_one_rank(pool: Pool, tmp_path: Path) -> None:
    """The samples of each step are the same, and validation counts each of its own once."""
    (tmp_path / "some.txt").write_text(250 * "one two ")
    base = ONE | keys_in("train.global_batch=5 train.stop_after=3 train.validate_every=3")
    base["data__validation"] = tmp_path / "some.txt"
    runs = []
    for number, speeds in enumerate(((1,), (1, 1, 1), (4, 1))):
        folder = tmp_path / str(number)
        mesh = parallel(dp_shard=len(speeds), speeds=[*speeds])
        pool.run(training.train, len(speeds), training.keys_for(folder, **base, **mesh))
        steps = training.lines(folder)
        runs.append([step["loss"] for step in steps] + [steps[-1]["validation_loss"]])
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], rel=1e-5)


test_refused = refusals(
    [
        (
            parallel(dp_shard=2, speeds=[1, 2, 3]),
            "parallel.speeds: has 3 numbers for the 2 ranks of pp x dp_replicate x dp_shard; give each"
            " of them one",
        ),
        (
            parallel(dp_shard=2, speeds=[1, 2]) | keys_in("metrics.noise_scale=true"),
            "metrics.noise_scale: true compares equal micro-batches, and the ranks have unequal shares"
            " of train.global_batch; use false",
        ),
        (
            parallel(dp_replicate=2, dp_shard=2, speeds=[2, 1]) | keys_in("outer.every=4"),
            "outer.every: 4 makes islands of equal shares, and the ranks have unequal shares of"
            " train.global_batch; use 0",
        ),
        (
            keys_in(
                "dp_shard=2 pp=2 zero=1 pp_schedule=Interleaved1F1B speeds=[2,1,2,1]"
                " train.global_batch=15 train.micro_batch=1 model.n_layers=4"
            ),
            "parallel.pp_schedule: Interleaved1F1B with parallel.pp 2 cannot run 5 micro-batches"
            " (PyTorch: Interleaved 1F1B requires the number of microbatches to be a multiple of the"
            " number of rounds (2), but got 5); nearest: 4 or 6",
        ),
    ]
)
