"""Which rank orthogonalizes which matrix, and which messages ranks send for it.

The rank that orthogonalizes a matrix needs the whole matrix. All ranks that hold parts of it, replicas
too, divide the matrices among themselves by cost, so that each matrix is computed once. Places are
regions of the whole tensor, taken from the cut that filled it (weights.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.optim.regions import Region, lengths, size
from compose.weights import local_region

# Elements of experts that one rank works on at once, unless a single expert has more.
SLAB = 2**24
# Elements of results that a rank receives at once, unless its part of a single slab has more.
IN_FLIGHT = 2**26


@dataclass(frozen=True)
class Slab:
    """Some matrices of a stack, and the rank of the group that orthogonalizes them."""

    parameter: int
    """The number of the stack."""
    region: Region
    """Their places in the stack; whole matrices."""
    owner: int
    """The rank."""
    elements: int
    """The size of the largest part of the slab that one rank holds."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of a stack of matrices (E, R, C) are, by rank of the group."""

    shape: tuple[int, ...]
    regions: Mapping[int, Region]
    """The region of each rank."""
    replica: Mapping[int, int]
    """A number for each rank; ranks with the same number hold one copy between them."""

    def part(self, rank: int, region: Region) -> Region | None:
        """Return the part of a region that a rank holds.

        Args:
            rank: The rank.
            region: The region.

        Returns:
            The part; None if it is empty.
        """
        held = tuple(
            slice(max(one.start, two.start), min(one.stop, two.stop))
            for one, two in zip(self.regions[rank], region, strict=True)
        )
        return held if size(held) else None

    def parts(self, region: Region) -> Iterator[tuple[int, Region]]:
        """Yield each rank that holds a part of ``region``, and the part."""
        for rank in self.regions:
            held = self.part(rank, region)
            if held:
                yield rank, held


def layout_of(
    parameter: Tensor, group: dist.ProcessGroup | None, mesh: DeviceMesh | None = None
) -> Layout:
    """Return the layout of a parameter.

    Without ``mesh`` each rank handles a plain tensor alone.

    Args:
        parameter: A parameter of 2 or 3 dims.
        group: The ranks that share the matrices; None is all ranks.
        mesh: A mesh that has the ranks of ``group``. A parameter that lies on some of its axes, or on
            none, as plain tensors do, has copies along the others.

    Returns:
        The layout.

    Raises:
        ValueError: The parameter's mesh has other ranks than ``group``, or it is a partial sum.
    """
    missing = 3 - parameter.ndim
    shape = (1,) * missing + tuple(parameter.shape)
    stack = (slice(0, 1),) * missing
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a parameter is still to be summed: {placements}")
    own = parameter.device_mesh if isinstance(parameter, DTensor) else None
    names = own.mesh_dim_names or ("",) if own else ()
    if mesh is not None and set(names) <= set(mesh.mesh_dim_names or ()):
        over = mesh
    elif own is None:
        me = dist.get_rank(group) if group else 0
        return Layout(shape, {me: stack + local_region(parameter)}, {me: 0})
    else:
        over, names = own, tuple(map(str, range(own.ndim)))
    ranks = dist.get_process_group_ranks(group) if group else []
    if mesh is not None and own and over is own and len(ranks) > own.size() and own.mesh_dim_names:
        # Copies of experts lie along other axes of the mesh that theirs is a part of.
        over, names = own._get_root_mesh(), own.mesh_dim_names
    held = set(over.mesh.flatten().tolist())
    if (over is own and set(ranks) != held) or not set(ranks) <= held:
        raise ValueError(f"a parameter is on {own}, and not on the ranks {ranks} of the optimizer")
    axes = names if over is own else over.mesh_dim_names or ()
    cut = {
        name for name, placement in zip(names, placements, strict=True) if not placement.is_replicate()
    }
    regions, copies = {}, []
    for number, rank in enumerate(ranks):
        at = dict(zip(axes, (over.mesh == rank).nonzero()[0].tolist(), strict=True))
        regions[number] = stack + local_region(parameter, [at[name] for name in names])
        copies.append(tuple(at[name] for name in axes if name not in cut))
    numbers = {copy: number for number, copy in enumerate(sorted(set(copies)))}
    return Layout(shape, regions, {number: numbers[copy] for number, copy in enumerate(copies)})


