"""Tensors behind their wrappers: this rank's part, its place in the whole, arrival, and ties."""

import sys
import traceback
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from compose.errors import ConfigError

T = TypeVar("T")

_COLUMNS = 251  # a prime: words that change places, as rows of a matrix do, then change columns too
_LARGE = 2**20  # bytes; torch adds up more in several threads
# Odd numbers: a product with one loses no bit where it wraps around.
_FACTORS = 2 * torch.arange(_COLUMNS) + 0x1E3779B97F4A7C15


def gathered_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what every rank of a group has passed, in the order of its ranks; a collective."""
    everyone = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def on_first_rank(
    work: Callable[..., T], *given: Any, group: dist.ProcessGroup | None = None, first: int = 0
) -> T:
    """Return on every rank of a group what ``work`` returns on the first; a collective.

    If it raises there, every rank raises. ``first`` may be the number of another rank.
    """
    results: list[Any] = [None]
    if dist.get_rank(group) == first:
        try:
            results = [work(*given)]
        except ConfigError as error:
            results = [error]
        except Exception:
            results = [RuntimeError(f"rank {first} failed:\n{traceback.format_exc()}")]
    dist.broadcast_object_list(results, group=group, group_src=first)
    result = results[0]
    if isinstance(result, ConfigError):
        raise ConfigError(*result.problems)
    if isinstance(result, RuntimeError):
        raise result
    return result


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return every rank's tensor, of this one's shape and type, in the order of ranks; a collective."""
    everyone = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(everyone, tensor, group=group)
    return everyone


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sums (T,) of the bytes of tensors, int64, on the first one's device.

    A sum changes with any one flipped bit. Most others change it too, and most bytes that change
    places: 8 bytes are a word, and words are added up in columns, which wrap around and lose nothing.
    A column is then made a random number, one to one, and the columns are added up.
    """
    return mixed([column_sums(tensor) for tensor in tensors])


@torch.no_grad()
def mixed(columns: Sequence[Tensor]) -> Tensor:
    """Return the checksums of tensors, or of parts of them, whose :func:`column_sums` these are."""
    sizes = [len(rows) for rows in columns]
    result = torch.empty(sum(sizes), dtype=torch.int64, device=columns[0].device)
    places = torch.arange(len(result), device=result.device).split(sizes)
    for device in dict.fromkeys(rows.device for rows in columns):
        chosen = [number for number, rows in enumerate(columns) if rows.device == device]
        factors = _FACTORS.to(device)
        products = torch.cat([columns[number] for number in chosen]) * factors
        # The upper bits reach the lower ones: else two flips of a word's last bit would cancel out.
        products ^= (products >> 32) & 0xFFFFFFFF
        sums = (products * factors.flip(0)).sum(1).to(result.device)
        result[torch.cat([places[number] for number in chosen])] = sums
    return result


def column_sums(tensor: Tensor, parts: int = 1) -> Tensor:
    """Return the sums of words by columns (parts, C), the first part of a checksum.

    The parts of a tensor are equally long, and follow one another.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu" and (len(flat) < _LARGE or torch.get_num_threads() == 1):
        return torch.from_numpy(_sums_by_numpy(flat.numpy(), parts))
    return _sums_by_torch(flat, parts)


