"""Hugging Face folders of every model of models/."""

import copy
import json
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from torch import Tensor

from compose.base.safetensors_files import Planned, write_files
from compose.build import fill_weights
from compose.huggingface.folder import HfName, find_hf, forms_of, name_of, published
from models import deepseek_v3, gpt_oss, llama, mixtral, qwen3
from tests.experts import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN
from tests.helpers import make_job

FOLDERS: dict[str, ModuleType] = {
    "gpt_oss": gpt_oss,
    "llama": llama,
    "mixtral": mixtral,
    "qwen3": qwen3,
    "deepseek_v3": deepseek_v3,
}


MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "tied": {"model__tie_embeddings": True, "model__n_layers": 3},
    "qwen3": QWEN | {"model__n_layers": 2},
    "gpt_oss": GPT_OSS | {"model__n_layers": 2},
    "mixtral": MIXTRAL | {"model__n_layers": 2},
    "deepseek_v3": DEEPSEEK | {"model__n_layers": 3},
}


def stored(hf_name: HfName, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What files hold of our tensor, by name."""
    form = forms_of(hf_name, name)[0]
    return dict(zip(form.parts(hf_name(name), tensor.shape), form.stored(tensor), strict=True))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files, by name."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


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
    planned: list[Planned] = []
    tensors: list[Tensor] = []
    generator = torch.Generator().manual_seed(1)
    hf_name = name_of(config.model.name, config.model.config)
    for ours, _, tensor in published(model, hf_name):
        values = torch.randn(tensor.shape, generator=generator)
        for theirs, part in stored(hf_name, ours, values).items():
            planned.append(Planned(theirs, tuple(part.shape), dtype))
            tensors.append(part.to(dtype))
    folder.mkdir()
    write_files(folder, planned, tensors, 300_000)
    values = find_hf(config.model.name).hf_config(config.model.config)
    (folder / "config.json").write_text(json.dumps(values))
