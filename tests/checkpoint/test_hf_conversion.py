"""Hugging Face's folders to checkpoints and back: bit for bit, one tensor at a time, or refused."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compose.__main__ import main
from compose.checkpoint.hf_conversion import _model_of, export
from compose.checkpoint.hf_folder import find_hf, load_hf, model_in, name_of, published
from compose.checkpoint.safetensors_files import INDEX, PlannedTensor, write_files
from compose.checkpoint.store import ModelFields
from compose.checkpoint.store import name_of as name_of_step
from compose.errors import ConfigError
from models import llama
from tests.support.checkpoints import MESHES, train_on
from tests.support.helpers import ROOT, Keys, make_job, refusal, refused
from tests.support.hugging_face import FOLDERS, MODELS, assert_same, read_tensors, save_model
from tests.support.pool import Pool
from tests.support.small_models import DEEPSEEK, QWEN
from tests.support.tokenizer_kinds import save_kind
from tests.support.tokenizers_made import CHATML, save_tokenizer
from tests.support.training import keys_for, lines, train
from tests.support.transformers_models import (
    DEEPSEEK_V2,
    GEMMA3,
    GPT2,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    QWEN3,
    QWEN3_MOE,
    YARN,
    as_files,
    randomize,
)

FAMILIES: dict[str, tuple[str, Any]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2, not tied": ("gpt2", dataclasses.replace(GPT2, tie_embeddings=False)),
    "gemma3": ("gemma3", GEMMA3),
    "gemma3, untied": ("gemma3", dataclasses.replace(GEMMA3, tie_embeddings=False)),
    "llama": ("llama", LLAMA),
    "llama, tied, scaled": (
        "llama",
        dataclasses.replace(
            LLAMA, tie_embeddings=True, rope_scaling=4.0, rope_original_seq_len=16, rope_theta=50.0
        ),
    ),
    "qwen3": ("qwen3", QWEN3),
    "qwen3, tied": ("qwen3", dataclasses.replace(QWEN3, tie_embeddings=True)),
    "qwen3, experts": ("qwen3", QWEN3_MOE),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "mixtral": ("mixtral", MIXTRAL),
    "deepseek_v3": ("deepseek_v3", YARN),
    "deepseek_v2": ("deepseek_v3", DEEPSEEK_V2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that transformers saved in several files come back unchanged, and it opens them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, config = FAMILIES[family]
    there, run, back = tmp_path / "there", tmp_path / "run", tmp_path / "back"
    torch.manual_seed(0)
    options: Any = {"experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**find_hf(name).hf_config(config)), **options
    ).eval()
    randomize(reference)
    for key, buffer in reference.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    reference.save_pretrained(there, max_shard_size="60KB")
    assert (there / INDEX).exists()
    (there / "tokenizer_config.json").write_text('{"model_max_length": 7}')

    assert main(["convert", str(there), str(run)]) == 0
    done = export(run / "checkpoints/step-00000000", back, shard_bytes=50_000)
    assert done.files == len(list(back.glob("*.safetensors"))) > 1
    assert capsys.readouterr().out.startswith(f"{run}/checkpoints/step-00000000: ")
    assert_same(read_tensors(back), read_tensors(there))
    assert (back / "tokenizer_config.json").read_text() == '{"model_max_length": 7}'

    other: Any = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True, **options)
    other, info = other
    assert not any(info.values()), info
    ours = FOLDERS[name].Model(config)
    load_hf(ours, there, name_of(name, config))
    tokens = torch.randint(config.vocab_size, (2, 40))
    with torch.no_grad():
        expected = reference(tokens).logits
        assert torch.equal(other.eval()(tokens).logits, expected)
        result = ours.eval()(tokens)
    assert float((result - expected).norm() / expected.norm()) < 1e-5


def test_a_model_of_ones_own_is_named_by_a_config() -> None:
    """That of its run has the fields too, without which its weights would not fit."""
    known: Any = SimpleNamespace(model=ModelFields(name="mine/"))
    line = refusal(_model_of, Path("run"), known)
    assert line.startswith("run/state.json: model.name: 'mine/' is none of deepseek_v3, dit, ")
    assert line.endswith("; give --config RUN_DIR/config.toml, which has model.path")


def test_an_export_ends_where_generate_ends(tmp_path: Path) -> None:
    """A run that was not begun with published weights: of bytes, and of a tokenizer with a template."""
    from transformers import AutoConfig, GenerationConfig

    hf, run = tmp_path / "hf", tmp_path / "run"
    save_model(hf, {})
    assert main(["convert", str(hf), str(run)]) == 0
    shutil.rmtree(run / "tokenizer")
    for kind, ends in {"": 256, "qwen": [0, 2]}.items():
        if kind:
            save_kind(run / "tokenizer", kind, eos_token="<|endoftext|>", chat_template=CHATML)
            (run / "tokenizer/generation_config.json").write_text('{"top_k": 20, "eos_token_id": 0}')
        target = tmp_path / f"back{kind}"
        assert main(["convert", str(run), str(target)]) == 0
        generation = GenerationConfig.from_pretrained(target)
        config: Any = AutoConfig.from_pretrained(target)
        assert generation.eos_token_id == config.eos_token_id == ends
        assert generation.bos_token_id is config.bos_token_id is None
        assert generation.top_k == (20 if kind else None)


def test_a_length_that_is_part_of_the_model_is_its_own(tmp_path: Path) -> None:
    """LongRoPE's factor may follow from the longest text, and a table of positions has so many rows."""
    factors = {"short_factor": 4 * [1.0], "long_factor": 4 * [2.0]}
    rule = {"rope_scaling": {"type": "longrope", "factor": 2.0, **factors}}
    lengths = {"original_max_position_embeddings": 64, "max_position_embeddings": 640}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"} | lengths))
    for name, change in {"phi3": rule | lengths, "gpt2": {}}.items():
        folder, run, back = (tmp_path / f"{name} {part}" for part in ("hf", "run", "back"))
        save_model(folder, MODELS[name])
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert main(["convert", str(folder), str(run)]) == 0
        original = None if change else other
        export(run / "checkpoints/step-00000000", back, original=original)
        assert model_in(back) == model_in(folder)


