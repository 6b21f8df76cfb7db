"""The gradient noise scale: one process's, in float64, on every mesh; and the truth in the long run."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from compose.data.datasets import open_data, training_batches
from compose.parallel.data_parallel import DataParallel
from compose.train import noise_scale
from compose.train.noise_scale import NoiseAverages
from tests.support.helpers import Keys, built, parallel, ranks_in, refusals, tiered
from tests.support.pool import Pool
from tests.support.training import keys_for, lines, train


def _trained(keys: Keys) -> list[tuple[float, float, int, int]]:
    """On every rank: train, and return what each step added."""
    added: list[tuple[float, float, int, int]] = []
    real = NoiseAverages.add

    def add(self: NoiseAverages, small: float, large: float, few: int, many: int) -> None:
        added.append((small, large, few, many))
        real(self, small, large, few, many)

    with mock.patch.object(NoiseAverages, "add", add):
        train(keys)
    return added


def _by_hand(keys: Keys, ranks: int) -> tuple[float, float]:
    """On one rank: the squared norms of two gradients of step 1, in float64 and plain PyTorch: of the
    first micro-batches of ``ranks`` data ranks, and of all samples."""
    job, composition = built(keys)
    model, config = composition.model.double(), job.config
    batch = training_batches(config, open_data(config), (0, 1), torch.device("cpu")).batch(0)
    targets = batch.pop("targets")
    many, each = len(targets), len(targets) // ranks
    first = [r * each + i for r in range(ranks) for i in range(config.train.micro_batch)]
    squares = []
    for samples in (first, list(range(many))):
        model.zero_grad()
        logits = model(**{name: value[samples] for name, value in batch.items()}).flatten(0, 1)
        loss = F.cross_entropy(logits, targets[samples].flatten(), reduction="sum")
        (loss / (targets >= 0).sum() * many / len(samples)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        squares.append(sum(float(g.square().sum()) for g in gradients))
    return squares[0], squares[1]


BASE: Keys = {"train__seq_len": 16, "train__global_batch": 8, "train__stop_after": 2}
BASE |= {"metrics__noise_scale": True, "optimizer__warmup": 1, "train__micro_batch": 1}
MOE: Keys = {"model__name": "mixtral", "model__preset": "debug", "model__balance_weight": 0.0}
MESHES: dict[str, Keys] = {
    "zero 3": parallel(dp_shard=2),
    "ddp": parallel(dp_replicate=2, dp_shard=1, zero=0) | {"train__micro_batch": 2},
    "pp": parallel(pp=2),
    "hsdp, zero 1": parallel(dp_replicate=2, dp_shard=2, zero=1),
    "zero 2, tp": parallel(dp_shard=2, tp=2, zero=2),
    "cp, offloaded, fp16": parallel(cp=2, offload="cpu") | {"precision__param": "float16"},
    "interleaved, zero 3": parallel(pp=2, dp_shard=2, pp_schedule="Interleaved1F1B")
    | {"model__n_layers": 4, "train__global_batch": 16},
    "pp, zero 2": parallel(pp=2, dp_shard=2, zero=2),
    "gpipe, tp": parallel(pp=2, tp=2, pp_schedule="GPipe") | {"activation_checkpoint__mode": "full"},
    "ep": MOE | parallel(dp_shard=2, ep=2),
    "ep x tp": MOE | parallel(dp_shard=2, ep=4, tp=2),
    "experts that stay": MOE | parallel(dp_shard=4, ep=2, zero3_reshard=2),
}


@pytest.mark.parametrize("name", tiered(MESHES, tuple(MESHES)[3:]))
def test_norms_are_those_of_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    keys = BASE | MESHES[name]
    degrees = (str(keys.get(f"parallel__{axis}", 1)) for axis in ("dp_replicate", "dp_shard"))
    ranks = math.prod(map(int, degrees))
    alone = {key: value for key, value in keys.items() if not key.startswith("parallel__")}
    alone |= {"precision__param": "float32"}
    small, large = pool.run(_by_hand, 1, alone, ranks)[0]
    results = pool.run(_trained, ranks_in(keys), keys_for(tmp_path, **keys))
    assert all(result == results[0] for result in results)
    rel = 2e-2 if "precision__param" in keys else 1e-4
    many, few = (int(str(keys[f"train__{key}"])) for key in ("global_batch", "micro_batch"))
    expected = pytest.approx(small, rel=rel), pytest.approx(large, rel=rel), few * ranks, many
    assert results[0][0] == expected
    averages = NoiseAverages()
    written = [line["noise_scale"] for line in lines(tmp_path)]
    for step, line in zip(results[0], written, strict=True):
        averages.add(*step)
        assert line == averages.report(16)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_averages(pool: Pool, tmp_path: Path) -> None:
    keys = BASE | parallel(dp_shard=2) | {"checkpoint__interval": 2}
    pool.run(_trained, 2, keys_for(tmp_path / "whole", **keys) | {"train__stop_after": 4})
    for stop in (2, 4):
        pool.run(_trained, 2, keys_for(tmp_path / "parts", **keys) | {"train__stop_after": stop})
    one, other = ([line["noise_scale"] for line in lines(tmp_path / f)] for f in ("whole", "parts"))
    assert len(one) == 4
    assert one == other


def test_a_run_without_it_sends_no_micro_batch_by_itself() -> None:
    data = DataParallel(torch.nn.Linear(2, 2), zero=3)
    data.prepare_micro_batch(last=False)
    data.end_micro_batch()
    assert not data.is_first


REFUSED: list[tuple[Keys, str]] = [
    (
        {"train__global_batch": 4, "train__micro_batch": 4},
        "metrics.noise_scale: true compares a step's first micro-batch with all of them, and the step"
        " has one; use train.micro_batch = 2, or false",
    ),
    (
        {"train__global_batch": 2, "train__micro_batch": 1} | parallel(dp_shard=2),
        "metrics.noise_scale: true compares a step's first micro-batch with all of them, and the step"
        " has one; use train.global_batch = 4, or false",
    ),
    (
        {"comm__gradients": "int8"} | parallel(dp_shard=2),
        'metrics.noise_scale: true reads exact sums, and comm.gradients = "int8" rounds them; use'
        ' comm.gradients = "off", or false',
    ),
    (
        {"train__micro_batch": 1} | parallel(pp=2, pp_schedule="ZBVZeroBubble"),
        "metrics.noise_scale: true reads the gradients of one backward, and ZBVZeroBubble runs it in"
        ' two parts; use parallel.pp_schedule = "Interleaved1F1B", or false',
    ),
    (
        {"train__micro_batch": 1, "model__tie_embeddings": True} | parallel(pp=2),
        "metrics.noise_scale: true reads sums, and weights that stages share are summed at the end of a"
        " step; use parallel.pp = 1, or false",
    ),
]
test_refused = refusals(REFUSED, {"metrics__noise_scale": True})


def test_formulas_are_unbiased_and_find_a_known_noise() -> None:
    """Gradients of samples are drawn with a known mean and covariance."""
    torch.manual_seed(0)
    dim, few, many, sigma = 50, 4, 32, 1.5
    mean = torch.randn(dim, dtype=torch.float64) * 0.2
    truth = dim * sigma**2 / float(mean.square().sum())
    averages = NoiseAverages()
    with mock.patch.object(noise_scale, "DECAY", 0.999):
        for _ in range(4_000):
            samples = mean + sigma * torch.randn(many, dim, dtype=torch.float64)
            small, large = (float(samples[:n].mean(0).square().sum()) for n in (few, many))
            averages.add(small, large, few, many)
    report = averages.report(seq_len=10)
    assert report is not None
    assert report["samples"] == pytest.approx(truth, rel=0.1)
    assert report["tokens"] == 10 * report["samples"]
    assert report["variance"] == pytest.approx(dim * sigma**2, rel=0.02)
    assert report["square"] == pytest.approx(float(mean.square().sum()), rel=0.1)


def test_it_is_null_until_both_averages_are_positive() -> None:
    averages = NoiseAverages()
    assert averages.report(8) is None
    averages.add(1.0, 2.0, 2, 4)  # by chance the larger batch has the larger gradient
    assert averages.report(8) is None
    averages.add(9.0, 5.0, 2, 4)
    assert averages.report(8) is not None
