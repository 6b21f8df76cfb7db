"""Forward alone on every axis: the loss of one process, and nothing that a next step would notice."""

import copy
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from compose.build import build, build_optimizer, fill_weights
from compose.checkpoint import store
from compose.checkpoint.hf_folder import checkpoints
from compose.checkpoint.local_shards import local_shard_of
from compose.checkpoint.store import Progress
from compose.composition import Composition
from compose.config.job import Job
from compose.config.tables import Config
from compose.data.batches import stacked
from compose.data.datasets import open_data
from compose.data.samples import random_batch
from compose.ops.batch import IGNORE
from compose.ops.cross_entropy import cross_entropy
from compose.parallel.expert_parallel import routers
from compose.parallel.output_projection import CrossEntropy
from compose.pipeline.schedules import SCHEDULES, Action, forwards, needs, placement
from compose.pipeline.timeline import simulate
from compose.train.evaluate import Validation, evaluate
from compose.train.step import clip_grad_norm_, forward_backward
from tests.support.collectives import counted_collectives
from tests.support.helpers import (
    ROOT,
    Keys,
    keys_in,
    make_job,
    printed,
    refusal,
    refusals,
    share_of,
    tier,
)
from tests.support.pool import Pool, make_mesh
from tests.support.training import keys_for, lines, logged_steps, train

CPU = torch.device("cpu")
ROWS = 12  # of the batch that is evaluated, the last ones of it filled up


TIED = "model.tie_embeddings=true model.n_layers=4"
EXPERTS = "model.name=qwen3 model.preset=debug_moe model.n_layers=4"
CASES = {
    2: {
        **{f"zero {zero}": f"dp_shard=2 zero={zero}" for zero in range(4)},
        "tp": "tp=2",
        "tp, whole": f"{TIED} tp=2 sequence=false loss=false train.seq_len=31",
        "ring": "cp=2 train.seq_len=29",
        "allgather": "cp=2 cp_method=allgather cp_balance=none",
        "ulysses": "cp=2 cp_method=ulysses",
        "tied pipeline": f"{TIED} pp=2",
        "V": f"{TIED} pp=2 pp_schedule=ZBVZeroBubble",
        "experts": f"{EXPERTS} dp_shard=2 ep=2 model.bias_rate=0.01 model.capacity_factor=1.0",
    },
    4: {
        "pipelines, zero 3": f"{TIED} pp=2 dp_shard=2",
        "pipelines, zero 1": f"{TIED} pp=2 dp_shard=2 zero=1 pp_schedule=Interleaved1F1B"
        " pp_virtual_stages=2",
        "cp x tp": "cp=2 tp=2 cp_method=ulysses train.seq_len=30",
        "experts in a pipeline": f"{EXPERTS} pp=2 tp=2 ep=2 pp_schedule=DualPipeV"
        " model.balance_loss=sequence model.z_weight=0.01",
    },
}


def batch_of(config: Config, rows: int, filled: int, seed: int) -> dict[str, Tensor]:
    batch = random_batch(rows, config.train.seq_len, config.model.config.vocab_size, seed)
    if filled:
        batch["targets"][-filled:], batch["positions"][-filled:] = IGNORE, -1
    return batch