def test_the_longest_text_is_no_shorter_than_what_was_learnt(alone: None, tmp_path: Path) -> None:
    folder, run, back = (tmp_path / name for name in ("hf", "run", "back"))
    save_model(folder, {})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 16}))
    sizes = {"train__seq_len": 32, "train__global_batch": 2, "train__steps": 1}
    train(keys_for(run, **sizes, checkpoint__interval=1, checkpoint__load_hf=folder))
    assert main(["convert", str(run), str(back)]) == 0
    assert json.loads((back / "config.json").read_text())["max_position_embeddings"] == 32


def _trained(run: Path, model: Keys, steps: int = 1) -> Path:
    sizes = {"train__seq_len": 16, "train__global_batch": 2, "train__stop_after": steps}
    train(keys_for(run, **(model | sizes), checkpoint__interval=1))
    return run / "checkpoints" / name_of_step(steps)


def test_a_bias_that_chooses_experts_is_not_lost(alone: None, tmp_path: Path) -> None:
    """An export without it would send tokens to other experts; Qwen3's class has none."""
    model = QWEN | {"model__n_layers": 1}
    first = _trained(tmp_path / "run", model | {"model__bias_rate": 0.1})
    no_key = "model.bias_rate: 0.1 has no place in the config.json of Qwen3MoeForCausalLM"
    assert refusal(export, first, tmp_path / "out") == f"{first}: {no_key}"
    second = _trained(tmp_path / "run", model | {"model__bias_rate": 0.0}, 2)  # it stays as it is
    assert refusal(export, second, tmp_path / "out") == (
        f"{second}: model.layers.0.moe.router.bias is not 0, so that it decides which experts are"
        " chosen, and Qwen3MoeForCausalLM has no such bias; train with model.bias_rate = 0"
    )
    export(_trained(tmp_path / "other", model), tmp_path / "out")


