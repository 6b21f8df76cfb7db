"""Initial weights that do not depend on the mesh: each is drawn by the seed and its own name."""

import hashlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition, module_of
from compose.errors import ConfigError
from compose.memory.lora import MAGNITUDE, init_adapter, is_adapter, row_norms
from compose.memory.quantized import packed, quantized_layers, rounded, weight_shape
from compose.ops.tensors import local_region, local_shard, local_tensor, tie, tied_names


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
    their values. Adapters (LoRA) begin as peft's, and quantized weights are drawn and then quantized.

    Args:
        whole: A model that was not cut, or what ``compose.apply`` returned.
        init_parameter: ``init_parameter(name, tensor, generator)`` fills ``tensor``, the whole float32
            parameter; a rank then keeps its own part. Adapters' parameters are not asked of it.
        seed: The seed of all weights. Each weight is drawn by the seed and its own name.
        device: The device for drawing, and for the parameters unless they are offloaded.
        only: Returns whether to fill a parameter, by its name.

    Raises:
        ConfigError: As in :func:`materialize`.
    """
    materialize(whole, device)
    model = module_of(whole)
    quantized = quantized_layers(model)

    def draw(name: str, shape: torch.Size, of: str = "") -> Tensor:
        drawn = torch.empty(shape, dtype=torch.float32, device=device)
        init = init_adapter if is_adapter(name) else init_parameter
        init(name, drawn, named_generator(seed, of or name, device))
        return drawn

    def rows_of(layer: str, rows: slice) -> Tensor:
        name = f"{layer}.weight"
        held = quantized.get(name)
        return draw(name, weight_shape(held) if held else model.get_parameter(name).shape)[rows]

    fill_from_rows(whole, rows_of, only)
    for name, parameter in whole.named_parameters():
        if not only(name) or name in quantized or name.endswith(MAGNITUDE):
            continue
        local = local_tensor(parameter)
        if parameter.ndim < 3:
            local.copy_(local_shard(draw(name, parameter.shape), parameter))
            continue
        numbers = torch.arange(len(parameter)).view(-1, *[1] * (parameter.ndim - 1))
        held = local_shard(numbers.expand(parameter.shape), parameter)
        for place, number in enumerate(held.flatten(1)[:, :1].flatten().tolist()):
            drawn = draw(name, parameter.shape[1:], f"{name}.{number}")
            local[place].copy_(local_shard(drawn.expand(parameter.shape), parameter)[place])


@torch.no_grad()
def fill_from_rows(
    whole: nn.Module | Composition,
    read: Callable[[str, slice], Tensor],
    only: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fill the bytes of quantized weights, and DoRA's vectors with the norms of first weights' rows.

    ``read`` returns rows of a linear layer's first weight by its name, (rows, inputs), in float32.
    """
    quantized = quantized_layers(module_of(whole))
    for name, parameter in whole.named_parameters():
        norms = name.endswith(MAGNITUDE)
        if not (norms or name in quantized) or not only(name):
            continue
        layer = name.removesuffix(MAGNITUDE if norms else ".weight")
        rows, held = read(layer, local_region(parameter)[0]), quantized.get(f"{layer}.weight")
        if not len(rows):
            continue
        if norms:
            value = row_norms(rounded(rows, held.base) if held else rows)
        else:
            value = packed(rows, quantized[name].base)
        local_tensor(parameter).copy_(value)


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> Generator:
    """Return a generator for one name, independent of all others.

    Its seed is 63 bits of the SHA-256 of ``seed`` and ``name``.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