def on_one_process(job: Job, batch: dict[str, Tensor]) -> tuple[float, int]:
    """(sum of the loss, targets) by the plain model."""
    model = copy.deepcopy(job.model)
    fill_weights(model, job, CPU)
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    with torch.no_grad():
        logits = model(**inputs).double()
    targets = batch["targets"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")
    return float(loss), int((targets != IGNORE).sum())


def _without_gradient(output: Tensor, targets: Tensor) -> Tensor:
    assert not output.requires_grad
    return cross_entropy(output, targets)


def _losses(cases: dict[str, str]) -> dict[str, tuple[float, float, int, int]]:
    """Return each case's loss, expected loss, targets and expected targets."""
    results = {}
    for name, line in cases.items():
        job = make_job(dist.get_world_size(), train__micro_batch=1, **keys_in(line))
        mesh = make_mesh(job.degrees)
        composition = build(job, mesh, CPU)
        # All rows of the last rank's share are filled up where there are two.
        batch = batch_of(job.config, ROWS, filled=6, seed=1)
        mine = share_of(batch, mesh)
        loss, count = evaluate(composition, mine, micro_batch=2, loss_function=_without_gradient)
        assert (loss.dtype, count.dtype) == (torch.float64, torch.int64)
        expected = on_one_process(job, batch)
        results[name] = loss.item(), expected[0], int(count), expected[1]
        function = CrossEntropy(chunk=7)
        loss, count = evaluate(composition, mine, micro_batch=2, loss_function=function)
        results[f"{name}, in chunks"] = loss.item(), expected[0], int(count), expected[1]
    return results


@pytest.mark.parametrize("ranks", ["V", *(pytest.param(n, marks=tier(slow=True)) for n in CASES)])
def test_equals_one_process(pool: Pool, ranks: int | str) -> None:
    """The one quick case has stages of a rank that follow one another, and others that do not."""
    cases = {ranks: CASES[2][ranks]} if isinstance(ranks, str) else CASES[ranks]
    results = pool.run(_losses, 2 if isinstance(ranks, str) else ranks, cases)
    assert all(result == results[0] for result in results)
    for name, (loss, expected, count, targets) in results[0].items():
        assert loss == pytest.approx(expected, rel=1e-6), name
        assert count == targets > 0, name


def _validation(file: Path) -> tuple[float | None, float, float | None]:
    """Return the validation loss on ``file`` when due, the plain model's mean, and the loss a step
    later."""
    keys = keys_in("dp_shard=2 train.validate_every=4 train.global_batch=4")
    job = make_job(2, data__validation=file, **keys)
    composition = build(job, make_mesh(job.degrees), CPU)
    samples = open_data(job.config).validation
    assert samples
    assert len(samples) == 5  # of which a batch holds 4
    loss, count = on_one_process(job, stacked([samples.read(number) for number in range(5)]))
    validation = Validation(job, samples, CPU, cross_entropy)
    return validation.loss(composition, 8), loss / count, validation.loss(composition, 9)


def test_validation_loss_is_the_mean_over_all_targets(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "held_out.txt"
    file.write_text((ROOT / "README.md").read_text()[: 5 * 32 + 7])
    for due, expected, other in pool.run(_validation, 2, file):
        assert due == pytest.approx(expected, rel=1e-6)
        assert other is None


NONE = "compares validation losses, and none is measured; set train.validate_every and data.validation"
VALIDATED: Keys = {"data__validation": "stdlib", "train__validate_every": 2}
REFUSED: list[tuple[Keys, str]] = [
    ({"train__patience": 3}, f"train.patience: 3 {NONE}, or train.patience = 0"),
    (
        {"checkpoint__keep_best": 2, "checkpoint__interval": 5},
        f"checkpoint.keep_best: 2 {NONE}, or checkpoint.keep_best = 0",
    ),
    (
        VALIDATED | {"checkpoint__keep_best": 2},
        "checkpoint.keep_best: 2 keeps checkpoints, and the run has none; set checkpoint.interval, or"
        " checkpoint.keep_best = 0",
    ),
    (
        VALIDATED | {"train__min_delta": 0.1},
        "train.min_delta: 0.1 is read with patience; set train.patience",
    ),
]
test_what_goes_by_validation_is_refused_without = refusals(REFUSED)


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "ends_after"),
    [
        ([3.0, 2.0, 2.0, 2.5, 1.0], 2, 0.0, 4),
        ([3.0, 2.0, 2.5, 1.0, 1.0], 2, 0.0, None),
        # A fall of less than min_delta is none, and the best is still the former one.
        ([3.0, 2.95, 2.91, 2.0], 2, 0.1, 3),
        ([3.0, 2.95, 2.89, 2.0], 2, 0.1, None),
        ([math.nan, math.inf, 1.0], 2, 0.0, 2),
        ([3.0, 3.0, 3.0], 0, 0.0, None),
    ],
)
def test_patience(losses: list[float], patience: int, min_delta: float, ends_after: int | None) -> None:
    keys = VALIDATED | {"train__patience": patience, "train__min_delta": min_delta}
    job, progress = make_job(1, **keys), Progress(0, 0, 0)
    validation = Validation(job, None, CPU, cross_entropy)
    for number, loss in enumerate(losses, start=1):
        progress = replace(progress, step=2 * number).validated(loss)
        assert bool(validation.enough(progress.validations)) == (number == ends_after)
        if number == ends_after:
            break


