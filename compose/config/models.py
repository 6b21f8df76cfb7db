"""Finds models by the name of their folder: ``models/<name>/`` exports Config, Model, PRESETS, plan.

It may also export ``task``: what the model learns, if that is not the next token.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Generator, Tensor, nn

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
            with torch.device("meta"):
                return self.Model(config)
        except RuntimeError as error:
            _, _, shape = str(error).partition("overflowed with sizes=")
            if not shape:
                raise
            raise ConfigError(f"model: a weight of shape {shape} is too large") from None


def shipped(name: str) -> Path:
    """Return what comes with compose: inside its folder in a wheel, and beside it in a checkout."""
    inside = Path(__file__).parents[1] / name
    return inside if inside.exists() else inside.parents[1] / name


def model_names() -> list[str]:
    """Return the folders under models/ that hold a plan.py."""
    package = importlib.import_module(PACKAGE)
    return sorted(
        result.name
        for result in pkgutil.iter_modules(package.__path__)
        if result.ispkg and importlib.util.find_spec(f"{PACKAGE}.{result.name}.plan")
    )


def find_model(name: str) -> ModelFolder:
    """Return the model in ``models/<name>/``; ConfigError if it lacks exports or is not there."""
    known = model_names()
    if name not in known:
        raise ConfigError(
            f"model.name: unknown model {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    folder = importlib.import_module(f"{PACKAGE}.{name}")
    missing = [part for part in ("Config", "Model", "PRESETS", "plan") if not hasattr(folder, part)]
    problems = [f"models/{name}/__init__.py: exports no {part}" for part in missing]
    if "Model" not in missing and not hasattr(folder.Model, "init_parameter"):
        problems.append(f"models/{name}: Model has no init_parameter(name, tensor, generator)")
    if problems:
        raise ConfigError(*problems)
    task = getattr(folder, "task", None)
    return ModelFolder(name, folder.Config, folder.Model, folder.PRESETS, folder.plan, task)


def training_fields(config: object) -> tuple[str, ...]:
    """Return the fields of a model's config that change its training, but not what its weights mean."""
    return getattr(config, "training_fields", ())


def max_seq_len(config: object) -> int | None:
    """Return ``max_seq_len`` of a model's config, which a model with a table of positions has."""
    return getattr(config, "max_seq_len", None)
