"""Hugging Face's weights and config.json: into a model on any mesh, bit for bit, or refused by name."""

import copy
import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compose.build import fill_weights
from compose.checkpoint.hf_folder import find_hf, load_hf, name_of, published
from compose.checkpoint.local_shards import named_tensors
from compose.checkpoint.safetensors_files import INDEX, PlannedTensor, TensorFiles, write_files
from compose.cli.command_line import parse
from compose.config.models import model_names
from compose.errors import ConfigError
from models import deepseek_v3, llama
from models.layers.published import shown
from tests.support.checkpoints import loaded
from tests.support.helpers import ROOT, Keys, make_config, make_job, parallel, ranks_in, refused
from tests.support.hugging_face import (
    FOLDERS,
    MODELS,
    assert_same,
    read_tensors,
    save_model,
    write_tensors,
)
from tests.support.pool import Pool
from tests.support.transformers_models import as_files


@pytest.mark.parametrize("name", FOLDERS)
def test_config_json_round_trips(name: str) -> None:
    hf = find_hf(name)
    for preset, config in FOLDERS[name].PRESETS.items():
        assert hf.config_from_hf(json.loads(json.dumps(hf.hf_config(config)))) == config, preset


# config.json as published; keys that say nothing of the weights are left out.
PUBLISHED = {tuple(path.stem.split()): path for path in Path(__file__).parent.glob("published/*.json")}


@pytest.mark.parametrize(("name", "preset"), sorted(PUBLISHED))
def test_published_config_json_is_the_preset(name: str, preset: str) -> None:
    hf, values = find_hf(name), json.loads(PUBLISHED[name, preset].read_text())
    # A preset is for training from the start, and has the weight that the file names and does not use.
    asked = {"output_router_logits": True} if "router_aux_loss_coef" in values else {}
    assert hf.config_from_hf(values | asked) == FOLDERS[name].PRESETS[preset]
    assert not asked or hf.config_from_hf(values).balance_weight == 0
    there = hf.hf_config(FOLDERS[name].PRESETS[preset])
    # No layer has the first network, and dropout is for training alone.
    unused = {"intermediate_size"} if name == "qwen3" else {"attn_pdrop", "embd_pdrop", "resid_pdrop"}
    unused |= asked.keys()
    assert not {k for k in values.keys() & there.keys() - unused if values[k] != there[k]}


_E5M2 = {"fmt": "e5m2", "weight_block_size": [128, 128]}
_AWQ = {"quant_method": "awq", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("gemma3", {"hidden_activation": "relu"}, 'only "gelu_pytorch_tanh"'),
        ("llama", {"partial_rotary_factor": 0.5}, "only 1"),
        ("llama", {"attention_dropout": 0.1}, "only 0"),
        ("llama", {"rope_scaling": {"type": "proportional", "factor": 2.0}}, ""),
        ("qwen3", {"use_sliding_window": True}, "only false"),
        ("mixtral", {"router_jitter_noise": 0.1}, "only 0"),
        *(
            (
                "deepseek_v3",
                {"quantization_config": {"quant_method": "fp8"} | more},
                'only quant_method "fp8" with weight_block_size; take the folder in bfloat16',
            )
            for more in ({}, {"weight_block_size": [128]}, {"weight_block_size": [0, 2]}, _E5M2, _AWQ)
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, 'only "noaux_tc"'),
        ("llama", {"hidden_size": None}, "is missing"),
    ],
)
def test_what_cannot_be_expressed_is_refused(name: str, change: dict[str, Any], problem: str) -> None:
    hf, ((key, value),) = find_hf(name), change.items()
    if value is not None:
        problem = f"{shown(value)} cannot be expressed here{', ' if problem else ''}{problem}"
    values = hf.hf_config(FOLDERS[name].PRESETS["debug"])
    with pytest.raises(ValueError, match=f"^{re.escape(f'{key}: {problem}')}$"):
        hf.config_from_hf(values | change)


@pytest.mark.parametrize("change", [{"window": 5}, {"sinks": True}])
def test_windows_and_sinks_are_not_written(change: dict[str, Any]) -> None:
    config = dataclasses.replace(FOLDERS["llama"].PRESETS["debug"], **change)
    line = f"{next(iter(change))}: LlamaForCausalLM has none, so no file of theirs can hold this model"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        find_hf("llama").hf_config(config)


def test_every_model_has_the_names() -> None:
    without = [name for name in model_names() if not (ROOT / "models" / name / "hf.py").exists()]
    assert without == ["dit"], "docs/diffusion.md says why"
    for name in model_names():
        assert name in without or find_hf(name).MODEL_TYPES


def test_a_weight_without_a_name_is_one_line() -> None:
    """A copied folder gets a new weight before its hf.py does (docs/new-architecture.md)."""
    line = "model: hf_name has no place for wg.weight; give it one in hf.py of the model's folder"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        list(published(torch.nn.ModuleDict({"wg": torch.nn.Linear(2, 2)}), {}.__getitem__))


