"""Who orthogonalizes which matrix, and what ranks send each other for it.

A matrix has to be whole on the rank that orthogonalizes it. The ranks that hold parts of it, replicas
too, share the matrices out by their cost, so that each is worked on once. Places are boxes of the whole
tensor, read off the cut that filled it (weights.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from compose.optimizer.boxes import Box, lengths, size
from compose.weights import local_box

# Elements of experts that one rank works on at once, if one expert is not more by itself.
SLAB = 2**24
# Elements of results that a rank receives at once, if its part of one slab is not more by itself.
IN_FLIGHT = 2**26


@dataclass(frozen=True)
class Slab:
    """Some matrices of a stack, and the rank of the group that orthogonalizes them.

    parameter: number of the stack. box: of it, whole matrices. elements: of the largest part of the
    slab that one rank holds.
    """

    parameter: int
    box: Box
    owner: int
    elements: int


@dataclass(frozen=True)
class Layout:
    """Where the parts of a stack of matrices (E, R, C) are, by rank of the group.

    replica: ranks of equal number hold one copy between them.
    """

    shape: tuple[int, ...]
    boxes: Mapping[int, Box]
    replica: Mapping[int, int]

    def part(self, rank: int, box: Box) -> Box | None:
        """What ``rank`` holds of ``box``; None if that is nothing."""
        held = tuple(
            slice(max(one.start, two.start), min(one.stop, two.stop))
            for one, two in zip(self.boxes[rank], box, strict=True)
        )
        return held if size(held) else None

    def parts(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Of every rank that holds something of ``box``: what."""
        for rank in self.boxes:
            held = self.part(rank, box)
            if held:
                yield rank, held


def layout_of(parameter: Tensor, group: dist.ProcessGroup | None) -> Layout:
    """Of a parameter of 2 or 3 dims; a plain tensor is all on each rank, which is alone with it.

    Raises ValueError where its mesh is of other ranks than ``group``, or it is a partial sum.
    """
    missing = 3 - parameter.ndim
    shape = (1,) * missing + tuple(parameter.shape)
    stack = (slice(0, 1),) * missing
    if not isinstance(parameter, DTensor):
        me = dist.get_rank(group) if group else 0
        return Layout(shape, {me: stack + local_box(parameter)}, {me: 0})
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a parameter is still to be summed: {placements}")
    ranks = dist.get_process_group_ranks(group) if group else []
    if sorted(ranks) != sorted(mesh.mesh.flatten().tolist()):
        raise ValueError(f"a parameter is on {mesh}, and not on the ranks {ranks} of the optimizer")
    copies = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    boxes, replica = {}, {}
    for number, rank in enumerate(ranks):
        coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
        boxes[number] = stack + local_box(parameter, coordinate)
        replica[number] = 0
        for axis in copies:
            replica[number] = replica[number] * mesh.size(axis) + coordinate[axis]
    return Layout(shape, boxes, replica)


def shared_out(layouts: Mapping[int, Layout]) -> list[list[Slab]]:
    """Rounds of slabs, at most one for each rank in a round; the same on every rank of the group.

    layouts: of parameters by their numbers. Costly matrices first, each to the rank that has least to
    do so far of those that hold a part of it.
    """
    wanted: list[tuple[float, int, Box, dict[int, Box]]] = []
    for number, layout in layouts.items():
        sides = layout.shape[1:]
        # Between two edges the experts have the same holders.
        edges = {edge for box in layout.boxes.values() for edge in (box[0].start, box[0].stop)}
        for first, last in zip(sorted(edges), sorted(edges)[1:], strict=False):
            box = (slice(first, last), slice(0, sides[0]), slice(0, sides[1]))
            holders = dict(layout.parts(box))
            count = last - first
            pieces = max(min(count, len(holders)), math.ceil(size(box) / SLAB))
            for i in range(pieces):
                ends = (first + count * i // pieces, first + count * (i + 1) // pieces)
                cost = (ends[1] - ends[0]) * flops(*sides)
                wanted.append((cost, number, (slice(*ends), *box[1:]), holders))
    load: dict[int, float] = {}
    rounds: list[list[Slab]] = []
    turns: dict[int, int] = {}
    for cost, number, box, holders in sorted(wanted, key=lambda one: -one[0]):
        owner = min(holders, key=lambda rank: (load.get(rank, 0.0), rank))
        load[owner] = load.get(owner, 0.0) + cost
        turn = turns[owner] = turns.get(owner, -1) + 1
        if turn == len(rounds):
            rounds.append([])
        most = max(size(part) for _, part in layouts[number].parts(box))
        rounds[turn].append(Slab(number, box, owner, most))
    return rounds


def flops(rows: int, columns: int, iterations: int = 5) -> float:
    """Of orthogonalizing a matrix: three products in each iteration of Newton and Schulz."""
    small, large = sorted((rows, columns))
    return iterations * (4.0 * small**2 * large + 2.0 * small**3)


def in_flight(slabs: Sequence[Slab]) -> Iterator[list[Slab]]:
    """``slabs`` in their order, as many at once as a rank may receive its parts of."""
    some: list[Slab] = []
    for slab in slabs:
        if some and sum(one.elements for one in some) + slab.elements > IN_FLIGHT:
            yield some
            some = []
        some.append(slab)
    if some:
        yield some


class Messages:
    """Pieces of tensors between the ranks of a group, all on their way at once."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.operations: list[dist.P2POp] = []

    def send(self, tensor: Tensor, to: int) -> None:
        """tensor: contiguous, and left alone until :meth:`exchange` has returned."""
        self.operations.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=to))

    def receive(self, box: Box, source: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for ``box``, which :meth:`exchange` fills."""
        tensor = torch.empty(lengths(box), dtype=dtype, device=device)
        self.operations.append(dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=source))
        return tensor

    def exchange(self) -> None:
        """Send and receive; messages between two ranks must be asked for in one order on both."""
        for work in dist.batch_isend_irecv(self.operations) if self.operations else ():
            work.wait()
        self.operations = []
