"""Applies torch.compile in place: names, hooks and parameters do not change.

    block  each unit of the plan is one graph; equal units share it, so only one layer is compiled
    model  the whole model, or stage; its hooks split it into several graphs, as FSDP's do

Shapes are static, so a new length or micro-batch size is compiled again.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.ops.tensors import arrived
from compose.ops.torch_versions import enable_async_tp


@dataclass(frozen=True)
class Compile:
    """The table [compile]: what torch.compile makes graphs of."""

    mode: Literal["off", "block", "model"] = "off"
    """torch.compile makes one graph of each layer, or of as much of the model as hooks leave."""
    async_tp: bool = False
    """With tp on CUDA: run products in pieces while their messages travel."""
    backend: Any = "inductor"  # backend of torch.compile


def compiled_parts(model: nn.Module, units: Sequence[str], opaque: Collection[str]) -> Iterator[str]:
    """Yield the names of the modules to compile.

    A unit without an opaque module is one part. In place of another unit come the largest modules
    inside it that hold no opaque module. A linear layer alone is left out, since a compiler cannot
    improve it.
    """
    for name in units:
        if not any(other == name or other.startswith(name + ".") for other in opaque):
            yield name
            continue
        inner = [
            f"{name}.{child}"
            for child, module in model.get_submodule(name).named_children()
            if not isinstance(module, nn.Linear) and any(True for _ in module.parameters())
        ]
        yield from compiled_parts(model, inner if name not in opaque else (), opaque)


def apply_compile(
    model: nn.Module,
    stages: Sequence[nn.Module],
    units: Sequence[str],
    experts: Collection[str],
    options: Compile,
    mesh: DeviceMesh,
) -> None:
    """Compile a model in place.

    FSDP must be applied afterwards, so that its hooks stay outside of the graphs. The rows of experts
    vary in number, and PyTorch cannot trace what sends rows to them (docs/speed.md). In mode "block"
    only what they compute is compiled. A graph of the whole model goes through experts that get rows
    from nowhere else.
    """
    if options.mode == "off":
        return
    if options.async_tp:
        enable_async_tp(mesh.get_group().group_name)
    how: dict[str, Any] = {"dynamic": False, "backend": options.backend}
    if options.mode == "block":
        for name in compiled_parts(model, units, experts):
            module = model.get_submodule(name)
            # Compile forward only: the hooks of FSDP and tp stay outside.
            module.forward = _settled(torch.compile(module.forward, fullgraph=True, **how))
        for name in set(units) & set(experts):
            inner: Any = model.get_submodule(name)
            inner.run = _of_any_rows(torch.compile(inner.run, fullgraph=True, **how))
        return
    for name in experts:
        module = model.get_submodule(name)
        if any(isinstance(p, DTensor) for p in module.parameters()):  # rows come from other ranks
            module.forward = torch.compiler.disable(module.forward)
    for stage in stages:
        stage.compile(**how)


def _settled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``forward`` that first waits for inputs whose collective is still running.

    As inputs of a graph, such tensors have another type. They would need another graph, and their
    gradient would be lost without an error (torch 2.13).
    """

    def settled(*args: Any, **kwargs: Any) -> Any:
        return forward(*map(arrived, args), **{name: arrived(x) for name, x in kwargs.items()})

    return settled


def _of_any_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` with one graph for any number of rows, its first argument's, above one."""

    def marked(rows: Tensor, *others: Any) -> Any:
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        return run(rows, *others)

    return marked


def graphs_compiled() -> int:
    """Return the number of graphs that this process has compiled."""
    from torch._dynamo.utils import counters  # what compiles nothing starts faster

    return counters["stats"]["unique_graphs"]
