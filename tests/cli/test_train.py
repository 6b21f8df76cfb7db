"""The dry run tells what ranks would really hold."""

import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import compose.memory.float8 as float8
import train
from compose.build import build
from compose.cli.train import _stage
from compose.config.job import Job
from compose.config.rules import check
from compose.config.toml import load
from compose.train.held_state import PlacedParameter, placements, state_bytes
from tests.support.command_lines import answered
from tests.support.helpers import ROOT, SMALL, keys_in, make_job, parallel
from tests.support.hugging_face import save_model
from tests.support.pool import Pool, make_mesh


def _real(keys: dict[str, object]) -> list[PlacedParameter]:
    job = make_job(dist.get_world_size(), **keys)
    mesh = make_mesh(job.degrees)
    return placements(build(job, mesh, torch.device("cpu")).model, mesh, job.config)


def table(output: str) -> dict[str, list[str]]:
    """Cells by parameter, for a dry run of one layer."""
    rows = [re.split(r"\s{2,}", line) for line in output.splitlines()]
    start = next(i for i, row in enumerate(rows) if row[0] == "parameter")
    end = next(i for i in range(start, len(rows)) if rows[i] == [""])
    return {row[0]: row[1:] for row in rows[start + 1 : end]}


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (1, {}),
        (4, {"dp_shard": 4}),
        (4, {"dp_shard": 4, "zero": 0}),
        (8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        (4, {"tp": 4, "sequence": False}),
    ],
    ids=str,
)
def test_same_as_real_ranks(pool: Pool, ranks: int, mesh: dict[str, object]) -> None:
    real = pool.run(_real, ranks, parallel(**mesh) | {"model__n_layers": 1})[0]
    overrides = {**SMALL, "model.n_layers": 1} | {
        f"parallel.{k}": str(v).lower() for k, v in mesh.items()
    }
    arguments = [f"--{key}={value}" for key, value in overrides.items()]
    done = answered("train.py", "--dry-run", "--world-size", str(ranks), *arguments)
    assert done.returncode == 0, done.stderr
    result = table(done.stdout)
    assert result.keys() == {p.name for p in real}
    axes = next(line for line in done.stdout.splitlines() if line.startswith("parameter ")).split()[
        2:-3
    ]
    for p in real:
        assert result[p.name] == [
            "x".join(map(str, p.shape)),
            *(p.placements[axis] for axis in axes),
            "x".join(map(str, p.local_shape)),
            f"{p.local_bytes:,}",
        ]
    state = 4 * sum(p.local_bytes for p in real)
    if ranks > 1 and not mesh.get("zero", 3):
        assert f"state in all        {state:>18,}" in done.stdout
    else:
        assert f"{state:,}" in done.stdout


def test_70b_on_512_ranks_takes_seconds() -> None:
    start = time.process_time()  # of this process, where the command runs
    done = answered(
        "train.py", "--dry-run", "--world-size", "512", "--model.preset=70b", "--parallel.tp=8",
        "--train.global_batch=128",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.process_time() - start < 30
    assert "mesh: 512 ranks: pp 1, dp_replicate 1, dp_shard 64, cp 1, tp 8; zero 3" in done.stdout
    assert "parameters: 70,553,706,496" in done.stdout
    row = next(
        line for line in done.stdout.splitlines() if "attention.wo" in line and "8192x8192" in line
    )
    assert row.split()[-7:] == ["8192x8192", "S(0)", "S(1)", "128x1024", "524,288", "x", "80"]


def test_needs_no_data_and_writes_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("dry") / "run"
    done = answered("train.py", "--dry-run", "--data.path=nowhere.bin", f"--run.dir={folder}")
    assert done.returncode == 0
    assert not folder.exists()


SLOW = (
    "llama3_405b_cp16_128k",
    "llama3_405b_tp8_pp16_fsdp64",
    "llama3_70b_tp8_pp8_dp8_zero1",  # a command of the docs
    "qwen3_235b_a22b_ep8_pp8_dp32_zero1",
    "deepseek_v3_671b_pp16_ep64",
)


def ranks_of(recipe: Path) -> int:
    """The recipe's own comment gives the number."""
    text = recipe.read_text()
    nodes = int((re.search(r"--nnodes (\d+)", text) or [0, 1])[1])
    return nodes * int((re.search(r"--nproc-per-node (\d+)", text) or [0, 1])[1])


each_recipe = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.full] if path.stem in SLOW else [])
        for path in sorted((ROOT / "recipes").glob("*.toml"))
    ],
)


