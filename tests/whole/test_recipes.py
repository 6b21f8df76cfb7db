"""A recipe trains: scaled down, under the same TOML, on CPUs. Graphs are traced, not made kernels."""

import contextlib
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import compose.memory.precision as loss_scale
from compose.__main__ import main
from compose.config import rules
from compose.config.toml import load
from compose.train.trainer import Trainer
from tests.support.helpers import ROOT
from tests.support.pool import Pool, make_mesh
from tests.support.training import lines

SMALL = {
    "model.vocab_size": 257,
    "model.dim": 64,
    "model.n_layers": 4,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.hidden_dim": 96,
    "train.seq_len": 64,
    "train.stop_after": 10,
    "optimizer.lr": 1e-2,
    "optimizer.warmup": 2,
    "data.path": "stdlib",
    "metrics.tensorboard": "false",
}


def _train(recipe: str, folder: Path, first_scale: float = 1.0, **more: Any) -> str:
    """Train, and what this rank printed of it."""
    overrides = {**SMALL, "run.dir": folder, **{key.replace("__", "."): v for key, v in more.items()}}
    file = str(ROOT / "recipes" / recipe)
    loaded = load(file, [(key, str(value)) for key, value in overrides.items()])
    job = rules.check(loaded, dist.get_world_size())
    compile = replace(job.config.compile, backend="aot_eager")
    job = replace(job, config=replace(job.config, compile=compile))
    with (
        mock.patch.object(loss_scale, "_FIRST", first_scale),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        Trainer(job, make_mesh(job.degrees), torch.device("cpu")).run()
    return printed.getvalue()


@pytest.mark.slow
def test_10_billion_on_two_small_gpus(pool: Pool, tmp_path: Path) -> None:
    """From a loss scale that overflows: it comes down, and the loss too."""
    recipe, keys = "llama_10b_2x24gb_offload_fp16.toml", {"model__n_layers": 2}
    pool.run(partial(_train, **keys), 2, recipe, tmp_path, 2.0**22)
    result = lines(tmp_path)
    skipped = result[-1]["skipped"]
    assert 0 < skipped < 7
    # A step that is skipped has no norm to show, and halves the scale.
    assert [line["grad_norm"] for line in result].count(None) == skipped
    assert result[0]["loss_scale"] == 2.0**22
    assert result[-1]["loss_scale"] == 2.0 ** (22 - skipped)
    losses = [line["loss"] for line in result]
    assert None not in losses
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_the_first_run_on_a_gpu(pool: Pool, tmp_path: Path) -> None:
    keys = {"train__global_batch": 32, "model__n_layers": 2}
    pool.run(partial(_train, **keys), 2, "llama_one_gpu.toml", tmp_path)
    losses = [line["loss"] for line in lines(tmp_path)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.full
def test_8_billion_in_float8(pool: Pool, tmp_path: Path) -> None:
    keys = {"parallel__dp_shard": 2, "train__global_batch": 8}
    printed = pool.run(partial(_train, **keys), 2, "llama3_8b_fsdp8_float8.toml", tmp_path)[0]
    assert (
        "float8 tensorwise (emulated here, for no gain in speed): 14 of 28 linear layers;"
        " 14 left out: in the plan's float8_except\n" in printed
    )
    result = lines(tmp_path)
    # The process may have compiled before; after the first step it compiles nothing.
    assert len({line["recompiles"] for line in result}) == 1
    losses = [line["loss"] for line in result]
    assert losses[-1] < losses[0] - 1


@pytest.mark.full
def test_8_billion_with_adapters(pool: Pool, tmp_path: Path) -> None:
    """Scaled down it trains, and what is saved is adapters."""
    keys = {"model__lora__rank": 4, "checkpoint__load_hf": "", "checkpoint__interval": 10}
    pool.run(partial(_train, **keys, train__loss_chunk=32), 1, "llama3_8b_lora.toml", tmp_path)
    losses = [line["loss"] for line in lines(tmp_path)]
    assert losses[-1] < losses[0]
    state = json.loads((tmp_path / "checkpoints/step-00000010/state.json").read_text())
    assert state["lora"]["rank"] == 4


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("llama3_8b_lora", marks=pytest.mark.slow),
        pytest.param("gemma3_4b_lora", marks=pytest.mark.full),
    ],
)
def test_adapters_fit_24_gb(tmp_path: Path, recipe: str) -> None:
    file, result = str(ROOT / f"recipes/{recipe}.toml"), tmp_path / "plan.json"
    words = ["--as-is", "--cluster=rtx4090", "--world-size=1", f"--json={result}"]
    assert main(["plan", file, *words]) == 0
    (planned,) = json.loads(result.read_text())["candidates"]
    assert planned["fits"]
    assert planned["memory"]["reserved"] < 21 * 2**30
