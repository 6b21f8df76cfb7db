"""Hugging Face folders (config.json and safetensors), read into a model that may be cut already.

The names of a model's weights in such a folder come from its ``models/<name>/hf.py``.
"""

import functools
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compose.checkpoint import store
from compose.checkpoint.dcp_storage import METADATA
from compose.checkpoint.hf_stored import (
    E4M3,
    Named,
    Stored,
    mxfp4_names,
    mxfp4_problems,
    read_mxfp4,
    read_values,
    scale_problems,
    scales_of,
    stored,
)
from compose.checkpoint.local_shards import LocalShard, local_shard_of
from compose.checkpoint.safetensors_files import DTYPES, INDEX, WHOLE, TensorFiles
from compose.composition import Composition, module_of
from compose.config.hugging_face import config_problems, described_model, find_hf, no_folder
from compose.config.job import Job
from compose.config.tables import Model
from compose.config.toml import COMMAND_LINE
from compose.data.tokenizer import TOKENIZER
from compose.errors import LEADS_OUT, ConfigError, leads_out, noted, refuse_link_out
from compose.memory.lora import is_adapter
from compose.memory.quantized import quantized_layers, weight_shape
from compose.object_storage import as_path
from compose.ops.tensors import persistent_buffers, tied_names

# Older files hold these besides the weights: rotary frequencies, and GPT-2's causal masks. Both are
# computed here.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$|(^|\.)h\.\d+\.attn\.(masked_)?bias$")
# A layer of DeepSeek's multi-token prediction. No model here has one.
_PREDICTION = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")

ADAPTER_CONFIG = "adapter_config.json"
_AT_ONCE = 2**24  # elements that are compared at once

HfName = Callable[[str], str | Stored]


def source_problems(job: Job) -> list[str]:
    """Return everything that keeps ``checkpoint.load_hf`` from filling the model of ``job``."""
    folder, model = as_path(job.config.checkpoint.load_hf), job.config.model
    if not folder.is_dir():
        return [no_folder(folder)]
    problems = config_problems(folder, model.name, model.config)
    if problems:  # comparing the tensors would be useless
        return problems
    with noted(problems):
        return differences(TensorFiles(folder), job.model, name_of(model.name, model.config))
    return problems


def name_of(name: str, config: Any) -> HfName:
    """Return the ``hf_name`` function of a model with this config."""
    return functools.partial(find_hf(name).hf_name, config=config)


def published(whole: nn.Module | Composition, hf_name: HfName) -> Iterator[Named]:
    """Yield (our name, its place in a folder, tensor) for each published tensor of a model.

    LoRA adapters are not published, nor buffers that Hugging Face's model does not have. A quantized
    weight is published by its shape, as a tensor on meta: nobody has its values.
    """
    model = module_of(whole)
    quantized = quantized_layers(model)
    for name, parameter in whole.named_parameters():
        if name in quantized:
            parameter = torch.empty(weight_shape(quantized[name]), device="meta")
        if is_adapter(name):
            continue
        try:
            place = stored(hf_name(name))
        except KeyError:
            raise ConfigError(
                f"model: hf_name has no place for {name}; give it one in hf.py of the model's folder"
            ) from None
        yield name, place, parameter
    for name, buffer in persistent_buffers(model).items():
        try:
            place = stored(hf_name(name))
        except KeyError:
            continue
        yield name, place, buffer


def load_hf(
    model: nn.Module | Composition, folder: str | Path, hf_name: HfName, whole: nn.Module | None = None
) -> None:
    """Fill a model from safetensors; each rank reads only its own part of each weight.

    ``whole`` is the model on meta, if ``model`` is a pipeline's part of it.
    """
    files = TensorFiles(as_path(folder))
    if problems := differences(files, whole or model, hf_name):
        raise ConfigError(*problems)
    quantized = quantized_layers(module_of(model))  # fill_weights fills them
    for name, place, tensor in published(model, hf_name):
        if name not in quantized:
            fill_shard(files, place, local_shard_of(tensor))


@torch.no_grad()
def fill_shard(files: TensorFiles, place: Stored, part: LocalShard) -> None:
    """Read this rank's part of a tensor in the files."""
    if part.local.numel() == 0:
        return
    region = [slice(at, at + size) for at, size in zip(part.offsets, part.local.shape, strict=True)]
    if place.in_mxfp4(files.entries):
        read_mxfp4(part.local, place.name, region, files.read)
        return

    def read(name: str, own: list[slice], shape: Sequence[int]) -> Tensor:
        theirs = place.resolved(name, files.entries)
        return place.ours(read_values(files, theirs, place.region(own, shape)))

    names = place.names(part.shape)
    if not place.stacked:
        part.local.copy_(read(names[0], region, part.shape))
        return
    for own, name in zip(part.local, names[region[0]], strict=True):
        own.copy_(read(name, region[1:], part.shape[1:]))


