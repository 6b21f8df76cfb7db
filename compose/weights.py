"""Initial weights that do not depend on the mesh: each is drawn by the seed and its own name."""

import hashlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition, module_of
from compose.errors import ConfigError
from compose.ops.tensors import local_shard, local_tensor, tie, tied_names


@torch.no_grad()
def materialize(whole: nn.Module | Composition, device: torch.device) -> None:
    """Move a model that was not cut, or a composition, from meta to ``device``, if it is not there.

    Parameters get memory without values, in host memory if they are offloaded; buffers keep their
    values. Raises ConfigError if a buffer is on meta, or if ``whole`` is a module that was cut.
    """
    model = module_of(whole)
    if model is whole and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError("model: was cut by compose.apply; give what that returned")
    home = torch.device("cpu") if isinstance(whole, Composition) and whole.offload else device
    if all(parameter.device.type == home.type for parameter in model.parameters()):
        return
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ConfigError(f"buffer {name} is on meta: give it a device where it is made")
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    ties = tied_names(model)
    model.to_empty(device=home)
    for names in ties:  # to_empty makes a new parameter for each name
        tie(model, names)
    for name, value in values.items():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, value.to(device))


@torch.no_grad()
def init_weights(
    whole: nn.Module | Composition,
    init_parameter: Callable[[str, Tensor, Generator], None],
    seed: int,
    device: torch.device,
    only: Callable[[str], bool] = lambda name: True,
) -> None:
    """Move a model from meta to ``device`` if needed, and fill it.

    The weights are bitwise the same on every mesh. One whole parameter is in memory at a time. For a
    stack (3 dims) it is one slice, and only slices of which the rank has a part are drawn. Buffers keep
    their values.

    Args:
        whole: A model that was not cut, or what ``compose.apply`` returned.
        init_parameter: ``init_parameter(name, tensor, generator)`` fills ``tensor``, the whole float32
            parameter; a rank then keeps its own part.
        seed: The seed of all weights. Each weight is drawn by the seed and its own name.
        device: The device for drawing, and for the parameters unless they are offloaded.
        only: Returns whether to fill a parameter, by its name.

    Raises:
        ConfigError: As in :func:`materialize`.
    """
    materialize(whole, device)
    for name, parameter in whole.named_parameters():
        if not only(name):
            continue
        local = local_tensor(parameter)
        if parameter.ndim < 3:
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            init_parameter(name, drawn, named_generator(seed, name, device))
            local.copy_(local_shard(drawn, parameter))
            continue
        numbers = torch.arange(len(parameter)).view(-1, *[1] * (parameter.ndim - 1))
        held = local_shard(numbers.expand(parameter.shape), parameter)
        for place, number in enumerate(held.flatten(1)[:, :1].flatten().tolist()):
            drawn = torch.empty(parameter.shape[1:], dtype=torch.float32, device=device)
            init_parameter(name, drawn, named_generator(seed, f"{name}.{number}", device))
            local[place].copy_(local_shard(drawn.expand(parameter.shape), parameter)[place])


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> Generator:
    """Return a generator for one name, independent of all others.

    Its seed is 63 bits of the SHA-256 of ``seed`` and ``name``.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
