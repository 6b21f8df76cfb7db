"""Segments: layers in a row that are recomputed together, from the input of the first of them.

A segment of k layers keeps one input in place of k. But it holds all that k layers save for backward
while it is in backward (Chen et al. 2016, arXiv:1604.06174, section 3). With N layers, i bytes of an
input and a bytes that a layer saves, the peak is near N i / k + k a, least at k = (N i / a)^0.5. The
square root of N alone is for layers that save nothing but their input.

Each layer is still a checkpoint of its own. But an input that the layer before it returned is not kept:
when backward asks for it, the layer before runs again, and keeps for its own backward what it saves. So
every layer runs again once. Hooks of the layers, as FSDP's, stay outside, as without segments.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from compose.errors import ConfigError
from compose.ops.tensors import local_tensor

Forward = Callable[..., Any]
Prepare = Callable[[Forward], Forward]


class ChangedBuffers:
    """The buffers that a unit's forward changes, as running means.

    Where forward runs again in backward, it takes the values that it took the first time, and changes
    nothing. Otherwise a mean would move twice, and a result that depends on it would be another one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tables: list[dict[str, Tensor | None]] = []
        self.modes = set[bool]()  # those in which the unit has run
        self.changed = set[int]()  # numbers of tables of which copies are needed

    def kept(self, forward: Forward) -> Forward:
        """Return ``forward`` for one call, and for its repetitions in backward."""
        first = self.module.training not in self.modes
        if first:
            self.modes.add(self.module.training)
            self.tables = [part._buffers for part in self.module.modules() if part._buffers]
        tables, before, again = self.tables, list[tuple[dict[str, Any], dict[str, Any]]](), False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal again
            if again:
                now = [(table, dict(table)) for table, _ in before]
                for table, values in before:
                    table.update(_copied(values))
                try:
                    return forward(*args, **kwargs)
                finally:  # a repetition may end early, by an exception
                    for table, values in now:
                        table.update(values)
            again = True
            held = [dict(table) for table in tables]
            versions = [_versions(table) for table in held]
            copies = {i: _copied(held[i]) for i in (range(len(held)) if first else self.changed)}
            result = forward(*args, **kwargs)
            # A kernel of BatchNorm changes means without a count, and its module counts batches. So a
            # module that changes one buffer has changed all.
            changed = [i for i, was in enumerate(versions) if _versions(tables[i]) != was]
            before.extend((tables[i], copies.get(i, dict(tables[i]))) for i in changed)
            self.changed.update(changed)
            return result

        return run


def _copied(table: dict[str, Any]) -> dict[str, Any]:
    # A simulation has no values.
    return {key: x if x is None or x.is_meta else x.detach().clone() for key, x in table.items()}


def _versions(table: dict[str, Tensor | None]) -> list[tuple[int, int]]:
    """Return for each buffer of a module which tensor it is, and how often that was written to."""
    held = [x for x in table.values() if x is not None and not x.is_inference()]
    return [(id(x), x._version) for x in held]


def segments_of(units: Sequence[str], length: int) -> list[list[str]]:
    """Return ``units``, in the order in which they run, in segments of ``length``.

    The last may be shorter: it is in backward while the inputs of all segments are kept.
    """
    return [list(units[i : i + length]) for i in range(0, len(units), length)]


def apply_segments(
    model: nn.Module, segments: Sequence[Sequence[str]], prepare: Prepare | None = None
) -> None:
    """Recompute the modules of each segment together, in the order in which they run.

    ``prepare`` is as for ``apply_activation_checkpointing``. In forward, a module but the first of its
    segment raises ConfigError if it takes nothing that the one before it returned.
    """
    for names in segments:
        modules = [model.get_submodule(name) for name in names]
        segment = _LayerSegment(list(names), modules)
        for place, module in enumerate(modules):
            module.forward = segment.recomputed(place, module.forward, prepare)


@dataclass(frozen=True)
class _OmittedInput:
    """Stands for an input that is not kept."""

    index: int
    """Its place among what the layer before returned."""
    first: int
    """Its place among the inputs of the first time."""


@dataclass
class _LayerOutput:
    """The result of a layer, until the next one begins. It is alive, so nothing else has its memory."""

    layer: int = -1
    leaves: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def note(self, layer: int, output: Any) -> None:
        """Note the output of a layer."""
        self.layer, self.leaves = layer, tree_leaves(output)
        self.versions = [x._version if isinstance(x, Tensor) else 0 for x in self.leaves]

    def place_of(self, layer: int, inputs: list[Any], value: Any) -> Any:
        """Return the place of ``value`` among what ``layer`` has returned; ``value`` if it has none.

        FSDP gives the next layer an alias, whose gradient tells it that a layer's backward has ended.
        So the first time takes ``value`` itself, which goes to ``inputs``.
        """
        if isinstance(value, Tensor) and layer == self.layer:
            for i, (leaf, version) in enumerate(zip(self.leaves, self.versions, strict=True)):
                if isinstance(leaf, Tensor) and version == value._version and _same(leaf, value):
                    inputs.append(value)
                    return _OmittedInput(i, len(inputs) - 1)
        return value


