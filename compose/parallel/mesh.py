"""The parallel degrees, and the DeviceMesh with named axes that they give.

From the outside in the axes are pp, dp_replicate, dp_shard, cp, tp. Neighbouring ranks differ in tp,
whose messages are largest and on the critical path. The messages of pp are smallest and cross nodes.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from compose.errors import ConfigError, LocalPath, NonNegative, Positive, Weight

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# The axes over which samples differ.
BATCH_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Parallel:
    """The table [parallel]: the degree of each axis, and the methods used on it."""

    dp_replicate: int = 1
    """Data-parallel replicas, each holding its own copy of the sharded state (HSDP's outer axis)."""
    dp_shard: int = -1
    """Data-parallel ranks that share one copy of the state. One degree may be -1: what is left."""
    zero: Literal[0, 1, 2, 3] = 3
    """dp_shard shards: 0 nothing (DDP), 1 optimizer state, 2 and gradients, 3 and parameters."""
    zero3_reshard: NonNegative = 0
    """With zero 3 (hpZ): the size of a group of neighbouring ranks. The first gather of a layer in a
    step uses all ranks that share it. Later gathers use only this group. 0: off."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: with zero 3, parameters, gradients and optimizer are in host memory between their uses."""
    cp: int = 1
    """Context-parallel degree: ranks that share each sequence."""
    cp_method: Literal["ring", "allgather", "ulysses"] = "ring"
    """How attention gets the keys of other ranks."""
    cp_balance: Literal["headtail", "none"] = "headtail"
    """headtail: each rank holds a piece from the front and one from the back of a sequence."""
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline-parallel degree; a step's micro-batches are those of train.micro_batch."""
    pp_schedule: LocalPath = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, a .csv
    file of actions; or without a flush, with gradients of older weights, PipeDream, PipeDream2BW."""
    pp_virtual_stages: NonNegative = 0
    """Stages on each pipeline rank; 0: as many as the schedule is made for."""
    pp_layers: tuple[NonNegative, ...] = ()
    """Layers of each stage, in order; empty: balanced by FLOPs, the output projection counted."""
    ep: Positive = 1
    """Expert-parallel degree, over the innermost of the other axes except pp; it adds no ranks."""
    speeds: tuple[Weight, ...] | Literal["measure"] = ()
    """Relative speed of each data-parallel rank: a slow one gets fewer samples of the global batch.
    With pp: the same for each pipeline rank in turn, and layers are balanced by these speeds too.
    measure: by the times of the first steps. Empty: equal shares."""
    sequence: bool = True
    """With tp: shard the sequence between layers (norms, residuals) over tp."""
    loss: bool = True
    """With tp: keep the logits sharded over the vocabulary, in the loss too."""

    @property
    def ranks(self) -> int:
        """The product of the degrees."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """The ranks over which samples differ."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage_speeds(self) -> list[float]:
        """The speed of each pipeline rank: the mean of its data ranks."""
        return [sum(row) / len(row) for row in self._speeds]

    @property
    def data_speeds(self) -> list[float]:
        """The speed of each data rank: of its slowest stage, where layers go by ``stage_speeds``."""
        means = self.stage_speeds
        return [
            min(row[rank] / mean for row, mean in zip(self._speeds, means, strict=True))
            for rank in range(self.data_ranks)
        ]

    @property
    def _speeds(self) -> list[list[float]]:
        """The speeds of the data ranks of each pipeline rank."""
        count = self.data_ranks
        if self.speeds == "measure" or len(self.speeds) != self.pp * count:
            return self.pp * [count * [1.0]]
        return [list(self.speeds[i * count : (i + 1) * count]) for i in range(self.pp)]


def resolve_degrees(parallel: Parallel, world_size: int) -> Parallel:
    """Fill in the degree that is -1, so that the degrees' product is ``world_size``."""
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    bad = [
        f"parallel.{axis}: {degree} is not a degree (1 or more, or -1 for what is left)"
        for axis, degree in degrees.items()
        if degree < 1 and degree != -1
    ]
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if len(free) > 1:
        keys = " and ".join(f"parallel.{axis}" for axis in free)
        bad.append(f"{keys}: only one degree may be -1")
    if bad:
        raise ConfigError(*bad)
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    if free and world_size % fixed == 0:
        return dataclasses.replace(parallel, **{free[0]: world_size // fixed})
    if free or fixed != world_size:
        raise ConfigError(_misfit(degrees, fixed, world_size))
    return parallel


def divisors(number: int) -> list[int]:
    """Return the whole numbers that divide ``number``, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def meshes(world_size: int, axes: Sequence[str] = AXES) -> Iterator[dict[str, int]]:
    """Yield every assignment of degrees to the axes whose product is ``world_size``."""
    first, *others = axes
    for degree in divisors(world_size) if others else [world_size]:
        for degrees in meshes(world_size // degree, others) if others else [{}]:
            yield {first: degree, **degrees}


def _misfit(degrees: dict[str, int], fixed: int, world_size: int) -> str:
    """Return one line with the product, the world size, and the nearest single change that fits."""
    free = -1 in degrees.values()
    product = " x ".join(f"{a} {d}" for a, d in degrees.items() if d not in (1, -1)) or "1"
    relation = "does not divide" if free else "is not"
    cures = []
    for axis, degree in degrees.items():
        others = fixed // degree if degree != -1 else fixed
        if world_size % others or degree == -1:
            continue
        most = world_size // others
        options = divisors(most) if free else [most]
        best = min((d for d in options if d != degree), key=lambda d: abs(d - degree), default=None)
        if best is not None:
            order = degree == 1, abs(best - degree), axis != "dp_shard"
            cures.append((order, f"parallel.{axis} = {best}"))
    # Prefer changing an axis that is in use, then the smallest change, then the axis of all models.
    cure = min(cures, key=lambda c: c[0])[1] if cures else f"{fixed} ranks"
    return (
        f"parallel: the degrees' product {product}{f' = {fixed}' if ' x ' in product else ''}"
        f" {relation} the world size {world_size}; nearest: {cure}"
    )


@functools.lru_cache(maxsize=65536)
def group_in_nodes(node: int, ranks: int, stride: int, world_size: int) -> tuple[int, int]:
    """Return over how many nodes a group of an axis goes, and the fewest ranks that it has in one.

    Of all groups of ``ranks`` ranks, ``stride`` apart, it is the one that spans most nodes, and the one
    with fewest ranks in a node: all wait for these.
    """
    nodes, fewest, size = 1, ranks, ranks * stride
    # Equal groups are in every node where they begin at the same place of it.
    for first in {(at + i) % node for at in range(0, world_size, size) for i in range(stride)}:
        counts = Counter((first + i * stride) // node for i in range(ranks))
        nodes, fewest = max(nodes, len(counts)), min(fewest, *counts.values())
    return nodes, fewest


def crosses_nodes(parallel: Parallel, node: int = 0) -> str:
    """Return which of tp and ep have ranks in several nodes, in words; empty if none has.

    Their messages are on the critical path, and links between nodes are slow. ``node`` is the
    number of a node's ranks; 0: as many as torchrun has started on this one.
    """
    node = node or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    degrees = {"tp": parallel.tp, "ep": parallel.ep}
    crossing = [f"{a} {d}" for a, d in degrees.items() if node and d > 1 and node % d]
    if not crossing:
        return ""
    verb = "cross" if len(crossing) > 1 else "crosses"
    return f"{' and '.join(crossing)} {verb} nodes of {node} ranks"


def check_same_degrees(parallel: Parallel, mesh: DeviceMesh) -> None:
    """Raise ConfigError unless ``mesh`` has the degrees of ``parallel``."""
    wanted = _shape(resolve_degrees(parallel, mesh.size()))
    for axis, degree in zip(AXES, wanted, strict=True):
        if axis_size(mesh, axis) != degree:
            raise ConfigError(
                f"parallel.{axis}: {degree}, but the mesh has {axis_size(mesh, axis)}; give the"
                " Parallel that the mesh was made of"
            )


def init_mesh(parallel: Parallel, device_type: str = "cpu") -> DeviceMesh:
    """Return the five-axis mesh over the default process group.

    With zero = 0 nothing is sharded over dp_shard, so its ranks count as replicas.

    Args:
        parallel: The table; it may still hold a -1.
        device_type: "cpu" or "cuda".

    Returns:
        The mesh with the axes ``AXES``.

    Raises:
        ConfigError: The degrees do not fit the number of ranks.
    """
    degrees = _shape(resolve_degrees(parallel, dist.get_world_size()))
    return init_device_mesh(device_type, degrees, mesh_dim_names=AXES)


def _shape(parallel: Parallel) -> tuple[int, ...]:
    if parallel.zero == 0:
        parallel = dataclasses.replace(parallel, dp_replicate=parallel.data_ranks, dp_shard=1)
    return tuple(getattr(parallel, axis) for axis in AXES)


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the number of ranks along an axis.

    This is cheap. ``mesh[axis].size()`` makes a mesh each time.
    """
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis))


def batch_share(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (index, count): this rank trains on part ``index`` of ``count`` equal batch parts."""
    index, count = 0, 1
    for axis in BATCH_AXES:
        size = axis_size(mesh, axis)
        index, count = index * size + mesh.get_local_rank(axis), count * size
    return index, count


@dataclass(frozen=True)
class Share:
    """The part of a global batch that one data rank trains on.

    Ranks whose collectives must match run equally many micro-batches. A rank with too few samples fills
    its micro-batches up with rows from which nothing is learnt.
    """

    first: int
    """The number of its first sample in the global batch."""
    samples: int
    micro_batch: int
    """Rows of each of its micro-batches."""
    micro_batches: int
    of: int
    """Samples of the global batch."""

    @property
    def rows(self) -> slice:
        """The rows of the global batch that it has."""
        return slice(self.first, self.first + self.samples)

    @property
    def rows_run(self) -> int:
        """The rows that it runs, of which some may be padding."""
        return self.micro_batch * self.micro_batches

    @property
    def padding(self) -> int:
        """The rows that it runs besides its samples."""
        return self.rows_run - self.samples


_NEARLY = 1.03  # shares that take so much longer by their rows are as good, with larger micro-batches


def deal(
    samples: int,
    speeds: Sequence[float],
    micro_batch: int,
    together: bool = True,
    can_run: Callable[[int], bool] = lambda micro_batches: True,
) -> tuple[Share, ...]:
    """Return each data rank's share of a global batch, such that the slowest rank is done soonest.

    Ranks have the relative ``speeds``, and run at most ``micro_batch`` rows at once. If they act
    ``together``, all run equally many micro-batches, and a slower rank has fewer rows in each; else it
    has fewer micro-batches. Where equal ranks divide the samples, no row is padding. Numbers of
    micro-batches that a rank ``can_run`` come before others.
    """
    fastest = max(speeds)

    def seconds(shares: tuple[Share, ...]) -> float:
        return max(share.rows_run / v for share, v in zip(shares, speeds, strict=True))

    options = []
    for size, up in itertools.product(range(min(micro_batch, samples), 0, -1), (0.5, 1e-9)):
        if together:
            sizes = [max(1, int(size * speed / fastest + up)) for speed in speeds]
            rows, counts = _cut(samples, sizes), len(speeds) * [-(-samples // sum(sizes))]
        else:
            sizes, rows = len(speeds) * [size], _cut(samples, speeds)
            counts = [-(-len(each) // size) or 1 for each in rows]
        parts = zip(rows, sizes, counts, strict=True)
        options.append(tuple(Share(r.start, len(r), size, n, samples) for r, size, n in parts))
    runs = [shares for shares in options if all(can_run(share.micro_batches) for share in shares)]
    # Padding of a few rows costs less than small micro-batches. The first ones are the largest.
    most = _NEARLY * min(map(seconds, runs or options))
    return next(shares for shares in runs or options if seconds(shares) <= most)


def _cut(samples: int, weights: Sequence[float]) -> list[range]:
    """Cut range(samples) into parts in proportion to ``weights``."""
    total = sum(weights)
    ends = [int(samples * part / total + 0.5) for part in itertools.accumulate(weights, initial=0)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def rows_of(mesh: DeviceMesh, batch: Mapping[str, torch.Tensor], share: Share | None = None) -> slice:
    """Return this rank's rows of a global batch: those of its share, or an equal part.

    Raises ConfigError if equal parts are not whole.
    """
    index, count = batch_share(mesh)
    sizes = {len(value) for value in batch.values()}
    if not share and any(size % count for size in sizes):
        raise ConfigError(f"batch: {max(sizes)} samples cannot be shared by {count} ranks")
    size = max(sizes) // count
    return share.rows if share else slice(index * size, (index + 1) * size)


def sum_over(tensor: torch.Tensor, mesh: DeviceMesh, axes: Iterable[str]) -> torch.Tensor:
    """Return the sum of a tensor over all ranks that differ from this one in ``axes`` only."""
    tensor = tensor.detach().clone()
    for axis in axes:
        if axis_size(mesh, axis) > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))
    return tensor


def begin_messages(
    group: dist.ProcessGroup | None,
    sent: Iterable[tuple[torch.Tensor, int]],
    received: Iterable[tuple[torch.Tensor, int]] = (),
    tag: int = 0,
) -> list[dist.Work]:
    """Begin to send contiguous tensors to ranks of a group, and to fill tensors from ranks of it.

    Two ranks must list the messages between them in the same order.
    """
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer, tag=tag)
        for operation, messages in ((dist.isend, sent), (dist.irecv, received))
        for tensor, peer in messages
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait for messages."""
    for work in works:
        work.wait()
