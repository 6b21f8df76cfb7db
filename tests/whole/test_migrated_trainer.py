"""transformers' Trainer and the TOML that migrate makes of its arguments take the same steps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compose.config.toml import load
from compose.data.datasets import open_data, training_batches
from tests.support.command_lines import answered, execute

STEPS, LENGTH, WORDS = 20, 32, 64
ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 5,
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}


def by_trainer(folder: Path, samples: list[list[int]]) -> list[float]:
    """The losses of transformers' Trainer, which takes the samples in their order."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = [{"input_ids": ids, "labels": ids} for ids in samples]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, disable_tqdm=True, **ARGUMENTS
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(rows)  # type: ignore[arg-type]

    trainer = InOrder(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
def test_20_steps_of_the_trainer(tmp_path: Path) -> None:
    transformers.set_seed(1)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SHAPE)  # type: ignore[arg-type]
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    generator = np.random.default_rng(0)
    count = STEPS * 8
    # Of one sample more, the last token is the target of the one before.
    tokens = generator.integers(0, WORDS, count * LENGTH + 1).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    given = {**ARGUMENTS, "model_name_or_path": str(tmp_path / "model"), "seed": 0}
    given |= {"train_file": "tokens.bin", "max_seq_length": LENGTH, "output_dir": str(tmp_path / "run")}
    (tmp_path / "arguments.json").write_text(json.dumps(given))
    words = ["-m", "compose", "migrate", str(tmp_path / "arguments.json"), "--world-size=1"]
    done = answered(*words)
    assert done.returncode == 0, done.stderr
    (tmp_path / "train.toml").write_text(done.stdout)
    done = execute("train.py", str(tmp_path / "train.toml"), f"--data.path={tmp_path / 'tokens.bin'}")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ours = [json.loads(line)["loss"] for line in lines]

    run = load(str(tmp_path / "train.toml"), [("data.path", str(tmp_path / "tokens.bin"))])
    batches = training_batches(run, open_data(run))
    samples = []
    for step in range(STEPS):
        batch = batches.batch(step * 8)
        samples += torch.cat([batch["tokens"], batch["targets"][:, -1:]], 1).tolist()
    theirs = by_trainer(tmp_path, samples)
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-5)