def test_a_validation_at_the_end_of_an_earlier_start_does_not_count() -> None:
    """Whether a run was stopped by train.stop_after at step 5 changes nothing."""
    job, losses = make_job(1, **VALIDATED, train__patience=2), [(2, 3.0), (4, 3.1), (5, 2.0), (6, 3.2)]
    validation = Validation(job, None, CPU, cross_entropy)
    assert not validation.enough(losses[:3])
    assert validation.enough(losses).startswith("2 validations in a row are no improvement on 3.0000")


def _decided(keys: Keys, losses: Mapping[int, float]) -> list[str]:
    """Train with these validation losses, and return the lines about an early end."""

    def loss(self: Validation, composition: Any, step: int) -> float | None:
        return losses.get(step)

    with mock.patch.object(Validation, "loss", loss), printed() as said:
        train(keys)
    return [line for line in said if "stopped" in line]


@pytest.mark.parametrize("stop", [*(pytest.param(n, marks=tier(slow=True)) for n in (0, 6, 8)), 5])
def test_decisions_outlive_a_stop(pool: Pool, tmp_path: Path, stop: int) -> None:
    """The two best are kept, and the run ends when it should, wherever it was begun again."""
    losses = dict(zip(range(2, 18, 2), [4.0, 2.0, 3.0, 2.5, 2.1, 2.2, 1.0, 0.5], strict=True))
    keys = keys_for(
        tmp_path,
        **VALIDATED,
        model__n_layers=1,
        train__seq_len=16,
        train__global_batch=2,
        train__steps=16,
        train__patience=4,
        checkpoint__interval=5,
        checkpoint__keep_last=1,
        checkpoint__keep_best=2,
    )
    if stop:
        assert pool.run(_decided, 1, keys | {"train__stop_after": stop}, losses) == [[]]
    said = "stopped after step 12: 4 validations in a row are no improvement on 2.0000 of step 4"
    assert pool.run(_decided, 1, keys, losses) == [[f"{said} (train.patience)"]]
    assert logged_steps(tmp_path) == list(range(1, 13))
    folders = store.newest_first(tmp_path / "checkpoints")
    assert [store.step_of(folder) for folder in folders] == [12, 10, 4]
    assert [store.step_of(folder) for folder in checkpoints(tmp_path, best=True)] == [4, 10, 12]
    # Nothing is left to train, and that is said again.
    assert pool.run(_decided, 1, keys, losses) == [[f"{said} (train.patience)"]]
    assert len(lines(tmp_path)) == 12


def test_the_best_of_what_was_never_measured(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / store.name_of(2)
    folder.mkdir(parents=True)
    assert refusal(checkpoints, tmp_path, best=True) == (
        f"command line: --best: {tmp_path}: no checkpoint in it has a validation loss; a run with"
        " train.validate_every and checkpoint.keep_best has some"
    )
    (folder / store.MANIFEST).touch()
    assert refusal(checkpoints, folder, best=True) == (
        f"command line: --best: {folder} is one checkpoint; name its run's folder"
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shards of parameters and gradients, buffers, modes and routers' state."""
    results: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        results[name] = local_shard_of(parameter).local.clone()
        if parameter.grad is not None:
            results[f"gradient of {name}"] = local_shard_of(parameter.grad).local.clone()
    results |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    results |= {f"mode of {name}": torch.tensor(m.training) for name, m in model.named_modules()}
    for name, router in routers(model).items():
        tokens = router.tokens_per_step
        results[f"tokens of {name}"] = torch.as_tensor(-1 if tokens is None else tokens)
        results |= {f"{key} of {name}": value.clone() for key, value in router.last.items()}
    return results


def _differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {
        name for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name])
    }


