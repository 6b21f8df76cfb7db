"""Dropout whose masks are the same on every mesh.

Whether an element is dropped is a hash of the step's seed and number, the module's name, and the
element's place: its sample in the global batch, its token in the whole sequence, its other indices.
There is no generator with a state. So ranks, micro-batches, stages and recomputation draw the masks of
one process, and so does a run that resumes.

The hash is the 32-bit integer hash of two multiplications that "Hash Prospector" (C. Wellons 2018)
rates best, once for each dim.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from compose.errors import ConfigError

SAMPLES = "dropout_samples"
"""The name under which a batch holds the numbers of its samples, (B,)."""


@dataclass(frozen=True)
class DropoutKey:
    """The masks of one optimizer step."""

    step: int
    """The step's number. Each step of a run needs another one, or it drops the same elements."""
    seed: int = 0
    """The run's seed."""
    first: int = 0
    """The number of the mesh's first sample, if several meshes share a global batch."""


class Masks:
    """The masks of one model's dropout, as this rank draws them."""

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], names: Sequence[str]) -> None:
        """Tie each dropout of ``model``.

        Args:
            model: The model, or what this rank's stages run of it.
            parts: The modules that are called: the model, or its stages.
            names: The names of all dropouts of the whole model.
        """
        self.model, self.names = model, names
        self.samples: Tensor | None = None
        self.places: Tensor | None = None
        here = dict(model.named_modules())
        self.modules = {name: cast(_Dropout, here[name]) for name in names if name in here}
        for name, module in self.modules.items():
            module.__class__ = _Dropout
            module.name, module.masks = name, self
            # On the host: a number for the kernels, and for a compiler a tensor, so no constant.
            module.key = torch.zeros((), dtype=torch.int32, device="cpu")
        for part in parts:
            part.forward = self._numbered(part.forward)

    def begin(
        self, key: DropoutKey | None, samples: Tensor, places: Tensor | None
    ) -> Mapping[str, Tensor]:
        """Begin a step.

        Args:
            key: The step's masks.
            samples: The numbers in the mesh's batch of the samples that this rank sees, (B,).
            places: The places in the sequence of the tokens that this rank sees, (L,), if not all.

        Returns:
            Another entry of the batch; empty if nothing is dropped.

        Raises:
            ConfigError: There is no key, and the model is in training mode.
        """
        if not self.model.training:
            return {}
        if key is None:
            others = len(self.names) - 1
            who = f"{self.names[0]} and {others} more need" if others else f"{self.names[0]} needs"
            raise ConfigError(
                f"dropout: {who} the number of the step, or each step would drop the same elements;"
                " give forward_backward dropout=DropoutKey(step), or call model.eval()"
            )
        for name, module in self.modules.items():
            module.key.fill_(_hashed(f"{key.seed}/{key.step}/{name}"))
        self.places = None if places is None else places.to(torch.int32)
        return {SAMPLES: (samples + key.first).to(torch.int32)}

    def held(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` with the micro-batch of now, for when it runs again in backward."""
        if torch.compiler.is_compiling():  # a graph keeps the numbers as its inputs
            return forward
        samples = self.samples

        def again(*args: Any, **kwargs: Any) -> Any:
            self.samples = samples
            return forward(*args, **kwargs)

        return again

    def _numbered(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def numbered(*args: Any, **kwargs: Any) -> Any:
            self.samples = kwargs.pop(SAMPLES, None)
            return forward(*args, **kwargs)

        return numbered


class _Dropout(nn.Dropout):
    name: str
    masks: Masks
    key: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        if not isinstance(input, DTensor):
            return self._drop(input, input.shape, [0] * input.ndim)
        if any(placement.is_partial() for placement in input.placements):
            input = input.redistribute(placements=[Replicate()])
        (placement,), mesh = input.placements, input.device_mesh
        first = [0] * input.ndim
        if placement.is_shard():
            dim = cast(Any, placement).dim % input.ndim
            first[dim] = mesh.get_local_rank() * -(-input.shape[dim] // mesh.size())
        local = self._drop(input.to_local(), input.shape, first)
        return DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=input.shape, stride=input.stride()
        )

    def _drop(self, x: Tensor, shape: torch.Size, first: Sequence[int]) -> Tensor:
        """Drop elements of ``x``, the part of a tensor of ``shape`` that begins at ``first``."""
        samples, places = self.masks.samples, self.masks.places
        if samples is None:
            raise ConfigError(
                f"dropout: {self.name} runs in training mode outside of forward_backward, which numbers"
                " its samples; call model.eval()"
            )
        wanted = [len(samples)] if places is None else [len(samples), len(places)]
        if list(shape[: len(wanted)]) != wanted:
            raise ConfigError(
                f"dropout: {self.name} takes {tuple(shape)}, and masks belong to samples"
                f"{' and tokens' if len(wanted) > 1 else ''}: it should take"
                f" ({', '.join(map(str, wanted))}, ...); reshape its input, or use p = 0"
            )
        if self.p == 1:
            return x * 0.0
        indices = [
            torch.arange(start, start + size, dtype=torch.int32, device=x.device)
            for start, size in zip(first, x.shape, strict=True)
        ]
        indices[0] = samples
        if places is not None:
            indices[1] = places.narrow(0, first[1], x.shape[1])
        hashed = indices[0] ^ self.key
        for index in indices[1:]:
            hashed = _mixed(hashed)[..., None] ^ _mixed(index)
        # int32 is from -2^31 to 2^31 - 1.
        kept = _half_mixed(hashed) >= round(self.p * 2**32) - 2**31
        return torch.where(kept, x / (1 - self.p), 0.0)


def dropouts(model: nn.Module) -> list[str]:
    """Return the names of the dropouts of ``model`` that drop anything."""
    return [name for name, m in model.named_modules() if type(m) is nn.Dropout and m.p > 0]


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big", signed=True)


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of each element, int32."""
    x = _half_mixed(x)
    return x ^ (x >> 15 & 0x1FFFF)


def _half_mixed(x: Tensor) -> Tensor:
    """Return a hash whose upper bits alone are good; products wrap, and masks make shifts unsigned."""
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x21F0AAAD
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x735A2D97
    return x
