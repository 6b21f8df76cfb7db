"""Finds models by the name of their folder: ``models/<name>/`` exports Config, Model, PRESETS, plan."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from compose.errors import ConfigError, did_you_mean
from compose.parallel.mesh import Parallel
from compose.plan import Plan


class ModelConfig(Protocol):
    """The part of any model's config that compose reads. The model may have more fields."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        ...

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for a token of a sample of ``seq_len`` tokens."""
        ...


class InitialisedModel(Protocol):
    """A model as the trainer needs it: besides ``forward``, it can draw one whole parameter."""

    def init_parameter(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Fill a whole parameter with its first values.

        Args:
            name: Name of the parameter in the whole model.
            tensor: The tensor to fill, float32, in the parameter's shape; for a stack, one slice.
            generator: The source of random numbers.
        """
        ...


@dataclass(frozen=True)
class ModelFolder:
    """The values that a model's folder exports."""

    name: str
    Config: type
    Model: Callable[[Any], nn.Module]
    presets: Mapping[str, ModelConfig]
    plan: Callable[[Any, Parallel], Plan]

    def on_meta(self, config: Any) -> nn.Module:
        """Return the model of ``config`` on meta, without memory.

        Raises:
            ConfigError: A weight has more elements than torch can count.
        """
        try:
            with torch.device("meta"):
                return self.Model(config)
        except RuntimeError as error:
            _, _, shape = str(error).partition("overflowed with sizes=")
            if not shape:
                raise
            raise ConfigError(f"model: a weight of shape {shape} is too large") from None


def model_names() -> list[str]:
    """Return the folders under models/ that hold a plan.py."""
    package = importlib.import_module("models")
    return sorted(
        found.name
        for found in pkgutil.iter_modules(package.__path__)
        if found.ispkg and importlib.util.find_spec(f"models.{found.name}.plan")
    )


def find_model(name: str) -> ModelFolder:
    """Return the model in ``models/<name>/``.

    Raises:
        ConfigError: There is no such model, or its folder lacks some exports.
    """
    known = model_names()
    if name not in known:
        raise ConfigError(
            f"model.name: unknown model {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    folder = importlib.import_module(f"models.{name}")
    missing = [part for part in ("Config", "Model", "PRESETS", "plan") if not hasattr(folder, part)]
    problems = [f"models/{name}/__init__.py: exports no {part}" for part in missing]
    if "Model" not in missing and not hasattr(folder.Model, "init_parameter"):
        problems.append(f"models/{name}: Model has no init_parameter(name, tensor, generator)")
    if problems:
        raise ConfigError(*problems)
    return ModelFolder(name, folder.Config, folder.Model, folder.PRESETS, folder.plan)


def training_fields(config: object) -> tuple[str, ...]:
    """Return the fields of a model's config that change its training, but not what its weights mean."""
    return getattr(config, "training_fields", ())


def max_seq_len(config: object) -> int | None:
    """Return the most tokens of a sample that a model can take; None if there is no limit.

    It is the field ``max_seq_len`` of the model's config, which a model with a table of positions has.
    """
    return getattr(config, "max_seq_len", None)