def assigned(layouts: Mapping[int, Layout]) -> list[list[Slab]]:
    """Return rounds of slabs, at most one per rank in a round; the same on every rank of the group.

    Costly matrices are dealt out first. Each goes to the rank that has least to do so far, among those
    that hold a part of it. ``layouts`` are those of parameters, by their numbers.
    """
    wanted: list[tuple[float, int, Region, dict[int, Region]]] = []
    for number, layout in layouts.items():
        sides = layout.shape[1:]
        # All experts between two edges are held by the same ranks.
        edges = {
            edge for region in layout.regions.values() for edge in (region[0].start, region[0].stop)
        }
        for first, last in zip(sorted(edges), sorted(edges)[1:], strict=False):
            region = (slice(first, last), slice(0, sides[0]), slice(0, sides[1]))
            holders = dict(layout.parts(region))
            count = last - first
            pieces = max(min(count, len(holders)), math.ceil(size(region) / SLAB))
            for i in range(pieces):
                ends = (first + count * i // pieces, first + count * (i + 1) // pieces)
                cost = (ends[1] - ends[0]) * flops(*sides)
                wanted.append((cost, number, (slice(*ends), *region[1:]), holders))
    load: dict[int, float] = {}
    rounds: list[list[Slab]] = []
    turns: dict[int, int] = {}
    for cost, number, region, holders in sorted(wanted, key=lambda one: -one[0]):
        owner = min(holders, key=lambda rank: (load.get(rank, 0.0), rank))
        load[owner] = load.get(owner, 0.0) + cost
        turn = turns[owner] = turns.get(owner, -1) + 1
        if turn == len(rounds):
            rounds.append([])
        most = max(size(part) for _, part in layouts[number].parts(region))
        rounds[turn].append(Slab(number, region, owner, most))
    return rounds


def flops(rows: int, columns: int, iterations: int = 5) -> float:
    """Return the FLOPs of orthogonalizing a matrix: three products in each iteration."""
    small, large = sorted((rows, columns))
    return iterations * (4.0 * small**2 * large + 2.0 * small**3)


def in_flight(slabs: Sequence[Slab]) -> Iterator[list[Slab]]:
    """Yield ``slabs`` in order, in lists whose parts a rank may receive at once."""
    some: list[Slab] = []
    for slab in slabs:
        if some and sum(one.elements for one in some) + slab.elements > IN_FLIGHT:
            yield some
            some = []
        some.append(slab)
    if some:
        yield some


class Messages:
    """Pieces of tensors that the ranks of a group send each other, all at the same time."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.operations: list[dist.P2POp] = []

    def send(self, tensor: Tensor, to: int) -> None:
        """Ask for a message to another rank.

        Args:
            tensor: Contiguous; it must not change until :meth:`exchange` has returned.
            to: The rank of the group.
        """
        self.operations.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=to))

    def receive(self, region: Region, source: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Ask for a message from another rank.

        Args:
            region: The region that arrives.
            source: The rank of the group.
            dtype: Its type.
            device: Where it goes.

        Returns:
            A tensor for ``region``; :meth:`exchange` fills it.
        """
        tensor = torch.empty(lengths(region), dtype=dtype, device=device)
        self.operations.append(dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=source))
        return tensor

    def exchange(self) -> None:
        """Send and receive all. Two ranks must ask for the messages between them in the same order."""
        for work in dist.batch_isend_irecv(self.operations) if self.operations else ():
            work.wait()
        self.operations = []
