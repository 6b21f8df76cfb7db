"""Degrees to one DeviceMesh with named axes.

From the outside in: pp, dp_replicate, dp_shard, cp, tp. Ranks that are neighbours differ in tp, whose
messages are largest and on the critical path; pp's are smallest and cross nodes.
"""

import dataclasses
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from compose.config import Parallel
from compose.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# The axes over which samples differ.
BATCH_AXES = ("dp_replicate", "dp_shard")


def resolve_degrees(parallel: Parallel, world_size: int) -> Parallel:
    """``parallel`` with the -1 filled in; the degrees' product is ``world_size``.

    Raises ConfigError, with the nearest legal degree, where that cannot be.
    """
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
    if free:
        if world_size % fixed == 0:
            return dataclasses.replace(parallel, **{free[0]: world_size // fixed})
        raise ConfigError(_misfit(degrees, free[0], fixed, world_size))
    if fixed != world_size:
        raise ConfigError(_misfit(degrees, None, fixed, world_size))
    return parallel


def _misfit(degrees: dict[str, int], free: str | None, fixed: int, world_size: int) -> str:
    """One line: the product, the world size, and the nearest single change that fits."""
    product = " x ".join(f"{a} {d}" for a, d in degrees.items() if d not in (1, -1)) or "1"
    relation = "does not divide" if free else "is not"
    cures = []
    for axis, degree in degrees.items():
        others = fixed // degree if degree != -1 else fixed
        if world_size % others or degree == -1:
            continue
        most = world_size // others
        options = [d for d in range(1, most + 1) if most % d == 0] if free else [most]
        best = min((d for d in options if d != degree), key=lambda d: abs(d - degree), default=None)
        if best is not None:
            cures.append((abs(best - degree), degree == 1, f"parallel.{axis} = {best}"))
    # Prefer changing an axis that is in use, then the smallest change.
    cure = min(cures, key=lambda c: (c[1], c[0]))[2] if cures else f"{fixed} ranks"
    return (
        f"parallel: the degrees' product {product}{f' = {fixed}' if ' x ' in product else ''}"
        f" {relation} the world size {world_size}; nearest: {cure}"
    )


def init_mesh(parallel: Parallel, device_type: str = "cpu") -> DeviceMesh:
    """The five-axis mesh over the default process group; ``parallel`` may still hold a -1.

    With zero = 0 nothing is sharded over dp_shard, so its ranks are counted as replicas.
    """
    parallel = resolve_degrees(parallel, dist.get_world_size())
    if parallel.zero == 0:
        replicas = parallel.dp_replicate * parallel.dp_shard
        parallel = dataclasses.replace(parallel, dp_replicate=replicas, dp_shard=1)
    degrees = tuple(getattr(parallel, axis) for axis in AXES)
    return init_device_mesh(device_type, degrees, mesh_dim_names=AXES)


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Ranks along ``axis`` of ``mesh``; cheap, where ``mesh[axis].size()`` makes a mesh each time."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis))


def batch_share(mesh: DeviceMesh) -> tuple[int, int]:
    """(index, count): which of how many equal parts of the global batch this rank trains on."""
    index, count = 0, 1
    for axis in BATCH_AXES:
        size = axis_size(mesh, axis)
        index, count = index * size + mesh.get_local_rank(axis), count * size
    return index, count


def sum_over(tensor: torch.Tensor, mesh: DeviceMesh, axes: Iterable[str]) -> torch.Tensor:
    """``tensor`` summed over every rank that differs from this one in ``axes`` only; a new tensor."""
    tensor = tensor.detach().clone()
    for axis in axes:
        if axis_size(mesh, axis) > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))
    return tensor
