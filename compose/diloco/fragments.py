"""Fragments of a model: what workers exchange at a time, and which rank of a worker sends which part.

A fragment has every F-th layer (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). The rows
of all other parameters are dealt to fragments of equal size by their number in the whole parameter, so
fragments do not depend on the mesh, and ranks send messages of like size. Ranks that hold the same part
of a parameter, such as replicas, each send a part of it.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import EllipsisType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.composition import Composition
from compose.ops.tensors import gathered_objects, local_region, local_tensor

Part = tuple[int, int]
"""The rows [low, high) of a parameter, by their places in the deal, or [begin, end) of a vector."""
Region = tuple[tuple[int, int], ...]
"""The region of a parameter that a rank holds: [begin, end) of each dim."""
_GOLDEN = 2654435769
"""2^32 over the golden ratio: multiples of it, modulo 2^32, are spread evenly (Knuth 1973, 6.4)."""
WHOLE = 2**32
"""The number of places in the deal."""


@dataclass(frozen=True)
class LocalParameter:
    """A parameter on this rank, with the ranks of the worker that hold the same part of it."""

    name: str  # in the whole model
    copies: list[nn.Parameter]
    """It, and its other copies on this rank, as stages of a pipeline have them."""
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None  # the group of these ranks; None if it is this rank alone

    @property
    def local(self) -> Tensor:
        """This rank's part of the first copy."""
        return local_tensor(self.copies[0]).detach()


@dataclass(frozen=True)
class ParameterSpan:
    """A part of a parameter in a fragment."""

    parameter: LocalParameter
    rows: Tensor | EllipsisType
    """The rows of the local tensor that are in the fragment; Ellipsis if all are."""
    size: int  # elements of these rows

    @property
    def each(self) -> int:
        """Elements that each of its ranks sends; the last ones may send fewer."""
        return -(-self.size // len(self.parameter.ranks))

    @property
    def own(self) -> Part:
        """The part of :meth:`take` that this rank sends."""
        begin = min(self.parameter.ranks.index(dist.get_rank()) * self.each, self.size)
        return begin, min(begin + self.each, self.size)

    def take(self, local: Tensor) -> Tensor:
        """Return the span's elements of a local tensor as a vector, (size,)."""
        return local[self.rows].flatten()

    def put(self, local: Tensor, values: Tensor) -> None:
        """Write a vector, (size,), to the span's elements of a local tensor."""
        local[self.rows] = values.to(local).view(-1, *local.shape[1:])


def shares(
    shapes: Mapping[str, Sequence[int]], layers: Sequence[str], each: int
) -> list[dict[str, Part]]:
    """Return each fragment's part of each parameter; 0 makes one fragment of all layers."""
    count = -(-len(layers) // each) if each and layers else 1
    results: list[dict[str, Part]] = [{} for _ in range(count)]
    rest: list[str] = []
    for name in shapes:
        layer = next((i for i, one in enumerate(layers) if name.startswith(f"{one}.")), None)
        if layer is None:
            rest.append(name)
        else:
            results[layer % count][name] = (0, WHOLE)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    amount = sum(sizes[name] for name in rest)
    got = _poured([sum(sizes[name] for name in part) for part in results], amount)
    borders = [total * WHOLE // max(1, amount) for total in accumulate(got, initial=0)]
    for fragment, (low, high) in enumerate(pairwise(borders)):
        results[fragment] |= {name: (low, high) for name in rest if low < high}
    return results


def rows_of(part: Part, region: Region) -> tuple[Tensor | EllipsisType, int]:
    """Return which rows of a region are in a part of a parameter, and how many elements they have."""
    size = math.prod(end - begin for begin, end in region)
    if part == (0, WHOLE) or not region:  # a single number is in the part that has the first row
        return ..., size if part[0] == 0 else 0
    dealt = torch.arange(*region[0]) * _GOLDEN % WHOLE
    rows = ((dealt >= part[0]) & (dealt < part[1])).nonzero().flatten()
    return rows, size // max(1, len(dealt)) * len(rows)


def _poured(filled: Sequence[int], amount: int) -> list[int]:
    """Return the share of ``amount`` of each, so that the fullest is as low as can be."""
    # The highest level to which there is enough to fill all that are below it.
    levels = range(amount + sum(filled) + 1)
    level = bisect_right(levels, amount, key=lambda n: sum(max(0, n - size) for size in filled)) - 1
    got = [max(0, level - size) for size in filled]
    got[filled.index(min(filled))] += amount - sum(got)
    return got


def fragments_of(
    composition: Composition, layers: Sequence[str], each: int
) -> list[list[ParameterSpan]]:
    """Return this rank's spans of each fragment, of ``each`` layers; a collective of the worker."""
    copies: dict[str, list[nn.Parameter]] = {}
    for name, parameter in composition.named_parameters():
        if parameter.requires_grad:
            copies.setdefault(name, []).append(parameter)
    here = {name: region_of(some[0]) for name, some in copies.items() if local_tensor(some[0]).numel()}
    shapes = {name: tuple(some[0].shape) for name, some in copies.items()}
    holders: dict[tuple[str, Region], list[int]] = {}
    whole: dict[str, tuple[int, ...]] = {}
    for rank, (regions, known) in enumerate(gathered_objects((here, shapes))):
        whole |= known
        for name, region in regions.items():
            holders.setdefault((name, region), []).append(rank)
    groups = _groups(composition.mesh, {tuple(ranks) for ranks in holders.values()})
    results: list[list[ParameterSpan]] = []
    for fragment in shares(dict(sorted(whole.items())), layers, each):
        results.append([])
        for name, part in fragment.items():
            if name not in here:
                continue
            ranks = tuple(holders[name, here[name]])
            rows, size = rows_of(part, here[name])
            if size:
                local = LocalParameter(name, copies[name], ranks, groups.get(ranks))
                results[-1].append(ParameterSpan(local, rows, size))
    return results


def region_of(parameter: Tensor) -> Region:
    """Return the region of a parameter that this rank holds."""
    return tuple((cut.start, cut.stop) for cut in local_region(parameter))


def _groups(mesh: DeviceMesh, wanted: set[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a process group for each set of several ranks, those of the mesh where it has them."""
    results: dict[tuple[int, ...], dist.ProcessGroup] = {}
    of_mesh: set[tuple[int, ...]] = set()
    for axis, _ in enumerate(mesh.shape):
        rows = mesh.mesh.movedim(axis, -1).flatten(0, -2).tolist()
        of_mesh |= {tuple(row) for row in rows}
        if mesh.size(axis) > 1:
            group = mesh.get_group(axis)
            results[tuple(sorted(dist.get_process_group_ranks(group)))] = group
    everyone = tuple(range(dist.get_world_size()))
    for ranks in sorted(wanted - of_mesh):
        if len(ranks) == len(everyone) > 1:
            assert dist.group.WORLD is not None
            results[ranks] = dist.group.WORLD
        elif len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                results[ranks] = group
    return results
