"""Exports of a checkpoint of adapters: the weights that they are merged into, one at a time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from compose.checkpoint import store
from compose.checkpoint.hf_folder import HfName, differences, fill_shard
from compose.checkpoint.hf_stored import stored
from compose.checkpoint.local_shards import LocalShard
from compose.checkpoint.lora_base import base_identity, shown
from compose.checkpoint.safetensors_files import TensorFiles
from compose.config.models import InitialisedModel
from compose.errors import ConfigError
from compose.memory.lora import Lora, adapt, is_adapter
from compose.plan import Plan
from compose.weights import init_weights

Read = Callable[[str, Tensor], Tensor]
"""Reads a tensor of a checkpoint by its name in the model, in the shape of another."""


def table_of(known: store.Adapters) -> Lora:
    """Return the table [model.lora] of a checkpoint."""
    return Lora(rank=known.rank, alpha=known.alpha, targets=tuple(known.targets))


def adapted(model: nn.Module, known: store.Adapters) -> dict[str, Tensor]:
    """Give a model on meta the adapters of a checkpoint; return their parameters by name."""
    adapt(model, Plan(), table_of(known))
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}


class Merged:
    """The weights of a model with its adapters merged in, W + alpha / rank * B A, one at a time."""

    def __init__(
        self, folder: Path, known: store.State, model: nn.Module, hf_name: HfName, read: Read
    ) -> None:
        """Find the frozen weights."""
        assert known.lora is not None
        self.lora, self.read, self.hf_name = known.lora, read, hf_name
        base = known.lora.load_hf
        self.files = TensorFiles(Path(base)) if base else None
        if self.files and (problems := differences(self.files, model, hf_name)):
            raise ConfigError(*problems)
        if base_identity(base, known.seed) != known.lora.base:
            raise ConfigError(
                f"{folder}: holds adapters of other weights than {shown(base, known.seed)} now has"
            )
        self.drawn: Mapping[str, Tensor] = {} if base else _drawn(model, known.seed)
        self.adapters = adapted(model, known.lora)

    def weight(self, name: str, like: Tensor) -> Tensor:
        """Return a whole tensor, float32 on the CPU."""
        if self.files:
            part = torch.empty(like.shape, dtype=torch.float32)
            origin = torch.Size([0] * like.ndim)
            fill_shard(self.files, stored(self.hf_name(name)), LocalShard(like.shape, origin, part))
        else:
            part = self.drawn[name].clone()
        a, b = (f"{name.removesuffix('.weight')}.lora.{leaf}" for leaf in "AB")
        if a in self.adapters:
            added = self.read(b, self.adapters[b]) @ self.read(a, self.adapters[a])
            part += self.lora.alpha / self.lora.rank * added
        return part


def _drawn(model: nn.Module, seed: int) -> dict[str, Tensor]:
    whole = model.to_empty(device="cpu")
    init_weights(whole, cast(InitialisedModel, model).init_parameter, seed, torch.device("cpu"))
    return {name: p.detach().clone() for name, p in whole.named_parameters()}