def _second_step(job: Job, evaluating: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The state after the gradients of a second step, and the collectives that it took."""
    config, mesh = job.config, make_mesh(job.degrees)
    composition = build(job, mesh, CPU)
    model, optimizer = composition.model, build_optimizer(composition, job)

    def gradients(seed: int) -> None:
        batch = batch_of(config, config.train.global_batch, 0, seed)
        mine = share_of(batch, mesh)
        forward_backward(composition, mine, micro_batch=config.train.micro_batch)
        clip_grad_norm_(composition, 1.0)

    gradients(1)
    optimizer.step()
    optimizer.zero_grad()
    if evaluating:
        before = _state(model)
        other = share_of(batch_of(config, ROWS, 6, seed=7), mesh)
        evaluate(composition, other, micro_batch=2)
        assert not _differences(before, _state(model)), _differences(before, _state(model))
    with counted_collectives() as counts:
        gradients(2)
    return _state(model), dict(counts)


def _after_an_evaluation(cases: dict[str, str]) -> dict[str, object]:
    """Return how a step after an evaluation differs from one without, by case."""
    results: dict[str, object] = {}
    for name, line in cases.items():
        keys = keys_in(f"train.global_batch=4 train.micro_batch=1 {line}")
        job = make_job(dist.get_world_size(), **keys)
        (plain, usual), (other, counts) = (
            _second_step(job, evaluating) for evaluating in (False, True)
        )
        assert any("gradient" in key for key in plain)
        results[name] = _differences(plain, other) or (usual != counts and (usual, counts))
    return results


# Cases like another one are left out here.
FOLLOWED = {*CASES[2], "pipelines, zero 1", "experts in a pipeline"} - {
    *("zero 0", "tp, whole", "allgather", "ulysses")
}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=tier(slow=True, full=n == 2)) for n in CASES])
def test_nothing_is_changed(pool: Pool, ranks: int) -> None:
    """Gradients, weights, routers and messages of the step that follows are bitwise those without."""
    cases = {name: keys for name, keys in CASES[ranks].items() if name in FOLLOWED}
    for result in pool.run(_after_an_evaluation, ranks, cases):
        assert not any(result.values()), result


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_order_of_forwards(schedule: str, micro_batches: int) -> None:
    """Forwards run once, after what they need. With many, ranks wait only at the start and the end. No
    stage has more than two waiting."""
    ranks = placement(schedule, 4, 0)
    order = forwards(ranks, micro_batches)
    assert sorted(order) == [Action(s, "F", m) for s in range(len(ranks)) for m in range(micro_batches)]
    for place, action in enumerate(order):
        for options in needs(action, len(ranks) - 1):
            assert options & set(order[:place])
        done = Counter(a.stage for a in order[: place + 1])
        assert all(done[stage] - done[stage + 1] <= 2 for stage in range(len(ranks) - 1))
    table = [[a for a in order if ranks[a.stage] == rank] for rank in range(4)]
    if micro_batches == 8:
        there_and_back = schedule in ("ZBVZeroBubble", "DualPipeV")
        least = len(table[0]) + (6 if there_and_back else 3)
        assert max(slot.end for slot in simulate(table)) == least


def test_refusals() -> None:
    nowhere: Any = None
    composition = Composition(nn.Linear(2, 2), nowhere)
    with pytest.raises(ValueError, match=r"^micro_batch: 0 should be at least 1$"):
        evaluate(composition, {"input": torch.ones(2, 2), "targets": torch.ones(2)}, micro_batch=0)


def _uneven() -> str:
    job = make_job(2, parallel__pp=2, train__micro_batch=1)
    composition = build(job, make_mesh(job.degrees), CPU)
    return refusal(evaluate, composition, batch_of(job.config, 3, 0, 1), micro_batch=2)


def test_a_pipeline_takes_whole_micro_batches(pool: Pool) -> None:
    assert pool.run(_uneven, 2)[0] == (
        "micro_batch: 3 samples are no whole number of micro-batches of 2, which a pipeline needs"
    )
