"""Secondary shards: zero-3 parameters gathered from near ranks, once the whole group has been asked.

ZeRO++'s hierarchical partition (hpZ; Wang et al. 2023, arXiv:2306.10209, section 3.2). A unit's first
gather of a step runs over all n ranks that share its parameters. Of what it gave each rank keeps one of
N parts, so that N neighbours hold the unit between them, and every gather that follows in the step (in
backward, and in later micro-batches) runs over those N. Costs 1/N of the unit in the type in which it
travels, until the step's last backward has ended; weights do not change before.

``fully_shard(reshard_after_forward=N)`` means the same, but takes no DTensor (torch 2.11 to 2.15:
``FSDPParam.to_sharded_post_forward``), so neither tp nor ep, and makes process groups for each unit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.base.torch_versions import ALL_GATHER
from compose.errors import ConfigError
from compose.parallel.mesh import axis_size


class NearGather:
    """The all-gather of one unit, for ``FSDPModule.set_custom_all_gather``; ``near`` holds the N ranks.

    Outside of :func:`near_shards` it is FSDP's own.
    """

    def __init__(self, near: dist.ProcessGroup) -> None:
        self.near = near
        self.keeping = False
        self.kept: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As FSDP's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (n S,) with the shards (S,) of the n ranks of ``group``, in order."""
        # Looked up at each call, as FSDP does: a measurement may stand in its place.
        gather = getattr(dist, ALL_GATHER)
        if self.kept is not None:
            return gather(output_tensor, self.kept, self.near, async_op)
        work = gather(output_tensor, input_tensor, group, async_op)
        if self.keeping:
            if work is not None:
                work.wait()
            # A copy: FSDP frees the whole. On its all-gather stream, which reads it again.
            self.kept = output_tensor.chunk(self.near.size())[self.near.rank()].clone()
        return work


@contextmanager
def near_shards(gathers: Sequence[NearGather]) -> Iterator[None]:
    """Within it weights do not change, and ``gathers`` keep their parts."""
    for gather in gathers:
        gather.keeping = True
    try:
        yield
    finally:
        for gather in gathers:
            gather.keeping, gather.kept = False, None


@dataclass(frozen=True)
class NearGroups:
    """This rank's group of neighbours: among those that share parameters, and among those that share
    experts, if there are fewer than all. experts_stay: there is one, so nothing of them is freed."""

    shards: dist.ProcessGroup
    experts: dist.ProcessGroup | None = None
    experts_stay: bool = False


def near_groups(
    mesh: DeviceMesh, near: int, zero: int, expert_mesh: DeviceMesh | None = None
) -> NearGroups | None:
    """The groups of ``near`` neighbours along dp_shard x cp; None where that is all.

    Experts are shared by other ranks, those of ``expert_mesh``: of them count those in the same span
    of near x tp ranks; where none holds all experts, they are all gathered from. Creates process
    groups: every rank calls it. Raises ConfigError as :func:`check_near` does.
    """
    ranks = axis_size(mesh, "dp_shard") * axis_size(mesh, "cp")
    check_near(near, zero, ranks)
    if near in (0, ranks):
        return None
    shards = _near_group(mesh.mesh.flatten(2, 3), near)
    if expert_mesh is None:
        return NearGroups(shards)
    few = near_experts(near, axis_size(mesh, "tp"), axis_size(expert_mesh, "ep"))
    experts = _near_group(expert_mesh.mesh, few) if few > 1 else None
    return NearGroups(shards, experts, experts_stay=few == 1)


def near_experts(near: int, tp: int, ep: int) -> int:
    """How many of ``near`` x ``tp`` neighbours share an expert; 0 where they do not hold every expert
    as often."""
    return near * tp // ep if near * tp % ep == 0 else 0


def _near_group(ranks: Tensor, near: int) -> dist.ProcessGroup:
    """This rank's of the groups of ``near`` neighbours along dim 2 of ``ranks`` (pp, replicas, shards,
    rest)."""
    rows = ranks.movedim(2, -1).reshape(-1, near).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows)
    assert isinstance(group, dist.ProcessGroup)
    return group


def check_near(near: int, zero: int, ranks: int) -> None:
    """Raise ConfigError unless parameters that ``ranks`` share in stage ``zero`` can be resharded to
    ``near`` of them; 0 is all."""
    if near == 0:
        return
    if zero != 3:
        raise ConfigError(
            f"parallel.zero3_reshard: {near} is where parameters are between forward and backward, and"
            f" parallel.zero = {zero} keeps them whole; use parallel.zero = 3, or"
            " parallel.zero3_reshard = 0"
        )
    allowed = [n for n in range(2, ranks + 1) if ranks % n == 0]
    if near not in allowed:
        nearest = min(allowed, key=lambda n: abs(n - near), default=0)
        problem = (
            "would keep every parameter whole, as parallel.zero = 2 does"
            if near == 1 < ranks
            else f"does not divide dp_shard x cp = {ranks}, the ranks that share parameters"
        )
        raise ConfigError(f"parallel.zero3_reshard: {near} {problem}; nearest: {nearest}")
