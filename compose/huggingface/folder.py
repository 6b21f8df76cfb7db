"""Hugging Face's folders, config.json and safetensors, read into a model that may be cut already.

What a model's weights are called there, its ``models/<name>/hf.py`` says.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from compose.base.json_files import read_json
from compose.base.own_files import LEADS_OUT, leads_out
from compose.base.safetensors_files import DTYPES, TensorFiles
from compose.base.tied import tied_names
from compose.checkpoint.parts import Part, part_of
from compose.composition.state import Composition, module_of
from compose.errors import ConfigError
from compose.legality.job import Job
from compose.registry import training_fields

# What older files hold besides weights: it is computed.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
# A layer of DeepSeek's multi-token prediction, which no model here has.
_PREDICTION = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")

HfName = Callable[[str], str]


class HuggingFace(Protocol):
    """What ``models/<name>/hf.py`` holds."""

    MODEL_TYPES: Sequence[str]
    """The model_type in config.json of models that can be expressed."""

    def hf_name(self, name: str, config: Any = None) -> str: ...

    def hf_config(self, config: Any) -> dict[str, Any]: ...

    def config_from_hf(self, values: Mapping[str, Any]) -> Any: ...


def find_hf(name: str) -> HuggingFace:
    """The hf.py of the model ``models/<name>/``. Raises ConfigError where there is none."""
    if importlib.util.find_spec(f"models.{name}.hf") is None:
        raise ConfigError(f"models/{name}: has no hf.py, with Hugging Face's names of its weights")
    return cast(HuggingFace, importlib.import_module(f"models.{name}.hf"))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of ``folder``. Raises ConfigError where it cannot be read."""
    path = folder / "config.json"
    if leads_out(path, folder):
        raise ConfigError(f"{path}: {LEADS_OUT}")
    return read_json(path, dict[str, Any])


def config_problems(folder: Path, name: str, config: Any) -> list[str]:
    """One line for each field of a model's config that is another than that of ``folder``'s
    config.json, and would have its weights compute something else."""
    try:
        hf = find_hf(name)
        theirs = hf.config_from_hf(read_config(folder))
    except ValueError as error:
        return [f"{folder}/config.json: {error}"]
    except ConfigError as error:
        return error.problems
    # There and back, so that what such a model makes no use of is alike in both.
    there, here = (_there_and_back(hf, one) for one in (theirs, config))
    fields = [f.name for f in dataclasses.fields(config) if f.name not in training_fields(config)]
    other = [field for field in fields if getattr(there, field) != getattr(here, field)]
    # As they were given, where it shows in them; else as they are understood.
    for one, two in ((theirs, config), (there, here)):
        problems = [
            f"{folder}: is a model with {field} = {getattr(one, field)}, not {getattr(two, field)}"
            for field in other
            if getattr(one, field) != getattr(two, field)
        ]
        if problems:
            return problems
    return []


def _there_and_back(hf: HuggingFace, config: Any) -> Any:
    with contextlib.suppress(ValueError):
        return hf.config_from_hf(hf.hf_config(config))
    return config


def source_problems(job: Job) -> list[str]:
    """Return all that keeps ``checkpoint.load_hf`` from filling the model of ``job``."""
    folder, model = Path(job.config.checkpoint.load_hf), job.config.model
    if not folder.is_dir():
        return [f"{folder}: no such folder"]
    problems = config_problems(folder, model.name, model.config)
    if problems:  # it would be of no use to compare the tensors too
        return problems
    try:
        return differences(TensorFiles(folder), job.model, name_of(model.name, model.config))
    except ConfigError as error:
        return error.problems


def name_of(name: str, config: Any) -> HfName:
    """``hf_name`` of the model ``models/<name>/`` with this config."""
    return functools.partial(find_hf(name).hf_name, config=config)


