"""Hugging Face folders of every model of models/."""

import copy
import json
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from torch import Tensor

from compose.build import fill_weights
from compose.checkpoint.hf_folder import find_hf, name_of, published
from compose.checkpoint.safetensors_files import INDEX, PlannedTensor, write_files
from models import deepseek_v3, gemma3, gpt2, gpt_oss, llama, mixtral, qwen3
from tests.support.helpers import make_job
from tests.support.small_models import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN
from tests.support.transformers_models import as_files

FOLDERS: dict[str, ModuleType] = {
    "gemma3": gemma3,
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "mixtral": mixtral,
    "qwen3": qwen3,
    "deepseek_v3": deepseek_v3,
}


MODELS: dict[str, dict[str, object]] = {
    "phi3": {"model__architecture": "phi3", "model__n_layers": 2},
    "gpt2": {"model__name": "gpt2"},
    "gpt2, not tied": {"model__name": "gpt2", "model__tie_embeddings": False},
    "llama": {},
    "tied": {"model__tie_embeddings": True, "model__n_layers": 3},
    "gemma3": {"model__name": "gemma3", "model__n_layers": 2, "model__global_every": 2},
    "qwen3": QWEN | {"model__n_layers": 2},
    "gpt_oss": GPT_OSS | {"model__n_layers": 2},
    "mixtral": MIXTRAL | {"model__n_layers": 2},
    "deepseek_v3": DEEPSEEK | {"model__n_layers": 3},
}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files, by name."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def write_tensors(folder: Path, tensors: dict[str, Tensor], shard_bytes: int = 10**9) -> None:
    """Write a folder's tensors, in place of those that it has."""
    folder.mkdir(exist_ok=True)
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink(missing_ok=True)
    planned = [PlannedTensor(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]
    write_files(folder, planned, tensors.values(), shard_bytes)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and bitwise the same values."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def save_model(folder: Path, keys: dict[str, object], dtype: torch.dtype = torch.float32) -> None:
    """A Hugging Face folder of the model of ``keys``, every value another."""
    job = make_job(1, **keys)
    config, model = job.config, copy.deepcopy(job.model)
    fill_weights(model, job, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    tensors = as_files(
        (ours, place, torch.randn(tensor.shape, generator=generator).to(dtype))
        for ours, place, tensor in published(model, name_of(config.model.name, config.model.config))
    )
    planned = [PlannedTensor(name, tuple(tensor.shape), dtype) for name, tensor in tensors.items()]
    folder.mkdir(exist_ok=True)
    write_files(folder, planned, tensors.values(), 300_000)
    values = find_hf(config.model.name).hf_config(config.model.config)
    (folder / "config.json").write_text(json.dumps(values))
