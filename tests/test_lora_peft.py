"""LoRA against peft: the same training on one process, and the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compose.__main__ import main
from compose.build import build_optimizer, fill_weights
from compose.huggingface.folder import find_hf, name_of
from compose.huggingface.peft_files import CONFIG, named_adapters
from tests.helpers import Keys, make_job
from tests.hugging_face import save_model
from tests.lora import ALL, lora
from tests.training import keys_for, lines, train

SHAPE: Keys = {"model__dim": 48, "model__n_heads": 6, "model__n_kv_heads": 2, "model__hidden_dim": 90}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face's folder of a Llama, every value another, of the size that weights have."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    save_model(folder, SHAPE)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        scaled = {n: 1 + t / 9 if t.ndim == 1 else t / 9 for n, t in tensors.items()}
        save_file(scaled, path, {"format": "pt"})
    return folder


def in_peft(base: Path, rank: int, alpha: float) -> Any:
    """peft's model of ``base``, with adapters at all linear layers but the output."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = AutoModelForCausalLM.from_pretrained(base)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules))


def test_training_equals_peft(base: Path) -> None:
    """20 steps of AdamW from the same adapters: losses and adapters differ by rounding alone."""
    torch.manual_seed(0)
    keys = SHAPE | lora(3, alpha=5) | {"checkpoint__load_hf": base}
    job = make_job(1, **keys, optimizer__lr=1e-2)
    model: Any = job.model
    fill_weights(model, job, torch.device("cpu"))
    reference = in_peft(base, 3, 5.0)
    theirs = dict(reference.named_parameters())
    ours = dict(named_adapters(model, name_of("llama", job.config.model.config)))
    trained = {n.replace(".default", "") for n, p in theirs.items() if p.requires_grad}
    assert set(ours) == trained
    with torch.no_grad():
        for name, parameter in ours.items():
            theirs[name.replace(".weight", ".default.weight")].copy_(parameter)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    steps = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], **options)
        for each in (model, reference)
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        tokens = torch.randint(257, (2, 33), generator=generator)
        losses = []
        for optimizer, logits_of in zip(steps, (model, lambda t: reference(t).logits), strict=True):
            logits = logits_of(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, parameter in ours.items():
        other = theirs[name.replace(".weight", ".default.weight")]
        assert float((parameter - other).norm() / other.norm()) < 1e-6, name
