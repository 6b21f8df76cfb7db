"""Stand-ins for modules that other stages hold, and a trial of whether a model can be cut.

A model whose layers are stand-ins has to do the same as its stages one after another: to call layers
and last modules with the same values, and to return the same. Otherwise a stage would fail, or be wrong
without an error.

With ``Pipeline.whole_forward`` a stage runs the model's whole forward on the token ids. Layers of other
stages pass the stream on, and a later stage's embedding gives zeros. The stream that has come from the
stage before takes the place of what the first layer gets.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from compose.errors import ConfigError, refused_if
from compose.ops.tensors import arrived, checksums, local_tensor

if TYPE_CHECKING:
    from compose.plan import Pipeline


class OtherStageModule(nn.Identity):
    """The identity in place of a module that another stage holds: it returns its first input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        first = next(iter(inspect.signature(module.forward).parameters), "")
        self.argument = module.argument if isinstance(module, OtherStageModule) else first

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the first input."""
        return args[0] if args else named[self.argument]


class OtherStageLayer(OtherStageModule):
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
            if isinstance(part, OtherStageLayer):
                part.outputs = outputs
    return getattr(forward, "outputs", 0)


class ZeroEmbedding(nn.Module):
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
    rows = [part for part in module.modules() if isinstance(part, ZeroEmbedding)]
    known = not hands_on

    def forward(stream: Any, **inputs: Any) -> Any:
        nonlocal known
        held, kept = list(module.get_submodule(layers).children()), list[Any]()
        given = [stream]  # for the first call alone: a forward may call a layer twice
        for part in rows:
            part.dtype = stream.dtype

        def take(layer: nn.Module, args: Any, named: Any) -> Any:
            if not given:
                return args, named
            if args:
                return (given.pop(), *args[1:]), named
            return args, {**named, next(iter(inspect.signature(layer.forward).parameters)): given.pop()}

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
        return kept[-1] if isinstance(kept[-1], Tensor) else kept[-1][0]

    result: Any = forward
    result.__signature__, result.outputs = inspect.signature(module.forward), 0
    return result


class FixedOutputLayer(OtherStageLayer):
    """A stand-in for a layer that returns what the trial sets."""

    result: Callable[[], Any] | None = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        forward: Any = lambda *args, **named: self.result and self.result()  # noqa: E731
        forward.__signature__ = inspect.signature(module.forward)
        self.forward = forward


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value  # forward may work in place


@dataclass(frozen=True)
class Digest:
    """A tensor without its memory: a trial compares one for each layer of the whole model."""

    shape: torch.Size
    dtype: torch.dtype
    sum: int
    coarse: int
    """The sum in bfloat16: FSDP rounds the inputs of a stage, and not those of the shell."""

    @staticmethod
    def of(value: Any) -> Any:
        """Return the digest of a tensor, and anything else as it is."""
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        own = local_tensor(value) + 0  # so that -0.0 is 0.0
        coarse = own.bfloat16() if own.is_floating_point() else own
        sums = checksums([own, coarse]).tolist() if own.numel() else (0, 0)
        return Digest(value.shape, value.dtype, *sums)

    def equals(self, other: "Digest") -> bool:
        """Return whether the tensors were equal, as finely as their types allow."""
        if self.dtype == other.dtype:
            return self == other
        return (self.shape, self.coarse) == (other.shape, other.coarse)


class CutTrial(NamedTuple):
    """The means to try a cut."""

    shell: nn.Module
    """The model without all that stages share out."""
    cut: "Pipeline"
    layers: list[dict[str, FixedOutputLayer]]
    """For each stage a stand-in for each of its layers, by its name in their container."""


class ModuleCall(NamedTuple):
    """A call of a module: its inputs by name, the first one in front, and the first call's output."""

    name: str
    inputs: dict[str, Any]
    output: Any


