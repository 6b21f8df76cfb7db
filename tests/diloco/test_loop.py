"""The outer loop: exchanges that equal data parallel, what goes on inside a worker, and corruption."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.diloco import Outer
from compose.diloco.loop import OuterLoop, Pending
from compose.parallel.mesh import batch_share
from compose.proof.comparison import whole
from compose.train import trainer as trainer_module
from compose.train.metrics import StepMetrics
from compose.train.processes import TrainingError
from compose.train.step import forward_backward
from compose.train.workers import Worker, this_worker
from tests.diloco.cases import BATCH, INSIDE, STREAMING, loop_of, outer, proof
from tests.support.helpers import HALF, Keys, built, parallel, ranks_in, tiered
from tests.support.mutation import mutated
from tests.support.pool import Pool
from tests.support.training import keys_for, trainer_of

SAMPLES, STEPS = 8, 5
AVERAGE = {"lr": 1.0, "momentum": 0.0}


def trained(keys: Keys, outer: dict[str, Any] | None, same_samples: bool = False) -> dict[str, Tensor]:
    """The weights after some steps of plain SGD, and the loss of each, on this rank's island."""
    islands = this_worker()
    job, composition = built(keys)
    optimizer = torch.optim.SGD(composition.model.parameters(), lr=0.1, foreach=False)
    loop = loop_of(job, composition, Outer(**outer), islands, STEPS) if outer else None
    if loop:
        loop.start(0)
    index, count = batch_share(composition.mesh)
    if not same_samples:
        index, count = islands.index * count + index, islands.count * count
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(256, (SAMPLES, 33), generator=torch.Generator().manual_seed(step))
        mine = tokens[index * SAMPLES // count : (index + 1) * SAMPLES // count]
        share = {"tokens": mine[:, :-1], "targets": mine[:, 1:]}
        losses.append(forward_backward(composition, share, micro_batch=1).detach())
        optimizer.step()
        optimizer.zero_grad()
        if loop:
            loop.after_update(step + 1)
    if loop:
        loop.close(failed=False)
    weights = {name: whole(parameter) for name, parameter in composition.named_parameters()}
    return weights | {"losses": torch.stack(losses)}


# Routers count the samples of their island alone.
DENSE = INSIDE.keys() - {"experts"}


@pytest.mark.parametrize("inside", tiered(sorted(DENSE), DENSE - {"zero 3"}))
def test_each_step_with_sgd_is_data_parallel(pool: Pool, inside: str) -> None:
    keys = BATCH | INSIDE[inside]
    ranks = ranks_in(keys)
    result = pool.run(trained, 2 * ranks, keys, {"every": 1, **AVERAGE}, islands=2)
    right = pool.run(trained, ranks, keys, None)
    for rank, weights in enumerate(result):
        del weights["losses"]  # of this island's samples
        for name, value in weights.items():
            torch.testing.assert_close(value, right[rank % ranks][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fragments", [0, 1])
def test_one_island_that_takes_the_mean_is_bitwise_no_islands(pool: Pool, fragments: int) -> None:
    keys = BATCH | parallel(dp_shard=2)
    outer = {"every": 2, "fragments": fragments, **AVERAGE}
    result, right = pool.run(trained, 2, keys, outer)[0], pool.run(trained, 2, keys, None)[0]
    for name, value in right.items():
        assert torch.equal(result[name], value), name


@pytest.mark.parametrize("islands", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_islands_with_the_same_samples_are_bitwise_one(pool: Pool, islands: int) -> None:
    keys = BATCH | parallel(dp_shard=2)
    outer = {"every": 2, "lr": 0.7, "momentum": 0.9}
    result = pool.run(trained, 2 * islands, keys, outer, True, islands=islands)
    right = pool.run(trained, 2, keys, outer)[0]
    for weights in result:
        for name, value in right.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("fragments", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("inside", tiered(("zero 3", "tp", "pp x tp"), slow=("tp", "pp x tp")))
def test_the_mesh_inside_islands_changes_nothing(pool: Pool, inside: str, fragments: int) -> None:
    """With fragments as without: these are parts of the whole model, not of what a rank holds."""
    outer = {"every": 2, "fragments": fragments, "mix": 0.5, "momentum": 0.9, "lr": 0.7}
    right = pool.run(trained, 2, BATCH, outer, islands=2)
    keys = BATCH | (INSIDE | {"tp": parallel(tp=2, dp_shard=1)})[inside]
    ranks = 2 * ranks_in(keys)
    result = pool.run(trained, ranks, keys, outer, islands=2)
    for rank, values in enumerate(result):
        for name, value in values.items():
            torch.testing.assert_close(value, right[rank * 2 // ranks][name], rtol=1e-6, atol=1e-6)


def _after_a_quarter() -> Tensor:
    """All weights after an outer step of a quarter of the distance to the next number in bfloat16."""
    job, composition = built(BATCH | HALF | INSIDE["replicas"])
    loop = loop_of(job, composition, Outer(every=1, lr=0.25, momentum=0.0), this_worker(), 3)
    parameters = [p.detach() for _, p in composition.named_parameters()]
    for place in (0, 1):  # of weights in bfloat16 from 1 on
        for parameter in parameters:
            parameter.fill_(1 + place * 2**-7)
        loop.start(0)
    loop.after_update(1)
    loop.close(failed=False)
    return torch.cat([whole(p).flatten() for _, p in composition.named_parameters()])


def test_weights_in_bfloat16_are_right_on_average(pool: Pool) -> None:
    """To the nearest they would stay at 1; all islands and replicas draw the same bits."""
    first, *others = pool.run(_after_a_quarter, 4, islands=2)
    assert float((first - 1).mean() * 2**7) == pytest.approx(0.25, rel=0.02)
    assert all(torch.equal(first, other) for other in others)


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


def a_run(keys: Keys, skipped: bool) -> tuple[dict[str, Tensor], list[dict[str, Any]], int]:
    """Weights, lines of metrics and skipped steps of a run, whose samples depend on the step alone."""
    trainer = trainer_of({"parallel__dp_replicate": this_worker().count, **keys})
    job, mesh = trainer.job, trainer.mesh
    length, share = job.config.train.seq_len, job.global_batch
    of = job.degrees.dp_shard

    def batch(_: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(trainer.progress.step)
        tokens = torch.randint(256, (share, length + 1), generator=generator)
        place = mesh["dp_shard"].get_local_rank()
        mine = tokens[place * share // of : (place + 1) * share // of]
        return {"tokens": mine[:, :-1].contiguous(), "targets": mine[:, 1:].contiguous()}

    real, result = trainer_module.clip_grad_norm_, list[StepMetrics]()

    def norm(*arguments: Any) -> Tensor:
        value = real(*arguments)
        return value * torch.inf if skipped and trainer.progress.step in (1, 2) else value

    with (
        mock.patch.object(trainer.batches, "batch", batch),
        mock.patch.object(trainer_module, "clip_grad_norm_", norm),
    ):
        real_step = trainer.step

        def step() -> StepMetrics:
            result.append(real_step())
            return result[-1]

        with mock.patch.object(trainer, "step", step):
            trainer.run()
    weights = {name: whole(p) for name, p in trainer.composition.named_parameters()}
    return weights, [{"loss": m.loss, "scale": m.loss_scale} for m in result], trainer.skipped


@pytest.mark.parametrize("name", tiered(OPTIONS, slow=OPTIONS, full=("compile",)))
def test_islands_that_see_the_same_are_one_run(pool: Pool, tmp_path: Path, name: str) -> None:
    inside, options = OPTIONS[name]
    keys: Keys = {"train__steps": STEPS, "train__seq_len": 16, "train__micro_batch": 1}
    keys |= INSIDE[inside] | options
    ranks = ranks_in(keys)
    skips = name == "float16"
    plain = {k: v for k, v in keys.items() if not k.startswith("outer__")}
    one = pool.run(a_run, ranks, keys_for(tmp_path / "one", train__global_batch=4, **plain), skips)
    many_keys = keys_for(tmp_path / "many", train__global_batch=8, **(MEAN | keys))
    many = pool.run(a_run, 2 * ranks, many_keys, skips, islands=2)
    for rank, (weights, steps, skipped) in enumerate(many):
        right, right_steps, right_skipped = one[rank % ranks]
        assert steps == right_steps
        assert skipped == right_skipped == (2 if skips else 0)
        for parameter, value in right.items():
            assert torch.equal(weights[parameter], value), parameter


def test_a_save_that_waits_for_messages_looks_whether_workers_are_to_stop() -> None:
    """A worker that is to stop may wait for this one, and then sends no message."""
    loop, messages = OuterLoop.__new__(OuterLoop), Future[list[Tensor | None]]()
    loop.pending, loop.worker = Pending(0, 4, 0.5, messages), mock.Mock(count=2)
    loop.worker.note_stop.side_effect = lambda step: messages.set_result([])
    with mock.patch.object(dist, "get_rank", return_value=0):
        loop.before_save(3)
    loop.worker.note_stop.assert_called_once_with(3)


END = "compose.diloco.loop:OuterLoop._end"


def _one_island_alone() -> str:
    keys = BATCH | STREAMING
    if this_worker().index == 0:
        return _message(keys)
    with mutated(END, "for message in arrived:", "for message in arrived[1:]:"):
        return _message(keys)


def _message(keys: Keys) -> str:
    try:
        proof(2, keys)
    except TrainingError as error:
        return str(error)
    return ""


def test_islands_that_differ_stop_the_run(pool: Pool) -> None:
    """The next exchange of that fragment sees it."""
    line = "the outer weights of islands differ: silent corruption; go on from the last checkpoint"
    assert pool.run(_one_island_alone, 2, islands=2) == [line] * 2


def _home_of_what_is_loaded(keys: Keys) -> list[str]:
    """The devices of a residual that was loaded, where the outer weights are on meta."""
    job, composition = built(keys)
    options = Outer(every=2, fragments=1, dtype="top_k", offload=False)
    loop = loop_of(job, composition, options, Worker(), 2)
    elsewhere = loop_of(job, composition, replace(options, offload=True), Worker(), 2)
    assert elsewhere.fingerprint == loop.fingerprint, "state of the one is of use to the other"
    loop.weights = {name: weight.to("meta") for name, weight in loop.weights.items()}
    shape, dtype = loop._forms(0)["lost.1"]
    loop.load({"outer.lost.1": torch.zeros(shape, dtype=dtype)}, (), 0)
    return [residual.device.type for residual in loop.residuals.values()]


def test_residuals_are_loaded_to_the_outer_weights(pool: Pool) -> None:
    """A checkpoint's residuals come in host memory, and norms of all are stacked."""
    assert pool.run(_home_of_what_is_loaded, 1, BATCH) == [["meta"]]


def test_a_stage_without_a_part_of_a_fragment_has_its_residual_beside_the_others() -> None:
    loop = OuterLoop.__new__(OuterLoop)
    loop.fragments, loop.dtype, loop.options = [[]], torch.float32, Outer(every=2, offload=False)
    loop.weights = {"of another fragment": torch.zeros(1, device="meta")}
    assert loop._own(0, None).device.type == "meta"
