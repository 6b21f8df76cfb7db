"""LoRA adapters in the format of peft: adapter_config.json and adapter_model.safetensors.

peft (https://github.com/huggingface/peft) names an adapter by its layer's name in Hugging Face's model.
An export may also merge a checkpoint's adapters into the weights that they were trained with.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compose.checkpoint import store
from compose.checkpoint.hf_folder import (
    ADAPTER_CONFIG,
    HfName,
    collapsed,
    compared,
    differences,
    fill_shard,
    name_of,
    published,
)
from compose.checkpoint.hf_stored import stored
from compose.checkpoint.local_shards import local_shard_of
from compose.checkpoint.safetensors_files import TensorFiles
from compose.composition import Composition
from compose.config.job import Job
from compose.config.json_files import KnownKeys, read_json
from compose.config.models import InitialisedModel
from compose.errors import ConfigError, refuse_link_out, toml_value
from compose.memory.lora import Lora, adapt, is_adapter, linear_layers
from compose.memory.quantized import rounded
from compose.object_storage import as_path
from compose.parallel.lora_parallel import TINY
from compose.plan import Plan
from compose.weights import init_weights

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SAMPLED = 1024  # elements of each tensor
KEYS = KnownKeys(
    read="r lora_alpha use_rslora use_dora",  # they are compared with [model.lora]
    only={
        "peft_type": ("LORA",),
        "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
        "bias": ("none", None),
        "ensure_weight_tying fan_in_fan_out lora_bias use_qalora": (False, None),
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
    end = "magnitude_vector" if leaf == "magnitude" else f"{leaf}.weight"
    return f"{_PREFIX}{place.name.removesuffix('.weight')}.lora_{end}"


def target_modules(model: nn.Module, hf_name: HfName) -> list[str]:
    """Return target_modules of adapter_config.json for a model with adapters.

    peft takes a word for the end of a name, so a layer has its whole name if its last word would also
    name a layer without an adapter.
    """
    names = [name for name, _ in model.named_parameters() if is_adapter(name)]
    layers = {stored(hf_name(f"{n.rsplit('.', 2)[0]}.weight")).name for n in names}
    targets = {name.removesuffix(".weight") for name in layers}
    others = {p.name.removesuffix(".weight") for _, p, _ in published(model, hf_name)} - targets
    ends = {name.rpartition(".")[2] for name in others}
    return sorted({name if (end := name.rpartition(".")[2]) in ends else end for name in targets})


def taken_for_experts(targets: Sequence[str], model: nn.Module, hf_name: HfName) -> str:
    """Return one of ``target_modules`` that has an expert's last word; empty if there is none.

    peft may take it for the experts, as of some models, and then loses its adapter.
    """
    stacks = [p.name.removesuffix(".weight") for _, p, _ in published(model, hf_name) if p.stacked]
    words = {name.rpartition(".")[2] for name in stacks}
    return next((one for one in targets if one.rpartition(".")[2] in words), "")


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
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(values, indent=2), encoding="utf-8")
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def adapter_problems(job: Job) -> list[str]:
    """Return everything that keeps ``model.lora.load`` from filling the adapters of ``job``."""
    chosen, lora = job.config.model, job.config.model.lora
    folder = as_path(lora.load)
    path = folder / ADAPTER_CONFIG
    if not folder.is_dir():
        return [f"{folder}: no such folder"]
    try:
        refuse_link_out(path, folder)
        hf_name = name_of(chosen.name, chosen.config)
        values = read_json(path, dict[str, Any])
        files = TensorFiles(folder, WEIGHTS)
    except ConfigError as error:
        return error.problems
    problems = [f"{path}: {line}" for line in KEYS.problems(values)]
    alpha = lora.effective_alpha
    for key, here, name in (("r", lora.rank, "rank"), ("lora_alpha", alpha, "alpha")):
        if values.get(key) != here:
            problems.append(f"{path}: {key} is {values.get(key)}, not model.lora.{name} = {here:g}")
    for name, flag in (("rslora", lora.rslora), ("dora", lora.dora)):
        if (values.get(f"use_{name}") or False) != flag:
            has = toml_value(values.get(f"use_{name}") or False)
            problems.append(f"{path}: use_{name} is {has}, not model.lora.{name} = {toml_value(flag)}")
    if problems:
        return problems
    expected = {name: tensor.shape for name, tensor in named_adapters(job.model, hf_name)}
    missing = "is missing, and model.lora.targets names its layer"
    unknown = "is of no layer that model.lora.targets names"
    return collapsed(folder, compared(files, expected, (), missing, unknown))


def named_adapters(whole: nn.Module | Composition, hf_name: HfName) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's name and the tensor of each parameter of an adapter."""
    for name, parameter in whole.named_parameters():
        if is_adapter(name):
            yield peft_name(name, hf_name), parameter


