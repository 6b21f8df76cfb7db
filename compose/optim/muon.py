"""Muon: orthogonalized momentum, for matrices that may be cut over any mesh.

The rank that orthogonalizes a matrix needs the whole matrix. All ranks that hold parts of it, replicas
too, divide the matrices among themselves by cost, so that each matrix is computed once. Places are
regions of the whole tensor, taken from the cut that filled it (ops/tensors.py).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compose.ops.tensors import at_least_float32, local_region
from compose.optim.rounding import (
    FixedGroups,
    Region,
    check_named,
    chunks,
    lengths,
    load_state,
    local,
    random_bits,
    size,
    steps,
    store,
    within,
)
from compose.parallel.mesh import begin_messages, wait_for

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # added to the norm by which matrices are divided
SCALE = 0.2
# Elements of experts that one rank works on at once, unless a single expert has more.
SLAB = 2**24
# Elements of results that a rank receives at once, unless its part of a single slab has more.
IN_FLIGHT = 2**26


@dataclass(frozen=True)
class Slab:
    """Some matrices of a stack, and the rank of the group that orthogonalizes them."""

    parameter: int
    region: Region
    """Their places in the stack; whole matrices."""
    owner: int
    elements: int
    """The size of the largest part of the slab that one rank holds."""


@dataclass(frozen=True)
class MatrixLayout:
    """Where the parts of a stack of matrices (E, R, C) are, by rank of the group."""

    shape: tuple[int, ...]
    regions: Mapping[int, Region]
    replica: Mapping[int, int]
    """A number for each rank; ranks with the same number hold one copy between them."""

    def part(self, rank: int, region: Region) -> Region | None:
        """Return the part of a region that a rank holds."""
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

    @cached_property  # many layers have one layout
    def cuts(self) -> list[tuple[int, int, list[int], int]]:
        """The experts that are held by the same ranks: the first, the end, these ranks.

        The last number is the most elements of one matrix that a rank holds.
        """
        rows = [held[0] for held in self.regions.values()]
        edges = sorted({edge for part in rows for edge in (part.start, part.stop)})
        results = []
        for first, last in pairwise(edges):
            matrix = (slice(first, first + 1), *(slice(0, side) for side in self.shape[1:]))
            sizes = {rank: size(part) for rank, part in self.parts(matrix)}
            results.append((first, last, list(sizes), max(sizes.values())))
        return results


def layout_of(
    parameter: Tensor, group: dist.ProcessGroup | None, mesh: DeviceMesh | None = None
) -> MatrixLayout:
    """Return the layout of a parameter.

    Without ``mesh`` each rank handles a plain tensor alone. With it, a parameter that lies on some of
    its axes, or on none, has copies along the others.
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
        return MatrixLayout(shape, {me: stack + local_region(parameter)}, {me: 0})
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
    cut = {name for name, of in zip(names, placements, strict=True) if not of.is_replicate()}
    regions, copies = {}, []
    for number, rank in enumerate(ranks):
        at = dict(zip(axes, (over.mesh == rank).nonzero()[0].tolist(), strict=True))
        for name in set(names) - at.keys():  # axes that FSDP has joined, as dp_shard_cp
            place = 0
            for axis, ranks_along in zip(axes, over.mesh.shape, strict=True):
                place = place * ranks_along + at[axis] if axis in name else place
            at[name] = place
        regions[number] = stack + local_region(parameter, [at[name] for name in names])
        copies.append(tuple(at[axis] for axis in axes if not any(axis in name for name in cut)))
    numbers = {copy: number for number, copy in enumerate(sorted(set(copies)))}
    return MatrixLayout(shape, regions, {number: numbers[copy] for number, copy in enumerate(copies)})


