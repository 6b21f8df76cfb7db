"""Models of other people: what they return and hand on, and how their modules are called."""

import os
import shutil
import subprocess
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

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
from compose.apply import _check_types
from compose.config.composition_rules import check_setup
from compose.config.setup import Setup
from compose.parallel.context_parallel import ContextParallel
from compose.parallel.local_parallel import LocalColwise, LocalInput, LocalRowwise
from compose.parallel.output_projection import CrossEntropy
from compose.pipeline.schedules import SCHEDULES
from compose.plan import resolve
from compose.proof.report import Report
from tests.support.command_lines import QUICK, command, execute
from tests.support.helpers import ROOT, proved, refusal
from tests.support.pool import Pool, make_mesh
from tests.support.training import lines
from tests.support.transformers_models import bert


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
    report = proved(pool.run(_transformers_llama, 2, schedule, (4 // stages,) * stages))
    assert sum(row.quantity == "gradient" for row in report.rows) == 3 + 4 * 9


def _transformers_cut(name: str) -> Report:
    """BERT as it is, or GPT-2's modules in the model of docs/plan.md."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = torch.randint(32, (4, 9))
    parallel = Parallel(pp=2)
    if name == "bert":
        model = bert("BertForMaskedLM", vocab_size=32, num_hidden_layers=4)
        plan = Plan(pipeline=Pipeline(["bert.embeddings"], "bert.encoder.layer", ["cls"]))
    else:
        dropout: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=4, n_head=2, **dropout)
        page = (ROOT / "docs" / "plan.md").read_text()
        results: dict[str, Any] = {}
        exec(next(b for b in page.split("```python") if "class Cut" in b).split("```")[0], results)
        model, plan = results["Cut"](GPT2LMHeadModel(config)), results["cut"]
    name = next(iter(signature(model.forward).parameters))
    batch = {name: tokens[:, :-1], "targets": tokens[:, 1:]}
    # Layers are shared out by weights, since neither model runs on meta.
    return verify(model, plan, make_mesh(parallel), batch, Options(parallel), Trial(micro_batch=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_of_transformers_in_stages(pool: Pool, name: str) -> None:
    proved(pool.run(_transformers_cut, 2, name))


def _bert(tensor: dict[str, Any], replicate: list[str]) -> Report:
    """Attention and networks are cut as Megatron cuts them, and the output as the arguments say."""
    layers = "bert.encoder.layer.*"
    columns = (f"{layers}.attention.self.[qkv]*", f"{layers}.intermediate.dense")
    rows = (f"{layers}.attention.output.dense", f"{layers}.output.dense")
    plan = Plan(
        tensor={
            **{name: ColwiseParallel() for name in columns},
            **{name: RowwiseParallel() for name in rows},
            **tensor,
        },
        replicate=[
            "bert.embeddings.[pt]*",
            "bert.embeddings.LayerNorm",
            f"{layers}.attention.output.LayerNorm",
            f"{layers}.output.LayerNorm",
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            *replicate,
        ],
    )
    torch.manual_seed(0)
    tokens = torch.randint(33, (4, 9))
    batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}
    model = bert("BertForMaskedLM", vocab_size=33, intermediate_size=25)
    return verify(model, plan, make_mesh(Parallel(tp=2, dp_shard=1)), batch)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "by rows"])
def test_bert_whose_bias_has_a_second_name(pool: Pool, way: str) -> None:
    """The name is ``cls.predictions.bias``, of a module without a style."""
    ends = ["bert.embeddings.word_embeddings", "cls.predictions.decoder"]
    tensor = {
        ends[0]: RowwiseParallel(input_layouts=Replicate()),
        ends[1]: ColwiseParallel(output_layouts=Replicate()),
    }
    given: Any = ({}, ends) if way == "whole" else (tensor, [])
    proved(pool.run(_bert, 2, *given))


class Holder(nn.Module):
    """It only holds what the layer inside it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.bias = self.up.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu()


class Odd(nn.Module):
    """Two ranks do not divide its 7 columns, and their bias has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.holder, self.down = Holder(), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.holder(x))


def _odd() -> Report:
    plan = Plan(tensor={"holder.up": ColwiseParallel(), "down": RowwiseParallel()})
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(2, 3, 4, generator=generator), "targets": torch.tensor([[0, 1, 2]] * 2)}
    return verify(Odd(), plan, make_mesh(Parallel(tp=2, dp_shard=1)), batch)


def test_an_uneven_width(pool: Pool) -> None:
    proved(pool.run(_odd, 2))


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
    return refusal(forward_backward, composition, batch, micro_batch=1)


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
    assert refusal(cross_entropy, (logits, None), targets) == (
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
    return report, refusal(model.block, scale=2.0)


def test_local_input_by_keyword(pool: Pool) -> None:
    results = pool.run(_by_keyword, 2)
    proved([report for report, _ in results])
    line = "LocalInput: Block was called without its input hidden"
    assert [result for _, result in results] == [line] * 2


def test_a_convolution_is_no_columns() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(2, 2, 1), "head": nn.Linear(2, 2)})
    plan = Plan(tensor={"conv": ColwiseParallel(), "head": ColwiseParallel()})
    assert refusal(resolve, plan, model) == (
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

    words = ["train.py", *QUICK, "--train.steps=3"]
    subprocess.run(
        command(*words, "--model.name=mine", f"--run.dir={tmp_path / 'mine'}"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
    )
    assert execute(*words, f"--run.dir={tmp_path / 'llama'}").returncode == 0
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("mine", "llama")]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


class Warm(nn.Module):
    """With a learned temperature in each layer, and one of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(4, 4), nn.Linear(4, 6)
        self.layers = nn.ModuleList(WarmLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WarmLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * self.temperature


def _warm(parallel: Parallel, micro_batch: int) -> Report:
    shard = ["into", "layers.*", "head"]
    plan = Plan(shard=shard, pipeline=Pipeline(["into"], "layers", ["head"]))
    generator = torch.Generator().manual_seed(0)
    batches = [
        {
            "x": torch.randn(8, 3, 4, generator=generator),
            "targets": torch.randint(6, (8, 3), generator=generator),
        }
        for _ in range(2)
    ]
    options, trial = Options(parallel), Trial(micro_batch=micro_batch)
    return verify(Warm(), plan, make_mesh(parallel), batches, options, trial)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, Parallel(dp_shard=2)),
        pytest.param(2, Parallel(dp_shard=2, zero=1), marks=pytest.mark.slow),
        pytest.param(4, Parallel(dp_replicate=2, dp_shard=2, zero=2), marks=pytest.mark.slow),
        pytest.param(
            4,
            Parallel(pp=2, dp_shard=2, pp_schedule="ZBVZeroBubble", pp_layers=(0, 1, 1, 0)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["zero 3", "zero 1", "hsdp", "backward in two parts"],
)
def test_parameters_without_dims(pool: Pool, ranks: int, parallel: Parallel) -> None:
    proved(pool.run(_warm, ranks, parallel, 2 if parallel.pp == 1 else 1))


def test_parameters_without_dims_stay_on_the_device() -> None:
    options = Options(Parallel(dp_shard=2, offload="cpu"))
    model = Warm()
    assert refusal(check_setup, Setup(model, resolve(Plan(), model), options, 2, "cpu")) == (
        'parallel.offload: "cpu" moves shards, and parameter layers.0.temperature has no dims to be cut'
        ' along; give it the shape (1,), or use parallel.offload = "none"'
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def _recurrent(frozen: bool) -> str:
    """An LSTM that a plan makes DTensors of, beside plain states; or one without a trained weight."""
    head = ColwiseParallel(output_layouts=Replicate())
    batch = {"x": torch.ones(2, 3, 4), "targets": torch.tensor([[0, 1, 2]] * 2)}
    mesh = make_mesh(Parallel(tp=2, dp_shard=1))
    model = Recurrent().requires_grad_(not frozen)
    return refusal(verify, model, Plan(tensor={"head": head}, replicate=["lstm"]), mesh, batch)


def test_what_fails_in_a_composition_is_one_line(pool: Pool) -> None:
    said = pool.run(_recurrent, 2, False)
    assert said[0] == said[1]
    assert said[0] == (
        "model: a module computes with a weight that plan.tensor or plan.replicate has placed and with"
        " a plain tensor, as nn.GRU, nn.LSTM and nn.MultiheadAttention do; one of replicate may take"
        " one tensor alone, by position, and make no other; or use parallel.tp = 1"
    )
    assert (
        pool.run(_recurrent, 2, True)
        == ["model: no parameter is trained, so that nothing can be proved"] * 2
    )


@pytest.mark.parametrize("mixes", [nn.GRU(4, 4), nn.MultiheadAttention(4, 2), nn.Conv1d(4, 4, 3)])
def test_modules_that_mix_tokens_need_a_style_with_cp(mixes: nn.Module) -> None:
    model = nn.ModuleDict({"mixes": mixes, "core": nn.Identity(), "alone": nn.Conv1d(4, 4, 1)})
    options, plan = Options(Parallel(dp_shard=1, cp=2)), Plan(context={"core": ContextParallel()})
    assert refusal(check_setup, Setup(model, resolve(plan, model), options, 2, "cpu")) == (
        f"plan.context: mixes is {type(mixes).__name__}, which mixes tokens, and a rank of cp has a"
        " part of them; give it a style that exchanges them, or use parallel.cp = 1"
    )


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("scale", [True, False])
def test_an_embedding_that_counts_tokens_of_one_forward(kind: Any, scale: bool) -> None:
    """Gradients were divided by each rank's own counts."""
    model = nn.ModuleDict({"table": kind(3, 4, scale_grad_by_freq=scale)})
    plan = resolve(Plan(context={"table": ContextParallel()}), model)
    for axis, ranks in (("dp_replicate", 2), ("dp_shard", 2), ("cp", 2), ("cp", 1)):
        degrees: dict[str, Any] = {"dp_shard": 1, axis: ranks}
        setup = Setup(model, plan, Options(Parallel(**degrees)), ranks, "cpu")
        line = "model: table has scale_grad_by_freq, which counts how often a token is in one forward,"
        line += " and each rank has others; leave it out, or use one rank of data and of cp"
        assert refusal(check_setup, setup) == (line if scale and ranks > 1 else "")


def test_weights_and_buffers_of_odd_kinds_and_a_layer_twice() -> None:
    model = nn.Module()
    model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert refusal(_check_types, model, torch.float32) == (
        "parameter turn is torch.complex64, which FSDP does not take; hold real numbers, and use"
        " torch.view_as_complex in forward"
    )
    assert refusal(_check_types, nn.Sequential(nn.LazyLinear(2)), torch.float32) == (
        "parameter 0.weight has no shape before the first forward; run the model once, on one sample,"
        " before compose.apply"
    )
    graph = nn.Module()
    graph.register_buffer("edges", torch.eye(2).to_sparse())
    resolve(Plan(), graph)
    assert refusal(_check_types, graph, torch.float32) == (
        "buffer edges is sparse, which messages do not take; hold its indices and values, and make it"
        " in forward"
    )
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, layer])})
    line = "plan.pipeline: layers holds a layer twice; make it two with tied weights"
    assert refusal(resolve, Plan(pipeline=Pipeline([], "layers", [])), model) == line