def load_adapters(whole: nn.Module | Composition, job: Job) -> None:
    """Fill the adapters of a model from ``model.lora.load``; each rank reads its own part."""
    if problems := adapter_problems(job):
        raise ConfigError(*(f"model.lora.load: {problem}" for problem in problems))
    chosen = job.config.model
    files = TensorFiles(as_path(chosen.lora.load), WEIGHTS)
    for name, parameter in named_adapters(whole, name_of(chosen.name, chosen.config)):
        fill_shard(files, stored(name), local_shard_of(parameter))


Read = Callable[[str, Tensor], Tensor]
"""Reads a tensor of a checkpoint by its name in the model, in the shape of another."""


def base_identity(load_hf: str, seed: int) -> str:
    """Return a text that tells the frozen weights from others."""
    return digest_of(TensorFiles(as_path(load_hf))) if load_hf else f"drawn by seed {seed}"


def digest_of(files: TensorFiles) -> str:
    """Return a SHA-256 of names, shapes and first elements as float32.

    It is the same for equal values in other files or in a wider type.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(files.entries.items()):
        region = [slice(0, 1) for _ in entry.shape[1:]] + [slice(0, _SAMPLED) for _ in entry.shape[:1]]
        values = files.read(name, region).to(torch.float32).contiguous()
        digest.update(f"{name} {entry.shape}".encode())
        digest.update(values.view(-1).numpy().tobytes())
    return f"sha256 {digest.hexdigest()}"


def name_of_base(load_hf: str, seed: int) -> str:
    """Return a name of the weights for a message."""
    return load_hf or f"weights drawn by train.seed = {seed}"


def table_of(known: store.Adapters) -> Lora:
    """Return the table [model.lora] of a checkpoint."""
    more = {"rslora": known.rslora, "dora": known.dora, "dropout": known.dropout}
    return Lora(rank=known.rank, alpha=known.alpha, targets=known.targets, **more)


def adapted(model: nn.Module, ends: Plan, known: store.Adapters) -> dict[str, Tensor]:
    """Give a model on meta the adapters of a checkpoint; return their parameters by name.

    ``ends`` names the projection onto the vocabulary, and what a pipeline has around the layers.
    """
    adapt(model, ends, table_of(known))
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}


def merged_weights(
    folder: Path, known: store.State, model: nn.Module, ends: Plan, hf_name: HfName, read: Read
) -> Read:
    """Return what reads weights with adapters merged in, W + scale B A, whole, in float32.

    With DoRA each row of that is scaled to its trained norm.
    """
    assert known.lora is not None
    lora, base = known.lora, known.lora.load_hf
    if base and not as_path(base).is_dir():
        raise ConfigError(
            f"{folder}: holds adapters of the weights in {base}, which is no folder now; put them there"
            " again, or a link to them"
        )
    files = TensorFiles(as_path(base)) if base else None
    if files and (problems := differences(files, model, hf_name)):
        raise ConfigError(*problems)
    if base_identity(base, known.seed) != lora.base:
        now = name_of_base(base, known.seed)
        raise ConfigError(f"{folder}: holds adapters of other weights than {now} now has")
    drawn = dict[str, Tensor]()
    if not base:
        whole = model.to_empty(device="cpu")
        init_weights(
            whole, cast(InitialisedModel, model).init_parameter, known.seed, torch.device("cpu")
        )
        drawn = {name: p.detach().clone() for name, p in whole.named_parameters()}
    layers = linear_layers(model, ends) if lora.kept != "full" else ()
    quantized = {f"{layer}.weight" for layer in layers}
    adapters, scale = adapted(model, ends, lora), table_of(lora).scale

    def weight(name: str, like: Tensor) -> Tensor:
        if files:
            part = torch.empty(like.shape, dtype=torch.float32)
            fill_shard(files, stored(hf_name(name)), local_shard_of(part))
        else:
            part = drawn[name].clone()
        a, b, m = (f"{name.removesuffix('.weight')}.lora.{leaf}" for leaf in ("A", "B", "magnitude"))
        if name in quantized:  # the weights that the adapters were trained with
            part = rounded(part, lora.kept)
        if a in adapters:
            part += scale * (read(b, adapters[b]) @ read(a, adapters[a]))
        if m in adapters:
            part *= (read(m, adapters[m]) / part.norm(dim=1).clamp(min=TINY))[:, None]
        return part

    return weight