def test_what_only_training_needs_is_the_runs(alone: None, tmp_path: Path) -> None:
    """The run's config.toml has it. A run that begins with the export trains as this one did."""
    model = DEEPSEEK | {"model__n_layers": 2, "model__bias_rate": 0.0, "model__latent_norm_eps": 1e-6}
    second: Keys = {
        "model__scoring": "softmax",
        "model__normalize_weights": False,
        "model__n_groups": 1,
    }
    for kind, more in {"deepseek_v3": {}, "deepseek_v2": second | {"model__top_groups": 1}}.items():
        export(_trained(tmp_path / kind, model | more), tmp_path / f"{kind} out")
        values = json.loads((tmp_path / f"{kind} out" / "config.json").read_text())
        assert (values["model_type"], values["bias_rate"]) == (kind, 0.0)
        assert (values["seq_aux"], values["aux_loss_alpha"]) == (True, 0.05)


@pytest.mark.parametrize("name", ["tied", "deepseek_v3", "gpt_oss"])
@pytest.mark.slow
def test_what_was_trained_is_exported(pool: Pool, tmp_path: Path, name: str) -> None:
    """The newest checkpoint of a run on eight ranks, as transformers would open it."""
    run, back = tmp_path / "run", tmp_path / "back"
    mesh = MESHES["tensor, uneven" if name == "tied" else "experts and pipeline"]
    state = train_on(pool, run, MODELS[name], mesh, 2)
    assert main(["convert", str(run), str(back), "--dtype", "bfloat16"]) == 0
    job, files = make_job(1, **MODELS[name]), read_tensors(back)
    chosen = job.config.model
    expected = as_files(
        (
            ours,
            place,
            state[f"model.{ours}"].to(torch.bfloat16 if tensor.requires_grad else torch.float32),
        )
        for ours, place, tensor in published(job.model, name_of(chosen.name, chosen.config))
    )
    assert_same(files, expected)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_weight_that_is_infinite_in_the_type_of_an_export(tmp_path: Path) -> None:
    """It was written as infinity."""
    folder, run, out = tmp_path / "hf", tmp_path / "run", tmp_path / "out"
    save_model(folder, {})
    name = "model.layers.0.mlp.down_proj.weight"
    path = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    weights = load_file(path)
    weights[name][1, 2] = -7e4
    save_file(weights, path, {"format": "pt"})
    assert main(["convert", str(folder), str(run)]) == 0
    step = run / "checkpoints/step-00000000"
    assert refused(main, ["convert", str(step), str(out), "--dtype", "float16"]) == [
        f"{step}: {name} holds 70000, which is infinite in float16; use --dtype bfloat16"
    ]
    assert not out.exists()
    assert main(["convert", str(step), str(out), "--dtype", "bfloat16"]) == 0
    assert read_tensors(out)[name][1, 2] == -70144


