"""Times functions on all ranks together, and the collectives between them."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from compose.ops.torch_versions import ALL_GATHER, REDUCE_SCATTER
from compose.planner.cluster import KINDS, Kind, Link, MeasuredCollective

T = TypeVar("T")
_WINDOWS = 6  # of calls; the last three count
_MOST_SENT = {"cpu": 16 << 20, "cuda": 256 << 20}  # bytes of a collective


@dataclass
class Sweep:
    """The ranks that measure together, and the time that they have."""

    device: torch.device
    seconds: float
    started: float = field(default_factory=time.monotonic)

    def left(self, until: float) -> float:
        """Return the seconds until a part of the whole time is over, on the first rank's sweep."""
        return self.agreed(self.started + until * self.seconds - time.monotonic())

    def shared_out(self, items: Sequence[T], until: float, least: int = 1) -> Iterator[tuple[T, float]]:
        """Yield items with equal parts of the seconds left; when none are left, ``least`` items."""
        for number, item in enumerate(items):
            left = self.left(until)
            if left <= 0 and number >= least:
                return
            yield item, left / (len(items) - number)

    def agreed(self, value: float) -> float:
        """Return the first rank's value on every rank."""
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(box, 0)
        return float(box)

    def time(self, run: Callable[[], object], most: float) -> float:
        """Time a function: the median of the last windows of several calls, then the mean over ranks.

        Each window is sized by the time of the one before, and has at most eight times its calls. So a
        short first call, made before other ranks had begun, does not make the rest last too long.
        """
        run()  # which may compile, connect and allocate
        calls, spent, result = 1, 0.0, []
        for to_come in reversed(range(_WINDOWS)):
            result.append(self._window(run, calls))
            each = self.agreed(result[-1])
            spent += each * calls
            if to_come == 0 or most - spent < each:
                break
            calls = max(1, min(1000, 8 * calls, int((most - spent) / to_come / each)))
        # The first window, of one call, counts if there is no other.
        middle = statistics.median(result[1:][-3:] or result)
        box = torch.tensor([middle], dtype=torch.float64, device=self.device)
        dist.all_reduce(box)
        return float(box) / dist.get_world_size()

    def _window(self, run: Callable[[], object], calls: int) -> float:
        dist.barrier()
        self._wait()
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        self._wait()
        return max(1e-9, (time.perf_counter() - begun) / calls)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def cores() -> int:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_collectives(sweep: Sweep) -> Iterator[MeasuredCollective]:
    """Time each collective on each axis that a mesh of all ranks can have, and fit a line to it.

    The groups of an axis all communicate at the same time, as in training.
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
        firsts = [block + first for block in blocks for first in range(stride)]
        rows = [[first + i * stride for i in range(ranks)] for first in firsts]
        group, _ = dist.new_subgroups_by_enumeration(rows)
        assert isinstance(group, dist.ProcessGroup)
        for kind in kinds_of(ranks):
            left = sweep.left(1.0)
            if left > 0 or (ranks, stride) == axes[0]:
                yield _fitted(sweep, kind, group, stride, max(0.0, left) / parts)
            parts -= 1
        dist.destroy_process_group(group)


def kinds_of(ranks: int) -> list[Kind]:
    """Return the kinds of collectives of a group; messages from rank to rank are between two."""
    return [kind for kind in KINDS if kind != "p2p" or ranks == 2]


def _fitted(
    sweep: Sweep, kind: Kind, group: dist.ProcessGroup, stride: int, most: float
) -> MeasuredCollective:
    planned = [1024 * 4**i for i in range(10) if 1024 * 4**i <= _MOST_SENT[sweep.device.type]]
    sizes, times = list[float](), list[float]()
    spent, share = 0.0, most / len(planned)
    for size in planned:
        if len(sizes) >= 3 and spent >= most:
            break
        numbers = max(1, size // 4 // group.size()) * group.size()
        seconds = sweep.time(_sending(kind, group, numbers, sweep.device), share)
        spent += max(share, 2 * seconds)  # a timing makes two calls or more
        # A call of p2p sends forth and back.
        sizes, times = [*sizes, 4.0 * numbers], [*times, seconds / (2 if kind == "p2p" else 1)]
    latency, inverse, error = fit(sizes, times)
    return MeasuredCollective(
        kind, group.size(), stride, latency, inverse, error, tuple(sizes), tuple(times)
    )


def _sending(
    kind: Kind, group: dist.ProcessGroup, numbers: int, device: torch.device
) -> Callable[[], object]:
    """Return a function that runs a collective of ``numbers`` of float32; p2p forth and back."""
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

    def forth_and_back() -> None:
        if group.rank() == 0:
            dist.send(whole, group=group, group_dst=1)
            dist.recv(other, group=group, group_src=1)
        else:
            dist.recv(other, group=group, group_src=0)
            dist.send(whole, group=group, group_dst=0)

    return forth_and_back


def link_of(rows: Sequence[MeasuredCollective], node: int) -> Link | None:
    """Return the link that the formula of a ring gives for the measured all-gather of most ranks.

    Between nodes a ring of neighbours uses the cards of all its ranks on a node at once.
    """
    gathers = [row for row in rows if row.kind == "all_gather"]
    if not gathers:
        return None
    row = max(gathers, key=lambda row: (row.ranks, -row.stride))
    inverse = row.inverse_bandwidth or row.seconds[-1] / row.bytes[-1]
    steps = row.ranks - 1
    cards = min(row.ranks, max(1, node // row.stride)) if row.ranks * row.stride > node else 1
    return Link(steps / row.ranks / inverse / cards, row.latency / steps)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit the line ``latency + size * inverse`` by least squares of the relative error.

    Relative errors count small messages, whose times are short, as much as large ones.
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