STAGES = parallel(pp=2, dp_shard=1) | {"train__micro_batch": 1}
CUT: list[tuple[str, Keys]] = [
    ("gpt2", parallel(dp_shard=2, tp=2)),
    ("gpt2, not tied", STAGES),
    ("llama", parallel(dp_shard=2, tp=2)),
    ("tied", parallel(dp_shard=4, tp=2)),
    ("tied", STAGES),
    ("phi3", parallel(dp_shard=2, tp=2)),
    ("qwen3", parallel(dp_shard=2, ep=2)),
    *((name, parallel(dp_shard=2, tp=2, ep=2)) for name in ("gpt_oss", "mixtral", "deepseek_v3")),
    ("deepseek_v3", parallel(pp=2, tp=2, ep=2)),
]


@pytest.mark.parametrize(("name", "mesh"), CUT, ids=[f"{n} {list(m.values())}" for n, m in CUT])
def test_a_cut_model_is_filled_alike(pool: Pool, tmp_path: Path, name: str, mesh: Keys) -> None:
    folder = tmp_path / "hf"
    save_model(folder, MODELS[name])
    keys = MODELS[name] | {"checkpoint__load_hf": folder}
    job = make_job(1, **keys)
    config, one = job.config, copy.deepcopy(job.model)
    fill_weights(one, job, torch.device("cpu"))
    names = name_of(config.model.name, config.model.config)
    assert_same(as_files(published(one, names)), read_tensors(folder))
    expected = {key: copies[0].detach() for key, copies in named_tensors(one, None).items()}
    for result, read, share in pool.run(loaded, ranks_in(mesh), keys | mesh):
        assert_same(result, expected)
        buffers = 4 * config.model.config.n_layers * getattr(config.model.config, "n_experts", 0)
        assert share <= read <= min(share + buffers, 1.1 * share)


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", {}, torch.bfloat16)
    job = make_job(1, checkpoint__load_hf=tmp_path / "hf")
    model = copy.deepcopy(job.model)
    fill_weights(model, job, torch.device("cpu"))
    there = read_tensors(tmp_path / "hf")["model.layers.1.mlp.up_proj.weight"]
    result = model.get_parameter("layers.1.feed_forward.w3.weight")
    assert there.dtype == torch.bfloat16
    assert result.dtype == torch.float32
    assert torch.equal(result, there.float())


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = read_tensors(folder)
    change(tensors)
    write_tensors(folder, tensors, 300_000)


