"""A node as a whole: the host memory that its ranks take together, and the energy of a step."""

import math
from collections.abc import Sequence

from compose.planner.cluster import Cluster

_JOULES = 3.6e6  # of a kWh


def host_bytes(cluster: Cluster, world_size: int, by_rank: Sequence[int]) -> int:
    """Return the bytes of host memory that the fullest node's ranks take.

    ``by_rank`` are those of a rank of each pipeline rank. The ranks of one follow one another.
    """
    each = world_size // len(by_rank)
    of_ranks = [by_rank[rank // each] for rank in range(world_size)]
    nodes = range(0, world_size, cluster.node)
    return max(sum(of_ranks[first : first + cluster.node]) for first in nodes)


def lack_of_host(cluster: Cluster, needed: float) -> str:
    """Return that a node lacks host memory, in words; empty if it does not, or if it is not known."""
    has = cluster.host_memory
    if not has or needed <= has:
        return ""
    return f"needs {needed / 2**30:,.0f} GiB of host memory, a node has {has / 2**30:,.0f}"


def step_kwh(cluster: Cluster, world_size: int, step: float, busy: Sequence[float]) -> float | None:
    """Return the kWh of a step of ``step`` seconds; None if the power of a device is not known.

    ``busy`` are the seconds in which a device of each pipeline rank computes. It then takes the power
    that the efficiencies were measured at, or the limit below it. While it waits, it takes that of an
    idle device, which is too little where it waits for messages. Each node takes ``host_power``
    besides, and 0 if that is unknown. Cooling of the building is not counted.
    """
    device = cluster.device
    if device.power == 1.0:  # Device's default
        return None
    load = min(device.power, device.power_limit) - device.power_idle
    joules = world_size * (device.power_idle * step + load * sum(busy) / len(busy))
    joules += math.ceil(world_size / cluster.node) * cluster.host_power * step
    return joules / _JOULES
