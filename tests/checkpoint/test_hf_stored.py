"""MXFP4: read as the specification says and as transformers does, by any region, or refused by name."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compose.__main__ import main
from compose.checkpoint.hf_conversion import export
from compose.checkpoint.hf_folder import fill_shard, find_hf, load_hf, name_of
from compose.checkpoint.hf_stored import Mxfp4, Stored, dequantized
from compose.checkpoint.local_shards import LocalShard
from compose.checkpoint.safetensors_files import TensorFiles
from models import gpt_oss
from tests.support.helpers import refused
from tests.support.hugging_face import assert_same, read_tensors, write_tensors
from tests.support.transformers_models import published, randomize

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


def test_any_region_is_read_by_itself(tmp_path: Path) -> None:
    blocks, scales = draw(5, 7, 70)
    write_tensors(tmp_path, {"w_blocks": blocks, "w_scales": scales})
    files, whole = TensorFiles(tmp_path), dequantized(blocks, scales)[..., :70]
    rng = random.Random(0)
    for _ in range(30):
        begins = [rng.randrange(size) for size in (5, 7, 70)]
        ends = [rng.randint(b + 1, size) for b, size in zip(begins, (5, 7, 70), strict=True)]
        region = tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))
        part = LocalShard(whole.shape, torch.Size(begins), torch.empty_like(whole[region]))
        fill_shard(files, Stored("w", transposed=True, code=Mxfp4()), part)
        assert torch.equal(part.local, whole[region])


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


def test_a_published_folder_is_imported_and_exported_in_bfloat16(tmp_path: Path) -> None:
    there, run, back = tmp_path / "there", tmp_path / "run", tmp_path / "back"
    meant = save_mxfp4(there)
    assert main(["convert", str(there), str(run)]) == 0
    export(run / "checkpoints/step-00000000", back, dtype=torch.bfloat16)
    assert_same(read_tensors(back), meant)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    # And loaded by a run itself.
    model, names = gpt_oss.Model(CONFIG), name_of("gpt_oss", CONFIG)
    load_hf(model, there, names)
    loaded = published(dict(model.named_parameters()), names)
    assert_same({name: one.bfloat16() for name, one in loaded.items()}, meant)


def test_nothing_is_written_in_it(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "there")
    assert main(["convert", str(tmp_path / "there"), str(tmp_path / "run")]) == 0
    assert refused(
        main, ["convert", str(tmp_path / "run"), str(tmp_path / "back"), "--dtype", "mxfp4"]
    ) == ["command line: --dtype: mxfp4 is none of float32, bfloat16, float16"]


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
