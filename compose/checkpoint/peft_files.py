"""Adapters in peft's format: adapter_config.json and adapter_model.safetensors.

peft (https://github.com/huggingface/peft) names an adapter by its layer's name in Hugging Face's model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from compose.checkpoint.hf_folder import HfName, collapsed, fill_shard, name_of, published
from compose.checkpoint.hf_stored import stored
from compose.checkpoint.local_shards import local_shard_of
from compose.checkpoint.safetensors_files import DTYPES, TensorFiles
from compose.composition import Composition
from compose.config.job import Job
from compose.config.json_files import read_json
from compose.errors import LEADS_OUT, ConfigError, KnownKeys, leads_out
from compose.memory.lora import Lora, is_adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
KEYS = KnownKeys(
    read="r lora_alpha",  # they are compared with [model.lora]
    only={
        "peft_type": ("LORA",),
        "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
        "bias": ("none", None),
        "ensure_weight_tying fan_in_fan_out lora_bias use_dora use_qalora use_rslora": (False, None),
        "alpha_pattern layer_replication loftq_config modules_to_save rank_pattern target_parameters"
        " trainable_token_indices": ({}, [], None),
        "alora_invocation_tokens arrow_config corda_config eva_config kasa_config lora_ga_config"
        " megatron_config monteclora_config use_bdlora velora_config": (None,),
    },
    # The names of the tensors say which layers have adapters. The rest is about how they were made.
    besides="auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern"
    " layers_to_transform lora_dropout megatron_core peft_version qalora_group_size revision"
    " runtime_config target_modules task_type",
    cures={
        "init_lora_weights": ", as it may change the base weights too; save the adapters with peft's"
        " path_initial_model_for_weight_conversion, or merge them"
    },
)
"""The keys of adapter_config.json, which has the fields of peft's LoraConfig."""


def peft_name(name: str, hf_name: HfName) -> str:
    """Return peft's name of a parameter of an adapter."""
    layer, _, leaf = name.rsplit(".", 2)
    place = stored(hf_name(f"{layer}.weight"))
    if place.transposed or place.parts > 1 or place.stacked:
        raise ConfigError(
            f"model.lora.targets: {layer} is not a layer of its own in Hugging Face's model"
            f" ({place.name.removesuffix('.weight')}), so that peft's format cannot hold its adapter;"
            " merge it"
        )
    return f"{_PREFIX}{place.name.removesuffix('.weight')}.lora_{leaf}.weight"


def target_modules(model: nn.Module, hf_name: HfName) -> list[str]:
    """Return what target_modules of adapter_config.json says for a model with adapters.

    peft takes a word for the end of a name. A layer has its whole name if its last word would also name
    a layer without an adapter.
    """
    names = [name for name, _ in model.named_parameters() if is_adapter(name)]
    layers = {stored(hf_name(f"{n.rsplit('.', 2)[0]}.weight")).name for n in names}
    targets = {name.removesuffix(".weight") for name in layers}
    others = {p.name.removesuffix(".weight") for _, p, _ in published(model, hf_name)} - targets
    ends = {name.rpartition(".")[2] for name in others}
    return sorted({name if (end := name.rpartition(".")[2]) in ends else end for name in targets})


def write_adapters(
    folder: Path, lora: Lora, base: str, targets: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    """Write a folder that peft opens."""
    alpha = lora.effective_alpha
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2), encoding="utf-8")
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def peft_problems(folder: Path, lora: Lora, model: nn.Module, hf_name: HfName) -> list[str]:
    """Return one line for each way in which a folder's adapters are not those of ``model``."""
    path = folder / CONFIG
    if not folder.is_dir():
        return [f"{folder}: no such folder"]
    if leads_out(path, folder):
        return [f"{path}: {LEADS_OUT}"]
    try:
        values = read_json(path, dict[str, Any])
        files = TensorFiles(folder, WEIGHTS)
    except ConfigError as error:
        return error.problems
    problems = [f"{path}: {line}" for line in KEYS.problems(values)]
    alpha = lora.effective_alpha
    for key, here, name in (("r", lora.rank, "rank"), ("lora_alpha", alpha, "alpha")):
        if values.get(key) != here:
            problems.append(f"{path}: {key} is {values.get(key)}, not model.lora.{name} = {here:g}")
    if problems:
        return problems
    found: list[tuple[str, str]] = []
    expected = dict(named_adapters(model, hf_name))
    for name, tensor in expected.items():
        entry = files.entries.get(name)
        if entry is None:
            found.append((name, "is missing, and model.lora.targets names its layer"))
        elif entry.shape != tuple(tensor.shape):
            found.append((name, f"is {entry.shape}, the model's is {tuple(tensor.shape)}"))
        elif entry.dtype not in DTYPES:
            found.append((name, f"is {entry.dtype}, not one of {', '.join(DTYPES)}"))
    for name in files.entries:
        if name not in expected:
            found.append((name, "is of no layer that model.lora.targets names"))
    return [f"{folder}: {line}" for line in collapsed(found)]


def adapter_problems(job: Job) -> list[str]:
    """Return everything that keeps ``model.lora.load`` from filling the adapters of ``job``."""
    model = job.config.model
    try:
        hf_name = name_of(model.name, model.config)
    except ConfigError as error:
        return error.problems
    return peft_problems(Path(model.lora.load), model.lora, job.model, hf_name)


def named_adapters(whole: nn.Module | Composition, hf_name: HfName) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's name and the tensor of each parameter of an adapter."""
    for name, parameter in whole.named_parameters():
        if is_adapter(name):
            yield peft_name(name, hf_name), parameter


def load_adapters(
    whole: nn.Module | Composition, folder: Path, lora: Lora, hf_name: HfName, model: nn.Module
) -> None:
    """Fill the adapters of a model from peft's folder; each rank reads its own part."""
    if problems := peft_problems(folder, lora, model, hf_name):
        raise ConfigError(*(f"model.lora.load: {problem}" for problem in problems))
    files = TensorFiles(folder, WEIGHTS)
    for name, parameter in named_adapters(whole, hf_name):
        fill_shard(files, stored(name), local_shard_of(parameter))
