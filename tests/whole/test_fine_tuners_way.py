"""From a folder and chats of any shape to a folder, with which transformers computes the same.

The models are tiny and random. Each is trained on tp 2 x dp 2, from chats of each shape.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compose.__main__ import main
from tests.support.command_lines import execute
from tests.support.helpers import tier
from tests.support.tokenizers_made import save_tokenizer
from tests.support.training import lines, mean_loss

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 52,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # so that the loss is not the logarithm of the vocabulary
    "tie_word_embeddings": False,
    "bos_token_id": 3,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 10},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {
        "head_dim": 10,
        "sliding_window": 16,
        "query_pre_attn_scalar": 10,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
ASKED = ["2 + ½?", "the user and", "naïve words", "return b", "日本"]
REPLIES = ["a + b", "words, and ½ of them", "def add(a, b)", "user", "assistant and user"]
SHAPES: dict[str, Any] = {
    "messages": lambda asked, reply: {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    },
    "sharegpt": lambda asked, reply: {
        "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": reply}]
    },
    "alpaca": lambda asked, reply: {"instruction": asked, "input": "", "output": reply},
    "prompt": lambda asked, reply: {"prompt": asked, "completion": reply},
    "chosen": lambda asked, reply: {"prompt": asked, "chosen": reply, "rejected": "no"},
}
TARGETS = '["layers.*.attention.w*", "layers.*.feed_forward.w*"]'
LORA = ["--model.lora.rank=3", "--model.lora.alpha=6", f"--model.lora.targets={TARGETS}"]


def base_of(folder: Path, kind: str) -> None:
    """Save a model of transformers with random weights, and a tokenizer with a chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)


def sets_of(folder: Path) -> tuple[dict[str, Path], Path]:
    """A token set of the same chats in each shape, and one of other chats to validate on."""
    results: dict[str, Path] = {}
    for shape in [*SHAPES, "validation"]:
        make = SHAPES.get(shape, SHAPES["messages"])
        chats = [*zip(ASKED, REPLIES, strict=True)]
        chats = [(asked[::-1], reply) for asked, reply in chats] if shape == "validation" else chats
        source, results[shape] = folder / f"{shape}.json", folder / shape
        source.write_text(json.dumps([make(*each) for each in chats * 2]))
        words = [
            "--chat",
            "--workers=1",
            "--tokenizer",
            str(folder / "base"),
            "--out",
            str(results[shape]),
        ]
        flags = [f"--shape={shape}"] if shape == "chosen" else []
        assert main(["tokenize", *words, *flags, str(source)]) == 0
    return results, results.pop("validation")


def content(folder: Path) -> dict[str, bytes]:
    """The files of a token set that a run reads."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=tier(slow=True)) for kind in MODELS])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "base"
    base_of(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path]:
    folder = tmp_path_factory.mktemp("sets")
    save_tokenizer(folder / "base")
    return sets_of(folder)


@pytest.mark.slow
def test_each_shape_gives_the_same_run(sets: tuple[dict[str, Path], Path]) -> None:
    first, *others = (content(each) for each in sets[0].values())
    assert all(each == first for each in others)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_transformers_computes_the_same(
    base: Path, sets: tuple[dict[str, Path], Path], tmp_path: Path, mode: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shapes, validation = sets
    data = shapes["sharegpt" if mode == "full" else "alpaca"]
    file = tmp_path / "train.toml"
    file.write_text('model.preset = "hf"\n')
    run, exported = tmp_path / "run", tmp_path / "exported"
    done = execute(
        *("train.py", str(file)),
        *(f"--checkpoint.load_hf={base}", "--checkpoint.interval=6"),
        *(f"--data.path={data}", f"--data.validation={validation}", f"--run.dir={run}"),
        *("--train.steps=6", "--train.seq_len=48", "--train.global_batch=4", "--train.micro_batch=1"),
        *("--train.validate_every=6", "--optimizer.lr=3e-3", "--optimizer.warmup=1"),
        *("--parallel.tp=2", "--parallel.dp_shard=2", "--run.device=cpu"),
        *(LORA if mode == "lora" else []),
        ranks=4,
    )
    assert done.returncode == 0, done.stderr
    assert main(["convert", str(run), str(exported), *(["--merged"] if mode == "lora" else [])]) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(exported).eval()
    last, tokenizer = lines(run)[-1], AutoTokenizer.from_pretrained(exported)
    assert last["validation_loss"] == pytest.approx(mean_loss(model, validation), rel=1e-6)
    before: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    assert mean_loss(before, validation) > last["validation_loss"] + 0.01

    expected = ""
    for asked in ASKED[:3]:
        prompt: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0].tolist()
        ids, ends = ids[prompt["input_ids"].shape[1] :], model.generation_config.eos_token_id
        stopped = ids[-1] in (ends if isinstance(ends, list) else [ends])
        expected += tokenizer.decode(ids[:-1] if stopped else ids) + "\n"
    flags = [f"--prompt={asked}" for asked in ASKED[:3]]
    done = execute(
        *("-m", "compose", "generate", str(run), "--chat", *flags),
        *("--temperature=0", "--max-tokens=12", "--run.device=cpu"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
