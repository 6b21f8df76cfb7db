"""Initial weights that no mesh can change: each is drawn by the seed and its own name."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from compose.base.local_tensor import local_tensor
from compose.base.tied import tie, tied_names
from compose.composition.state import Composition, module_of
from compose.errors import ConfigError


@torch.no_grad()
def materialize(whole: nn.Module | Composition, device: torch.device) -> None:
    """Move a model from meta to ``device``: parameters get memory without values, buffers keep theirs.

    A model that is there already is left as it is. Parameters that are offloaded are put into host
    memory.

    Args:
        whole: A model that was not cut, or what ``compose.apply`` returned.
        device: Where it is moved to.

    Raises:
        ConfigError: A buffer is on meta: nothing here could know its values. Or a module is given that
            was cut.
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
    for names in ties:  # to_empty gives each name a parameter of its own
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
) -> None:
    """Move a model from meta to ``device``, if it is not there, and fill it.

    The weights are bitwise the same on every mesh. One whole parameter is held at a time; of a stack
    (3 dims), one slice, and only of the slices that the rank has a part of. Buffers keep their values.

    Args:
        whole: A model that was not cut, or what ``compose.apply`` returned.
        init_parameter: ``init_parameter(name, tensor, generator)`` fills ``tensor``, the whole float32
            parameter; a rank then keeps its own part.
        seed: Of all weights. Each is drawn by it and its own name.
        device: Where parameters are drawn, and put unless they are offloaded.

    Raises:
        ConfigError: As :func:`materialize` does.
    """
    materialize(whole, device)
    for name, parameter in whole.named_parameters():
        local = local_tensor(parameter)
        if parameter.ndim < 3:
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            init_parameter(name, drawn, named_generator(seed, name, device))
            local.copy_(local_part(drawn, parameter))
            continue
        numbers = torch.arange(len(parameter)).view(-1, *[1] * (parameter.ndim - 1))
        held = local_part(numbers.expand(parameter.shape), parameter)
        for place, number in enumerate(held.flatten(1)[:, :1].flatten().tolist()):
            drawn = torch.empty(parameter.shape[1:], dtype=torch.float32, device=device)
            init_parameter(name, drawn, named_generator(seed, f"{name}.{number}", device))
            local[place].copy_(local_part(drawn.expand(parameter.shape), parameter)[place])


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of a DTensor placed as ``like``; a view. All of it if
    ``like`` is a plain tensor."""
    return whole[local_box(like)]


def local_box(like: Tensor, coordinate: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Where in the whole of a DTensor the part lies that the rank at ``coordinate`` of its mesh holds
    (None: this rank); one slice for each dim, all of it if ``like`` is a plain tensor.

    FSDP cuts a dim after tensor parallel has (its placement is then a strided one). PyTorch's
    ``distribute_tensor`` cuts uneven ones elsewhere than FSDP does: 257 rows over dp 4 x tp 2.
    """
    box = [range(size) for size in like.shape]
    if isinstance(like, DTensor):
        place = like.device_mesh.get_coordinate() if coordinate is None else coordinate
        assert place is not None, "a rank outside of the mesh holds nothing"
        cuts = [
            (isinstance(placement, _StridedShard), axis, placement.dim)
            for axis, placement in enumerate(like.placements)
            if isinstance(placement, (Shard, _StridedShard))
        ]
        for _, axis, dim in sorted(cuts):
            each = -(-len(box[dim]) // like.device_mesh.size(axis))  # as Tensor.chunk cuts
            box[dim] = box[dim][place[axis] * each : (place[axis] + 1) * each]
    return tuple(slice(held.start, held.stop) for held in box)


def named_generator(seed: int, name: str, device: torch.device | str = "cpu") -> Generator:
    """A generator for one name, independent of all others: SHA-256 of the two, 63 bits of it."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
