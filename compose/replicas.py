"""Copies that must be bitwise equal, compared: memory and links flip bits, and nothing else would tell.

Weights, gradients and optimizer state have copies on the ranks of every axis over which they are not
sharded: replicas, norms on the tp axis, experts on what ep leaves. All of them are results of the same
operations on the same values, or of a collective that gives every rank the same sum.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.applied import applied_to
from compose.mesh import AXES


def differences(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: DeviceMesh
) -> list[str]:
    """One line for each group of ranks whose copies differ: which ranks, and in what; a collective.

    To be called after gradients are complete and before the optimizer's step. The same on every rank.
    Of two copies that differ both ranks are named; of more, those unlike most.
    """
    by_axis: dict[tuple[DeviceMesh, int], list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(model, optimizer):
        if isinstance(tensor, DTensor):
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate() and tensor.device_mesh.size(axis) > 1:
                    local = (name, tensor.to_local())
                    by_axis.setdefault((tensor.device_mesh, axis), []).append(local)
        else:  # whole on every rank of a stage
            for axis, axis_name in enumerate(AXES):
                if axis_name != "pp" and mesh.size(axis) > 1:
                    by_axis.setdefault((mesh, axis), []).append((name, tensor))
    found: list[str] = []
    for (where, axis), tensors in by_axis.items():
        group = where.get_group(axis)
        mine = torch.stack([checksum(tensor) for _, tensor in tensors])
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        found += _unlike([x.tolist() for x in everyone], [name for name, _ in tensors], group)
    shared: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shared, found)
    return list(dict.fromkeys(line for lines in shared for line in lines))


def checksum(tensor: Tensor) -> Tensor:
    """Of a tensor's bits, int64: any one flipped bit changes it, and so do two that change places."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    # Odd factors: of a product with one, no bit is lost where sums wrap around.
    return (bits * (2 * places + 1)).sum()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    aliases = applied_to(model).aliases
    for held_as, parameter in model.named_parameters():
        name = aliases.get(held_as, held_as)
        yield f"weight {name}", parameter
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            if isinstance(value, Tensor) and key != "step":  # which may be on the host
                yield f"{key} of {name}", value
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield f"buffer {name}", buffer


def _unlike(sums: Sequence[Sequence[int]], names: Sequence[str], group: dist.ProcessGroup) -> list[str]:
    """sums: by rank of ``group``, then by tensor."""
    guilty: dict[tuple[int, ...], list[str]] = {}
    for name, column in zip(names, zip(*sums, strict=True), strict=True):
        counts = Counter(column)
        if len(counts) > 1:
            (most, times), (_, second) = counts.most_common(2)
            usual = most if times > second else None
            ranks = tuple(
                dist.get_global_rank(group, i) for i, value in enumerate(column) if value != usual
            )
            guilty.setdefault(ranks, []).append(name)
    return [_line(ranks, found) for ranks, found in guilty.items()]


def _line(ranks: Sequence[int], found: Sequence[str]) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    who = (
        f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} differ"
    )
    return f"{who} in {found[0]}{more}"
