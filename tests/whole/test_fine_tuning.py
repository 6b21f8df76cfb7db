"""Supervised fine-tuning, from weights that transformers made to what transformers opens."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from compose.__main__ import main
from compose.config.tables import Data
from compose.data.samples import open_samples
from tests.support.command_lines import execute
from tests.support.data_made import chats
from tests.support.tokenizers_made import save_tokenizer
from tests.support.training import lines, mean_loss

RECIPE = "recipes/llama_tiny_sft_cpu.toml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder, and chats that its tokenizer has made ids of."""
    folder = tmp_path_factory.mktemp("sft")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        initializer_range=0.2,  # so that the loss is not the logarithm of the vocabulary
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokenizer = save_tokenizer(folder / "model")
    source = chats(folder / "chats.jsonl", 60)
    words = ["--chat", "--workers=1", "--tokenizer", str(tokenizer), "--out", str(folder / "set")]
    assert main(["tokenize", *words, str(source)]) == 0
    return folder / "model", folder / "set"


@pytest.mark.slow
def test_a_model_of_transformers_is_fine_tuned(made: tuple[Path, Path], tmp_path: Path) -> None:
    """The first step's loss is that of transformers, conversation by conversation; after training the
    export has learnt the replies, as transformers finds."""
    model, data = made
    words = [
        RECIPE,
        f"--checkpoint.load_hf={model}",
        f"--data.path={data}",
        f"--run.dir={tmp_path}/run",
    ]
    # One step over all the conversations there are, at the weights it began with.
    count = len(open_samples(str(data), Data(), 128, 300))
    whole = [f"--train.{key}_batch={count}" for key in ("global", "micro")] + ["--train.stop_after=1"]
    once = [f"--run.dir={tmp_path}/once", "--checkpoint.interval=0"]
    done = execute("train.py", *words, *whole, *once)
    assert done.returncode == 0, done.stderr
    assert f"{data}:\n  rows {61:>23}\n  replies {60:>20}\n" in done.stdout
    (line,) = lines(tmp_path / "once")
    before = mean_loss(AutoModelForCausalLM.from_pretrained(model), data)
    assert line["epochs"] == {str(data): 1.0}
    assert line["loss"] == pytest.approx(before, rel=2e-6)

    done = execute("train.py", *words)
    assert done.returncode == 0, done.stderr
    assert main(["convert", f"{tmp_path}/run", f"{tmp_path}/exported"]) == 0
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    after = mean_loss(tuned, data)
    assert after < before / 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