@dataclass
class _LayerRerun:
    """Makes a layer run again. The layer itself holds ``outputs`` alone, so there is no cycle."""

    asking: Any
    """A node of the layer's graph. Its saved tensor can only be had if the layer runs again."""
    outputs: list[Any]
    """Filled by the layer when it runs again."""

    def run(self) -> list[Any]:
        """Return what the layer returns."""
        _ = self.asking.saved_tensors
        results = list(self.outputs)
        self.outputs.clear()
        return results


class _RerunHandle(torch.autograd.Function):
    """Saves a tensor in the graph of a layer."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor) -> Tensor:
        ctx.save_for_backward(handle)
        return handle.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


class _LayerSegment:
    """The layers of a segment, and how far the forward of a micro-batch has come in it."""

    def __init__(self, names: list[str], modules: list[nn.Module]) -> None:
        self.names, self.modules = names, modules
        self.returned = _LayerOutput()
        self.again: _LayerRerun | None = None

    def recomputed(self, place: int, forward: Forward, prepare: Prepare | None) -> Forward:
        """Return ``forward`` of the layer at ``place``, recomputed in backward."""
        buffers = ChangedBuffers(self.modules[place])

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kept = buffers.kept(prepare(forward) if prepare else forward)
            return self._run(place, kept, args, kwargs)

        return run

    def _run(self, place: int, forward: Forward, args: Any, kwargs: Any) -> Any:
        returned, before = self.returned, self.again
        self.returned, self.again = _LayerOutput(), None
        inputs, outputs, nodes = list[Any](), list[Any](), list[Any]()
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        tensors += self.modules[place].parameters()  # inputs may be within an object
        if place:
            args, kwargs = tree_map(partial(returned.place_of, place - 1, inputs), (args, kwargs))
            if not inputs:
                raise ConfigError(
                    f"activation_checkpoint.segment: {self.names[place]} takes nothing that"
                    f" {self.names[place - 1]} returned just before, and so cannot be computed again"
                    " from there; use activation_checkpoint.segment = 1"
                )
        last, backward = place + 1 == len(self.modules), False

        def call(handle: Tensor, *args: Any, **kwargs: Any) -> Any:
            given = before.run() if backward and before else []

            def value_of(x: Any) -> Any:
                if not isinstance(x, _OmittedInput):
                    return x
                return given[x.index] if backward else inputs[x.first]

            args, kwargs = tree_map(value_of, (args, kwargs))
            asking = None if last else _RerunHandle.apply(handle)
            if not backward:
                nodes.append(asking)
                return forward(*args, **kwargs)
            with self._gathered(place):
                output = forward(*args, **kwargs)
            if not last:
                outputs.extend(
                    x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
                    for x in tree_leaves(output)
                )
            return output

        # With it, checkpoint finds the device whose random numbers it repeats.
        handle = torch.empty(0, device=tensors[0].device, requires_grad=True)
        # The input of the next layer must be computed, also where the layer's own backward needs less.
        result = checkpoint(call, handle, *args, use_reentrant=False, early_stop=last, **kwargs)
        inputs.clear()
        backward, asking = True, nodes.pop()
        if not last:
            self.again = _LayerRerun(asking.grad_fn, outputs)
            self.returned.note(place, result)
        return result

    @contextmanager
    def _gathered(self, place: int) -> Iterator[None]:
        """Gather a layer that FSDP has freed, and free it again, as in forward.

        The next gather travels meanwhile. The last layer is in backward, and FSDP has gathered it. The
        last but one stays: its backward comes next. Experts are a unit within the layer: FSDP gathers
        them before they run, and in backward frees nothing after a forward.
        """
        module, last = self.modules[place], len(self.modules) - 1
        known = {id(parameter) for parameter in module.parameters()}
        if place < last and isinstance(module, FSDPModule):
            module.unshard()
        following = self.modules[place + 1] if place + 1 < last else None
        if isinstance(following, FSDPModule):
            following.unshard(async_op=True)
        yield
        units = [m for m in module.modules() if isinstance(m, FSDPModule)] if place + 1 < last else []
        for unit in reversed(units):  # parameters are other objects once they are gathered
            if any(id(parameter) not in known for parameter in unit.parameters()):
                unit.reshard()


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory in the same form, on meta too."""
    a, b = local_tensor(one), local_tensor(other)
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and (a.storage_offset(), a.shape, a.stride()) == (b.storage_offset(), b.shape, b.stride())
        and a.dtype == b.dtype
    )
