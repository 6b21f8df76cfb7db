"""The message that a rank sends in an exchange: a checksum, the coded change, and buffers."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition
from compose.diloco.codes import code_of
from compose.diloco.fragments import Place, place_of, rows_of, shares
from compose.diloco.options import Outer
from compose.parallel.mesh import axis_size

CHECK = 8
"""Bytes at the front of a message: a checksum of the outer weights."""


def checksum(values: Tensor) -> Tensor:
    """Return 8 bytes, (8,) uint8, that depend on each bit of a vector."""
    words = values.contiguous().view(torch.int32).to(torch.int64)
    places = torch.arange(len(words), device=words.device) % 8191 + 1
    return (words * places).sum()[None].view(torch.uint8)


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that training changes, such as a router's bias; islands average them."""
    persistent = model.state_dict(keep_vars=True)
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name in persistent and buffer.is_floating_point()
    ]


def outer_dtype(composition: Composition) -> torch.dtype:
    """Return the type of the outer weights: that of the model's own, and float32 at least."""
    own = {p.dtype for _, p in composition.named_parameters() if p.requires_grad}
    wide = {torch.promote_types(dtype, torch.float32) for dtype in own} or {torch.float32}
    return max(wide, key=lambda dtype: dtype.itemsize)


def first_rank_messages(
    options: Outer, composition: Composition, shapes: dict[str, torch.Size], layers: list[str]
) -> list[int]:
    """Return the bytes of the message of each fragment, without asking other ranks.

    It takes this rank for the first one of those that hold the same parts. Others send as
    much, but for a few rows.

    Args:
        options: The table [outer].
        composition: The composed model, which may be on meta.
        shapes: The shape of each parameter that is trained, of the whole model.
        layers: Names of the layers of the whole model, in order.

    Returns:
        The bytes for one other island.
    """
    mesh = composition.mesh
    stage = mesh.size() // axis_size(mesh, "pp")
    held: dict[str, tuple[Place, int]] = {}
    for name, parameter in composition.named_parameters():
        ranks = stage * composition.holding_ranks(name)
        if isinstance(parameter, DTensor):
            cuts = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            ranks //= math.prod(size for size, placement in cuts if not placement.is_replicate())
        held[name] = place_of(parameter), ranks
    code, found = code_of(options, outer_dtype(composition)), []
    for fragment in shares(dict(sorted(shapes.items())), layers, options.fragments):
        elements = 0
        for name, part in fragment.items():
            if name in held:
                place, ranks = held[name]
                elements += -(-rows_of(part, place)[1] // ranks)
        found.append(CHECK + code.size(elements))
    found[-1] += 4 * sum(buffer.numel() for buffer in averaged_buffers(composition.model))
    return found
