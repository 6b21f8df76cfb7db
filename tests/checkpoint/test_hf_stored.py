"""Formats of few bits: read as specified and by transformers, by any region; or refused by name."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compose.__main__ import main
from compose.checkpoint.hf_conversion import export
from compose.checkpoint.hf_folder import HfName, fill_shard, load_hf, name_of
from compose.checkpoint.hf_stored import Named, Stored, dequantized, stored
from compose.checkpoint.local_shards import LocalShard
from compose.checkpoint.safetensors_files import TensorFiles
from compose.config.hugging_face import find_hf
from models import deepseek_v3, gpt_oss, llama
from tests.support.checkpoints import loaded
from tests.support.helpers import Keys, make_config, parallel, ranks_in, refused
from tests.support.hugging_face import MODELS, assert_same, read_tensors, save_model, write_tensors
from tests.support.pool import Pool
from tests.support.transformers_models import as_files, published, randomize

CONFIG = gpt_oss.Config(
    vocab_size=91, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, n_experts=3, top_k=2, expert_dim=96
)
EXPERTS = "model.layers.{}.mlp.experts."


def draw(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a tensor of this shape."""
    generator = torch.Generator().manual_seed(seed)
    groups = (*shape[:-1], -(-shape[-1] // 32))
    blocks = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 128, groups, generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_values_are_those_of_the_table() -> None:
    """Section 5.3.3 of the specification, and 5.4.1 for scales."""
    ascending = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = ascending + [-value for value in ascending]
    blocks = torch.tensor([[low + 16 * (15 - low) for low in range(16)]])
    expected = [value for pair in zip(table, table[::-1], strict=True) for value in pair]
    for scale, factor in ((127, 1.0), (128, 2.0), (120, 2.0**-7), (1, 2.0**-126), (0, 2.0**-127)):
        result = dequantized(blocks.to(torch.uint8), torch.tensor([scale], dtype=torch.uint8))
        assert result.tolist() == [factor * value for value in expected]
    result = dequantized(blocks.to(torch.uint8), torch.tensor([127], dtype=torch.uint8)).tolist()
    assert math.copysign(1.0, result[1 + 2 * 7]) == -1.0, "8 is the negative zero"
    none = dequantized(blocks.to(torch.uint8), torch.tensor([255], dtype=torch.uint8))
    assert none.isnan().all(), "255 is no number"


def test_equals_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = draw(3, 10, 96)
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(dequantized(blocks, scales).to(dtype).mT, theirs)


def check_regions(folder: Path, place: Stored, whole: Tensor, count: int) -> None:
    """Read regions of a tensor from a folder, and compare them with the whole."""
    files, chance = TensorFiles(folder), random.Random(0)
    for _ in range(count):
        begins = [chance.randrange(size) for size in whole.shape]
        ends = [chance.randint(b + 1, size) for b, size in zip(begins, whole.shape, strict=True)]
        region = tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))
        part = LocalShard(whole.shape, torch.Size(begins), torch.empty_like(whole[region]))
        fill_shard(files, place, part)
        assert torch.equal(part.local, whole[region])


def test_any_region_is_read_by_itself(tmp_path: Path) -> None:
    blocks, scales = draw(5, 7, 70)
    write_tensors(tmp_path, {"w_blocks": blocks, "w_scales": scales})
    whole = dequantized(blocks, scales)[..., :70]
    check_regions(tmp_path, Stored("w", transposed=True, mxfp4=True), whole, 30)


def save_mxfp4(folder: Path) -> dict[str, Tensor]:
    """A folder as OpenAI publishes it; returned is what its files mean, in bfloat16."""
    torch.manual_seed(0)
    model = gpt_oss.Model(CONFIG)
    randomize(model)
    meant = published(dict(model.named_parameters()), name_of("gpt_oss", CONFIG))
    meant = {name: one.bfloat16() for name, one in meant.items()}
    stored = dict(meant)
    for i in range(CONFIG.n_layers):
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            key = EXPERTS.format(i) + name
            blocks, scales = draw(3, rows, columns, seed=i)
            del stored[key]
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            meant[key] = dequantized(blocks, scales).mT.bfloat16()
    write_tensors(folder, stored)
    values = find_hf("gpt_oss").hf_config(CONFIG)
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(values))
    return meant


