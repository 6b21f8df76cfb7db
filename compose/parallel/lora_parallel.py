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

DoRA (Liu et al. 2024, arXiv:2402.09353) then scales each output by m / ||W + scale B A||, with the norm
of that output's row and a trained m (N,). m is cut as the rows are. The norm of a row that is cut is
over all ranks, so they sum the squares: N numbers, the only message. As in peft, no gradient goes
through the norm, and a bias is added after the scaling.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from compose.ops.tensors import local_region, local_tensor, local_weight
from compose.parallel.stream_messages import send_plain

TINY = 1e-30  # a row of zeros has the magnitude 0 too, and stays zeros
Cut = Literal["rows", "columns", "heads", "nothing"]

# The placements of A and B, and whether each rank has only a part of their gradients.
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

    def __init__(
        self, layer: nn.Linear, rank: int, scale: float, dropout: float = 0.0, dora: bool = False
    ) -> None:
        super().__init__()
        device = layer.weight.device
        self.A = nn.Parameter(torch.empty(rank, layer.in_features, device=device))
        self.B = nn.Parameter(torch.empty(layer.out_features, rank, device=device))
        self.magnitude = nn.Parameter(torch.empty(layer.out_features, device=device)) if dora else None
        self.scale = scale
        self.dropout = nn.Dropout(dropout) if dropout else None

    def attach(self, layer: nn.Module) -> None:
        """Let ``layer``, whose child this is, add this adapter's output to its own."""
        layer.register_forward_hook(_add)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the adapter adds, (..., N) of (..., D) with its dropout."""
        return self.scale * F.linear(F.linear(x, self.A), self.B)

    def adapted(self, layer: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        """Return the output of ``layer`` for ``x``, with what this adapter adds."""
        drops = self.dropout is not None and self.training
        kept = self.dropout(x) if self.dropout is not None and drops else x
        if self.magnitude is None:
            return output + self(kept)
        weight, bias, a, b, magnitude = self.held(layer, x)
        norm = self.summed(self.squares(weight, a, b)).sqrt().clamp(min=TINY)
        factor = self.mine((magnitude / norm).to(x.dtype))
        if drops:
            base = self.mine(F.linear(kept, weight))
        else:
            base = output if bias is None else output - self.mine(bias)
        return output + (factor - 1) * base + factor * self(kept)

    def held(self, layer: nn.Module, x: Tensor) -> tuple[Any, ...]:
        """Return this rank's weight, the bias that is in the layer's output, A, B and m."""
        dequantized: Callable[..., Tensor] | None = getattr(layer, "dequantized", None)
        weight = dequantized(x.dtype) if dequantized else layer.weight
        return weight, layer.bias, self.A, self.B, self.magnitude

    def summed(self, squares: Tensor) -> Tensor:
        """Return the squares of norms of whole rows."""
        return squares

    def mine(self, outputs: Tensor) -> Tensor:
        """Return what the layer returns of its outputs (..., N)."""
        return outputs

    @torch.no_grad()
    def squares(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the squared norm of each row of W + scale B A, (N,), in float32 or wider.

        It is |W|^2 + 2 scale W A^T B^T + scale^2 B A A^T B^T, so that no matrix (N, D) is made.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        products = weight @ (2 * self.scale * a.mT) + b @ (self.scale**2 * (a @ a.mT))
        own = torch.linalg.vector_norm(weight, dim=-1, dtype=wide).square()
        return own + (products * b).sum(-1, dtype=wide)


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    adapter = cast(Adapter, layer.get_submodule("lora"))
    return output if adapter.off else adapter.adapted(layer, inputs[0], output)


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
        for name, place in (("A", place_a), ("B", place_b), ("magnitude", place_b)):
            if getattr(module, name) is None:
                continue
            parameter = module.get_parameter(name)
            cut = distribute_tensor(parameter, device_mesh, [place], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        module.__class__ = _CutAdapter
        assert isinstance(module, _CutAdapter)
        module.cut, module.n_heads = self.cut, self.n_heads
        module.head = device_mesh.get_local_rank() * self.n_heads // device_mesh.size()
        if self.cut == "columns" and module.dropout is not None:
            # The input is a plain tensor, which does not tell that it has a part of the columns.
            part = local_region(module.A)[1].start, module.A.shape[1]
            cast(Any, module.dropout).dropout_part = part
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
        h = F.linear(x, local_weight(self.A, sum_a))
        return self.mine(self.scale * F.linear(h, local_weight(self.B, sum_b)))

    def held(self, layer: nn.Module, x: Tensor) -> tuple[Any, ...]:
        weight, bias, a, b, magnitude = super().held(layer, x)
        if isinstance(x, DTensor):
            return weight, bias, a, b, magnitude
        if bias is not None:  # a layer that is cut by columns adds it after the sum over ranks
            bias = None if self.cut == "columns" else local_tensor(bias)
        magnitude = local_weight(magnitude, _PLACES[self.cut][3])
        return local_tensor(weight), bias, local_tensor(a), local_tensor(b), magnitude

    def summed(self, squares: Tensor) -> Tensor:
        mesh = cast(DTensor, self.A).device_mesh
        if isinstance(squares, DTensor) or self.cut != "columns" or mesh.size() == 1:
            return squares
        return send_plain(squares, "sum", mesh.get_group().group_name)

    def mine(self, outputs: Tensor) -> Tensor:
        if isinstance(outputs, DTensor) or self.cut != "heads":
            return outputs
        return outputs.unflatten(-1, (self.n_heads, -1))[..., self.head, :]


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
