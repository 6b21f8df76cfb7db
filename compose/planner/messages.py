"""Measures collectives over message size, and fits a line to each: latency and inverse bandwidth."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from compose.ops.torch_versions import ALL_GATHER, REDUCE_SCATTER
from compose.planner.cluster import KINDS, Collective, Kind, Link

_MOST_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


class Clock(Protocol):
    """A value that times a function on all ranks: ``compose.planner.measure.Sweep``."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        ...

    def left(self, until: float) -> float:
        """Return the seconds until a part of the whole time is over, the same on every rank."""
        ...

    def time(self, run: Callable[[], object], most: float) -> float:
        """Return the seconds of one call, the same on every rank."""
        ...


def measure_collectives(clock: Clock, until: float) -> Iterator[Collective]:
    """Time each collective on each axis that a mesh of all ranks can have, and fit a line to it.

    The groups of an axis all communicate at the same time, as in training.

    Yields:
        The collectives; every rank must take all.
    """
    world = dist.get_world_size()
    axes = [
        (ranks, stride)
        for ranks in range(2, world + 1)
        for stride in range(1, world // ranks + 1)
        if world % (ranks * stride) == 0
    ]
    axes.sort(key=lambda axis: (axis[1], -axis[0]))
    parts = sum(len(kinds_of(ranks)) for ranks, _ in axes)
    for ranks, stride in axes:
        blocks = range(0, world, ranks * stride)
        rows = [
            [block + first + i * stride for i in range(ranks)]
            for block in blocks
            for first in range(stride)
        ]
        group, _ = dist.new_subgroups_by_enumeration(rows)
        assert isinstance(group, dist.ProcessGroup)
        for kind in kinds_of(ranks):
            left = clock.left(until)
            if left > 0 or (ranks, stride) == axes[0]:
                yield _fitted(clock, kind, group, stride, max(0.0, left) / parts)
            parts -= 1
        dist.destroy_process_group(group)


def kinds_of(ranks: int) -> list[Kind]:
    """Return the kinds of collectives of a group; messages from rank to rank are between two."""
    return [kind for kind in KINDS if kind != "p2p" or ranks == 2]


def _fitted(clock: Clock, kind: Kind, group: dist.ProcessGroup, stride: int, most: float) -> Collective:
    planned = [1024 * 4**i for i in range(10) if 1024 * 4**i <= _MOST_BYTES[clock.device.type]]
    sizes: list[float] = []
    times: list[float] = []
    spent, share = 0.0, most / len(planned)
    for size in planned:
        if len(sizes) >= 3 and spent >= most:
            break
        numbers = max(1, size // 4 // group.size()) * group.size()
        seconds = clock.time(_sending(kind, group, numbers, clock.device), share)
        spent += max(share, 2 * seconds)  # a timing makes two calls or more
        # Of p2p, a call sends there and back.
        sizes, times = [*sizes, 4.0 * numbers], [*times, seconds / (2 if kind == "p2p" else 1)]
    latency, inverse, error = fit(sizes, times)
    return Collective(kind, group.size(), stride, latency, inverse, error, tuple(sizes), tuple(times))


def _sending(
    kind: Kind, group: dist.ProcessGroup, numbers: int, device: torch.device
) -> Callable[[], object]:
    """Return a function that runs a collective of ``numbers`` of float32; p2p there and back."""
    whole, other = torch.zeros(numbers, device=device), torch.zeros(numbers, device=device)
    part = torch.zeros(numbers // group.size(), device=device)
    if kind == "all_gather":
        return lambda: getattr(dist, ALL_GATHER)(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: getattr(dist, REDUCE_SCATTER)(part, whole, group=group)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, group=group, group_src=0)

    def there_and_back() -> None:
        if group.rank() == 0:
            dist.send(whole, group=group, group_dst=1)
            dist.recv(other, group=group, group_src=1)
        else:
            dist.recv(other, group=group, group_src=0)
            dist.send(whole, group=group, group_dst=0)

    return there_and_back


def link_of(rows: Sequence[Collective]) -> Link | None:
    """Return the link that the formula of a ring gives for the measured all-gather of most ranks.

    Args:
        rows: Collectives on one level of the network.

    Returns:
        The link; None without an all-gather.
    """
    gathers = [row for row in rows if row.kind == "all_gather"]
    if not gathers:
        return None
    row = max(gathers, key=lambda row: (row.ranks, -row.stride))
    inverse = row.inverse_bandwidth or row.seconds[-1] / row.bytes[-1]
    steps = row.ranks - 1
    return Link(steps / row.ranks / inverse, row.latency / steps)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit the line ``latency + size * inverse`` by least squares of the relative error.

    Relative errors count small messages, whose times are short, as much as large ones.

    Args:
        sizes: Bytes.
        seconds: The time of each.

    Returns:
        Latency and inverse bandwidth, neither below 0, and the root of the mean square relative error.
    """
    # Minimise the sum of (latency u + inverse v - 1)^2, where u = 1 / seconds and v = size / seconds.
    u, v = [1 / t for t in seconds], [size / t for size, t in zip(sizes, seconds, strict=True)]
    uu, vv = sum(a * a for a in u), sum(b * b for b in v)
    uv = sum(a * b for a, b in zip(u, v, strict=True))
    determinant = uu * vv - uv * uv
    candidates = [(sum(u) / uu, 0.0), (0.0, sum(v) / vv)]
    if determinant > 1e-12 * uu * vv:
        both = (sum(u) * vv - sum(v) * uv) / determinant, (sum(v) * uu - sum(u) * uv) / determinant
        candidates += [both] if min(both) >= 0 else []

    def error(line: tuple[float, float]) -> float:
        squares = [(line[0] * a + line[1] * b - 1) ** 2 for a, b in zip(u, v, strict=True)]
        return math.sqrt(sum(squares) / len(squares))

    best = min(candidates, key=error)
    return *best, error(best)
