"""A rank's part of a whole model, and rank 0's own part of a proof."""

import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compose.composition import Composition
from compose.errors import ConfigError
from compose.ops.local_tensor import local_shard, local_tensor
from compose.weights import named_generator

# The standard deviation of the noise that is added to a parameter whose elements are all alike.
_SPREAD = 0.02
_T = TypeVar("_T")


def buffers_of(model: nn.Module, composed: nn.Module) -> Iterator[tuple[str, torch.Size, list[Tensor]]]:
    """Yield name and shape of each buffer of the whole model, and what this rank has of it."""
    here = dict(composed.named_buffers())
    for name, buffer in model.named_buffers():
        yield name, buffer.shape, [here[name]] if name in here else []


@torch.no_grad()
def spread(model: nn.Module, composition: Composition, first: bool) -> None:
    """Add noise to each parameter whose elements are all alike, on the whole model and on every rank.

    Zeros would hide the modules behind them, and ones would hide a wrong order of shards.
    """
    alike = [
        name
        for name, p in model.named_parameters()
        if first and p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all())
    ]
    shared = [alike]
    dist.broadcast_object_list(shared, src=0)
    for name, parameter in [
        *composition.named_parameters(),
        *(model.named_parameters() if first else ()),
    ]:
        if name in shared[0]:
            noise = torch.empty(parameter.shape, dtype=torch.float32)
            noise.normal_(0.0, _SPREAD, generator=named_generator(0, name))
            local = local_tensor(parameter)
            changed = local.float() + local_shard(noise, parameter).to(local.device)
            local.copy_(changed)


def parameters_of(composition: Composition) -> dict[str, list[nn.Parameter]]:
    """Return this rank's parameters by their names in the whole model; one may have several copies."""
    held: dict[str, list[nn.Parameter]] = {}
    for name, parameter in composition.named_parameters():
        held.setdefault(name, []).append(parameter)
    return held


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the whole gradient of a parameter, zeros if it has none; a collective."""
    if parameter.grad is None:
        return torch.zeros(parameter.shape, device=parameter.device)
    return whole(parameter.grad)


def on_first_rank(work: Callable[[], _T]) -> _T:
    """Do rank 0's own work, and return its result on all ranks. If it raises, every rank raises."""
    problem: list[Any] = [None, None]
    try:
        if dist.get_rank() == 0:
            problem[1] = work()
    except ConfigError as error:
        problem[0] = error.problems
    except Exception:
        problem[0] = traceback.format_exc()
    dist.broadcast_object_list(problem, src=0)
    if isinstance(problem[0], list):
        raise ConfigError(*problem[0])
    if problem[0] is not None:
        raise RuntimeError(f"the model failed on one process:\n{problem[0]}")
    return problem[1]


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (a collective), or the tensor itself, as a detached copy."""
    if isinstance(tensor, DTensor):  # its part may be in host memory, where collectives do not work
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return tensor.detach().clone()


def share_of(value: Tensor, index: int, count: int) -> Tensor:
    """Return one of ``count`` equal parts of a batch's tensor."""
    share = len(value) // count
    return value[index * share : (index + 1) * share]