def published(whole: nn.Module | Composition, hf_name: HfName) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name in the whole model, Hugging Face's, tensor) of what a model, or this rank's part of
    one, has of the published weights: all parameters, and the persistent buffers with a name there."""
    model = module_of(whole)
    for name, parameter in whole.named_parameters():
        yield name, hf_name(name), parameter
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        try:
            theirs = hf_name(name)
        except KeyError:
            continue
        if name in persistent:
            yield name, theirs, buffer


def load_hf(
    model: nn.Module | Composition,
    folder: str | Path,
    hf_name: HfName,
    whole: nn.Module | None = None,
) -> None:
    """Fill a model from safetensors. Each rank reads its own part of each weight alone.

    The values are cast to the parameters' type.

    Args:
        model: Has memory: a whole model, or what ``compose.apply`` returned.
        folder: Holds the safetensors.
        hf_name: Hugging Face's name of our parameter; '{}' in it stands for the index in a stack.
        whole: The model before it was cut, on meta, where ``model`` is a pipeline's part of it.

    Raises:
        ConfigError: A tensor is missing, has no place or another shape. All are named, before any is
            loaded.
    """
    files = TensorFiles(Path(folder))
    problems = differences(files, whole or model, hf_name)
    if problems:
        raise ConfigError(*problems)
    for _, theirs, tensor in published(model, hf_name):
        fill_part(files, theirs, part_of(tensor))


@torch.no_grad()
def fill_part(files: TensorFiles, theirs: str, part: Part) -> None:
    """Read what ``part`` is of the tensor ``theirs``, or of the stack of them that '{}' stands for."""
    if part.local.numel() == 0:
        return
    box = [slice(at, at + size) for at, size in zip(part.offsets, part.local.shape, strict=True)]
    if "{}" not in theirs:
        part.local.copy_(files.read(theirs, box))
        return
    for place, index in enumerate(range(box[0].start, box[0].stop)):
        part.local[place].copy_(files.read(theirs.format(index), box[1:]))


def differences(files: TensorFiles, whole: nn.Module | Composition, hf_name: HfName) -> list[str]:
    """One line for each tensor that ``files`` lack, have in another shape or type, or hold besides.

    ``whole``: a model, or one that was cut, but for pipeline stages. What is alike in all layers makes
    one line. What a file may hold besides: the second name of a tied weight, frequencies of the rotary
    embedding, and layers of multi-token prediction.
    """
    model = module_of(whole)
    expected: dict[str, tuple[int, ...]] = {}
    for _, theirs, tensor in published(whole, hf_name):
        if "{}" in theirs:
            expected |= {theirs.format(i): tuple(tensor.shape[1:]) for i in range(len(tensor))}
        else:
            expected[theirs] = tuple(tensor.shape)
    found: list[tuple[str, str]] = []
    for name, shape in expected.items():
        entry = files.entries.get(name)
        if entry is None:
            found.append((name, "is missing"))
        elif entry.shape != shape:
            found.append((name, f"is {entry.shape}, the model's is {shape}"))
        elif entry.dtype not in DTYPES:
            found.append((name, f"is {entry.dtype}, not one of {', '.join(DTYPES)}"))
    tied = {hf_name(name) for names in tied_names(model) for name in names[1:]}
    prediction = {match[1] for name in files.entries if (match := _PREDICTION.fullmatch(name))}
    prediction -= {match[0] for name in expected if (match := re.match(r"model\.layers\.\d+\.", name))}
    for name in files.entries:
        besides = name in tied or _COMPUTED.search(name) or name.startswith(tuple(prediction))
        if name not in expected and not besides:
            found.append((name, "is not of this model"))
    return [f"{files.folder}: {line}" for line in _collapsed(found)]


def _collapsed(found: Sequence[tuple[str, str]]) -> list[str]:
    """One line for what is said of several names that differ by numbers alone."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, words in found:
        alike.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), words), []).append(name)
    return [
        f"{pattern} {words} ({len(names)} of them)" if len(names) > 1 else f"{names[0]} {words}"
        for (pattern, words), names in alike.items()
    ]
