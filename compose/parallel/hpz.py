"""hpZ: zero-3 parameters that neighbours keep between them after the first gather of a step.

This is ZeRO++'s hierarchical partition (Wang et al. 2023, arXiv:2306.10209, section 3.2). A unit's
first gather of a step runs over all n ranks that share its parameters. Each rank then keeps one of N
parts of the result, so that N neighbours hold the unit between them. Every later gather of the step (in
backward, and in later micro-batches) runs over those N. The kept part costs 1/N of the unit, in the
type in which it travels, until the step's last backward has ended. Weights do not change before that.

``fully_shard(reshard_after_forward=N)`` means the same. But it takes no DTensor (torch 2.11 to 2.15:
``FSDPParam.to_sharded_post_forward``), so it excludes tp and ep, and it makes process groups for each
unit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compose.errors import ConfigError
from compose.ops.torch_versions import ALL_GATHER
from compose.parallel.mesh import axis_size, divisors


class OwnMemory:
    """The memory that custom messages of FSDP fill."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor, as FSDP's own does."""
        return torch.empty(*size, dtype=dtype, device=device)


class HpzGather(OwnMemory):
    """The all-gather of one unit, for ``FSDPModule.set_custom_all_gather``, with its N neighbours.

    Outside of :func:`hpz_shards` it does what FSDP's own does.
    """

    def __init__(
        self, neighbours: dist.ProcessGroup, first: Callable[..., dist.Work | None] | None = None
    ) -> None:
        """Take the group of neighbours, and the first gather of a step, if it is not FSDP's own."""
        self.neighbours, self.first = neighbours, first
        self.keeping = False
        self.kept: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (n S,) with the shards (S,) of all n ranks of ``group``, in order."""
        # It is looked up at each call, as FSDP does: a measurement may have replaced it.
        gather = getattr(dist, ALL_GATHER)
        if self.kept is not None:
            return gather(output_tensor, self.kept, self.neighbours, async_op)
        work = (self.first or gather)(output_tensor, input_tensor, group, async_op)
        if self.keeping:
            if work is not None:
                work.wait()
            # FSDP frees the whole tensor, so the part is copied. The copy is made on FSDP's all-gather
            # stream, which also reads it later.
            self.kept = output_tensor.chunk(self.neighbours.size())[self.neighbours.rank()].clone()
        return work


@contextmanager
def hpz_shards(gathers: Sequence[HpzGather]) -> Iterator[None]:
    """Let ``gathers`` keep their parts inside this context; weights must not change there."""
    for gather in gathers:
        gather.keeping = True
    try:
        yield
    finally:
        for gather in gathers:
            gather.keeping, gather.kept = False, None


@dataclass(frozen=True)
class HpzGroups:
    """This rank's groups of neighbours."""

    shards: dist.ProcessGroup
    """The neighbours that share parameters."""
    experts: dist.ProcessGroup | None = None
    """The neighbours that gather experts; None: all ranks with the same experts do, or they stay."""
    experts_stay: bool = False
    """Whether that group would be one rank, so that gathered experts stay until the step's end."""


def hpz_groups(
    mesh: DeviceMesh, neighbours: int, expert_mesh: DeviceMesh | None = None
) -> HpzGroups | None:
    """Return the groups of ``neighbours`` ranks along dp_shard x cp.

    Experts are shared by other ranks, those of ``expert_mesh``. Their neighbours are the ranks in the
    same span of neighbours x tp ranks. Where such a span does not hold all experts equally often,
    experts are gathered from all. The call creates process groups, so every rank makes it.
    """
    ranks = axis_size(mesh, "dp_shard") * axis_size(mesh, "cp")
    if neighbours in (0, ranks):
        return None
    shards = _hpz_group(mesh.mesh.flatten(2, 3), neighbours)
    if expert_mesh is None:
        return HpzGroups(shards)
    few = hpz_experts(neighbours, axis_size(mesh, "tp"), axis_size(expert_mesh, "ep"))
    experts = _hpz_group(expert_mesh.mesh, few) if few > 1 else None
    return HpzGroups(shards, experts, experts_stay=few == 1)


def hpz_experts(neighbours: int, tp: int, ep: int) -> int:
    """Return how many of ``neighbours`` x ``tp`` ranks share an expert; 0 if the numbers differ."""
    return neighbours * tp // ep if neighbours * tp % ep == 0 else 0


def _hpz_group(ranks: Tensor, neighbours: int) -> dist.ProcessGroup:
    """Return this rank's group of ``neighbours`` ranks along dim 2 of ``ranks``.

    The dims of ``ranks`` are pp, replicas, shards and the rest.
    """
    rows = ranks.movedim(2, -1).reshape(-1, neighbours).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows)
    assert isinstance(group, dist.ProcessGroup)
    return group


def check_hpz(neighbours: int, zero: int, ranks: int) -> None:
    """Raise ConfigError unless parameters can be resharded to ``neighbours`` ranks."""
    if neighbours == 0:
        return
    if zero != 3:
        raise ConfigError(
            f"parallel.zero3_reshard: {neighbours} is where parameters are between forward and"
            f" backward, and parallel.zero = {zero} keeps them whole; use parallel.zero = 3, or"
            " parallel.zero3_reshard = 0"
        )
    allowed = divisors(ranks)[1:]
    if neighbours not in allowed:
        nearest = min(allowed, key=lambda n: abs(n - neighbours), default=0)
        problem = (
            "would keep every parameter whole, as parallel.zero = 2 does"
            if neighbours == 1
            else f"does not divide dp_shard x cp = {ranks}, the ranks that share parameters"
        )
        raise ConfigError(f"parallel.zero3_reshard: {neighbours} {problem}; nearest: {nearest}")
