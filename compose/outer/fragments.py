"""Fragments of a model: what islands exchange at a time, and which rank of an island sends which part.

A fragment has every F-th layer (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). All that is
outside of layers is dealt to fragments so that they get as equal as can be. Ranks that hold the same
part of a parameter, such as replicas, each send a part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.base.local_tensor import local_tensor
from compose.composition.state import Composition
from compose.weights import local_region

Part = tuple[int, int]  # [begin, end) of a flat local tensor


@dataclass(frozen=True)
class Held:
    """A parameter on this rank, with the ranks of the island that hold the same part of it."""

    name: str
    """Its name in the whole model."""
    copies: list[nn.Parameter]
    """It, and its other copies on this rank, as stages of a pipeline have them."""
    ranks: tuple[int, ...]
    """The ranks, of the default group."""
    group: dist.ProcessGroup | None
    """Their group; None if it is this rank alone."""

    @property
    def local(self) -> Tensor:
        """This rank's part of the first copy."""
        return local_tensor(self.copies[0]).detach()


@dataclass(frozen=True)
class Span:
    """A part of a parameter in a fragment."""

    held: Held
    whole: Part
    """What of the flat local tensor is in the fragment."""
    each: int
    """Elements that each of its ranks sends; the last ones may send fewer."""

    @property
    def own(self) -> Part:
        """What of the flat local tensor this rank sends."""
        return self.of(self.held.ranks.index(dist.get_rank()))

    def of(self, place: int) -> Part:
        """Return what the ``place``-th of the parameter's ranks sends."""
        begin, end = self.whole
        return min(begin + place * self.each, end), min(begin + (place + 1) * self.each, end)


def shares(sizes: Mapping[str, int], layers: Sequence[str], each: int) -> list[dict[str, Part]]:
    """Deal parameters to fragments.

    Args:
        sizes: Elements of each parameter of the whole model, by name.
        layers: Names of the layers, in order.
        each: Layers of a fragment; 0 makes one fragment of all.

    Returns:
        For each fragment the part of each parameter in it, as elements of the whole.
    """
    count = -(-len(layers) // each) if each and layers else 1
    found: list[dict[str, Part]] = [{} for _ in range(count)]
    rest: list[str] = []
    for name, size in sizes.items():
        layer = next((i for i, one in enumerate(layers) if name.startswith(f"{one}.")), None)
        if layer is None:
            rest.append(name)
        else:
            found[layer % count][name] = (0, size)
    filled = [sum(end for _, end in part.values()) for part in found]
    borders = list(accumulate(_poured(filled, sum(sizes[name] for name in rest)), initial=0))
    begin = 0
    for name in rest:
        for fragment in range(count):
            low, high = max(begin, borders[fragment]), min(begin + sizes[name], borders[fragment + 1])
            if low < high:
                found[fragment][name] = (low - begin, high - begin)
        begin += sizes[name]
    return found


def _poured(filled: Sequence[int], amount: int) -> list[int]:
    """Return how much of ``amount`` each gets, so that the fullest is as low as can be."""
    order = sorted(range(len(filled)), key=filled.__getitem__)
    levels = (
        ((amount + sum(filled[i] for i in order[:many])) // many, filled[order[many - 1]])
        for many in range(len(order), 0, -1)
    )
    # The level that the lowest reach together, with as many of them as it covers.
    level = next(level for level, fullest in levels if level >= fullest)
    got = [max(0, level - size) for size in filled]
    got[order[0]] += amount - sum(got)
    return got


def fragments_of(composition: Composition, layers: Sequence[str], each: int) -> list[list[Span]]:
    """Return this rank's parts of all fragments; a collective of the island.

    Args:
        composition: The composed model.
        layers: Names of the layers of the whole model, in order.
        each: Layers of a fragment; 0 makes one fragment of all.

    Returns:
        The spans of each fragment.
    """
    copies: dict[str, list[nn.Parameter]] = {}
    for name, parameter in composition.named_parameters():
        if parameter.requires_grad:
            copies.setdefault(name, []).append(parameter)
    here = {name: _place(some[0]) for name, some in copies.items() if local_tensor(some[0]).numel()}
    sizes = {name: some[0].numel() for name, some in copies.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (here, sizes))
    holders: dict[tuple[str, Any], list[int]] = {}
    total: dict[str, int] = {}
    for rank, (there, known) in enumerate(everyone):
        total |= known
        for name, place in there.items():
            holders.setdefault((name, place), []).append(rank)
    groups = _groups(composition.mesh, {tuple(ranks) for ranks in holders.values()})
    found: list[list[Span]] = []
    for fragment in shares(dict(sorted(total.items())), layers, each):
        found.append([])
        for name, (begin, end) in fragment.items():
            if name not in here:
                continue
            ranks = tuple(holders[name, here[name]])
            held = Held(name, copies[name], ranks, groups.get(ranks))
            local, whole = held.local.numel(), total[name]
            part = (begin * local // whole, end * local // whole)
            found[-1].append(Span(held, part, -(-(part[1] - part[0]) // len(ranks))))
    return found


def _place(parameter: nn.Parameter) -> tuple[Part, ...]:
    """Return the region of a parameter that this rank holds."""
    if not isinstance(parameter, DTensor):
        return tuple((0, size) for size in parameter.shape)
    return tuple((cut.start, cut.stop) for cut in local_region(parameter))


def _groups(mesh: DeviceMesh, wanted: set[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a process group for each set of several ranks, those of the mesh where it has them."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    of_mesh: set[tuple[int, ...]] = set()
    for axis, _ in enumerate(mesh.shape):
        rows = mesh.mesh.movedim(axis, -1).flatten(0, -2).tolist()
        of_mesh |= {tuple(row) for row in rows}
        if mesh.size(axis) > 1:
            group = mesh.get_group(axis)
            found[tuple(sorted(dist.get_process_group_ranks(group)))] = group
    everyone = tuple(range(dist.get_world_size()))
    for ranks in sorted(wanted - of_mesh):
        if len(ranks) == len(everyone) > 1:
            assert dist.group.WORLD is not None
            found[ranks] = dist.group.WORLD
        elif len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                found[ranks] = group
    return found