GATE, DOWN = (EXPERTS.format(1) + name for name in ("gate_up_proj", "down_proj"))
FILE = "model.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            (f"{GATE}_scales", None),
            f"{GATE}_scales is missing, and {FILE} holds gate_up_proj_blocks",
        ),
        ((f"{DOWN}_blocks", None), f"{DOWN}_blocks is missing, and {FILE} holds down_proj_scales"),
        (
            (f"{GATE}_blocks", torch.zeros(3, 192, 2, 8, dtype=torch.uint8)),
            f"{GATE}_blocks in {FILE} is (3, 192, 2, 8), the model's is (3, 192, 2, 16)",
        ),
        (
            (f"{DOWN}_scales", torch.zeros(3, 64, 2, dtype=torch.uint8)),
            f"{DOWN}_scales in {FILE} is (3, 64, 2), the model's is (3, 64, 3)",
        ),
        (
            (f"{DOWN}_scales", torch.zeros(3, 64, 3)),
            f"{DOWN}_scales in {FILE} is F32, not U8",
        ),
        ((DOWN, torch.zeros(3, 96, 64)), f"{DOWN} is not of this model"),
    ],
)
def test_what_is_damaged_is_one_line(
    tmp_path: Path, change: tuple[str, Tensor | None], message: str
) -> None:
    there = tmp_path / "there"
    save_mxfp4(there)
    tensors = read_tensors(there) | dict([change])
    write_tensors(there, {name: one for name, one in tensors.items() if one is not None})
    assert refused(main, ["convert", str(there), str(tmp_path / "run")]) == [f"{there}: {message}"]
    assert not (tmp_path / "run").exists()


