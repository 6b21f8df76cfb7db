"""Texts that are made while a run trains: on any mesh the same ones, and training does not notice."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from compose.config.tables import Checkpoint
from compose.data.datasets import open_data
from compose.train.samples import Prompts, PromptSamples
from tests.support.command_lines import QUICK, answered, execute
from tests.support.helpers import (
    Keys,
    keys_in,
    make_config,
    make_job,
    printed,
    ranks_in,
    refusal,
    refusals,
    refused,
    tiered,
)
from tests.support.pool import Pool
from tests.support.tokenizers_made import save_tokenizer
from tests.support.training import keys_for, lines, train, trainer_of

PROMPTS = ["def f(", "import "]
SAMPLING: Keys = {
    "metrics__samples_every": 3,
    "metrics__prompts": PROMPTS,
    "metrics__sample_tokens": 9,
}
BASE: Keys = {"train__steps": 4, "train__global_batch": 4, "train__seq_len": 16}
EXPERTS = "model.name=qwen3 model.preset=debug_moe"
MESHES = {
    "zero 3": "dp_shard=2",
    "zero 1": "dp_shard=2 zero=1",
    "replicas": "dp_replicate=2 zero=0",
    "tp": "tp=2",
    "ring": "cp=2",
    "ulysses": "cp=2 cp_method=ulysses",
    "pipeline": "pp=2 train.micro_batch=1",
    "tp, odd": "tp=2 sequence=false loss=false train.seq_len=15",
    "islands": "dp_replicate=2 outer.every=2",
    "pipeline x tp": "pp=2 tp=2 pp_schedule=ZBVZeroBubble train.micro_batch=1",
    "cp x dp": "cp=2 dp_shard=2 zero=2",
    "compiled": "dp_shard=2 compile.mode=block compile.backend=aot_eager",
    "compiled by Inductor": "dp_shard=2 compile.mode=block",
    "codes": "dp_shard=2 comm.weights=int4_diff comm.gradients=int8",
    "float8": "tp=2 model.dim=128 model.hidden_dim=192 precision.float8=tensorwise",
    "offload": "dp_shard=2 parallel.offload=cpu activation_checkpoint.mode=full",
    "experts": f"{EXPERTS} dp_shard=2 ep=2 model.capacity_factor=1.0",
}
QUICKEST = ("zero 3",)


@pytest.mark.parametrize(
    "name", tiered(MESHES, slow=MESHES.keys() - QUICKEST, full=["compiled by Inductor"])
)
def test_training_does_not_notice(pool: Pool, tmp_path: Path, name: str) -> None:
    """Losses and gradients are bitwise those of a run without samples, and each prompt has its text."""
    keys = BASE | keys_in(MESHES[name])
    ranks = ranks_in(keys)
    for folder, more in (("without", {}), ("with", SAMPLING)):
        run = keys_for(tmp_path / folder, **keys, **more)
        pool.run(train, ranks, run, **({"islands": 2} if name == "islands" else {}))
    without, sampled = lines(tmp_path / "without"), lines(tmp_path / "with")
    for key in ("loss", "grad_norm", "recompiles"):
        assert [line.get(key) for line in sampled] == [line.get(key) for line in without]
    assert [list(line.get("texts", {})) for line in sampled] == [[], [], PROMPTS, PROMPTS]


@pytest.mark.slow
def test_the_same_texts_on_every_mesh(pool: Pool, tmp_path: Path) -> None:
    """Those that `generate` makes of the checkpoint, greedy and drawn."""
    kept = BASE | SAMPLING | {"train__steps": 3, "checkpoint__interval": 3, "train__micro_batch": 1}
    for temperature, meshes in ((0.0, ["tp=2"]), (1.0, ["dp_shard=2", "tp=2", "pp=2", "cp=2"])):
        texts = []
        for name in ("", *meshes):
            folder = tmp_path / f"{name} {temperature}"
            keys = kept | keys_in(name) | {"metrics__sample_temperature": temperature}
            pool.run(train, ranks_in(keys), keys_for(folder, **keys))
            texts.append([line.get("texts") for line in lines(folder)])
        assert texts == texts[:1] * len(texts)
        words = [f"--prompt={prompt}" for prompt in PROMPTS]
        words += [f"--temperature={temperature}", "--max-tokens=9"]
        done = execute("-m", "compose", "generate", str(tmp_path / f" {temperature}"), *words)
        expected = "".join(f"{prompt}{text}\n" for prompt, text in (texts[0][-1] or {}).items())
        assert done.stdout == expected, done.stderr


def test_where_they_go(pool: Pool, tmp_path: Path) -> None:
    """The console, metrics.jsonl and TensorBoard have them; with few tokens."""
    keys = keys_for(tmp_path, **(BASE | SAMPLING | {"train__steps": 1, "model__n_layers": 1}))
    said = pool.run(_train_and_listen, 1, keys | {"metrics__tensorboard": True})[0]
    texts = lines(tmp_path)[0]["texts"]
    assert said == [f"step 1: {prompt!r} continues {text!r}" for prompt, text in texts.items()]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {f"texts/{prompt}/text_summary" for prompt in PROMPTS} <= set(events.Tags()["tensors"])


def _train_and_listen(keys: dict[str, Any]) -> list[str]:
    with printed() as said:
        train(keys)
    return [line for line in said if "continues" in line]


def _sampled_while_weights_change(keys: dict[str, Any]) -> list[str]:
    """Train; the model mixes tokens at step 2, and at step 3 it gives no numbers."""
    trainer, step = trainer_of(keys), 0
    composition, measure = trainer.composition, PromptSamples.measure

    def changed(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = inputs
        return x * {2: 1 + x[:, :1], 3: torch.nan}.get(step, 1), *others

    def measured(self: PromptSamples, number: int) -> dict[str, Any]:
        nonlocal step
        step = number
        try:
            return measure(self, number)
        finally:
            step = 0

    stages = composition.pipeline.stages if composition.pipeline else ()
    for whole in (composition.model, *(stage.module for stage in stages)):
        for layer in whole.get_submodule("layers").children():
            layer.register_forward_pre_hook(changed)
    with printed() as said, mock.patch.object(PromptSamples, "measure", measured):
        trainer.run()
    return [line for line in said if line.startswith("metrics.prompts")]


@pytest.mark.parametrize("keys", ["", "pp=2 train.micro_batch=1"], ids=["one rank", "pp 2"])
def test_no_sample_ends_a_run(pool: Pool, tmp_path: Path, keys: str) -> None:
    """Weights that mix tokens later do not end it, nor do logits that are not finite."""
    more = BASE | SAMPLING | {"metrics__samples_every": 1, "metrics__sample_tokens": 3} | keys_in(keys)
    said = pool.run(_sampled_while_weights_change, ranks_in(more), keys_for(tmp_path, **more))
    assert said == [
        [
            f"metrics.prompts: step 3: {prompt!r} has no text: token {len(prompt)}: the model's logits"
            " are not finite: its weights are damaged, or too large for precision.param"
            for prompt in PROMPTS
        ],
        *[[]] * (len(said) - 1),
    ]
    assert [list(line.get("texts", {})) for line in lines(tmp_path)] == [PROMPTS, PROMPTS, [], PROMPTS]


NEEDS = 'needs texts to continue; set metrics.prompts, as ["Once upon a time"], or 0'
REFUSED: list[tuple[Keys, str]] = [
    ({"metrics__samples_every": 5}, f"metrics.samples_every: 5 {NEEDS}"),
    (
        {"metrics__samples_every": 5, "metrics__prompts": ["a", ""]},
        f"metrics.samples_every: 5 {NEEDS}",
    ),
    (
        {"metrics__prompts": ["a"], "metrics__sample_tokens": 3},
        'metrics.prompts: ["a"] is read with samples; set metrics.samples_every\n'
        "metrics.sample_tokens: 3 is read with samples; set metrics.samples_every",
    ),
]
test_refused = refusals(REFUSED)


def test_a_model_without_texts() -> None:
    line = "metrics.samples_every: 3 continues texts, and model.name = dit learns no text; use 0"
    assert line in refused(make_job, 1, **SAMPLING, model__name="dit")


def test_prompts_need_a_tokenizer(tmp_path: Path) -> None:
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "t.bin")
    words = [f"--data.path={tmp_path}/t.bin", "--metrics.samples_every=2", '--metrics.prompts=["a"]']
    done = answered("train.py", *QUICK, f"--run.dir={tmp_path / 'run'}", *words)
    assert done.stderr == (
        f"train.toml: metrics.prompts: {tmp_path}/t.bin has no tokenizer to encode them; use a folder"
        " of compose tokenize, or metrics.samples_every = 0\n"
    )


def test_a_text_within_the_models_positions() -> None:
    config = make_config(1, model__name="gpt2", model__max_seq_len=16, train__seq_len=16, **SAMPLING)
    assert refusal(Prompts, config, open_data(config).sets) == ""
    longer = make_config(
        1,
        model__name="gpt2",
        model__max_seq_len=16,
        train__seq_len=16,
        **(SAMPLING | {"metrics__sample_tokens": 11}),
    )
    assert refusal(Prompts, longer, open_data(longer).sets) == (
        "metrics.sample_tokens: 11 after a prompt of 6 are more than the 16 positions that the model"
        " has"
    )


def test_a_prompt_beyond_the_vocabulary() -> None:
    config = make_config(1, **SAMPLING)
    less = replace(config.model, config=replace(config.model.config, vocab_size=116))
    assert refusal(Prompts, replace(config, model=less), open_data(config).sets) == (
        "metrics.prompts: 'import ' has the id 116 of bytes, and the model's vocabulary 116"
    )


def test_a_chat_set_without_a_template_is_prompted_with_texts(tmp_path: Path) -> None:
    """Its prompts and replies were joined as texts."""
    file = save_tokenizer(tmp_path)
    settings = file.with_name("tokenizer_config.json")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": None}))
    manifest = SimpleNamespace(kind="chat", tokenizer=SimpleNamespace(end=1))
    sets: Any = [SimpleNamespace(token_set=SimpleNamespace(path=tmp_path, manifest=manifest))]
    prompts = Prompts(make_config(1, model__vocab_size=400, **SAMPLING), sets)
    assert prompts.ids == {
        text: prompts.tokenizer.encode(text, added=True, markup=True) for text in prompts.ids
    }


def test_repeated_tokens_are_penalized_as_by_generate(tmp_path: Path) -> None:
    """The generation_config.json beside the tokenizer says by how much; bytes have none."""
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    config = make_config(1, model__vocab_size=400, **SAMPLING)
    ours = replace(config, checkpoint=Checkpoint(load_hf=str(tmp_path)))
    for given, penalty in ((ours, 1.3), (config, 1.0)):
        batches = SimpleNamespace(sets=[] if given is ours else open_data(given).sets)
        trainer: Any = SimpleNamespace(
            config=given, batches=batches, composition=None, worker=SimpleNamespace(say=print)
        )
        assert PromptSamples(trainer).sampling.repetition_penalty == penalty
