"""torch.compile, in place: names, hooks and parameters stay what they are.

    block  each unit of the plan, as one graph. Units that are alike share it: one layer is compiled
    model  the whole model, or stage, in as many graphs as its hooks leave: FSDP's end one each

Shapes are taken as they come, so another length or micro-batch compiles again.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

from compose.base.local_tensor import arrived
from compose.base.torch_versions import enable_async_tp
from compose.errors import ConfigError


@dataclass(frozen=True)
class Compile:
    mode: Literal["off", "block", "model"] = "off"
    """What torch.compile makes one graph of: each layer, or as much of the model as hooks leave."""
    async_tp: bool = False
    """With tp on CUDA: run products in pieces while their messages travel."""
    backend: Any = "inductor"  # of torch.compile


def check_whole(mode: str, tp: int) -> None:
    """Raise ConfigError unless ``tp`` is 1 where the whole model is compiled."""
    if mode == "model" and tp > 1:
        raise ConfigError(
            f'compile.mode: "model" with parallel.tp = {tp}: Dynamo cannot trace the hooks by which'
            ' styles change tensors between modules; use compile.mode = "block"'
        )


def parts(model: nn.Module, units: Sequence[str], opaque: Collection[str]) -> Iterator[str]:
    """``units``; in place of one with a module of ``opaque`` in it, its largest parts that have none.

    A product by itself, which a compiler cannot better, is no part.
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
        yield from parts(model, inner if name not in opaque else (), opaque)


def apply_compile(
    model: nn.Module,
    stages: Sequence[nn.Module],
    units: Sequence[str],
    opaque: Collection[str],
    options: Compile,
    mesh: DeviceMesh,
) -> None:
    """Compile ``units`` of ``model``, or ``stages`` whole, but for the modules ``opaque``: what PyTorch
    cannot trace (docs/speed.md). ``mesh`` is that of tp. FSDP comes afterwards: its hooks stay outside.
    """
    if options.mode == "off":
        return
    if options.async_tp:
        enable_async_tp(mesh.get_group().group_name)
    how: dict[str, Any] = {"dynamic": False, "backend": options.backend}
    if options.mode == "block":
        for name in parts(model, units, opaque):
            module = model.get_submodule(name)
            # forward and no more: what hooks do (FSDP's, those of tp) is theirs.
            module.forward = _settled(torch.compile(module.forward, fullgraph=True, **how))
        return
    for name in opaque:
        module = model.get_submodule(name)
        module.forward = torch.compiler.disable(module.forward)
    for stage in stages:
        stage.compile(**how)


def _settled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, given plain tensors in place of those whose collective is still on its way.

    As inputs of a graph these would be another type, for another graph, and their gradient would be
    lost without a word (torch 2.13).
    """

    def settled(*args: Any, **kwargs: Any) -> Any:
        return forward(*map(arrived, args), **{name: arrived(x) for name, x in kwargs.items()})

    return settled


def graphs_compiled() -> int:
    """Graphs that this process has compiled."""
    return counters["stats"]["unique_graphs"]


class GraphCount:
    """What a run reports of its compiler: nothing where it has none."""

    def __init__(self, mode: str) -> None:
        self.on, self.steps, self.known = mode != "off", 0, 0

    def after_step(self, say: Callable[[str], None]) -> int | None:
        """The graphs so far. One that is compiled after two steps is said: shapes or types changed."""
        if not self.on:
            return None
        before, self.known = self.known, graphs_compiled()
        self.steps += 1
        if self.steps > 2 and self.known > before:
            say(
                f"torch.compile compiled {self.known - before} more graphs, {self.known} in all:"
                " TORCH_LOGS=recompiles tells why"
            )
        return self.known