def differences(files: TensorFiles, whole: nn.Module | Composition, hf_name: HfName) -> list[str]:
    """Return one line for each tensor, or several of equal layers, in which files and model differ.

    The files may hold a tied weight under any of its names, and computed buffers and layers of
    multi-token prediction besides.
    """
    model = module_of(whole)
    expected: dict[str, tuple[int, ...]] = {}
    results: list[tuple[str, str]] = []
    quantized: set[str] = set()
    for _, place, tensor in published(whole, hf_name):
        if place.in_mxfp4(files.entries):
            quantized.update(mxfp4_names(place.name))
            results += mxfp4_problems(place.name, tensor.shape, files.entries)
            continue
        names = [place.resolved(name, files.entries) for name in place.names(tensor.shape)]
        expected |= dict.fromkeys(names, place.shape(tensor.shape))
    for name in [n for n in expected if n in files.entries and files.entries[n].dtype == E4M3]:
        quantized.add(scales_of(name))
        results += scale_problems(files, name)
    tied = set[str]()
    for first, *others in tied_names(model):
        place, seconds = stored(hf_name(first)), {stored(hf_name(name)).name for name in others}
        kept, there = place.resolved(place.name, files.entries), sorted(seconds & files.entries.keys())
        tied |= seconds
        # The save_model of safetensors keeps the first of the names by the alphabet.
        if kept not in files.entries and there:
            files.entries[kept] = files.entries[there.pop()]
        results += [
            (
                name,
                f"is not {kept}, so that transformers ties nothing; set tie_word_embeddings to false",
            )
            for name in there
            if not _same(files, kept, name)
        ]
    if (files.folder / ADAPTER_CONFIG).exists():
        results.append(
            (ADAPTER_CONFIG, "has adapters beside the weights; merge them, or move them out")
        )
    prediction = {match[1] for name in files.entries if (match := _PREDICTION.fullmatch(name))}
    prediction -= {match[0] for name in expected if (match := re.match(r"model\.layers\.\d+\.", name))}
    besides = {
        name
        for name in files.entries
        if name in tied
        or _COMPUTED.search(name)
        or name.startswith(tuple(prediction))
        or 0 in files.entries[name].shape  # transformers writes networks without width
    }
    types, known = (*DTYPES, E4M3), quantized | besides
    results += compared(files, expected, known, "is missing", "is not of this model", types)
    return collapsed(files.folder, results)


def _same(files: TensorFiles, one: str, other: str) -> bool:
    shape = files.entries[one].shape
    if shape != files.entries[other].shape:
        return False
    rows = max(1, _AT_ONCE // max(1, math.prod(shape[1:])))
    parts = [slice(start, start + rows) for start in range(0, shape[0], rows)]
    return all(torch.equal(files.read(one, [part]), files.read(other, [part])) for part in parts)


def compared(
    files: TensorFiles,
    expected: Mapping[str, Sequence[int]],
    besides: Container[str],
    missing: str,
    unknown: str,
    types: Container[str] = DTYPES,
) -> Iterator[tuple[str, str]]:
    """Yield (name, words) for each tensor in which files differ from shapes by name."""
    for name, shape in expected.items():
        entry = files.entries.get(name)
        if entry is None:
            yield name, missing
        elif entry.shape != tuple(shape):
            yield name, f"is {entry.shape}, the model's is {tuple(shape)}"
        elif entry.dtype not in types:
            yield name, f"is {entry.dtype}, not one of {', '.join(DTYPES)}"
    for name in files.entries:
        if name not in expected and name not in besides:
            yield name, unknown


def collapsed(folder: Path, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line for equal words about names that differ only by numbers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, words in entries:
        groups.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), words), []).append(name)
    return [
        f"{folder}: {pattern} {words} ({len(names)} of them)"
        if len(names) > 1
        else f"{folder}: {names[0]} {words}"
        for (pattern, words), names in groups.items()
    ]


def kept_tokenizer(checkpoint: Path) -> Path:
    """Return the folder in which the run of a checkpoint keeps its tokenizer."""
    run = checkpoint.resolve().parent.parent  # a checkpoint is in checkpoints/
    kept = run / TOKENIZER
    refuse_link_out(kept, run)
    return kept


def is_hugging_face(folder: Path) -> bool:
    """Return whether ``folder`` holds a model as transformers saves it."""
    weights = any((folder / name).exists() for name in (WHOLE, INDEX))
    return weights and (folder / "config.json").exists()


def checkpoints(folder: Path, best: bool = False) -> list[Path]:
    """Return ``folder`` if it is a checkpoint, else those of the run in it, newest first.

    With ``best``, return those whose validation loss is known, and the one with the lowest first.
    """
    if not folder.is_dir():
        raise ConfigError(f"{COMMAND_LINE}: {no_folder(folder)}")
    if any((folder / name).exists() for name in (store.MANIFEST, METADATA)):
        if best:
            raise ConfigError(
                f"{COMMAND_LINE}: --best: {folder} is one checkpoint; name its run's folder"
            )
        return [folder]
    result, root = store.sent(folder / "checkpoints"), folder / "checkpoints"
    outside = [path for path in (root, *result) if leads_out(path, folder)]
    if outside:
        raise ConfigError(*(f"{path}: {LEADS_OUT}" for path in outside))
    if not result and (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"{COMMAND_LINE}: {folder}: the run has saved no checkpoint; train with checkpoint.interval"
            " above 0"
        )
    if not result:
        raise ConfigError(
            f"{COMMAND_LINE}: {folder}: is neither a checkpoint ({store.MANIFEST}) nor Hugging Face's"
            f" folder (config.json, and {WHOLE} or {INDEX})"
        )
    if best and not (result := store.with_best_first(result)):
        raise ConfigError(
            f"{COMMAND_LINE}: --best: {folder}: no checkpoint in it has a validation loss; a run with"
            " train.validate_every and checkpoint.keep_best has some"
        )
    return result


def model_in(folder: Path, own: str = "") -> Model:
    """Return the model that config.json in ``folder`` describes; ``own``: see ``described_model``."""
    name, config = described_model(folder, own)
    return Model(name, own, config=config)
