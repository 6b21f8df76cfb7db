"""Hugging Face's weights: into a model on any mesh, into a checkpoint and out of one, bit for bit."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from compose.__main__ import main
from compose.build import build, fill
from compose.checkpoint.exchange import export
from compose.checkpoint.parts import part_of
from compose.checkpoint.state import named_tensors
from compose.cli import parse
from compose.errors import ConfigError
from compose.hugging_face import find_hf, load_hf, name_of, published
from compose.registry import build_model, model_names
from compose.safetensors_files import INDEX, Planned, TensorFiles, write_files
from compose.verify import whole
from models import deepseek_v3, llama, qwen3
from tests.helpers import ROOT, make_config
from tests.pool import Pool, make_mesh
from tests.test_checkpoint import MESHES, train
from tests.test_expert_parallel import DEEPSEEK, QWEN
from tests.test_moe_transformers import QWEN3 as QWEN3_MOE
from tests.test_moe_transformers import YARN
from tests.test_qwen3 import ODD as QWEN3
from tests.test_trainer import _train as train_steps
from tests.test_trainer import keys_for, lines

LLAMA = llama.Config(vocab_size=91, dim=48, n_layers=3, n_heads=6, n_kv_heads=2, hidden_dim=71)
FOLDERS: dict[str, ModuleType] = {"llama": llama, "qwen3": qwen3, "deepseek_v3": deepseek_v3}
DEEPSEEK_V2 = dataclasses.replace(
    YARN,
    kv_rank=18,  # transformers views a row as complex numbers
    q_rank=0,
    scoring="softmax",
    normalize_weights=False,
    n_groups=1,
    top_groups=1,
    rope_mscale=0.707,
    rope_mscale_all_dim=0.707,
    bias_rate=0.0,
)
FAMILIES: dict[str, tuple[str, Any]] = {
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
    "deepseek_v3": ("deepseek_v3", YARN),
    "deepseek_v2": ("deepseek_v3", DEEPSEEK_V2),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_config_json_round_trips(name: str) -> None:
    hf = find_hf(name)
    for preset, config in FOLDERS[name].PRESETS.items():
        assert hf.config_from_hf(json.loads(json.dumps(hf.hf_config(config)))) == config, preset


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "llama",
            {"attention_bias": True},
            "attention_bias: true cannot be expressed here, only false",
        ),
        ("llama", {"head_dim": 9}, "head_dim: 9 cannot be expressed here, only 16"),
        ("llama", {"hidden_size": None}, "hidden_size: is missing"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            'rope_scaling: {"type": "linear", "factor": 2.0} cannot be expressed here',
        ),
        (
            "qwen3",
            {"use_sliding_window": True},
            "use_sliding_window: true cannot be expressed here, only false",
        ),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            'quantization_config: {"quant_method": "fp8"} cannot be expressed here',
        ),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            'topk_method: "greedy" cannot be expressed here, only "noaux_tc"',
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    hf = find_hf(name)
    values = hf.hf_config(FOLDERS[name].PRESETS["debug"])
    with pytest.raises(ValueError, match=r".") as caught:
        hf.config_from_hf(values | change)
    assert str(caught.value) == message


def test_every_model_has_the_names() -> None:
    for name in model_names():
        assert find_hf(name).MODEL_TYPES


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What transformers saved, in several files, comes back as it was, and transformers opens it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, config = FAMILIES[family]
    there, run, back = tmp_path / "there", tmp_path / "run", tmp_path / "back"
    torch.manual_seed(0)
    options: Any = {"experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**find_hf(name).hf_config(config)), **options
    ).eval()
    with torch.no_grad():
        for tensor in [*reference.parameters(), *reference.buffers()]:
            if tensor.is_floating_point() and tensor.ndim != 1:
                tensor.normal_(std=0.2)
        for key, buffer in reference.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    reference.save_pretrained(there, max_shard_size="60KB")
    assert (there / INDEX).exists()
    (there / "tokenizer_config.json").write_text('{"model_max_length": 7}')

    assert main(["convert", str(there), str(run)]) == 0
    done = export(run / "checkpoints/step-00000000", back, shard_bytes=50_000)
    assert done.files == len(list(back.glob("*.safetensors"))) > 1
    assert capsys.readouterr().out.startswith(f"{run}/checkpoints/step-00000000: ")
    _same(_tensors(back), _tensors(there))
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
        found = ours.eval()(tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def _save(folder: Path, keys: dict[str, object], dtype: torch.dtype = torch.float32) -> None:
    """A Hugging Face folder of the model of ``keys``, every value another."""
    config = make_config(1, **keys)
    model, _ = build_model(config)
    fill(model, config, torch.device("cpu"))
    planned: list[Planned] = []
    tensors: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for _, theirs, tensor in published(model, name_of(config.model.name, config.model.config)):
        values = torch.randn(tensor.shape, generator=generator)
        for i, part in enumerate(values if "{}" in theirs else [values]):
            planned.append(Planned(theirs.format(i), tuple(part.shape), dtype))
            tensors.append(part.to(dtype))
    folder.mkdir()
    write_files(folder, planned, tensors, 300_000)
    values = find_hf(config.model.name).hf_config(config.model.config)
    (folder / "config.json").write_text(json.dumps(values))


def _loaded(keys: dict[str, object]) -> tuple[dict[str, Tensor], int, int]:
    """On every rank: (the whole model's state, bytes that were read, bytes that this rank holds)."""
    config = make_config(dist.get_world_size(), **keys)
    mesh = make_mesh(config.parallel)
    read, count = TensorFiles.read, 0

    def counted(self: TensorFiles, name: str, box: Any) -> Tensor:
        nonlocal count
        value = read(self, name, box)
        count += value.nbytes
        return value

    with mock.patch.object(TensorFiles, "read", counted):
        model = build(config, mesh, torch.device("cpu"))
    share = sum(part_of(parameter).local.nbytes for parameter in model.parameters())
    named = named_tensors(model, None)
    mine: dict[str, Tensor] = {}
    for name, copies in named.items():
        mine[name], *others = [whole(copy) for copy in copies]
        assert all(torch.equal(other, mine[name]) for other in others)
    everyone: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: value for part in everyone for name, value in part.items()}, count, share


MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "tied": {"model__tie_embeddings": True, "model__n_layers": 3},
    "qwen3": QWEN | {"model__n_layers": 2},
    "deepseek_v3": DEEPSEEK | {"model__n_layers": 3},
}
CUT: list[tuple[str, dict[str, object]]] = [
    ("llama", {"parallel__dp_shard": 2, "parallel__tp": 2}),
    ("tied", {"parallel__dp_shard": 4, "parallel__tp": 2}),
    ("tied", {"parallel__pp": 2, "parallel__dp_shard": 1, "train__micro_batch": 1}),
    ("qwen3", {"parallel__dp_shard": 2, "parallel__ep": 2}),
    ("deepseek_v3", {"parallel__dp_shard": 2, "parallel__tp": 2, "parallel__ep": 2}),
    ("deepseek_v3", {"parallel__pp": 2, "parallel__tp": 2, "parallel__ep": 2}),
]


@pytest.mark.parametrize(("name", "mesh"), CUT, ids=[f"{n} {list(m.values())}" for n, m in CUT])
def test_a_cut_model_is_filled_alike(
    pool: Pool, tmp_path: Path, name: str, mesh: dict[str, object]
) -> None:
    folder = tmp_path / "hf"
    _save(folder, MODELS[name])
    keys = MODELS[name] | {"checkpoint__load_hf": folder}
    config = make_config(1, **keys)
    one, _ = build_model(config)
    fill(one, config, torch.device("cpu"))
    theirs = _tensors(folder)
    for _, there, tensor in published(one, name_of(config.model.name, config.model.config)):
        parts = [theirs[there.format(i)] for i in range(len(tensor))] if "{}" in there else None
        assert torch.equal(tensor, torch.stack(parts) if parts else theirs[there]), there
    expected = {key: copies[0].detach() for key, copies in named_tensors(one, None).items()}
    ranks = 1
    for axis in ("pp", "dp_shard", "tp"):
        ranks *= int(str(mesh.get(f"parallel__{axis}", 1)))
    for found, read, share in pool.run(_loaded, ranks, keys | mesh):
        _same(found, expected)
        buffers = 4 * config.model.config.n_layers * getattr(config.model.config, "n_experts", 0)
        assert share <= read <= min(share + buffers, 1.1 * share)


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    _save(tmp_path / "hf", {}, torch.bfloat16)
    config = make_config(1, checkpoint__load_hf=tmp_path / "hf")
    model, _ = build_model(config)
    fill(model, config, torch.device("cpu"))
    there = _tensors(tmp_path / "hf")["model.layers.1.mlp.up_proj.weight"]
    found = model.get_parameter("layers.1.feed_forward.w3.weight")
    assert there.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert torch.equal(found, there.float())


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = _tensors(folder)
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink(missing_ok=True)
    change(tensors)
    planned = [Planned(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]
    write_files(folder, planned, tensors.values(), 300_000)


def test_all_that_does_not_fit_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    keys = MODELS["deepseek_v3"]
    _save(folder, keys)

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
    with pytest.raises(ConfigError) as caught:
        load_hf(model, folder, name_of("deepseek_v3", config.model.config))
    assert sorted(caught.value.problems) == [
        f"{folder}: lm_head.weight is (32, 257), the model's is (257, 32)",
        f"{folder}: model.layers.*.mlp.experts.*.up_proj.weight is missing (3 of them)",
        f"{folder}: model.layers.*.self_attn.o_proj.bias is not of this model (3 of them)",
        f"{folder}: model.layers.1.mlp.experts.2.down_proj.weight is (32, 23), the model's is (32, 24)",
        f"{folder}: model.layers.2.mlp.gate.e_score_correction_bias is missing",
        f"{folder}: model.norm.weight is missing",
    ]
    _same(dict(model.named_parameters()), before)


def test_the_second_name_of_a_tied_weight_may_be_there(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    _save(folder, MODELS["tied"])
    _rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(257, 64)}))
    config = make_config(1, **MODELS["tied"])
    model = llama.Model(config.model.config)
    load_hf(model, folder, name_of("llama", config.model.config))
    assert torch.equal(model.output.weight, _tensors(folder)["model.embed_tokens.weight"])


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
    _save(folder, {"model__dim": 128, "model__hidden_dim": 384})
    if "missing" in message:
        (folder / "model-00002-of-00008.safetensors").unlink()
    file = str(ROOT / "train.toml")
    words = [file, f"--checkpoint.load_hf={folder}", f"--run.dir={tmp_path / 'run'}", *change]
    with pytest.raises(ConfigError) as caught:
        parse(words, "train.py", trains=True)
    assert caught.value.problems == [f"{file}: checkpoint.load_hf: {message.format(folder)}"]