def test_layers_with_one_fault_are_one_line(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    tensors = read_tensors(tmp_path)
    for i in range(CONFIG.n_layers):
        del tensors[EXPERTS.format(i) + "down_proj_scales"]
    write_tensors(tmp_path, tensors)
    assert refused(load_hf, gpt_oss.Model(CONFIG), tmp_path, name_of("gpt_oss", CONFIG)) == [
        f"{tmp_path}: model.layers.*.mlp.experts.down_proj_scales is missing, and {FILE} holds"
        " down_proj_blocks (2 of them)"
    ]


def draw_blocks(shape: Sequence[int], sides: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random matrix in e4m3, and the scale of each block."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator) * 100
    grid = [-(-n // side) for n, side in zip(shape, sides, strict=True)]
    return values.to(torch.float8_e4m3fn), torch.rand(*grid, generator=generator) / 100 + 1e-4


def plain_values(values: Tensor, scales: Tensor, sides: tuple[int, int]) -> Tensor:
    """The product, block by block."""
    result = values.float()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = tuple(
                slice(at * side, (at + 1) * side) for at, side in zip((i, j), sides, strict=True)
            )
            result[block] *= float(scales[i, j])
    return result


def quantization(*sides: int) -> dict[str, object]:
    """What DeepSeek-V3's config.json says."""
    form = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    return {"quantization_config": form | {"weight_block_size": list(sides)}}


@pytest.mark.parametrize(
    ("shape", "sides"), [((576, 200), (128, 128)), ((37, 23), (16, 5)), ((3, 300), (128, 128))]
)
def test_any_region_of_blocks_is_read_by_itself(
    tmp_path: Path, shape: tuple[int, int], sides: tuple[int, int]
) -> None:
    values, scales = draw_blocks(shape, sides)
    write_tensors(tmp_path, {})
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(quantization(*sides)))
    whole = plain_values(values, scales, sides)
    check_regions(tmp_path, Stored("w"), whole, 20)
    check_regions(tmp_path, Stored("w", transposed=True), whole.mT, 20)


def save_blocks(
    folder: Path, sides: tuple[int, int], scale: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A DeepSeek-V3 as it is published; returned is what its files mean."""
    save_model(folder, MODELS["deepseek_v3"])
    kept, meant = dict[str, Tensor](), dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(sorted(read_tensors(folder).items())):
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            kept[name] = meant[name] = tensor
            continue
        values, scales = draw_blocks(tensor.shape, sides, seed)
        scales = scales.to(scale)
        kept |= {name: values, f"{name}_scale_inv": scales}
        meant[name] = plain_values(values, scales.float(), sides)
    write_tensors(folder, {})
    save_file(kept, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | quantization(*sides)
    (folder / "config.json").write_text(json.dumps(values))
    return meant


@pytest.mark.parametrize(
    "mesh",
    [
        parallel(dp_shard=2, tp=2),
        parallel(pp=2, tp=2, ep=2),
        parallel(dp_shard=2, ep=4, tp=2),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_cut_model_is_filled_from_blocks(pool: Pool, tmp_path: Path, mesh: Keys) -> None:
    """Blocks of 7 x 5 divide no side, and ranks begin within them; each rank reads its part alone."""
    meant = save_blocks(tmp_path / "hf", (7, 5))
    keys = MODELS["deepseek_v3"] | {"checkpoint__load_hf": tmp_path / "hf"}
    names = name_of("deepseek_v3", make_config(1, **keys).model.config)
    for result, read, share in pool.run(loaded, ranks_in(mesh), keys | mesh):
        assert_same(as_files(place_of(result, names)), meant)
        # A byte for each element in place of 4, but for the rest of the weights, and the scales.
        assert read < share


def place_of(state: dict[str, Tensor], names: HfName) -> list[Named]:
    """A state's tensors with their places in files."""
    model = {name.removeprefix("model."): value for name, value in state.items()}
    return [
        (name, stored(names(name)), value)
        for name, value in model.items()
        if "router" not in name or name.endswith(("gate.weight", "router.bias"))
    ]


@pytest.mark.parametrize(
    ("save", "dtype"),
    [
        (save_mxfp4, torch.bfloat16),
        (lambda folder: save_blocks(folder, (128, 128), torch.bfloat16), torch.float32),
    ],
    ids=["mxfp4", "blocks"],
)
def test_a_published_folder_is_imported_and_exported(
    tmp_path: Path, save: Callable[[Path], dict[str, Tensor]], dtype: torch.dtype
) -> None:
    """Scales may have another type; config.json has no quantization afterwards."""
    there, run, back = tmp_path / "there", tmp_path / "run", tmp_path / "back"
    meant = save(there)
    assert main(["convert", str(there), str(run)]) == 0
    export(run / "checkpoints/step-00000000", back, dtype=dtype)
    assert_same(read_tensors(back), meant)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_a_run_loads_a_published_folder_itself(tmp_path: Path) -> None:
    meant = save_mxfp4(tmp_path)
    model, names = gpt_oss.Model(CONFIG), name_of("gpt_oss", CONFIG)
    load_hf(model, tmp_path, names)
    loaded = published(dict(model.named_parameters()), names)
    assert_same({name: one.bfloat16() for name, one in loaded.items()}, meant)


def test_blocks_equal_those_of_transformers(tmp_path: Path) -> None:
    """It reads sides that the blocks divide, and takes the values in bfloat16."""
    config = llama.Config(vocab_size=96, dim=128, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=256)
    model, names = llama.Model(config), name_of("llama", config)
    randomize(model)
    tensors = dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(published(dict(model.named_parameters()), names).items()):
        tensors[name] = tensor.detach()
        if name.endswith("_proj.weight"):
            values, scales = draw_blocks(tensor.shape, (64, 32), seed)
            tensors |= {name: values, f"{name}_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    values = find_hf("llama").hf_config(config) | quantization(64, 32)
    (tmp_path / "config.json").write_text(json.dumps(values))
    load_hf(model, tmp_path, names)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert_same(published(dict(model.named_parameters()), names), theirs)


PROJ = "model.layers.0.self_attn.o_proj.weight"
SCALE = f"{PROJ}_scale_inv"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DAMAGED: list[tuple[str, Tensor | None, str]] = [
    (SCALE, None, f"{SCALE} is missing, and {FILE} holds {PROJ} in F8_E4M3"),
    (SCALE, torch.ones(3, 3), f"{SCALE} is (3, 3), blocks of (16, 8) need (2, 8)"),
    (SCALE, torch.ones(2, 8).int(), f"{SCALE} is I32, not one of F32, BF16, F16"),
    (PROJ, torch.ones(32, 64).to(E5M2), f"{PROJ} is F8_E5M2, not one of F32, BF16, F16"),
    (
        "model.norm.weight",
        torch.ones(32).to(E4M3),
        "model.norm.weight is F8_E4M3 of shape (32,); only matrices are read from it",
    ),
    ("x.weight_scale_inv", torch.ones(1), "x.weight_scale_inv is not of this model"),
]


def test_damaged_blocks_are_one_line(tmp_path: Path) -> None:
    save_blocks(tmp_path, (16, 8))
    whole, path = read_tensors(tmp_path), tmp_path / "config.json"
    config = make_config(1, **MODELS["deepseek_v3"]).model.config
    model, names = deepseek_v3.Model(config), name_of("deepseek_v3", config)
    for name, value, message in DAMAGED:
        without = SCALE if name == PROJ else ""
        tensors = {k: v for k, v in (whole | {name: value}).items() if v is not None and k != without}
        save_file(tensors, tmp_path / "model.safetensors")
        assert refused(load_hf, model, tmp_path, names) == [f"{tmp_path}: {message}"]
    save_file(whole, tmp_path / "model.safetensors")
    values = json.loads(path.read_text())
    for given, message in (
        ({}, "quantization_config: is missing"),
        (
            quantization(0, 8),
            "quantization_config.weight_block_size[0]: 0 should be greater than or equal to 1",
        ),
    ):
        del values["quantization_config"]
        path.write_text(json.dumps(values | given))
        values["quantization_config"] = {}
        assert refused(load_hf, model, tmp_path, names) == [f"{path}: {message}"]
