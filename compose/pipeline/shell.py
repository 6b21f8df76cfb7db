"""The check that a model can be cut: its forward leaves the stream to the modules of stages.

A stage is the model's own forward with the identity in place of what other stages hold. So forward
without all these modules, the shell, has to return the stream that it gets as its first argument, and
to call layers as the first stage does. Otherwise a later stage fails, or is wrong without an error.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from compose.errors import ConfigError, refused_if
from compose.ops.tensors import arrived, local_tensor
from compose.pipeline.stage import plain_stream

_CURE = "or use parallel.pp = 1 (docs/plan.md, Pipeline parallel)"


class _Called(Exception):
    """A forward has come to its first layer."""


@torch.no_grad()
def try_first_stage(
    stage: nn.Module, shell: nn.Module, layers: str, first: Tensor, inputs: Mapping[str, Any]
) -> Any:
    """Return what the first stage returns, once forward was seen to leave the stream alone."""
    layer = next(stage.get_submodule(layers).children(), None)
    line = "plan.pipeline: {}: the first stage fails; does the model run by itself?"
    with refused_if(line), torch.compiler.set_stance("force_eager"):  # graphs are for training
        if layer is None or first.is_meta:
            return stage(first, **inputs)
        output, stream, others = _noted(layer, False, lambda: stage(first, **inputs))
    if type(stream) is not Tensor:
        return output
    name, argument = type(shell).__name__, next(iter(signature(shell.forward).parameters))
    instead = f"a later stage calls {name} with the stream {_form(stream)} in place of {argument}"
    if first.ndim == stream.ndim - 1 and first.shape != stream.shape[:-1]:
        instead += " (with SequenceParallel the stream is L / tp long)"
    cure = f"take lengths, positions and masks from other inputs of the model, {_CURE}"
    container = shell.get_submodule(layers)._modules
    container.clear()
    taken = signature(shell.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        # A stage may take more than its model, as the numbers of samples.
        inputs = {name: value for name, value in inputs.items() if name in taken}
    with refused_if(f"plan.pipeline: {{}}: {instead}; {cure}"), _not_by_number(shell, layers):
        alone = plain_stream(shell(stream, **inputs))
        container["0"] = layer
        _, _, later = _noted(layer, True, lambda: shell(stream, **inputs))
    if alone.shape != stream.shape or not torch.equal(alone.to(stream.dtype), stream):
        raise ConfigError(
            f"plan.pipeline: {name} does something to the stream outside the modules of first, layers"
            f" and last: without them it takes {_form(stream)} and returns {_form(alone)}, not the"
            f" same; do that in a module of first or last, {_CURE}"
        )
    for key, here in others.items():
        there = later.get(key)
        if not isinstance(here, Tensor) or not isinstance(there, Tensor):
            continue
        if not local_tensor(here).equal(local_tensor(there)):  # nor if shapes differ
            raise ConfigError(
                f"plan.pipeline: layers get {key} = {_form(here)} in the first stage, and"
                f" {_form(there)}, not the same, in others: {instead}; {cure}"
            )
    return output


@contextmanager
def _not_by_number(shell: nn.Module, layers: str) -> Iterator[None]:
    """Refuse a forward that looks up a layer which this stage does not hold."""
    try:
        yield
    except (IndexError, KeyError) as error:
        callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if shell.get_submodule(layers) in callers:
            line = f"plan.pipeline: a forward looks up {layers} by number or name, and a stage holds"
            raise ConfigError(f"{line} only some; iterate over all of them, {_CURE}") from None
        raise


def _noted(layer: nn.Module, ends: bool, run: Callable[[], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return what ``run`` returns, and the first and other arguments of ``layer``, where it may end."""
    names, call = list(signature(layer.forward).parameters), dict[str, Any]()

    def note(module: nn.Module, args: Any, named: Any) -> None:
        call.update({**dict(zip(names, args, strict=False)), **named})
        if ends:
            raise _Called

    handle = layer.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        output = run()
    except _Called:
        output = None
    finally:
        handle.remove()
    return output, arrived(call.pop(names[0], None)), call


def _form(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
