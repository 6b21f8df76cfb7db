"""Models of other people: what they return and hand on, and how their modules are called."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from compose import (
    Options,
    Parallel,
    Pipeline,
    Plan,
    Trial,
    apply,
    cross_entropy,
    forward_backward,
    verify,
)
from compose.errors import ConfigError
from compose.loss.output import CrossEntropy
from compose.parallel.local_parallel import LocalColwise, LocalInput, LocalRowwise
from compose.pipeline.schedules import SCHEDULES
from compose.plan import resolve
from compose.proof.report import Report
from tests.command_lines import QUICK, command
from tests.helpers import ROOT, agreed
from tests.pool import Pool, make_mesh


def _transformers_llama(schedule: str, layers: tuple[int, ...]) -> Report:
    """It returns an object with ``.logits``, which between stages are a slice of the stream."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    pipeline = Pipeline(["model.embed_tokens"], "model.layers", ["model.norm", "lm_head"])
    shard = ["model.embed_tokens", "model.layers.*", ["model.norm", "lm_head"]]
    torch.manual_seed(0)
    tokens = torch.randint(32, (4, 9))
    return verify(
        LlamaForCausalLM(config),
        Plan(shard=shard, pipeline=pipeline),
        make_mesh(Parallel(pp=2)),
        {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]},
        Options(Parallel(pp=2, pp_schedule=schedule, pp_layers=layers)),
        Trial(micro_batch=1),
    )


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=[] if s == "ZBVZeroBubble" else pytest.mark.full) for s in SCHEDULES],
)
def test_llama_of_transformers(pool: Pool, schedule: str) -> None:
    stages = 2 * SCHEDULES[schedule]
    report = agreed(pool.run(_transformers_llama, 2, schedule, (4 // stages,) * stages))
    assert report.ok, str(report)
    assert sum(row.quantity == "gradient" for row in report.rows) == 3 + 4 * 9


class Pairs(nn.Module):
    """Between whose layers there are two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        stream = x if isinstance(x, tuple) else (x, x)
        for layer in self.layers:
            stream = (layer(stream[0]), stream[1])
        return stream if isinstance(self.head, nn.Identity) else self.head(stream[0])


def _pairs_refused() -> str:
    mesh = make_mesh(Parallel(pp=2))
    plan = Plan(pipeline=Pipeline([], "layers", ["head"]))
    composition = apply(Pairs(), plan, mesh, Options(Parallel(pp=2, pp_layers=(1, 1))))
    batch = {"x": torch.ones(2, 4, 3), "targets": torch.zeros(2, 4, dtype=torch.int64)}
    with pytest.raises(ConfigError) as caught:
        forward_backward(composition, batch, micro_batch=1)
    return str(caught.value)


def test_a_pair_between_layers_is_refused_by_every_rank(pool: Pool) -> None:
    line = (
        "plan.pipeline: a stage hands on a tuple, and messages take one plain tensor; have the model"
        " return that between its layers, or use parallel.pp = 1"
    )
    assert pool.run(_pairs_refused, 2) == [line] * 2


def test_logits_of_an_object() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, -100]])
    given: Any = SimpleNamespace(logits=logits)
    for function in (cross_entropy, CrossEntropy(z_loss=0.1)):
        assert torch.equal(function(given, targets), function(logits, targets))
    with pytest.raises(ConfigError) as caught:
        cross_entropy((logits, None), targets)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "loss_function: cross_entropy takes logits, and the model returned a tuple; give a"
        " loss_function that takes that"
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.up(hidden).relu()) * scale


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.block = nn.Linear(4, 4), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(scale=2.0, hidden=self.into(x))


def _by_keyword() -> tuple[Report, str]:
    tensor = {
        "block": LocalInput(Replicate()),
        "block.up": LocalColwise(),
        "block.down": LocalRowwise(Replicate()),
    }
    mesh, model = make_mesh(Parallel(tp=2, dp_shard=1)), ByKeyword()
    plan = Plan(tensor=tensor, replicate=["into"])
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(2, 3, 4, generator=generator), "targets": torch.tensor([[0, 1, 2]] * 2)}
    report = verify(model, plan, mesh, batch)
    apply(model, plan, mesh)
    with pytest.raises(ConfigError) as caught:
        model.block(scale=2.0)
    return report, str(caught.value)


def test_local_input_by_keyword(pool: Pool) -> None:
    results = pool.run(_by_keyword, 2)
    report = agreed([report for report, _ in results])
    assert report.ok, str(report)
    line = "LocalInput: Block was called without its input hidden"
    assert [found for _, found in results] == [line] * 2


def test_a_convolution_is_no_columns() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(2, 2, 1), "head": nn.Linear(2, 2)})
    plan = Plan(tensor={"conv": ColwiseParallel(), "head": ColwiseParallel()})
    with pytest.raises(ConfigError) as caught:
        resolve(plan, model)
    assert str(caught.value) == (
        "plan.tensor: conv is Conv1d, and ColwiseParallel cuts nn.Linear and nn.Embedding alone;"
        " list it in replicate, or give it another style"
    )


@pytest.mark.slow
def test_a_new_architecture_is_one_folder(tmp_path: Path) -> None:
    """A copy of models/llama by another name trains as it does, in a checkout with no other edit."""
    for name in ("compose", "models"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "train.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(tmp_path / "models" / "llama", tmp_path / "models" / "mine")

    losses = {}
    for name in ("llama", "mine"):
        words = [
            *QUICK,
            "--train.steps=3",
            f"--model.name={name}",
            f"--run.dir={tmp_path / 'runs' / name}",
        ]
        subprocess.run(
            command("train.py", *words),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            check=True,
            capture_output=True,
        )
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert len(losses["mine"]) > 1
    assert losses["mine"] == losses["llama"]
