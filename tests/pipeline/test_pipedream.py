"""PipeDream and 2BW, proved equal to one process that applies the same gradients of older weights."""

import copy
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from compose.build import fill_weights, parallelize
from compose.config.job import Job
from compose.data.samples import random_batch
from compose.ops.cross_entropy import cross_entropy
from compose.pipeline.pipedream import AsynchronousRunner
from compose.proof.one_process import EXACT, PlainAttention
from compose.train.step import clip_grad_norm_, forward_backward
from tests.support.helpers import (
    ROOT,
    Keys,
    make_job,
    parallel,
    prove_step,
    ranks_in,
    refused,
    share_of,
)
from tests.support.pool import Pool, make_mesh
from tests.support.training import (
    keys_for,
    lines,
    logged_steps,
    signalled,
    train,
    train_until_error,
)

CPU = torch.device("cpu")
RATES = {"sgd": 0.5, "adamw": 1e-2}
Weights = dict[str, Tensor]


def _batches(job: Job, steps: int) -> list[dict[str, Tensor]]:
    """Rows of documents, in which micro-batches and steps have unequal numbers of targets."""
    vocabulary = job.config.model.config.vocab_size
    return [random_batch(job.global_batch, 32, vocabulary, seed=step) for step in range(steps)]


def _optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
    }
    return kinds[name](parameters, lr=RATES[name])


@dataclass
class Trained:
    """One rank's stage after each step, and what it held at most."""

    stage: int
    weights: list[Weights]
    losses: list[float]
    norms: list[float]
    versions: int
    in_flight: int


def _train(keys: Keys, steps: int, name: str) -> Trained:
    """On every rank of a pool: so many steps of a small model in float64."""
    job = make_job(dist.get_world_size(), **keys)
    mesh = make_mesh(job.degrees)
    composition = parallelize(job, mesh, CPU, replace(job.options, precision=EXACT))
    fill_weights(composition, job, CPU)
    optimizer = _optimizer(name, composition.model.parameters())
    runner = composition.pipeline
    assert isinstance(runner, AsynchronousRunner)
    result = Trained(runner.rank, [], [], [], 0, 0)
    real = runner._backward

    def watched() -> Tensor:
        result.in_flight = max(result.in_flight, len(runner.flight))
        held = [*runner.versions, runner.own]
        pointers = {next(iter(version.values())).data_ptr() for version in held}
        result.versions = max(result.versions, len(pointers))
        return real()

    runner._backward = watched
    batches = _batches(job, steps + job.degrees.pp)
    for step in range(steps):
        loss = torch.zeros(())
        for ahead in composition.needed():
            batch = share_of(batches[step + ahead], mesh)
            loss = forward_backward(composition, batch, micro_batch=job.config.train.micro_batch)
        result.norms.append(float(clip_grad_norm_(composition, 0.0)))
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(float(loss))
        named = composition.named_parameters()
        result.weights.append({n: p.detach().clone() for n, p in named})
    dist.barrier()  # the last gradient may still be on its way
    return result


def _stale(job: Job, stage_of: dict[str, int], steps: int, name: str) -> Trained:
    """One process, which keeps the weights of all steps and takes those that the papers name."""
    model = copy.deepcopy(job.model)
    fill_weights(model, job, CPU)
    model.double()
    newest = dict(model.named_parameters())
    history: list[Weights] = [{n: p.detach().clone() for n, p in newest.items()}]
    optimizer = _optimizer(name, iter(newest.values()))
    d, one = job.degrees.pp, job.degrees.pp_schedule == "PipeDream"
    result = Trained(-1, [], [], [], 0, 0)
    for step, batch in enumerate(_batches(job, steps)):
        delays = {n: d - 1 - stage_of[n] if one else 1 for n in newest}
        used = {n: history[max(0, step - delay)][n].clone() for n, delay in delays.items()}
        for weight in used.values():
            weight.requires_grad_()
        targets = batch.pop("targets")
        with PlainAttention():
            output = torch.func.functional_call(model, used, (), batch)
        loss = cross_entropy(output, targets) / (targets != -100).sum()
        gradients = torch.autograd.grad(loss, list(used.values()))
        for parameter, gradient in zip(newest.values(), gradients, strict=True):
            parameter.grad = gradient
        result.norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
        optimizer.step()
        result.losses.append(float(loss.detach()))
        history.append({n: p.detach().clone() for n, p in newest.items()})
        result.weights.append(history[-1])
    return result