@pytest.mark.parametrize(
    ("name", "mesh"), [("tied", "tensor, uneven"), ("deepseek_v3", "experts and pipeline")]
)
def test_what_was_trained_is_exported(pool: Pool, tmp_path: Path, name: str, mesh: str) -> None:
    """The newest checkpoint of a run on eight ranks, as transformers would open it."""
    run, back = tmp_path / "run", tmp_path / "back"
    state = train(pool, run, MODELS[name], MESHES[mesh], 2)
    assert main(["convert", str(run), str(back), "--dtype", "bfloat16"]) == 0
    config, files = make_config(1, **MODELS[name]), _tensors(back)
    model, _ = build_model(config)
    for ours, theirs, tensor in published(model, name_of(config.model.name, config.model.config)):
        kind = torch.bfloat16 if isinstance(tensor, torch.nn.Parameter) else torch.float32
        value = state[f"model.{ours}"].to(kind)
        for i, part in enumerate(value if "{}" in theirs else [value]):
            assert torch.equal(files.pop(theirs.format(i)), part), ours
    assert not files
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_run_begins_with_what_was_imported(pool: Pool, tmp_path: Path) -> None:
    """And takes the steps that one does which loads the same weights itself."""
    folder = tmp_path / "hf"
    _save(folder, {})
    assert main(["convert", str(folder), str(tmp_path / "imported")]) == 0
    keys = {"train__stop_after": 2, "train__global_batch": 4, "parallel__tp": 2}
    pool.run(train_steps, 2, keys_for(tmp_path / "loaded", **keys, checkpoint__load_hf=folder))
    pool.run(train_steps, 2, keys_for(tmp_path / "imported", **keys))
    loaded, imported = lines(tmp_path / "loaded"), lines(tmp_path / "imported")
    assert [line["step"] for line in imported] == [1, 2]
    for a, b in zip(loaded, imported, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


def test_convert_says_what_is_wrong(tmp_path: Path) -> None:
    hf, run, config = tmp_path / "hf", tmp_path / "run", str(ROOT / "train.toml")
    _save(hf, {})
    assert main(["convert", str(hf), str(run)]) == 0
    step = run / "checkpoints/step-00000000"
    other = tmp_path / "other"
    other.mkdir()
    cases: dict[str, list[object]] = {
        "command line: convert: needs SOURCE and TARGET, got 1 folders": [hf],
        "command line: --confg: unknown option; did you mean --config?": [hf, "x", "--confg=a"],
        "command line: --dtype: is for the way to Hugging Face": [hf, "x", "--dtype=float32"],
        "command line: --dtype: int8 is none of float32, bfloat16, float16": [
            run,
            "x",
            "--dtype",
            "int8",
        ],
        "command line: gone: no such folder": ["gone", "x"],
        f"command line: {other}: is neither a checkpoint (manifest.json) nor Hugging Face's folder"
        " (config.json, and model.safetensors or model.safetensors.index.json)": [other, "x"],
        f"{run}: exists already; choose another target": [hf, run],
        f"{other}: exists already; choose another target": [step, other],
        f"{hf}: is a model with n_layers = 2, not 5\n{hf}: is a model with dim = 64, not 128\n"
        f"{hf}: is a model with hidden_dim = 96, not 384": [hf, "x", "--config", config],
    }
    for message, words in cases.items():
        with pytest.raises(ConfigError) as caught:
            main(["convert", *map(str, words)])
        assert sorted(str(caught.value).split("\n")) == sorted(message.split("\n"))
    (hf / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError) as caught:
        main(["convert", str(hf), "x"])
    assert str(caught.value) == (
        f"{hf}/config.json: model_type: 'mamba' is no model here"
        " (known: deepseek_v2, deepseek_v3, llama, qwen3, qwen3_moe)"
    )
    shard = next(step.glob("__*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r": damaged: __0_0\.distcp has [\d,]+ of [\d,]+ bytes$"):
        main(["convert", str(run), "x"])
    assert not Path("x").exists()


PEAK = """
import sys
from compose.__main__ import main

def peak():  # of this program alone, where getrusage has its parent's too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line)

before = peak()
main(["convert", sys.argv[1], sys.argv[2]])
main(["convert", sys.argv[2], sys.argv[3]])
print((peak() - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells of memory on Linux")
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, dim=768, n_layers=6, hidden_dim=3072)
    with torch.device("meta"):
        model = llama.Model(config)
    sizes = {theirs: tuple(p.shape) for _, theirs, p in published(model, name_of("llama", config))}
    planned = [Planned(name, shape, torch.float32) for name, shape in sizes.items()]
    folder = tmp_path / "hf"
    folder.mkdir()
    write_files(folder, planned, (torch.zeros(one.shape) for one in planned), 10**9)
    (folder / "config.json").write_text(json.dumps(find_hf("llama").hf_config(config)))
    words = [sys.executable, "-c", PEAK, folder, tmp_path / "run", tmp_path / "back"]
    # What is freed is given back at once, and does not stay with the program.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    grown = int(done.stdout.splitlines()[-1])
    largest, everything = max(one.nbytes for one in planned), sum(one.nbytes for one in planned)
    assert everything > 20 * largest
    assert grown < 5 * largest
