"""Initial weights that no mesh can change: each is drawn by the seed and its own name."""

import hashlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from compose.errors import ConfigError
from compose.ties import tie, tied_names


@torch.no_grad()
def init_weights(
    model: nn.Module,
    init_parameter: Callable[[str, Tensor, Generator], None],
    seed: int,
    device: torch.device,
) -> None:
    """Move a model from meta to ``device`` and fill it, bitwise the same on every mesh.

    ``init_parameter(name, tensor, generator)`` fills ``tensor``, the whole float32 parameter; a rank
    then keeps its own part. One whole parameter is held at a time. Buffers must have been made on a
    real device, since nothing here could know their values: one on meta raises ConfigError.
    """
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ConfigError(f"buffer {name} is on meta: give it a device where it is made")
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    ties = tied_names(model)
    model.to_empty(device=device)
    for names in ties:  # to_empty gives each name a parameter of its own
        tie(model, names)
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        init_parameter(name, whole, named_generator(seed, name, device))
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(whole)


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> Generator:
    """A generator for one name, independent of all others: SHA-256 of the two, 63 bits of it."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
