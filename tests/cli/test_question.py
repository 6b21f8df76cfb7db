"""A question in one line: its devices, its model, its tokens and its batch."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from compose.cli import COMMANDS
from compose.cli.command_line import read_words
from compose.cli.question import (
    STANDARD,
    _check_kinds,
    amount,
    amount_in_words,
    default_batch,
    gpus,
    model_keys,
    parameters,
    question_words,
    read_question,
)
from compose.config.models import find_model, model_names
from compose.config.toml import without_file
from compose.planner.cluster import Cluster, cluster_names, load_cluster
from models.llama import PRESETS
from models.llama.hf import hf_config
from tests.support.helpers import ROOT, refusal

CLUSTERS = f"known: {', '.join(cluster_names())}; or the path of a .toml file"


def ask(words: str) -> Any:
    """Read a command line of plan."""
    return read_question(read_words(words.split(), COMMANDS["plan"].flags))


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("16xa100_40gb", "a100_40gb", 16),
        ("8xA100", "a100_80gb", 8),
        ("512xh100", "h100_sxm", 512),
        ("2x4090", "rtx4090", 2),
        ("1xh200", "h200", 1),
        ("8x./my.toml", "./my.toml", 8),
    ],
)
def test_devices(text: str, name: str, count: int) -> None:
    assert gpus(text) == (name, count)


def test_two_kinds_of_device() -> None:
    question = ask("--model 1b --gpus 8xh100+16xa100_80gb")
    assert [(one.name, ranks) for one, ranks in question.kinds] == [("h100_sxm", 8), ("a100_80gb", 16)]
    assert (question.world_size, question.cluster.name) == (24, "8xh100_sxm+16xa100_80gb")
    assert not ask("--model 1b --gpus 8xh100").kinds


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "8xh100+8x4090",
            "rtx4090 has nodes of 2 devices for nccl, and h100_sxm of 8 for nccl; they should be equal",
        ),
        (
            "4xh100+8xa100",
            "4xh100_sxm is no whole number of nodes of 8, as kinds of devices side by side need",
        ),
        ("8xh100+", " is no number of devices of a cluster, as 16xa100_40gb"),
    ],
)
def test_kinds_that_are_no_cluster(text: str, line: str) -> None:
    assert refusal(ask, f"--model 1b --gpus {text}") == f"command line: --gpus: {line}"


def test_three_kinds_share_one_type() -> None:
    """Those that share types in pairs alone are refused."""

    def kind(name: str, *types: str) -> tuple[Cluster, int]:
        cluster = load_cluster("h100_sxm")
        peaks = {one: cluster.device.peak[one] for one in types}
        return replace(cluster, name=name, device=replace(cluster.device, peak=peaks)), 8

    pairs = (kind("a", "bfloat16", "float32"), kind("b", "bfloat16"), kind("c", "float32"))
    problem = "command line: --gpus: c and a have no type in common"
    assert refusal(_check_kinds, pairs) == problem


# The number of parameters of each, in billions, as published.
SIZES = {
    "1b": 1.24,
    "3b": 3.21,
    "7b": 6.74,
    "8b": 8.03,
    "10b": 10.2,
    "13b": 13.0,
    "30b": 32.5,
    "33b": 32.5,
    "65b": 65.3,
    "70b": 70.6,
    "175b": 175.0,
    "405b": 406.0,
}


@pytest.mark.parametrize("name", STANDARD)
def test_standard_sizes(name: str) -> None:
    assert parameters(without_file(model_keys(name))) / 1e9 == pytest.approx(SIZES[name], rel=0.005)


@pytest.mark.parametrize(
    ("text", "name", "preset"),
    [
        ("deepseek:671b", "deepseek_v3", "671b"),
        ("mixtral:8x7b", "mixtral", "8x7b"),
        ("gpt-oss:20b", "gpt_oss", "20b"),
        ("30b_a3b", "qwen3", "30b_a3b"),
        ("llama:8B", "llama", "8b"),
    ],
)
def test_presets(text: str, name: str, preset: str) -> None:
    model = without_file(model_keys(text)).model
    assert (model.name, model.config) == (name, find_model(name).presets[preset])


def test_every_preset_can_be_asked_for() -> None:
    for name in model_names():
        for preset in find_model(name).presets:
            assert dict(model_keys(f"{name}:{preset}"))["model.preset"] == preset


@pytest.mark.parametrize("file", ["", "/config.json"])
def test_a_folder_of_hugging_face(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(PRESETS["3b"])))
    model = without_file(model_keys(f"{tmp_path}{file}")).model
    assert (model.name, asdict(model.config)) == ("llama", asdict(PRESETS["3b"]))


@pytest.mark.parametrize(
    ("count", "seq_len", "devices", "samples"),
    [
        (124e6, 1024, 4, 512),
        (1.2e9, 4096, 8, 256),
        (13e9, 4096, 16, 1024),
        (405e9, 4096, 16_384, 4096),
        (7e9, 4096, 24, 960),  # a multiple of 8 for each device
        (7e9, 4096, 1536, 768),  # the nearest that divides the devices
        (7e9, 4096, 1031, 1031),  # a prime number of them
        (7e9, 2**23, 8, 1),
    ],
)
def test_the_batch_that_is_not_given(count: float, seq_len: int, devices: int, samples: int) -> None:
    assert default_batch(count, seq_len, devices) == samples
    assert samples % devices == 0 or devices % samples == 0


def test_a_question_is_a_config() -> None:
    words = "--model 13b --gpus 16xa100_40gb --train.seq_len=1024 --batch 64,128 --parallel.tp=2"
    question = ask(words)
    config = question.config
    assert (config.model.config.dim, config.precision.param, config.precision.reduce) == (
        5120,
        "bfloat16",
        "float32",
    )
    assert (config.train.seq_len, config.train.global_batch, config.parallel.tp) == (1024, 64, 2)
    assert (question.batches, question.world_size, question.cluster.node) == ((64, 128), 16, 8)
    assert "64 samples a step" in question.words


@pytest.mark.parametrize(
    ("count", "words"), [(8.03e9, "8.03B"), (671e9, "671B"), (1.0267e12, "1.027T")]
)
def test_sizes_in_words(count: float, words: str) -> None:
    config = ask("--model llama:debug --gpus 1xh100").config
    assert question_words("it", count, config, batch_given=True).startswith(f"it: {words} parameters ")


def test_a_file_on_devices_in_short() -> None:
    question = ask(f"{ROOT / 'train.toml'} --gpus 8x4090 --seq-len 512 --batch 32 --parallel.tp=2")
    train = question.config.train
    assert (question.cluster.name, question.world_size) == ("rtx4090", 8)
    assert (train.seq_len, train.global_batch, train.micro_batch) == (512, 32, 2)
    assert (question.given["train.seq_len"], question.keys) == ("command line", ())


def test_a_table_of_positions_bounds_a_sample() -> None:
    assert ask("--model gpt2:124m --gpus 4x4090").config.train.seq_len == 1024
    long = ask("--model 175b --gpus 64xh100 --seq-len 4096").config
    assert (long.train.seq_len, long.model.config.max_seq_len) == (4096, 4096)


@pytest.mark.parametrize(
    ("text", "tokens"), [("1T", 1e12), ("300B", 3e11), ("2.5b", 2.5e9), ("15e12", 15e12), ("7", 7.0)]
)
def test_amounts(text: str, tokens: float) -> None:
    assert amount(read_words([f"--tokens={text}"], COMMANDS["plan"].flags), "--tokens") == tokens


def test_amounts_in_words() -> None:
    assert [amount_in_words(n) for n in (1e12, 3e11, 4_194_304, 512)] == ["1T", "300B", "4.194M", "512"]


GPUS = "command line: --gpus:"
MODEL = "command line: --model:"
BAD = {
    "--model 7b": "command line: plan: needs --gpus, as 16xa100_40gb, or --cluster and --world-size",
    "--model 7b --gpus 16": f"{GPUS} 16 is no number of devices of a cluster, as 16xa100_40gb",
    "--model 7b --gpus 0xh100": f"{GPUS} 0xh100 is no number of devices of a cluster, as 16xa100_40gb",
    "--model 7b --gpus h100": f"{GPUS} h100 is no number of devices of a cluster, as 16xa100_40gb",
    "--model 7b --gpus 8xv100": f"{GPUS} v100 is no cluster; did you mean h100? ({CLUSTERS})",
    "--model 7b --gpus 8xa10": f"{GPUS} a10 is no cluster; it may be a100_40gb or a100_80gb"
    f" ({CLUSTERS})",
    "--gpus 8xh100 --world-size 8": f"{GPUS} takes the place of --world-size; give one of them",
    "train.toml --model 7b --gpus 8xh100": f"{MODEL} takes the place of train.toml; give one of them",
    "--model 34b --gpus 8xh100": f"{MODEL} 34b is no model; did you mean 33b? (known:"
    f" {', '.join(STANDARD)}; a preset, as mixtral:8x7b; or a folder with Hugging Face's config.json)",
    "--model mixtral --gpus 8xh100": f"{MODEL} mixtral names no preset of mixtral (known:"
    " mixtral:8x7b, mixtral:8x22b)",
    "--model gpt_oss:12b --gpus 8xh100": f"{MODEL} gpt_oss:12b names no preset of gpt_oss; did you"
    " mean 120b? (known: gpt_oss:20b, gpt_oss:120b)",
    "--model 4b --gpus 8xh100": f"{MODEL} 4b is a preset of several models; say gemma3:4b or qwen3:4b",
    "--model a/shape.json --gpus 8xh100": f"{MODEL} a/shape.json should be a config.json, or a folder"
    " with one",
    "--model 7b --gpus 8xh100 --batch 256,many": "command line: --batch: 256,many is no number of"
    " samples a step, as 512 or 256,512,1024",
    "--model 7b --gpus 8xh100 --seq-len 0": "command line: --seq-len: 0 is not a number of tokens",
}


@pytest.mark.parametrize(("words", "line"), BAD.items())
def test_bad_questions(words: str, line: str) -> None:
    assert refusal(ask, words) == line


@pytest.mark.parametrize("text", ["many", "1X", "0", "-1T", "nan", "inf"])
def test_bad_amounts(text: str) -> None:
    given = read_words([f"--tokens={text}"], COMMANDS["plan"].flags)
    assert refusal(amount, given, "--tokens") == (
        f"command line: --tokens: {text} is not a number above 0, as 15e12 or 1T"
    )