def assigned(layouts: Mapping[int, MatrixLayout]) -> list[list[Slab]]:
    """Return rounds of slabs, at most one per rank in a round; the same on every rank of the group.

    Costly matrices are dealt out first. Each goes to the rank that has least to do so far, among those
    that hold a part of it. ``layouts`` are those of parameters, by their numbers.
    """
    wanted: list[tuple[float, int, Region, list[int], int]] = []
    for number, layout in layouts.items():
        sides = layout.shape[1:]
        for first, last, holders, largest in layout.cuts:
            count = last - first
            pieces = min(count, max(len(holders), math.ceil(count * math.prod(sides) / SLAB)))
            for i in range(pieces):
                ends = (first + count * i // pieces, first + count * (i + 1) // pieces)
                cost = (ends[1] - ends[0]) * flops(*sides)
                region = (slice(*ends), slice(0, sides[0]), slice(0, sides[1]))
                wanted.append((cost, number, region, holders, (ends[1] - ends[0]) * largest))
    load: dict[int, float] = {}
    rounds: list[list[Slab]] = []
    turns: dict[int, int] = {}
    for cost, number, region, holders, most in sorted(wanted, key=lambda one: -one[0]):
        owner = min(holders, key=lambda rank: (load.get(rank, 0.0), rank))
        load[owner] = load.get(owner, 0.0) + cost
        turn = turns[owner] = turns.get(owner, -1) + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(Slab(number, region, owner, most))
    return rounds


def flops(rows: int, columns: int) -> float:
    """Return the FLOPs of orthogonalizing a matrix: three products in each iteration."""
    small, large = sorted((rows, columns))
    return ITERATIONS * (4.0 * small**2 * large + 2.0 * small**3)


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


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return nearly U V^T for each matrix U S V^T in (..., R, C), and zeros for zeros.

    These are five quintic iterations of Newton and Schulz, in the type of ``matrices``, with the
    coefficients of Jordan et al. 2024 (kellerjordan.github.io/posts/muon). They bring small singular
    values up fast. But they bring singular values to between 0.7 and 1.2, not to 1.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # this gives the smaller of the two Gram matrices
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    x = (x / (norm + EPS)).to(matrices.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def product_dtype(device_type: str) -> torch.dtype:
    """Return the type in which a device orthogonalizes: a GPU's matrix units are for bfloat16."""
    return torch.float32 if device_type == "cpu" else torch.bfloat16


class Muon(FixedGroups):
    """Muon (Jordan et al. 2024), with the scale of Moonlight (Liu et al. 2025, arXiv:2502.16982).

    For a matrix W (R, C) with gradient G, momentum m and weight decay w:

        M <- m M + G
        W <- (1 - lr w) W - lr 0.2 sqrt(max(R, C)) orthogonalized(G + m M)

    The elements of a step have a root mean square of about 0.2 lr, as AdamW's do. So AdamW's learning
    rate and weight decay can be used here too.

    Parameters are matrices (R, C), or stacks of them (E, R, C), one for each expert; float32 or
    bfloat16; plain, or DTensors in any placement on meshes of the ranks of ``group`` (None: all ranks).
    All these ranks take the step together: a gradient is None on all of them or on none.

    Matrices are sent and orthogonalized in ``dtype``. None is bfloat16 on a GPU, whose matrix units are
    several times as fast in it, and float32 on a CPU. ``mesh`` is that of :func:`layout_of`;
    ``state_dtype`` and ``seed`` are as AdamW's (adamw.py).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        check_named(self.param_groups)
        self.group = group or (dist.group.WORLD if dist.is_initialized() else None)
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.state_dtype, self.seed = state_dtype, seed
        self.matrices: list[tuple[str, nn.Parameter, dict[str, Any]]] = [
            (name, parameter, options)
            for options in self.param_groups
            for name, parameter in zip(options["param_names"], options["params"], strict=True)
        ]
        for name, parameter, _ in self.matrices:
            if parameter.ndim not in (2, 3):
                raise ValueError(f"{name} is no matrix or stack of matrices: {tuple(parameter.shape)}")
        self.device = self.matrices[0][1].device
        self.dtype = dtype or product_dtype(self.device.type)
        self.layouts: list[MatrixLayout] = []
        known: dict[Any, MatrixLayout] = {}  # many layers have the same layout
        for _, parameter, _ in self.matrices:
            key = tuple(getattr(parameter, x, None) for x in ("shape", "placements", "device_mesh"))
            if key not in known:
                known[key] = layout_of(parameter, self.group, mesh)
            self.layouts.append(known[key])
        if self.group and self.group.size() > 1:
            # NCCL needs a first collective of the whole group before some of its ranks send messages.
            dist.all_reduce(torch.zeros((), device=self.device), group=self.group)
        # A rank may have other tensors that it handles alone.
        cut = {i: len(layout.regions) > 1 for i, layout in enumerate(self.layouts)}
        self.rounds = assigned({i: x for i, x in enumerate(self.layouts) if cut[i]})
        self.rounds += assigned({i: x for i, x in enumerate(self.layouts) if not cut[i]})

    @steps
    def step(self) -> None:  # type: ignore[override]
        """Take a step for the parameters that have a gradient; a collective of ``group``."""
        for _, parameter, _ in self.matrices:
            if parameter.grad is not None:
                self._begin(parameter)
        for slabs in self.rounds:
            here = [slab for slab in slabs if self.matrices[slab.parameter][1].grad is not None]
            own = self._gather(here)
            result = None if own is None else orthogonalized(own)
            del own
            for some in in_flight(here):
                self._scatter(some, result)

    load_state_dict = load_state  # type: ignore[assignment]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of ``parameter``, and make it if there is none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # it is on the host, since the host reads it
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        return state

    def _begin(self, parameter: nn.Parameter) -> None:
        there, here = (getattr(x, "placements", ()) for x in (parameter.grad, parameter))
        if there != here:
            raise ValueError(f"a gradient is placed as {there}, its parameter as {here}")
        self.state_of(parameter)["step"] += 1

    def _gather(self, slabs: Sequence[Slab]) -> Tensor | None:
        """Update the momentum, gather slabs on their owners, and return the slab of this rank."""
        sent: list[tuple[Tensor, int]] = []
        arriving: list[tuple[Region, Tensor, int]] = []
        own: Tensor | None = None
        for slab in slabs:
            layout = self.layouts[slab.parameter]
            mine = layout.part(self.rank, slab.region)
            if not mine:
                continue
            part, copy = self._momentum(slab.parameter, mine), layout.replica[slab.owner]
            if slab.owner == self.rank:
                own = part.new_empty(lengths(slab.region))
                own[within(mine, slab.region)] = part
                for rank, region in layout.parts(slab.region):
                    if rank != self.rank and layout.replica[rank] == copy:
                        arriving.append((within(region, slab.region), self._empty(region), rank))
            elif layout.replica[self.rank] == copy:  # the other replicas would send the same
                sent.append((part, slab.owner))
        wait_for(begin_messages(self.group, sent, [(piece, rank) for _, piece, rank in arriving]))
        for place, piece, _ in arriving:
            assert own is not None
            own[place] = piece
        return own

    def _scatter(self, slabs: Sequence[Slab], result: Tensor | None) -> None:
        """Give every rank its part of the owners' results, and take the step with it.

        ``result`` belongs to the slab that this rank owns, which need not be one of ``slabs``.
        """
        sent: list[tuple[Tensor, int]] = []
        received: list[tuple[Tensor, int]] = []
        results = []
        for slab in slabs:
            layout = self.layouts[slab.parameter]
            mine = layout.part(self.rank, slab.region)
            if slab.owner == self.rank:
                assert result is not None
                packed: dict[str, Tensor] = {}  # replicas get the same message
                for rank, region in layout.parts(slab.region):
                    piece = packed.get(str(region))
                    if piece is None:
                        piece = packed[str(region)] = result[within(region, slab.region)].contiguous()
                    if rank != self.rank:
                        sent.append((piece, rank))
                results.append((slab.parameter, mine, packed[str(mine)]))
            elif mine:
                received.append((self._empty(mine), slab.owner))
                results.append((slab.parameter, mine, received[-1][0]))
        wait_for(begin_messages(self.group, sent, received))
        for parameter, region, piece in results:
            self._update(parameter, region, piece)

    def _empty(self, region: Region) -> Tensor:
        return torch.empty(lengths(region), dtype=self.dtype, device=self.device)

    def _momentum(self, number: int, region: Region) -> Tensor:
        """Update this rank's momentum in ``region``; return it with Nesterov's look ahead."""
        name, parameter, options = self.matrices[number]
        gradient = self._stack(parameter.grad, number)
        buffer = self._stack(self.state[parameter]["momentum_buffer"], number)
        purpose = f"{name}/{int(self.state[parameter]['step'])}/state"
        ahead = self._empty(region)
        shape, held = self.layouts[number].shape, self.layouts[number].regions[self.rank]
        for part in chunks(region):
            here = within(part, held)
            g = at_least_float32(gradient[here])
            momentum = at_least_float32(buffer[here]) * options["momentum"]
            momentum += g
            ahead[within(part, region)] = g.add(momentum, alpha=options["momentum"])
            store(buffer[here], momentum, random_bits(self.seed, purpose, part, shape, buffer))
        return ahead

    def _update(self, number: int, region: Region, direction: Tensor) -> None:
        name, parameter, options = self.matrices[number]
        weight = self._stack(parameter, number)
        purpose = f"{name}/{int(self.state[parameter]['step'])}/weight"
        shape, held = self.layouts[number].shape, self.layouts[number].regions[self.rank]
        lr, scale = options["lr"], SCALE * math.sqrt(max(shape[1:]))
        for part in chunks(region):
            here = within(part, held)
            new = at_least_float32(weight[here]) * (1 - lr * options["weight_decay"])
            new.add_(direction[within(part, region)].to(new.dtype), alpha=-lr * scale)
            store(weight[here], new, random_bits(self.seed, purpose, part, shape, weight))

    def _stack(self, tensor: Tensor | None, number: int) -> Tensor:
        """Return this rank's part of a tensor like parameter ``number``, as a view with three dims."""
        part = local(tensor)
        return part if part.ndim == 3 else part.unsqueeze(0)
