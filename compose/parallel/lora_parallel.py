"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) of linear layers, and their cut over tp.

The adapter of a layer W (N, D) adds ``scale * B A x`` to its output, with A (r, D) and B (N, r). It is
cut as its layer is. Then it needs no message of its own:

    the layer is cut by      A                        B
    rows (column parallel)   whole, gradient summed   by rows
    columns (row parallel)   by columns               whole, gradient summed
    heads that ranks share   whole, gradient summed   whole, gradient summed
    nothing                  whole                    whole

In a row-parallel layer each rank adds ``B A x`` of its own columns before the layer's outputs are
summed, so that this sum completes both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

Cut = Literal["rows", "columns", "heads", "nothing"]

# The placements of A and B, and whether each rank finds only a part of their gradients.
_PLACES: dict[Cut, tuple[Placement, bool, Placement, bool]] = {
    "rows": (Replicate(), True, Shard(0), False),
    "columns": (Shard(1), False, Replicate(), True),
    "heads": (Replicate(), True, Replicate(), True),
    "nothing": (Replicate(), False, Replicate(), False),
}


class Adapter(nn.Module):
    """The adapter of an nn.Linear; it is the layer's child, and a hook adds its output."""

    off = False
    """Whether the layer computes as if it had no adapter."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        device = layer.weight.device
        self.A = nn.Parameter(torch.empty(rank, layer.in_features, device=device))
        self.B = nn.Parameter(torch.empty(layer.out_features, rank, device=device))
        self.scale = scale

    def attach(self, layer: nn.Module) -> None:
        """Let ``layer``, whose child this is, add this adapter's output to its own."""
        layer.register_forward_hook(_add)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the adapter adds, (..., N) of (..., D)."""
        return self.scale * F.linear(F.linear(x, self.A), self.B)


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    adapter = layer.get_submodule("lora")
    return output if adapter.off else output + adapter(inputs[0])


class AdapterParallel(ParallelStyle):
    """A style for the adapter of a layer.

    ``cut`` says how tp cuts the layer. "heads" is a layer that is whole, and of whose ``n_heads`` heads
    a rank returns one. "nothing" is a layer that does the same on every rank.
    """

    def __init__(self, cut: Cut, n_heads: int = 0) -> None:
        self.cut: Cut = cut
        self.n_heads = n_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert type(module) is Adapter
        place_a, _, place_b, _ = _PLACES[self.cut]
        for name, place in (("A", place_a), ("B", place_b)):
            parameter = module.get_parameter(name)
            cut = distribute_tensor(parameter, device_mesh, [place], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        module.__class__ = _CutAdapter
        assert isinstance(module, _CutAdapter)
        module.cut, module.n_heads = self.cut, self.n_heads
        module.head = device_mesh.get_local_rank() * self.n_heads // device_mesh.size()
        return module

    def __repr__(self) -> str:
        return f"AdapterParallel({self.cut!r}{f', n_heads={self.n_heads}' if self.n_heads else ''})"


class _CutAdapter(Adapter):
    cut: Cut
    n_heads: int
    head: int

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):  # as PyTorch's styles hand on: it tracks what is still to be summed
            return super().forward(x)
        _, sum_a, _, sum_b = _PLACES[self.cut]
        h = F.linear(x, _local(self.A, sum_a))
        added = self.scale * F.linear(h, _local(self.B, sum_b))
        if self.cut == "heads":
            return added.unflatten(-1, (self.n_heads, -1))[..., self.head, :]
        return added


@contextmanager
def without_adapter(layer: nn.Module) -> Iterator[None]:
    """Take the adapter out of a layer meanwhile: PyTorch's styles cut all that is in a module."""
    adapters = [(name, child) for name, child in layer.named_children() if isinstance(child, Adapter)]
    for name, _ in adapters:
        delattr(layer, name)
    try:
        yield
    finally:
        for name, child in adapters:
            layer.add_module(name, child)


def _local(parameter: Tensor, partial: bool) -> Tensor:
    """Return this rank's part; ``partial``: this rank finds a part of its gradient."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()] if partial else None)