CASES: list[Any] = [
    # layers of the stages, an odd number in all; schedule; micro-batches; ranks of data; optimizer
    ("3,2", "PipeDream", 1, 1, "sgd"),
    ("3,2", "PipeDream2BW", 3, 1, "adamw"),
    ("2,1,1,1", "PipeDream", 1, 1, "adamw"),
    ("2,1,1,1", "PipeDream2BW", 5, 1, "sgd"),
    ("2,1", "PipeDream", 1, 2, "adamw"),
    ("1,2", "PipeDream2BW", 3, 2, "sgd"),
]


def _keys(layers: str, schedule: str, micro_batches: int, copies: int) -> Keys:
    cut = [int(number) for number in layers.split(",")]
    keys = parallel(pp=len(cut), dp_replicate=copies, dp_shard=1, pp_layers=f"[{layers}]")
    keys |= parallel(pp_schedule=schedule) | {"model__n_layers": sum(cut), "train__max_norm": 0.0}
    return keys | {"train__micro_batch": 2, "train__global_batch": 2 * micro_batches * copies}


@pytest.mark.parametrize(("layers", "schedule", "micro_batches", "copies", "name"), CASES)
def test_equals_one_process_with_stale_weights(
    pool: Pool, layers: str, schedule: str, micro_batches: int, copies: int, name: str
) -> None:
    keys = _keys(layers, schedule, micro_batches, copies)
    d = layers.count(",") + 1
    steps = 2 * d + 1
    job = make_job(d * copies, **keys)
    ranks = pool.run(_train, d * copies, keys, steps, name)
    stage_of = {n: rank.stage for rank in ranks for n in rank.weights[0]}
    right = _stale(job, stage_of, steps, name)
    assert stage_of.keys() == right.weights[0].keys()
    for step in range(steps):
        for rank in ranks:
            for n, weight in rank.weights[step].items():
                assert torch.allclose(weight, right.weights[step][n], rtol=1e-6, atol=1e-9), (step, n)
        norm = sum(rank.norms[step] ** 2 for rank in ranks[::copies]) ** 0.5
        assert norm == pytest.approx(right.norms[step], rel=1e-6)
        assert ranks[-1].losses[step] == pytest.approx(right.losses[step], rel=1e-6)
        assert all(rank.losses[step] == 0 for rank in ranks if rank.stage < d - 1)
    for rank in ranks:
        assert rank.in_flight == d - rank.stage
        assert rank.versions == (d - rank.stage if schedule == "PipeDream" else 2)


def _saved(folder: Path, step: int) -> dict[str, bytes]:
    """What a checkpoint holds of tensors, by file: the state, and the versions of each rank."""
    files = folder / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in (*files.glob("__*"), *files.glob("comm-*"))}