def test_all_that_does_not_fit_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    keys = MODELS["deepseek_v3"]
    save_model(folder, keys)

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            tensors[f"model.layers.{layer}.self_attn.o_proj.bias"] = torch.zeros(32)
            # These may be there.
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["model.layers.3.eh_proj.weight"] = tensors["model.layers.3.enorm.weight"] = torch.ones(
            2
        )
        for layer, expert in ((1, 0), (1, 5), (2, 7)):
            del tensors[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"]
        del tensors["model.norm.weight"], tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
        tensors["lm_head.weight"] = torch.zeros(32, 257)
        tensors["model.layers.1.mlp.experts.2.down_proj.weight"] = torch.zeros(32, 23)

    _rewrite(folder, change)
    config = make_config(1, **keys)
    model = deepseek_v3.Model(config.model.config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert sorted(refused(load_hf, model, folder, name_of("deepseek_v3", config.model.config))) == [
        f"{folder}: lm_head.weight is (32, 257), the model's is (257, 32)",
        f"{folder}: model.layers.*.mlp.experts.*.up_proj.weight is missing (3 of them)",
        f"{folder}: model.layers.*.self_attn.o_proj.bias is not of this model (3 of them)",
        f"{folder}: model.layers.1.mlp.experts.2.down_proj.weight is (32, 23), the model's is (32, 24)",
        f"{folder}: model.layers.2.mlp.gate.e_score_correction_bias is missing",
        f"{folder}: model.norm.weight is missing",
    ]
    assert_same(dict(model.named_parameters()), before)


def test_the_second_name_of_a_tied_weight_may_be_there(tmp_path: Path) -> None:
    """With the values of the first. With others transformers ties nothing."""
    folder = tmp_path / "hf"
    save_model(folder, MODELS["tied"])
    first = read_tensors(folder)["model.embed_tokens.weight"]
    _rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": first.clone()}))
    config = make_config(1, **MODELS["tied"])
    model = llama.Model(config.model.config)
    load_hf(model, folder, name_of("llama", config.model.config))
    assert torch.equal(model.output.weight, first)
    # safetensors' save_model writes a tied weight once, under the name that is first by the alphabet.
    _rewrite(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    model = llama.Model(config.model.config)
    load_hf(model, folder, name_of("llama", config.model.config))
    assert torch.equal(model.output.weight, first)
    _rewrite(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": first.clone()}))
    other = first.clone()
    other[-1, -1] += 1
    for wrong in (other, first[:-1].clone()):
        _rewrite(folder, lambda tensors, wrong=wrong: tensors.update({"lm_head.weight": wrong}))
        assert refused(load_hf, model, folder, name_of("llama", config.model.config)) == [
            f"{folder}: lm_head.weight is not model.embed_tokens.weight, so that transformers ties"
            " nothing; set tie_word_embeddings to false"
        ]


def test_adapters_beside_the_weights_are_not_passed_over(tmp_path: Path) -> None:
    """transformers loads both."""
    folder = tmp_path / "hf"
    save_model(folder, MODELS["tied"])
    (folder / "adapter_config.json").write_text("{}")
    config = make_config(1, **MODELS["tied"])
    model = llama.Model(config.model.config)
    assert refused(load_hf, model, folder, name_of("llama", config.model.config)) == [
        f"{folder}: adapter_config.json has adapters beside the weights; merge them, or move them out"
    ]


def test_one_file_comes_before_shards(tmp_path: Path) -> None:
    """transformers does so too, where both are in a folder."""
    write_files(tmp_path, [PlannedTensor("tensor.0", (2,), torch.float32)], [torch.ones(2)], 100)
    _index_of(tmp_path, ["old.safetensors"])
    assert TensorFiles(tmp_path).entries.keys() == {"tensor.0"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "{}: is a model with n_layers = 2, not 5"),
        (
            ["--model.n_layers=2", "--model.rope_theta=7.0"],
            "{}: is a model with rope_theta = 10000.0, not 7.0",
        ),
        (["--checkpoint.load_hf=gone"], "gone: no such folder"),
        (["--model.n_layers=2"], "{}/model-00002-of-00008.safetensors: is missing"),
    ],
)
def test_a_run_says_at_once_what_is_wrong(tmp_path: Path, change: list[str], message: str) -> None:
    folder = tmp_path / "hf"
    save_model(folder, {"model__dim": 128, "model__hidden_dim": 384})
    if "missing" in message:
        (folder / "model-00002-of-00008.safetensors").unlink()
    file = str(ROOT / "train.toml")
    words = [file, f"--checkpoint.load_hf={folder}", f"--run.dir={tmp_path / 'run'}", *change]
    assert refused(parse, words, "train.py", trains=True) == [
        f"{file}: checkpoint.load_hf: {message.format(folder)}"
    ]


def _index_of(folder: Path, names: list[object]) -> None:
    """A Hugging Face folder whose index maps a tensor to each of ``names``."""
    folder.mkdir(exist_ok=True)
    places = {f"tensor.{i}": name for i, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../other/model.safetensors", "weight_map: {} is no file's name"),
        ("/{other}/model.safetensors", "weight_map: {} is no file's name"),
        ("sub/model.safetensors", "weight_map: {} is no file's name"),
        ("..\\other\\model.safetensors", "weight_map: {} is no file's name"),
        ("..", "weight_map: {} is no file's name"),
        ("", "weight_map: {} is no file's name"),
        ("a\0b", "weight_map: {} is no file's name"),
        (5, "weight_map.tensor.0: expected a string, got 5"),
    ],
)
def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path, name: object, words: str) -> None:
    other = tmp_path / "other"
    (other / "sub").mkdir(parents=True)
    for folder in (other, other / "sub"):
        write_files(folder, [PlannedTensor("tensor.0", (2,), torch.float32)], [torch.ones(2)], 100)
    (other / "model.safetensors").rename(other / "moved")
    shown = name.format(other=other) if isinstance(name, str) else name
    _index_of(other, [shown])
    assert refused(TensorFiles, other) == [f"{other / INDEX}: {words.format(json.dumps(shown))}"]


def test_links_out_of_the_folder_are_refused_and_those_of_the_hub_are_not(tmp_path: Path) -> None:
    """The hub's client lays a model out as links to blobs, two folders up."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1f", tmp_path / "models--a--b/blobs"
    save_model(tmp_path / "hf", MODELS["llama"])
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted((tmp_path / "hf").iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(i))
    keys = MODELS["llama"] | {"checkpoint__load_hf": snapshot}
    job = make_job(1, **keys)
    fill_weights(copy.deepcopy(job.model), job, torch.device("cpu"))
    for name in ("config.json", INDEX, "model-00001-of-00002.safetensors"):
        before = os.readlink(snapshot / name)
        (snapshot / name).unlink()
        secret = tmp_path / name
        secret.write_bytes(b"{}")
        (snapshot / name).symlink_to(secret)
        with pytest.raises(ConfigError, match=r"is a link that leads out of its folder") as caught:
            fill_weights(copy.deepcopy(job.model), job, torch.device("cpu"))
        assert str(snapshot / name) in str(caught.value)
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(before)


def test_a_tensor_in_two_files_and_a_pipe_are_named(tmp_path: Path) -> None:
    one = [PlannedTensor("tensor.0", (2,), torch.float32)]
    for name in ("a.safetensors", "b.safetensors"):
        write_files(tmp_path, one, [torch.ones(2)], 100)
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    os.mkfifo(tmp_path / "c.safetensors")
    (tmp_path / "d.safetensors").mkdir()
    _index_of(tmp_path, [f"{letter}.safetensors" for letter in "abcd"])
    assert refused(TensorFiles, tmp_path) == [
        f"{tmp_path}/b.safetensors: holds tensor.0, which a.safetensors holds too",
        f"{tmp_path}/c.safetensors: is no file",
        f"{tmp_path}/d.safetensors: is no file",
    ]
