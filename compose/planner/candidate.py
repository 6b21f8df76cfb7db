"""A candidate of the search: a composition with its estimates, and what makes it the better one."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from compose.config.tables import Config
from compose.planner.cluster import Cluster
from compose.planner.estimate import Estimate
from compose.planner.quick import Quick


@dataclass(frozen=True)
class Space:
    """The keys that the search may change, and its objective."""

    config: Config
    """The config of the file and the command line."""
    cluster: Cluster
    world_size: int
    fixed: Collection[str] = ()
    """Keys that stay as they are."""
    objective: str = "time"
    """"time", "memory" or "devices"."""
    islands: int = 1
    """Islands of the job; all else here is of one of them."""


@dataclass(frozen=True)
class Candidate:
    """One composition with its estimates."""

    config: Config
    keys: dict[str, Any]
    """The keys that it sets."""
    rough: Quick
    found: Estimate | None = None
    """The estimate from a record; None if none was made."""

    @property
    def reserved(self) -> int:
        """Bytes that the allocator of the fullest rank has from the device."""
        return max(p.reserved for p in self.found.peaks) if self.found else round(self.rough.memory)


def capacity(cluster: Cluster) -> int:
    """Return the bytes of a device that a process can allocate."""
    return cluster.device.memory - cluster.device.context - cluster.nccl_bytes


def order(
    space: Space, candidate: Candidate, size_factor: float = 1.0, step_factor: float = 1.0
) -> tuple[Any, ...]:
    """Return what candidates are sorted by: those that fit come first.

    Args:
        space: The space, for its cluster and objective.
        candidate: The candidate.
        size_factor: Corrects its bytes.
        step_factor: Corrects its seconds.
    """
    room, size = capacity(space.cluster), candidate.reserved * size_factor
    step = candidate.found.step_seconds if candidate.found else candidate.rough.step
    step *= step_factor
    too_large = size > room
    if too_large or space.objective == "memory":
        return (too_large, size, step)
    return (False, step, size)


def fits(space: Space, candidate: Candidate) -> bool:
    """Return whether the fullest rank of a candidate fits on a device."""
    return candidate.reserved <= capacity(space.cluster)
