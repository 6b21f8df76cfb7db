"""Stand-ins for modules that other stages hold, and a stage that runs all of a model's forward.

With ``Pipeline.whole_forward`` a stage runs the model's whole forward on the token ids. Layers of other
stages pass the stream on, and a later stage's embedding gives zeros. The stream that has come from the
stage before takes the place of what the first layer gets.
"""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from compose.ops.tensors import arrived


class Elsewhere(nn.Identity):
    """The identity in place of a module that another stage holds: it returns its first input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        first = next(iter(inspect.signature(module.forward).parameters), "")
        self.argument = module.argument if isinstance(module, Elsewhere) else first

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the first input."""
        return args[0] if args else named[self.argument]


class Skipped(Elsewhere):
    """A stand-in for a layer. ``outputs`` is the length of the tuple that layers return, or 0.

    It has the layer's own attributes, since forward may read them (the kind of a layer's attention).
    """

    outputs = 0

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        own = {name for name in vars(self) if not name.startswith("_")} | {"forward"}
        given = {n: v for n, v in vars(module).items() if not n.startswith("_") and n not in own}
        vars(self).update(given)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the stream as a layer returns it."""
        stream = super().forward(*args, **named)
        return (stream, *(None,) * (self.outputs - 1)) if self.outputs else stream


def outputs_of_layers(module: nn.Module, outputs: int | None = None) -> int:
    """Return how many values a stage's layers return in a tuple, or set that number; 0: one tensor.

    A stage without stand-ins keeps the number too, since later stages ask for it.
    """
    forward: Any = module.forward
    if outputs is not None and hasattr(forward, "outputs"):
        forward.outputs = outputs
        for part in module.modules():
            if isinstance(part, Skipped):
                part.outputs = outputs
    return getattr(forward, "outputs", 0)


class NoRows(nn.Module):
    """Zeros in place of the rows that an embedding of another stage looks up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding_dim, self.dtype = width, torch.float32

    def forward(self, input: Tensor) -> Tensor:
        """Return zeros, (..., width), for rows of any shape."""
        return input.new_zeros((*input.shape, self.embedding_dim), dtype=self.dtype)


def stage_forward(module: nn.Module, layers: str, later: bool, hands_on: bool) -> Callable[..., Any]:
    """Return the forward of a stage that runs the whole forward, on inputs that hold the token ids.

    Its first argument is the stream, which the first layer takes if the stage is a ``later`` one. It
    returns what the last layer returns if the stage hands that on.
    """
    whole = type(module).forward
    rows = [part for part in module.modules() if isinstance(part, NoRows)]
    known = not hands_on

    def forward(stream: Any, **inputs: Any) -> Any:
        nonlocal known
        held, kept = list(module.get_submodule(layers).children()), list[Any]()
        for part in rows:
            part.dtype = stream.dtype

        def take(layer: nn.Module, args: Any, named: Any) -> Any:
            if args:
                return (stream, *args[1:]), named
            return args, {**named, next(iter(inspect.signature(layer.forward).parameters)): stream}

        def note(layer: nn.Module, args: Any, output: Any) -> None:
            outputs_of_layers(module, len(output) if isinstance(output, tuple) else 0)

        with ExitStack() as hooks:
            if later:
                hook = held[0].register_forward_pre_hook(take, with_kwargs=True, prepend=True)
                hooks.enter_context(hook)
            elif not known:
                hooks.enter_context(held[0].register_forward_hook(note))
                known = True
            if hands_on:
                hook = held[-1].register_forward_hook(lambda layer, args, output: kept.append(output))
                hooks.enter_context(hook)
            output = whole(module, **inputs)
        if not hands_on:
            return output
        return kept[0] if isinstance(kept[0], Tensor) else kept[0][0]

    told: Any = forward
    told.__signature__, told.outputs = inspect.signature(module.forward), 0
    return told


def calls(layer: nn.Module, run: Callable[[], Any]) -> tuple[Any, list[list[Any]]]:
    """Return what ``run`` returns; and stream, other arguments and output of each call of ``layer``."""
    names, seen = list(inspect.signature(layer.forward).parameters), list[list[Any]]()

    def begin(module: nn.Module, args: Any, named: Any) -> None:
        call = {**dict(zip(names, args, strict=False)), **named}
        stream = call.pop(names[0], None)
        others = {key: "the stream" if value is stream else value for key, value in call.items()}
        seen.append([arrived(stream), others])

    with (
        layer.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
        layer.register_forward_hook(lambda *given: seen[-1].append(given[-1])),
    ):
        return run(), seen
