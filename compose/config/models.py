"""Finds models by the name of their folder: ``models/<name>/`` exports Config, Model, PRESETS, plan.

It may also export ``task``: what the model learns, if that is not the next token.
"""

import functools
import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from compose.errors import ConfigError, did_you_mean
from compose.parallel.mesh import Parallel
from compose.plan import Plan

if TYPE_CHECKING:
    from compose.composition import Composition
    from compose.config.tables import Config
    from compose.data.samples import Samples
    from compose.ops.cross_entropy import LossFunction


class Sampler(Protocol):
    """How ``python -m compose generate`` makes samples with a model."""

    flags: Mapping[str, str]
    """The command's flags, each of which takes a value, with a line on each."""

    def prepare(self, config: "Config", flags: Mapping[str, str]) -> "Callable[[Composition], None]":
        """Check the flags before any rank starts; return the function that makes the samples.

        Every rank calls it with the composition, and the first rank writes the samples.
        """
        ...


class Task(Protocol):
    """The task of a model: its data, its loss and its samples. compose takes all of them from here.

    A batch is tensors by name: ``targets``, which only the loss sees, and the inputs of the model. A
    tensor (B, L, ...) is of sequences, of which a rank of cp has a part; a tensor (B,) is of samples.
    """

    sampler: Sampler | None
    """How samples are made; None: the model continues a text."""

    def check(self, config: "Config") -> list[str]:
        """Return what does not fit among the keys of a config, one line each."""
        ...

    def open(self, path: str, config: "Config") -> "Samples":
        """Open the samples of ``data.path`` or ``data.validation``; a ConfigError names no key.

        Random numbers may depend on the seed, the number of a sample and the epoch alone, so that they
        are the same on every mesh.
        """
        ...

    def random_batch(self, config: "Config", samples: int, seed: int) -> dict[str, Tensor]:
        """Return a batch of the data's shapes and types that needs no data and makes a proof hard."""
        ...

    def loss(self, config: "Config") -> "LossFunction":
        """Return the loss: of the model's output and targets, the sum over the targets that count.

        Integers of IGNORE and floats of NaN do not count.
        """
        ...


PACKAGE = "compose.models"
"""The package of models, and the group of entry points by which other packages bring theirs."""
_PARTS = ("Config", "Model", "PRESETS", "plan")
_OF_DOCUMENTS = ("positions", "document_ids")


def batch_on_meta(
    task: Task, config: "Config", samples: int = 1, documents: bool = False
) -> dict[str, Tensor]:
    """Return a batch of the task without values."""
    return {
        name: torch.empty((samples, *value.shape[1:]), dtype=value.dtype, device="meta")
        for name, value in task.random_batch(config, 1, 0).items()
        if documents or name not in _OF_DOCUMENTS
    }


class ModelConfig(Protocol):
    """The part of a model's config that compose reads; a language model's has ``vocab_size`` too."""

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for a token of a sample of ``seq_len`` tokens."""
        ...


class InitialisedModel(Protocol):
    """A model as the trainer needs it: besides ``forward``, it can draw one whole parameter."""

    def init_parameter(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill a whole float32 parameter, or one slice of a stack, by its name in the whole model."""
        ...


class _WithoutNumbers(TorchFunctionMode):
    """Skips ``nn.init.normal_`` of tensors on meta, which have no values.

    PyTorch would run it as a program in Python, for which it imports Dynamo: half a second.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.init.normal_ and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ModelFolder:
    """The values that a model's folder exports."""

    name: str
    Config: type
    Model: Callable[[Any], nn.Module]
    presets: Mapping[str, ModelConfig]
    plan: Callable[[Any, Parallel], Plan]
    task: Task | None = None
    """The model's task; None: the next token (``compose.data.datasets.LanguageModelling``)."""

    def on_meta(self, config: Any) -> nn.Module:
        """Return the model of ``config`` on meta; ConfigError if a weight has too many elements."""
        try:
            with torch.device("meta"), _WithoutNumbers():
                return self.Model(config)
        except RuntimeError as error:
            _, _, shape = str(error).partition("overflowed with sizes=")
            if not shape:
                raise
            raise ConfigError(f"model: a weight of shape {shape} is too large") from None


def shipped(name: str) -> Path:
    """Return what comes with compose: inside its folder in a wheel, and beside it in a checkout."""
    inside, beside = Path(__file__).parents[1:3]
    return inside / name if (inside / name).exists() else beside / name