def _sums_by_torch(flat: Tensor, parts: int) -> Tensor:
    if flat.storage_offset() % 8:  # words begin where a word of the memory begins
        flat = flat.clone()
    length = len(flat) // parts
    last = length % 8
    if parts > 1 and last:
        return torch.cat([_sums_by_torch(row, 1) for row in flat.view(parts, length)])
    words = flat[: len(flat) - last].view(torch.int64).view(parts, length // 8)
    table = words[:, : words.shape[1] // _COLUMNS * _COLUMNS]
    result = table.unflatten(1, (-1, _COLUMNS)).sum(1)
    rest = words[:, table.shape[1] :]
    result[:, : rest.shape[1]] += rest
    if last:
        result[0, -1] += F.pad(flat[-last:], (0, 8 - last)).view(torch.int64)[0]
    return result


def _sums_by_numpy(data: np.ndarray, parts: int) -> np.ndarray:
    """Return the same sums; a call of numpy takes a third of one of torch."""
    length = len(data) // parts
    last = length % 8
    if parts > 1 and last:
        return np.concatenate([_sums_by_numpy(row, 1) for row in data.reshape(parts, length)])
    words = data[: len(data) - last].view(np.int64).reshape(parts, length // 8)
    whole = words.shape[1] // _COLUMNS * _COLUMNS
    result = np.add.reduce(words[:, :whole].reshape(parts, -1, _COLUMNS), 1)
    result[:, : words.shape[1] - whole] += words[:, whole:]
    if last:
        result[0, -1:] += int.from_bytes(data[-last:].tobytes().ljust(8, b"\0"), sys.byteorder)
    return result


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32, or as it is if its type is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself; it is the memory, not a copy.

    A weight that FSDP gathers in its own way (float8) is a subclass that wraps its memory. Code that
    copies, compares, saves or sums bytes needs the wrapped memory.
    """
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held._tensor if hasattr(held, "fsdp_pre_all_gather") else held  # type: ignore[attr-defined]


def local_weight(parameter: Tensor | None, partial: bool = False) -> Any:
    """Return this rank's part of a DTensor, with its gradient; None of None.

    ``partial`` says that a rank computes a part of the gradient, which is summed over the axis.
    """
    if parameter is None:
        return None
    assert isinstance(parameter, DTensor)
    if partial or torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=[Partial()] if partial else None)
    return _LocalWeight.apply(parameter)


class _LocalWeight(torch.autograd.Function):
    """DTensor.to_local of a weight, in half the time: the gradient's layout is known to be its own."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> DTensor:
        return DTensor(grads[0].contiguous(), copy(ctx.spec), requires_grad=False)


def local_shard(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of ``whole``, as a view; it is placed as the DTensor ``like`` is."""
    return whole[local_region(like)]


def local_region(like: Tensor, coordinate: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return the place of a rank's part in the whole of a DTensor.

    FSDP cuts a dim after tensor parallel has cut it (its placement is then a strided one). PyTorch's
    ``distribute_tensor`` cuts uneven dims elsewhere than FSDP does: 257 rows over dp 4 x tp 2.
    """
    region = [range(size) for size in like.shape]
    if isinstance(like, DTensor):
        place = like.device_mesh.get_coordinate() if coordinate is None else coordinate
        assert place is not None, "a rank outside of the mesh holds nothing"
        cuts = [
            (isinstance(placement, _StridedShard), axis, placement.dim)
            for axis, placement in enumerate(like.placements)
            if isinstance(placement, (Shard, _StridedShard))
        ]
        for _, axis, dim in sorted(cuts):
            each = -(-len(region[dim]) // like.device_mesh.size(axis))  # the rule of Tensor.chunk
            region[dim] = region[dim][place[axis] * each : (place[axis] + 1) * each]
    return tuple(slice(held.start, held.stop) for held in region)


def arrived(value: Any) -> Any:
    """Return ``value``; a tensor whose collective is still running is waited for and made plain.

    If a graph or a message got the waiting tensor, it would see another type, and might lose its
    gradient without an error (torch 2.13).
    """
    return _ArrivedTensor.apply(value) if isinstance(value, AsyncCollectiveTensor) else value


class _ArrivedTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.trigger_wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint has, by their names."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, one for each place of a module that holds one.

    They are for ``torch.func.functional_call`` without ``tie_weights``, which does not bring back the
    tensors of a module with two names.
    """
    return {
        f"{path}.{name}".removeprefix("."): tensor
        for path, module in model.named_modules()
        for kind in (module.named_parameters, module.named_buffers)
        for name, tensor in kind(recurse=False, remove_duplicate=False)
    }


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of every tied parameter, which has more than one; the first name comes first.

    Such a parameter has to stay one when modules are rebuilt.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, names: list[str]) -> None:
    """Put the parameter ``names[0]`` under the other names too."""
    first = model.get_parameter(names[0])
    for name in names[1:]:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_parameter(leaf, first)


def place_parameters(
    placement: Placement, src_data_rank: int | None, name: str, module: nn.Module, mesh: DeviceMesh
) -> None:
    """Give the parameters that ``module`` itself holds a placement on a mesh of one axis.

    It serves ``distribute_module`` with its first two arguments bound. A source of None sends nothing.
    """
    for leaf, parameter in module.named_parameters(recurse=False):
        placed = distribute_tensor(parameter, mesh, [placement], src_data_rank=src_data_rank)
        module.register_parameter(leaf, nn.Parameter(placed, requires_grad=parameter.requires_grad))