@pytest.fixture
def model(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder ``model``, if a recipe takes its model from there."""
    if 'preset = "hf"' in recipe.read_text():
        monkeypatch.chdir(tmp_path)
        save_model(tmp_path / "model", {})
        (tmp_path / "chats").write_text("text " * 1000)  # epochs need the data


@each_recipe
def test_recipes_pass(recipe: Path, model: None, capsys: pytest.CaptureFixture[str]) -> None:
    train.main([str(recipe), "--dry-run", "--world-size", str(ranks_of(recipe))])
    assert "state in all" in capsys.readouterr().out


@each_recipe
def test_recipes_are_legal_on_gpus(recipe: Path, model: None) -> None:
    """Checks for GPUs run too: this machine may have none."""
    with (
        mock.patch.object(Job, "on_cuda", new=True),
        mock.patch.object(float8, "emulated", return_value=False),
    ):
        check(load(str(recipe)), ranks_of(recipe))


def test_steps_follow_from_epochs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)  # 31 samples of 32 tokens
    keys = [f"--data.path={tmp_path / 'a.txt'}", "--train.seq_len=32", "--train.global_batch=8"]
    epochs = [*keys, "--train.epochs=2.5", "--optimizer.warmup=2", "--profile.steps=[9,10]"]
    shown = answered("train.py", "--dry-run", *epochs)
    assert "\nsteps: 10 of 8 samples, 256 tokens\n" in shown.stdout
    late = answered("train.py", "--dry-run", *epochs, "--profile.steps=[9,11]")
    assert late.stderr == (
        "train.toml: profile.steps: [9, 11] goes beyond the run's last step, 10; nearest: [9, 10]\n"
    )
    gone = answered("train.py", "--dry-run", "--train.epochs=1", "--data.path=nowhere.bin")
    assert gone.stderr == "train.toml: data.path: no file at nowhere.bin\n"


def test_a_dry_run_of_islands_is_of_one() -> None:
    """Its samples and tokens too."""
    keys = ["--outer.every=10", "--parallel.dp_replicate=2", "--world-size=2"]
    shown = answered("train.py", "--dry-run", *keys).stdout
    assert shown.startswith("islands: 2, which exchange weights every 10 steps; all below is of one\n")
    assert "\nsteps: 250 of 8 samples, 2,048 tokens\n" in shown


def test_a_short_warmup_is_said() -> None:
    shown = answered("train.py", "--dry-run", "--train.steps=2").stdout
    assert (
        "optimizer.warmup = 20 is not over after train.steps = 2: the learning rate ends at 0.000286"
        " and never reaches optimizer.lr = 0.003\n" in shown
    )
    assert "\n\n\n" not in shown
    whole = answered("train.py", "--dry-run", "--train.stop_after=2").stdout
    assert "warmup" not in whole
    assert not whole.endswith("\n\n")


@pytest.mark.parametrize(
    ("ranks", "keys", "gathered", "whole"),
    [
        (1, "zero=2", 0, False),  # weights serve as they are
        (1, "zero=2 precision.param=bfloat16", 2, False),
        (1, "zero=3 precision.param=bfloat16", 0, False),
        (2, "zero=2 tp=2", 0, False),
        (2, "zero=1 train.global_batch=8", 4, True),
        (2, "zero=1 train.global_batch=4", 4, False),
    ],
)
def test_what_a_step_holds_besides(ranks: int, keys: str, gathered: int, whole: bool) -> None:
    """Bytes of each number that stay gathered; whole gradients wait for the last of several batches."""
    job = make_job(ranks, **keys_in(keys))
    placed = _stage(job, 0)
    numbers, sizes = sum(p.numel() for p in job.model.parameters()), state_bytes(placed, job)
    assert sizes["gathered in a step"] == gathered * numbers
    local = sum(p.local_bytes for p in placed)
    assert sizes["gradients"] == (4 * numbers if whole else local)