def calls(modules: Mapping[str, nn.Module], run: Callable[[], Any]) -> tuple[Any, list[ModuleCall]]:
    """Return what ``run`` returns, and the calls of ``modules``."""
    seen = list[ModuleCall]()

    def begin(name: str, names: list[str], module: nn.Module, args: Any, named: Any) -> None:
        call = {**dict(zip(names, args, strict=False)), **named}
        stream = call.pop(names[0], None)
        others = {key: "the stream" if value is stream else value for key, value in call.items()}
        seen.append(ModuleCall(name, tree_map(Digest.of, {names[0]: arrived(stream), **others}), None))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if len(seen) == 1:
            seen[0] = seen[0]._replace(output=output)

    with ExitStack() as hooks:
        for name, module in modules.items():
            note = partial(begin, name, list(inspect.signature(module.forward).parameters))
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True, prepend=True))
            hooks.enter_context(module.register_forward_hook(end))
        return run(), seen


_CURE = "or use parallel.pp = 1 (docs/plan.md, Pipeline parallel)"


@torch.no_grad()
def try_first_stage(
    stage: nn.Module, trial: CutTrial, first: Tensor, inputs: Mapping[str, Any]
) -> Tensor:
    """Return the stream that the first stage hands on, once forward was seen to leave it alone."""
    shell, cut, layers = trial
    real: dict[str, Any] = dict(stage.get_submodule(cut.layers)._modules)
    with refused_if("plan.pipeline: {}: the first stage fails; does the model run by itself?"):
        stream, seen = _run(trial, stage, first, inputs, dict([*real.items()][:1]), real)
    if first.is_meta:
        return stream
    name, parameters = type(shell).__name__, inspect.signature(shell.forward).parameters
    instead = f"a later stage calls {name} with the stream {_form(stream)} in place of"
    instead += f" {next(iter(parameters))}"
    if first.ndim == stream.ndim - 1 and first.shape != stream.shape[:-1]:
        instead += " (with SequenceParallel the stream is L / tp long)"
    instead += f"; take lengths, positions and masks from other inputs of the model, {_CURE}"
    outputs_of_layers(shell, outputs_of_layers(stage))
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    # A stage may take more than its model, as the numbers of samples.
    named = {key: value for key, value in inputs.items() if open_ended or key in parameters}
    other = stream + 1  # another stream shows what forward computes from it
    with refused_if(f"plan.pipeline: {{}}: {instead}"), _not_by_number(shell, cut.layers):
        alone, _ = _run(trial, shell, other.clone(), named, {})
    if alone.shape != other.shape or not torch.equal(alone.to(other.dtype), other):
        raise ConfigError(
            f"plan.pipeline: {name} does something to the stream outside the modules of first, layers"
            f" and last: without them it takes {_form(stream)} and returns {_form(alone)}, not the"
            f" same; do that in a module of first or last, {_CURE}"
        )
    whole = {key: layer for part in layers for key, layer in part.items()}
    # No rank knows what layers of other stages return, nor the first one, if it has none.
    results = [call.output for call in seen if call.name not in cut.last][:1]
    for result in results or [stream, (stream, None)]:
        _set_results(whole, result)
        try:
            end, wanted = _run(trial, stage, first, inputs, whole)
            break
        except Exception as error:  # their layers return several kinds of results
            if cut.whole_forward:  # and so would fail in other stages too
                with refused_if(f"plan.pipeline: {{}}: {instead}"):
                    raise error
    else:
        return stream
    made, given = list[ModuleCall](), first
    with refused_if(f"plan.pipeline: {{}}: {instead}"), _not_by_number(shell, cut.layers):
        for number, own in enumerate(layers, start=1):
            module, more = (shell, named) if number > 1 else (stage, inputs)
            given, called = _run(trial, module, given, more, own)
            made += [call for call in called if number == len(layers) or call.name not in cut.last]
    for layer in whole.values():
        layer.result = None  # it holds a stream
    wanted.append(ModuleCall("the output", {"args": Digest.of(end)}, None))
    made.append(ModuleCall("the output", {"args": Digest.of(given)}, None))
    _compare(trial, wanted, made, instead)
    return stream