@pytest.mark.parametrize(
    ("layers", "schedule", "micro_batches", "copies"),
    [
        ("2,1", "PipeDream", 1, 1),
        pytest.param("2,1", "PipeDream2BW", 3, 2, marks=pytest.mark.slow),
        pytest.param("1,1,1", "PipeDream", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_bitwise_and_writes_each_step_once(
    pool: Pool, tmp_path: Path, layers: str, schedule: str, micro_batches: int, copies: int
) -> None:
    """Also with recomputation, validation between steps, and comparison of copies."""
    keys = _keys(layers, schedule, micro_batches, copies)
    keys |= {"train__steps": 8, "optimizer__warmup": 2}
    held_out = tmp_path / "held_out.txt"
    held_out.write_text((ROOT / "README.md").read_text()[: 13 * 32])
    keys |= {"data__validation": held_out, "train__validate_every": 3}
    keys |= {"activation_checkpoint__mode": "full", "comm__check_every": 4}
    keys |= {"checkpoint__interval": 6}
    ranks = (layers.count(",") + 1) * copies
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pool.run(train, ranks, keys_for(whole, **keys))
    pool.run(train, ranks, keys_for(parts, **keys, train__stop_after=6))
    pool.run(train, ranks, keys_for(parts, **keys))
    one, two = lines(whole), lines(parts)
    assert [line["step"] for line in two] == list(range(1, 9))
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "lr", "validation_loss"):
            assert a.get(name) == b.get(name)
    assert sum("validation_loss" in line for line in one) == 3
    assert one[-1]["loss"] < one[0]["loss"]
    assert _saved(whole, 8) == _saved(parts, 8)
    assert {f"comm-{rank:05d}.safetensors" for rank in range(ranks)} <= _saved(whole, 8).keys()


def test_a_loss_that_is_not_finite_ends_the_run_later(pool: Pool, tmp_path: Path) -> None:
    keys = _keys("2,1", "PipeDream", 1, 1) | {"train__steps": 8}
    (error, *others) = pool.run(
        train_until_error, 2, keys_for(tmp_path, **keys), float("nan"), "clip_grad_norm_"
    )
    assert others == [error]
    assert error == (
        "step 3: the gradient norm is nan; the weights were changed by it, those of the last checkpoint"
        " were not (a lower optimizer.lr or a longer optimizer.warmup may help)"
    )
    assert logged_steps(tmp_path) == [1, 2]


def _warned(keys: Keys) -> None:
    """Train; SIGTERM comes in the third step."""
    with signalled(signal.SIGTERM):
        train(keys)


def test_a_signal_stops_a_run_that_saves_each_step(pool: Pool, tmp_path: Path) -> None:
    """A save reads all steps, so that none is read late."""
    keys = _keys("2,1", "PipeDream", 1, 1) | {"train__steps": 20, "checkpoint__interval": 1}
    pool.run(_warned, 2, keys_for(tmp_path, **keys))
    assert 3 <= len(lines(tmp_path)) < 10


BASE = "parallel.pp=2 parallel.pp_schedule=PipeDream train.global_batch=2 train.max_norm=0.0"
REFUSED = {
    "train.max_norm=1.0": "train.max_norm: 1 needs the norm of all stages before any of them takes its"
    " step, and PipeDream waits for none; use train.max_norm = 0.0",
    "train.global_batch=4": "parallel.pp_schedule: PipeDream with parallel.pp 2 cannot run 2"
    " micro-batches (it takes a step after each micro-batch); nearest: 1 (train.global_batch is 2 times"
    " that)",
    "parallel.pp_schedule=PipeDream2BW": "parallel.pp_schedule: PipeDream2BW with parallel.pp 2 cannot"
    " run 1 micro-batches (two versions of the weights need at least as many as there are stages);"
    " nearest: 2 (train.global_batch is 2 times that)",
    "model.tie_embeddings=true": "parallel.pp_schedule: PipeDream is not proved where stages share a"
    ' weight, as tok_embeddings.weight; use parallel.pp_schedule = "1F1B", or another model',
    "parallel.dp_replicate=2 train.global_batch=4 outer.every=4": "parallel.pp_schedule: PipeDream is"
    ' proved for the next token alone, and without islands; use parallel.pp_schedule = "1F1B"',
}
UNPROVED = {
    "parallel.tp=2": ("2", "1"),
    "parallel.dp_shard=2 train.global_batch=4": ("2", "1"),
    "compile.mode=block": ('"block"', '"off"'),
    "precision.param=bfloat16": ('"bfloat16"', '"float32"'),
    "train.z_loss=1e-4": ("0.0001", "0.0"),
    "train.skip_nonfinite=true": ("true", "false"),
    "checkpoint.memory=1 run.dir=runs/mine": ("1", "0"),
    "parallel.speeds=[1,1]": ("[1.0, 1.0]", "[]"),
    "metrics.slow_rank=1.5": ("1.5", "0.0"),
    "optimizer.name=muon": ('"muon"', '"adamw"'),
    "activation_checkpoint.mode=selective": ('"selective"', '"full"'),
}
for _words, (_value, _only) in UNPROVED.items():
    REFUSED[_words] = (
        f"{_words.partition('=')[0]}: {_value} is not proved with parallel.pp_schedule = PipeDream; use"
        f' {_only}, or parallel.pp_schedule = "1F1B"'
    )


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_proved_is_refused(words: str) -> None:
    given = dict(word.split("=", 1) for word in f"{BASE} {words}".split())
    keys: Keys = {name.replace(".", "__"): value for name, value in given.items()}
    assert refused(make_job, ranks_in(keys), **keys) == [REFUSED[words]]


def test_a_proof_is_refused(pool: Pool) -> None:
    keys = _keys("2,1", "PipeDream", 1, 1)
    with pytest.raises(AssertionError, match="takes gradients of older weights, which are not those"):
        pool.run(prove_step, 2, keys)
