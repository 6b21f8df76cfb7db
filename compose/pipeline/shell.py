"""The check that a model can be cut: outside the modules of its stages, forward leaves the stream alone.

A stage is the model's own forward with the identity in place of what other stages hold. So forward
without all these modules, the shell, has to return the stream that it gets as its first argument, and to
call layers as the first stage does. Otherwise a later stage fails, or is wrong without an error.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from compose.base.local_tensor import arrived, local_tensor
from compose.errors import ConfigError, refused_if
from compose.pipeline.stage import plain_stream

_CURE = "or use parallel.pp = 1 (docs/plan.md, Pipeline parallel)"


class Spy(nn.Module):
    """A layer's double: it notes what it is called with, and runs the layer or ends the forward."""

    def __init__(self, layer: nn.Module, run: bool) -> None:
        super().__init__()
        self.layer, self.run = layer, run
        self.names = list(inspect.signature(layer.forward).parameters)
        self.stream: Any = None
        self.others: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # forward may ask a layer of what kind it is
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return what the layer returns, if it runs."""
        self.others = {**dict(zip(self.names, args, strict=False)), **named}
        self.stream = arrived(self.others.pop(self.names[0], None))
        if self.run:
            return self.layer(*args, **named)
        raise _Called


class _Called(Exception):
    """A forward has come to its first layer."""


@contextmanager
def spied(container: nn.Module, layer: nn.Module | None = None) -> Iterator[Spy | None]:
    """Have a spy on the first layer in ``container``; on ``layer``, which does not run, if it has none."""
    kept = dict(container._modules)
    name, layer = next(iter(kept.items()), ("0", layer))
    spy = Spy(layer, run=bool(kept)) if layer else None
    if spy:
        container._modules[name] = spy
    try:
        yield spy
    finally:
        container._modules.clear()
        container._modules.update(kept)


def check_shell(
    shell: nn.Module, layers: str, ran: Spy, argument: str, first: Tensor, inputs: Mapping[str, Any]
) -> None:
    """Raise ConfigError if ``shell`` changes the stream, or calls layers unlike the first stage.

    Args:
        shell: The model without its layers and ends.
        layers: The name of the container of layers.
        ran: The spy of the first stage.
        argument: The name of the model's first argument.
        first: Its value in the first stage.
        inputs: The model's other inputs.

    Raises:
        ConfigError: The model cannot be cut so.
    """
    name, stream = type(shell).__name__, ran.stream
    if type(stream) is not Tensor:
        return  # the first stage cannot hand it on either
    instead = f"a later stage calls {name} with the stream {_form(stream)} in place of {argument}"
    if first.ndim == stream.ndim - 1 and first.shape != stream.shape[:-1]:
        instead += " (with SequenceParallel the stream is L / tp long)"
    cure = f"take lengths, positions and masks from other inputs of the model, {_CURE}"
    with refused_if(f"plan.pipeline: {{}}: {instead}; {cure}"):
        output = plain_stream(shell(stream, **inputs))
        with spied(shell.get_submodule(layers), ran.layer) as later, suppress(_Called):
            shell(stream, **inputs)
    if output.shape != stream.shape or not torch.equal(output.to(stream.dtype), stream):
        raise ConfigError(
            f"plan.pipeline: {name} does something to the stream outside the modules of first, layers"
            f" and last: without them it takes {_form(stream)} and returns {_form(output)}, not the same;"
            f" do that in a module of first or last, {_CURE}"
        )
    for key, here in ran.others.items():
        there = later.others.get(key) if later else here
        if isinstance(here, Tensor) and isinstance(there, Tensor) and not _same(here, there):
            raise ConfigError(
                f"plan.pipeline: layers get {key} = {_form(here)} in the first stage, and {_form(there)},"
                f" not the same, in others: {instead}; {cure}"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and local_tensor(one).equal(local_tensor(other))


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}"