def _run(
    trial: CutTrial,
    module: nn.Module,
    given: Tensor,
    inputs: Mapping[str, Any],
    own: Mapping[str, nn.Module],
    held: Mapping[str, Any] | None = None,
) -> tuple[Tensor, list[ModuleCall]]:
    """Return the stream that ``module`` makes of ``given`` with ``own`` as its layers, and their calls.

    ``held`` are its layers, if they are more. The last modules' calls are among them.
    """
    from compose.pipeline.stage import plain_stream  # it imports PyTorch's pipelines and the compiler

    shell, cut, _ = trial
    container = module.get_submodule(cut.layers)._modules
    before = dict(container)
    fillers = dict(shell.get_submodule(cut.layers)._modules) if cut.whole_forward else {}
    buffers = [(part._buffers, key, x) for part in module.modules() for key, x in part._buffers.items()]
    values = [_copied(x) for _, _, x in buffers]  # a trial leaves running means as they are
    container.clear()
    container.update({**fillers, **own} if held is None else held)
    watched = {f"{cut.layers}.{key}": part for key, part in own.items()}
    watched |= {key: module.get_submodule(key) for key in cut.last}
    devices = [given.device] if given.is_cuda else []
    try:
        # Graphs are for training, and each run draws the same.
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            output, seen = calls(watched, lambda: module(given, **inputs))
    finally:
        container.clear()
        container.update(before)
        for (place, key, x), value in zip(buffers, values, strict=True):
            place[key] = x if x is None else x.copy_(value)
    return plain_stream(output), seen


def _set_results(layers: Mapping[str, FixedOutputLayer], result: Any) -> None:
    """Have stand-ins return ``result``, each with another stream, so that its place is seen."""
    leaves, form = tree_flatten(result)
    main = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), 0)

    def shifted(place: int) -> Any:
        own = [_copied(leaf) for leaf in leaves]
        own[main] = leaves[main] + place if isinstance(leaves[main], Tensor) else leaves[main]
        return tree_unflatten(own, form)

    for place, layer in enumerate(layers.values(), start=1):
        layer.result = partial(shifted, place)


def _compare(trial: CutTrial, wanted: list[ModuleCall], made: list[ModuleCall], instead: str) -> None:
    """Raise ConfigError unless stages make the calls of the whole model."""
    shell, cut, _ = trial
    if [call.name for call in wanted] != [call.name for call in made]:
        raise ConfigError(
            f"plan.pipeline: {type(shell).__name__} does not call {cut.layers} in their order, and what"
            f" is last after them; a stage calls its own alone; do so, {_CURE}"
        )
    for call, here in zip(wanted, made, strict=True):
        for key, early, late in _unlike(call.inputs, here.inputs):
            constant = key in wanted[0].inputs and not [*_unlike({key: early}, wanted[0].inputs)]
            if constant and key != next(iter(call.inputs)):
                raise ConfigError(
                    f"plan.pipeline: layers get {key} = {_form(early)} in the first stage, and"
                    f" {_form(late)}, not the same, in others: {instead}"
                )
            key = "input" if key == "args" else key
            raise ConfigError(
                f"plan.pipeline: {here.name} gets {key} = {_form(late)} in its stage, and"
                f" {_form(early)}, not the same, if all layers are there: a stage hands on the stream"
                f" alone, and counts its layers anew; let {key} depend on nothing but what the layer"
                f" before returned, {_CURE}"
            )


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


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the tensors, numbers and texts that differ in two calls of a layer."""
    kinds = (Digest, int, float, str, type(None))
    for key in (key for key in one if key in other):
        for a, b in zip(tree_leaves(one[key]), tree_leaves(other[key]), strict=False):
            # Other objects, as caches, are not compared.
            plain = isinstance(a, kinds) and isinstance(b, kinds)
            if isinstance(a, Digest) and isinstance(b, Digest):
                same = a.equals(b)
            else:
                same = not plain or (type(a) is type(b) and a == b)
            if not same:
                yield key, a, b


def _form(value: Any) -> str:
    return str(tuple(value.shape) if isinstance(value, (Tensor, Digest)) else value)
