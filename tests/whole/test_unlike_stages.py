"""Stages of a pipeline that are unlike: one has experts, layers or a shared weight, another has not.

What all ranks do together, as the making of groups, must not wait for what a stage may lack.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from compose.ops.tensors import local_tensor
from compose.train.trainer import Trainer
from tests.support.checkpoints import parallelize_without_weights
from tests.support.helpers import prove_on, prove_step, tier
from tests.support.pool import Pool
from tests.support.small_models import DEEPSEEK, QWEN, keys_of
from tests.support.training import keys_for, lines, trainer_of

CONTENTS: dict[str, dict[str, object]] = {
    "dense first": DEEPSEEK | {"model__n_dense_layers": 1},
    "no layers first": QWEN | {"parallel__pp_layers": "[0,2]"},
    "no layers last": QWEN | {"parallel__pp_layers": "[2,0]", "model__tie_embeddings": True},
}
MESHES = (
    "pp 2 tp 2",
    "pp 2 tp 2 ep 2",
    "pp 2 ds 2 ep 2",
    "pp 2 cp 2 ep 2",
    "pp 2 dr 2 ep 2 zero 1",
    "pp 2 ds 2 tp 2 ep 4",
)


def _in_turn() -> list[Any]:
    """The two that need a rank to do what it has nothing of; ``-m full`` runs the others."""
    chosen = ("dense first", "no layers first")
    return [
        pytest.param(
            mesh, name, marks=tier(name == chosen[0], full=mesh != MESHES[0] or name not in chosen)
        )
        for mesh in MESHES
        for name in CONTENTS
    ]


@pytest.mark.parametrize(("mesh", "content"), _in_turn())
def test_equals_one_process(pool: Pool, mesh: str, content: str) -> None:
    prove_on(pool, keys_of(CONTENTS[content], mesh)[1], prove_step)


def _resumed(folder: str) -> list[bool]:
    """Return whether both stages of a rank that share a weight have exactly what was saved."""
    keys = keys_for(
        Path(folder),
        parallel__pp=2,
        parallel__pp_schedule="ZBVZeroBubble",
        parallel__pp_layers="[0,1,1,0]",
        model__tie_embeddings=True,
        train__seq_len=8,
        train__global_batch=4,
        train__micro_batch=1,
        train__stop_after=1,
        checkpoint__interval=1,
    )
    trained = trainer_of(keys)
    trained.run()
    with mock.patch("compose.train.trainer.parallelize", parallelize_without_weights):
        again = Trainer(trained.job, trained.mesh, trained.device)
    again.run_folder.release()
    models = again.composition.model, trained.composition.model
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return [torch.equal(local_tensor(p), local_tensor(q)) for p, q in pairs]


def test_loading_fills_every_copy_of_a_shared_weight(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(_resumed, 2, str(tmp_path))
    assert first == [True] * 3  # the embedding, what it is as an output, and the last norm
    assert second
    assert all(second)


def _train(keys: dict[str, object], steps: int) -> list[int]:
    """Up to so many steps, from where the run stands; the steps it began and ended with."""
    trainer = trainer_of(keys | {"train__stop_after": steps})
    before = trainer.progress.step
    trainer.run()
    return [before, trainer.progress.step]


@pytest.mark.full
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_all_that_a_run_does(pool: Pool, tmp_path: Path, mesh: str, content: str) -> None:
    """Muon, routers' counts, comparing copies, validation, saving and loading."""
    ranks, keys = keys_of(CONTENTS[content], mesh)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 8)
    keys |= keys_for(
        tmp_path / "run",
        model__tie_embeddings=True,
        optimizer__name="muon",
        comm__check_every=1,
        checkpoint__interval=1,
        data__validation=tmp_path / "text.txt",
        train__validate_every=1,
    )
    assert pool.run(_train, ranks, keys, 1) == [[0, 1]] * ranks
    assert pool.run(_train, ranks, keys, 2) == [[1, 2]] * ranks
    for line in lines(tmp_path / "run"):
        assert line["routing"]
        assert line["validation_loss"]