def test_a_run_begins_with_what_was_imported(pool: Pool, tmp_path: Path) -> None:
    """And takes the steps that one does which loads the same weights itself."""
    folder = tmp_path / "hf"
    save_model(folder, {})
    assert main(["convert", str(folder), str(tmp_path / "imported")]) == 0
    keys = {"train__stop_after": 2, "train__global_batch": 4, "parallel__tp": 2}
    pool.run(train, 2, keys_for(tmp_path / "loaded", **keys, checkpoint__load_hf=folder))
    pool.run(train, 2, keys_for(tmp_path / "imported", **keys))
    loaded, imported = lines(tmp_path / "loaded"), lines(tmp_path / "imported")
    assert [line["step"] for line in imported] == [1, 2]
    for a, b in zip(loaded, imported, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


def test_what_was_imported_learns_ids_of_its_own_tokenizer(pool: Pool, tmp_path: Path) -> None:
    """As a run does that loads the same folder itself."""
    folder, run = tmp_path / "hf", tmp_path / "run"
    save_model(folder, {"model__vocab_size": 300})
    save_tokenizer(folder)
    assert main(["convert", str(folder), str(run)]) == 0
    documents = tmp_path / "a.jsonl"
    documents.write_text('{"text": "def add(a, b): return a + b"}\n' * 40)
    keys: Keys = {"model__vocab_size": 300, "train__seq_len": 16, "train__stop_after": 1}
    for number, size in enumerate((300, 280)):
        own = save_tokenizer(tmp_path / f"tokenizer{number}", vocab_size=size)
        words = ["--tokenizer", str(own), "--out", str(tmp_path / str(number)), "--workers", "1"]
        assert main(["tokenize", *words, str(documents)]) == 0
    other, own = ({**keys, "data__path": str(tmp_path / n)} for n in "10")
    assert pool.run(refusal, 1, train, keys_for(run, **other)) == [
        f"{run}/checkpoints/step-00000000: was trained on ids of another tokenizer than data.path is of"
    ]
    pool.run(train, 1, keys_for(run, **own))
    assert [line["step"] for line in lines(run)] == [1]


def test_convert_says_what_is_wrong(tmp_path: Path) -> None:
    hf, run, config = tmp_path / "hf", tmp_path / "run", str(ROOT / "train.toml")
    save_model(hf, {})
    assert main(["convert", str(hf), str(run)]) == 0
    step = run / "checkpoints/step-00000000"
    other = tmp_path / "other"
    other.mkdir()
    mxfp4 = "--dtype=mxfp4"  # which is read, and not written
    cases: dict[str, list[object]] = {
        "command line: convert: needs SOURCE and TARGET, got 1 folders": [hf],
        "command line: --confg: unknown option; did you mean --config?": [hf, "x", "--confg=a"],
        "command line: --dtype: is for the way to Hugging Face": [hf, "x", "--dtype=float32"],
        "command line: --dtype: mxfp4 is none of float32, bfloat16, float16": [run, "x", mxfp4],
        "command line: gone: no such folder": ["gone", "x"],
        f"command line: {other}: is neither a checkpoint (manifest.json) nor Hugging Face's folder"
        " (config.json, and model.safetensors or model.safetensors.index.json)": [other, "x"],
        f"{run}: exists already; choose another target": [hf, run],
        f"{other}: exists already; choose another target": [step, other],
        f"{hf}: is a model with n_layers = 2, not 5\n{hf}: is a model with dim = 64, not 128\n"
        f"{hf}: is a model with hidden_dim = 96, not 384": [hf, "x", "--config", config],
    }
    for message, words in cases.items():
        assert sorted(refused(main, ["convert", *map(str, words)])) == sorted(message.split("\n"))
    (hf / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    (line,) = refused(main, ["convert", str(hf), "x"])
    assert line.startswith(f"{hf}/config.json: model_type: 'mamba' is no model here (known: ")
    shard = next(step.glob("__*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r": damaged: __0_0\.safetensors has [\d,]+ of [\d,]+ bytes$"):
        main(["convert", str(run), "x"])
    assert not Path("x").exists()


PEAK = """
import sys
# Modules are imported when they are used. Here they are before memory is measured.
import torch._dynamo
import compose.build, compose.checkpoint.hf_conversion, compose.cli.commands
from compose.config.models import model_names
model_names()
from compose.__main__ import main

def peak():  # of this program alone, where getrusage has its parent's too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line)

before = peak()
main(["convert", sys.argv[1], sys.argv[2]])
main(["convert", sys.argv[2], sys.argv[3]])
print((peak() - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells of memory on Linux")
@pytest.mark.slow
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, dim=768, n_layers=6, hidden_dim=3072)
    with torch.device("meta"):
        model = llama.Model(config)
    sizes = {place.name: tuple(p.shape) for _, place, p in published(model, name_of("llama", config))}
    planned = [PlannedTensor(name, shape, torch.float32) for name, shape in sizes.items()]
    folder = tmp_path / "hf"
    folder.mkdir()
    write_files(folder, planned, (torch.zeros(one.shape) for one in planned), 10**9)
    (folder / "config.json").write_text(json.dumps(find_hf("llama").hf_config(config)))
    words = [sys.executable, "-c", PEAK, folder, tmp_path / "run", tmp_path / "back"]
    # Freed memory goes back at once, and does not stay with the program.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    grown = int(done.stdout.splitlines()[-1])
    largest, everything = max(one.nbytes for one in planned), sum(one.nbytes for one in planned)
    assert everything > 20 * largest
    assert grown < 5 * largest
