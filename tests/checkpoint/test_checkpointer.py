"""Checkpoints: saved while training goes on, resumed on any mesh, whole or not there."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from compose.checkpoint import store
from compose.checkpoint.checkpointer import Checkpointer
from compose.checkpoint.loading import data_changes
from compose.checkpoint.store import DataFields, ModelFields, Progress, State
from compose.train.evaluate import Validation
from compose.train.trainer import Trainer
from tests.support.checkpoints import (
    MESHES,
    SAVING,
    goes_on_bitwise,
    resume,
    tensor_at,
    train_on,
    trained_state,
)
from tests.support.helpers import ROOT, Keys, printed, refusal, refused, tier, tiered
from tests.support.pool import Pool
from tests.support.small_models import DEEPSEEK, QWEN
from tests.support.training import keys_for, lines, trainer_of

TIED: Keys = {"model__tie_embeddings": True, "model__n_layers": 3}
PAIRS: list[tuple[str, Keys, str, str]] = [
    ("llama", {"model__n_layers": 3}, "data", "tensor, uneven"),
    ("llama", {"model__n_layers": 3}, "tensor, uneven", "one"),
    ("llama", {"model__n_layers": 3}, "one", "pipeline"),
    ("llama", {"model__n_layers": 3}, "v-schedule", "context"),
    ("llama", {"model__n_layers": 3}, "replicas", "v-schedule"),
    ("tied", TIED, "pipeline", "data"),
    ("tied", TIED, "tensor, uneven", "v-schedule"),
    ("tied", TIED, "v-schedule", "pipeline"),
    ("qwen3", QWEN | {"model__n_layers": 2}, "experts", "one"),
    ("qwen3", QWEN | {"model__n_layers": 2}, "data", "experts and pipeline"),
    ("deepseek_v3", DEEPSEEK | {"model__n_layers": 3}, "experts and pipeline", "experts"),
    ("deepseek_v3", DEEPSEEK | {"model__n_layers": 3}, "one", "experts"),
]


@pytest.fixture(scope="session")
def uninterrupted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Seven steps of a model on one process: (its state, its lines), made once."""
    known: dict[str, Any] = {}

    def get(name: str, model: Keys) -> Any:
        if name not in known:
            folder = tmp_path_factory.mktemp("one")
            state = train_on(pool, folder, model, MESHES["one"], 7)
            known[name] = state, lines(folder)
        return known[name]

    return get


IN_THE_SUITE = {
    ("llama", "tensor, uneven", "one"),
    ("tied", "v-schedule", "pipeline"),
    ("qwen3", "data", "experts and pipeline"),
}