@functools.cache
def _entry_points() -> Mapping[str, str]:
    """Return the module of each model that another installed package brings, by its name."""
    return {entry.name: entry.module for entry in entry_points(group=PACKAGE)}


def model_names() -> list[str]:
    """Return the folders under models/ that hold a plan.py, and the models of installed packages."""
    package = importlib.import_module(PACKAGE)
    packaged = {
        result.name
        for result in pkgutil.iter_modules(package.__path__)
        if result.ispkg and importlib.util.find_spec(f"{PACKAGE}.{result.name}.plan")
    }
    return sorted(packaged | {*_entry_points()})


def folder_name(path: str) -> str:
    """Return the name of the model in a folder of one's own: its absolute path."""
    return os.path.realpath(path)


def short_name(name: str) -> str:
    """Return a model's name as checkpoints keep it: of a folder of one's own its last part and a /."""
    return f"{Path(name).name}/" if os.path.isabs(name) else name


def module_of(name: str) -> str:
    """Return the name of a model's module."""
    if os.path.isabs(name):
        return importlib.import_module(PACKAGE).module_name(name)
    return _entry_points().get(name, f"{PACKAGE}.{name}")


def source_files(name: str) -> list[Path]:
    """Return the Python files of this package and of a model, in the same order on every machine."""
    packages = (importlib.import_module(PACKAGE), importlib.import_module(module_of(name)))
    folders = [Path(__file__).parents[1]]
    folders += [Path(place) for package in packages for place in getattr(package, "__path__", ())]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def find_model(name: str) -> ModelFolder:
    """Return a model by its name; ConfigError if it lacks exports or is not there.

    The name is that of ``models/<name>/`` or of an entry point in the group ``compose.models``, or the
    absolute path of a folder (``model.path``). Such a folder has the same exports in __init__.py, or
    without one Config, Model and PRESETS in model.py and plan in plan.py.
    """
    module, own = module_of(name), os.path.isabs(name)
    where = name if own else f"models/{name}" if module.startswith(PACKAGE) else f"{name} ({module})"
    if own and not Path(name).is_dir():
        raise ConfigError(f"model.path: {name}: no such folder")
    if not own and name not in (known := model_names()):
        raise ConfigError(
            f"model.name: unknown model {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    if name in _entry_points() and importlib.util.find_spec(f"{PACKAGE}.{name}"):
        raise ConfigError(
            f"model.name: {name} is models/{name} and the entry point of {module}; rename that one"
        )
    exports, places = _exports(module, where)
    problems = [f"{places[part]}: exports no {part}" for part in _PARTS if part not in exports]
    if "Model" in exports and not hasattr(exports["Model"], "init_parameter"):
        problems.append(f"{where}: Model has no init_parameter(name, tensor, generator)")
    if problems:
        raise ConfigError(*problems)
    config, model, presets, plan = (exports[part] for part in _PARTS)
    return ModelFolder(name, config, model, presets, plan, exports.get("task"))


def _exports(module: str, where: str) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return what a model's module exports, and the file that each part is to be in."""
    try:
        folder = importlib.import_module(module)
        if getattr(folder, "__file__", "") is not None:
            return vars(folder), dict.fromkeys(_PARTS, f"{where}/__init__.py")
        lacking = [f for f in ("model", "plan") if not importlib.util.find_spec(f"{module}.{f}")]
        if lacking:
            raise ConfigError(*(f"{where}/{file}.py: no such file" for file in lacking))
        parts = {part: "plan" if part == "plan" else "model" for part in _PARTS}
        files = {each: vars(importlib.import_module(f"{module}.{each}")) for each in ("model", "plan")}
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"{where}: cannot be imported: {type(error).__name__}: {error}") from None
    exports = {part: files[file][part] for part, file in parts.items() if part in files[file]}
    places = {part: f"{where}/{file}.py" for part, file in parts.items()}
    return {"task": files["model"].get("task"), **exports}, places


def training_fields(config: object) -> tuple[str, ...]:
    """Return the fields of a model's config that change its training, but not what its weights mean."""
    return getattr(config, "training_fields", ())


def max_seq_len(config: object) -> int | None:
    """Return ``max_seq_len`` of a model's config, which a model with a table of positions has."""
    return getattr(config, "max_seq_len", None)