@pytest.mark.parametrize(
    ("name", "model", "before", "after"),
    [
        pytest.param(
            *pair,
            id=f"{pair[0]}: {pair[2]} to {pair[3]}",
            marks=tier(pair[0] in ("llama", "qwen3"), full=(pair[0], *pair[2:]) not in IN_THE_SUITE),
        )
        for pair in PAIRS
    ],
)
def test_resumes_on_another_mesh(
    pool: Pool,
    tmp_path: Path,
    uninterrupted: Callable[..., Any],
    name: str,
    model: Keys,
    before: str,
    after: str,
) -> None:
    """Two steps on one mesh and five on another are seven on one process, optimizer state included."""
    train_on(pool, tmp_path, model, MESHES[before], 2)
    result = train_on(pool, tmp_path, model, MESHES[after], 7)
    expected, steps = uninterrupted(name, model)
    there = lines(tmp_path)
    assert [line["step"] for line in there] == list(range(1, 8))
    for a, b in zip(steps, there, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["samples"] == a["samples"]
    assert set(result) == set(expected)
    for key, value in expected.items():
        # AdamW divides by a gradient's own size, which may be rounding noise.
        bound = 1e-3 if key.startswith("model.") else 1e-2
        error = (result[key].double() - value.double()).norm()
        assert float(error) <= bound * float(value.double().norm()) + 1e-12, key


@pytest.mark.parametrize(
    "mesh", tiered(("one", "tensor, uneven", "v-schedule"), full=("one", "v-schedule"))
)
def test_goes_on_bitwise_on_the_same_mesh(pool: Pool, tmp_path: Path, mesh: str) -> None:
    goes_on_bitwise(pool, tmp_path, {"model__n_layers": 3}, MESHES[mesh], steps=5)
    for a, b in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


def test_what_is_kept(pool: Pool, tmp_path: Path) -> None:
    keys = SAVING | {"checkpoint__interval": 1, "checkpoint__keep_every": 3}
    train_on(pool, tmp_path, keys, MESHES["data"], 8)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [store.name_of(step) for step in (3, 6, 7, 8)]
    for folder in (tmp_path / "checkpoints").iterdir():
        assert store.problems(folder) == []
    state = json.loads((tmp_path / "checkpoints" / names[-1] / "state.json").read_text())
    assert (state["step"], state["samples"], state["tokens"]) == (8, 64, 8 * 8 * 16)
    reports = [line["checkpoint"] for line in lines(tmp_path) if "checkpoint" in line]
    assert reports  # also of saves that were still going on when the next one began
    assert all(r["stall"] < r["seconds"] and r["bytes"] > 0 and not r["failed"] for r in reports)


def test_the_best_stays_if_a_better_one_could_not_be_saved(alone: None, tmp_path: Path) -> None:
    publish, losses = Checkpointer._publish, {2: 3.0, 4: 2.0, 6: 5.0, 8: 4.0}

    def fails(checkpointer: Checkpointer, target: Path, progress: Progress, files: Any) -> Any:
        full = "No space left on device", 0
        return full if progress.step == 4 else publish(checkpointer, target, progress, files)

    def loss(validation: Validation, composition: Any, step: int) -> float | None:
        return losses.get(step)

    keys = SAVING | {"data__validation": __file__, "train__validate_every": 2, "train__stop_after": 8}
    keys |= {"checkpoint__keep_last": 1, "checkpoint__keep_best": 1}
    with (
        mock.patch.object(Checkpointer, "_publish", fails),
        mock.patch.object(Validation, "loss", loss),
    ):
        trainer_of(keys_for(tmp_path, **keys)).run()
    assert [store.step_of(p) for p in store.newest_first(tmp_path / "checkpoints")] == [8, 2]


def _damage(folder: Path, how: str) -> str:
    """Damage a checkpoint; what is then said of it."""
    shard = min(folder.glob("__*.safetensors"))
    if how == "truncated":
        size = shard.stat().st_size
        with shard.open("r+b") as file:
            file.truncate(size - 10)
        return f"{shard.name} has {size - 10:,} of {size:,} bytes"
    if how == "one bit":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 4
        shard.write_bytes(content)
        where = tensor_at(shard, len(content) // 2)
        return f"{shard.name} is not what was written (checksum) in {where}"
    if how == "a shard is gone":
        shard.unlink()
        return f"{shard.name} is missing"
    if how == "no manifest":
        (folder / "manifest.json").unlink()
        return "manifest.json is missing"
    (folder / "manifest.json").write_text('{"files": {')
    return (
        "manifest.json cannot be read: is not JSON: Expecting property name enclosed in double quotes:"
        " line 1 column 12 (char 11)"
    )


DAMAGES = ["truncated", "one bit", "a shard is gone", "no manifest", "half a manifest"]


def test_damage_is_named_and_passed_over(pool: Pool, tmp_path: Path) -> None:
    """What is damaged is never deleted, and stays beside what takes its name."""
    keys: Keys = {"checkpoint__interval": 1, "checkpoint__keep_last": 9}
    train_on(pool, tmp_path, keys, MESHES["data"], 1 + len(DAMAGES))
    first, *folders = sorted((tmp_path / "checkpoints").iterdir())
    words = [_damage(folder, how) for folder, how in zip(folders, DAMAGES, strict=True)]
    damaged = list(map(shards_of, folders))
    progress, said = pool.run(resume, 2, keys_for(tmp_path, **(SAVING | keys)))[0]
    assert progress == Progress(1, 8, 8 * 16)
    assert said[::-1] == [
        f"{first}: resumed after step 1",
        *(f"{p}: damaged and passed over: {why}" for p, why in zip(folders, words, strict=True)),
    ]
    train_on(pool, tmp_path, keys, MESHES["data"], 1 + len(DAMAGES))
    assert [store.problems(folder) for folder in folders] == [[]] * len(DAMAGES)
    assert [shards_of(p.with_name(f"{p.name}.damaged-1")) for p in folders] == damaged


def test_a_damaged_one_takes_the_place_of_none_that_is_kept(alone: None, tmp_path: Path) -> None:
    """Nor does it once the run has passed its step."""
    keys = keys_for(tmp_path, **(SAVING | {"checkpoint__keep_last": 2}))
    trainer_of(keys | {"train__stop_after": 6}).run()
    root = tmp_path / "checkpoints"
    _damage(root / store.name_of(6), "truncated")
    trainer_of(keys | {"train__stop_after": 7, "checkpoint__interval": 7}).run()
    assert [store.step_of(p) for p in store.newest_first(root)] == [7, 6, 4]


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("__*")}


def test_a_broken_attempt_is_not_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    train_on(pool, tmp_path, {}, MESHES["data"], 2)
    root = tmp_path / "checkpoints"
    shutil.copytree(root / store.name_of(2), root / ".writing-step-00000004")
    (root / ".writing-step-00000004" / "manifest.json").unlink()
    progress, said = pool.run(resume, 2, keys_for(tmp_path, **SAVING))[0]
    assert progress
    assert progress.step == 2
    assert said == [f"{root}/step-00000002: resumed after step 2"]
    assert [p.name for p in root.iterdir()] == ["step-00000002"]


def test_another_models_checkpoint_is_refused(pool: Pool, tmp_path: Path) -> None:
    train_on(pool, tmp_path, {"model__n_layers": 2}, MESHES["one"], 2)
    keys = keys_for(tmp_path, **SAVING, model__n_layers=3, model__tie_embeddings=True)
    folder = tmp_path / "checkpoints/step-00000002"
    assert pool.run(refused, 1, resume, keys)[0] == [
        f"{folder}: was made with model.n_layers = 2, not 3",
        f"{folder}: was made with model.tie_embeddings = False, not True",
    ]


def _train_saying(keys: Keys) -> list[str]:
    with printed() as said:
        try:
            trained_state(keys)
            ended = []
        except Exception as error:
            ended = [str(error)]
    return said + ended


def _with_full_disk(keys: Keys, warned: int = 0) -> list[str]:
    """With a limit on the size of files, which the shards exceed. A save ends before the next step but
    one, so that its failure is in that step's line whatever the load. SIGTERM comes in step ``warned``.
    """
    before, real = resource.getrlimit(resource.RLIMIT_FSIZE), Trainer.step

    def step(trainer: Trainer) -> Any:
        if trainer.progress.step % 2:
            trainer.checkpointer.wait()
        if trainer.progress.step + 1 == warned:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer)

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with mock.patch.object(Trainer, "step", step):
            return _train_saying(keys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(pool: Pool, tmp_path: Path) -> None:
    """Training goes on, and says so once for each save; what was valid stays. The end is a failure."""
    train_on(pool, tmp_path, {}, MESHES["data"], 2)
    root = tmp_path / "checkpoints"
    keys = keys_for(tmp_path, **(SAVING | MESHES["data"] | {"train__stop_after": 6}))
    said = pool.run(_with_full_disk, 2, keys)[0]
    failures = [line for line in said if line.startswith("checkpoint of step")]
    assert [line.split(" failed: ")[0] for line in failures] == [
        "checkpoint of step 4",
        "checkpoint of step 6",
    ]
    assert all(line.endswith("; training goes on") for line in failures)
    assert said[-1] == "the checkpoint of step 6, the last, could not be saved: start again, to go on"
    assert len(lines(tmp_path)) == 6
    assert [line["checkpoint"]["failed"] for line in lines(tmp_path) if "checkpoint" in line] == [1.0]
    assert [p.name for p in root.iterdir()] == [store.name_of(2)]
    assert store.problems(root / store.name_of(2)) == []
    keys |= {"checkpoint__fail_after": 1, "train__stop_after": 20}
    assert pool.run(_with_full_disk, 2, keys)[0][-1].endswith(
        ": 1 checkpoints could not be saved (checkpoint.fail_after)"
    )
    said = pool.run(_with_full_disk, 2, keys | {"checkpoint__fail_after": 0}, 3)[0]
    assert said[-2:] == [
        "stopped by SIGTERM after step 3",
        "the checkpoint of step 3, the last, could not be saved: start again, to go on",
    ]


def _train_and_remove(keys: Keys) -> list[str]:
    """With the folder of checkpoints removed on the way, in a save and between two.

    The first save is held until then, when its files are written and it is to be published.
    """
    real, publish = Trainer.step, Checkpointer._publish
    written, removed = threading.Event(), threading.Event()

    def held(checkpointer: Checkpointer, target: Path, progress: Progress, files: Any) -> Any:
        if progress.step == 3:
            written.set()
            assert removed.wait(60)
        return publish(checkpointer, target, progress, files)

    def step(trainer: Trainer) -> Any:
        if dist.get_rank() == 0 and trainer.progress.step in (3, 6):
            if trainer.progress.step == 3:
                assert written.wait(60)
            else:
                trainer.checkpointer.wait()
            shutil.rmtree(trainer.checkpointer.root)
            removed.set()
        return real(trainer)

    with mock.patch.object(Trainer, "step", step), mock.patch.object(Checkpointer, "_publish", held):
        return _train_saying(keys)


def test_a_folder_that_goes_away_is_made_again(pool: Pool, tmp_path: Path) -> None:
    keys = keys_for(tmp_path, **(SAVING | MESHES["data"] | {"train__stop_after": 8}))
    said = pool.run(_train_and_remove, 2, keys | {"checkpoint__interval": 1})[0]
    failures = [line for line in said if line.startswith("checkpoint of step")]
    assert failures == ["checkpoint of step 3 failed: No such file or directory; training goes on"]
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == [store.name_of(7), store.name_of(8)]
    assert store.problems(tmp_path / "checkpoints" / names[-1]) == []
    assert len(lines(tmp_path)) == 8


def test_a_second_run_is_refused(pool: Pool, tmp_path: Path) -> None:
    """While a first one holds the folder: here, this process."""
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        holder = f"process 7 on {os.uname().nodename}"
        file.write(holder)
        file.flush()
        said = pool.run(_train_saying, 2, keys_for(tmp_path, **(SAVING | MESHES["data"])))
    assert said == [[f"run.dir: {tmp_path} is in use by another run ({holder})"]] * 2
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_other_data_are_told_and_another_tokenizer_refused() -> None:
    was = {"tokenizer": "ab", "samples": [9], "weights": [], "seq_len": 32, "seed": 0}

    def said(now: dict[str, Any], before: dict[str, Any] = was) -> str:
        model = ModelFields(name="llama")
        known = State(0, 0, 0, model=model, data=DataFields(**before))
        return data_changes(Path("step"), known, now)

    assert said(was) == ""
    assert said(was, {}) == ""  # of an older checkpoint nothing is known
    assert said({**was, "seq_len": 64, "samples": [4]}) == (
        "step: the data are not what they were (samples [9], now [4], seq_len 32, now 64); samples are"
        " counted on"
    )
    assert "tokenizer ab, now None" in said({**was, "tokenizer": None})
    assert refused(said, {**was, "tokenizer": "cd"}) == [
        "step: was trained on ids of another tokenizer than data.path is of"
    ]


def _of_a_node(folder: Path) -> str:
    path = folder / f"{dist.get_rank()}.txt"
    return refusal(trainer_of, keys_for(folder / "run", data__path=path, parallel__dp_shard=2))


def test_other_data_on_another_node_are_refused(pool: Pool, tmp_path: Path) -> None:
    """Of another copy of the files ranks would read other samples under the same numbers."""
    for rank in range(2):
        (tmp_path / f"{rank}.txt").write_text(f"{rank} text\n" * 1000)
    line = "data.path: rank 1 reads other data than the first rank does"
    assert pool.run(_of_a_node, 2, tmp_path) == [line] * 2


# Threads of the process at the end of each step; the first save is after the second step.
THREADS = """
import os, runpy, sys
from compose.train.trainer import Trainer
step = Trainer.step
def counted(self):
    self.checkpointer.wait()
    print("threads", len(os.listdir("/proc/self/task")), flush=True)
    return step(self)
Trainer.step = counted
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_save_leaves_no_threads(tmp_path: Path) -> None:
    """They would slow down training on a CPU."""
    keys = ["train.steps=4", "train.global_batch=2", "train.seq_len=64", "checkpoint.interval=2"]
    words = [f"--{key}" for key in (*keys, f"run.dir={tmp_path}", "metrics.tensorboard=false")]
    done = subprocess.run(
        [sys.executable, "-c", THREADS, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("threads")]
    assert len(counts) == 4
    assert counts[3] == counts[1], done.stdout
    assert "assuming the intent" not in done.stderr
