"""Expert parallel: each rank of the ep axis holds some experts, and tokens travel to them and back.

The axis adds no factor to the world size. It is laid over the innermost of the data, context and tensor
axes, whose ranks hold different tokens anyway (Lepikhin et al. 2020, arXiv:2006.16668). Ranks that hold
the same experts each keep a shard of them (``apply_data_parallel``).

In each layer and direction a rank sends its rows twice: to the experts, and back (docs/moe.md).

Routing does not depend on the mesh: routers count on each rank, and act on the whole batch's counts. A
router is any module whose class has ``finish_step`` and the other attributes of :class:`Router`.
models/layers/router.py has one.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Shard, distribute_module

from compose.errors import ConfigError
from compose.ops.operators import operator
from compose.ops.tensors import gathered, gathered_objects, place_parameters
from compose.parallel.mesh import axis_size, divisors, sum_over
from compose.parallel.stream_messages import SendsActivations, Style

# The axes over which tokens differ.
_TOKEN_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
_Reported = dict[str, list[str]]  # the names of what a rank's routers report, by router


class Experts(Protocol):
    """A module of stacked experts: its forward(rows, counts) is run(rows, counts, *its parameters).

    Every parameter is (E, ...), for E experts.
    """

    def run(self, rows: Tensor, counts: Tensor, *weights: Tensor) -> Tensor:
        """Apply each expert to its ``counts`` (E,) of the rows (N, D), which are sorted by expert."""
        ...


class ExpertParallel(SendsActivations, Style):
    """A style for a module of stacked experts (:class:`Experts`): dim 0 of its parameters is sharded.

    It replaces the module's own forward. The new one sends each row to the rank that holds its expert,
    runs the experts there, and brings the rows back in their order. Loads may be uneven: an expert or a
    rank may get no row. On an axis of one rank nothing is sent. Applying it raises ConfigError if the
    ranks cannot hold equally many experts.
    """

    send = staticmethod(all_to_all_single_autograd)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_experts(len(next(module.parameters())), device_mesh.size())
        distribute_module(module, device_mesh, partial(place_parameters, Shard(0), self.src_data_rank))
        group = device_mesh.get_group()
        module.forward = partial(_run_on_owners, module, group, self.send)
        return module


class GatherSequence(Style):
    """A style for a router that looks at whole sequences, on an axis whose ranks hold parts of them.

    It extends ``module.gather_sequence``, which takes tensors (B, L, n), so that the call gathers the
    other ranks' parts too. It may be applied on several axes, one after another.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        router = cast(Any, module)
        router.gather_sequence = partial(
            _gather_sequence, device_mesh.get_group(), router.gather_sequence
        )
        return module


def check_experts(n_experts: int, ep: int) -> None:
    """Raise ConfigError unless ``ep`` ranks can hold equally many of ``n_experts``."""
    if n_experts % ep:
        allowed = ", ".join(map(str, divisors(n_experts)))
        raise ConfigError(f"parallel.ep: {ep} does not divide {n_experts} experts (allowed: {allowed})")


def expert_mesh(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """Return a mesh of the same ranks with the axes pp, expert_replicate, expert_shard, ep.

    ep neighbours in (dp_replicate, dp_shard, cp, tp) hold all experts between them; the innermost axes
    are used first. Ranks that hold the same experts shard them between each other. Where ep does not
    use up dp_replicate, the rest of that axis holds replicas instead. The call creates process groups,
    so every rank makes it.
    """
    replicas = axis_size(mesh, "dp_replicate")
    inner = math.prod(axis_size(mesh, axis) for axis in ("dp_shard", "cp", "tp"))
    shared = math.gcd(inner, ep)
    shape = (axis_size(mesh, "pp"), replicas // (ep // shared), inner // shared, ep)
    names = ("pp", "expert_replicate", "expert_shard", "ep")
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(shape), mesh_dim_names=names)


def _run_on_owners(
    module: nn.Module,
    group: dist.ProcessGroup,
    send: Callable[..., Tensor],
    rows: Tensor,
    counts: Tensor,
) -> Tensor:
    """Run ``module``'s forward. Each rank of ``group`` holds equally many experts, in order."""
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    run = cast(Experts, module).run
    if group.size() == 1:
        return run(rows, counts, *weights)
    counts_to = counts.view(group.size(), -1)
    # counts_from[i, j]: rows that rank i sends for this rank's j-th expert.
    counts_from, sizes = _exchange_counts(counts_to, group.group_name)
    sent, received = _row_counts(sizes, len(rows))
    arrived = send(rows, received, sent, group)
    # The rows arrive sorted by rank. The experts need them sorted by expert.
    order, places = _transposed(counts_from, sum(received))
    result = run(_Permute.apply(arrived, order, places), counts_from.sum(0), *weights)
    back = _Permute.apply(result, places, order)
    return send(back, sent, received, group)


@operator("compose::exchange_counts")
def _exchange_counts(counts_to: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Send counts (ranks, experts of each), and return those that come, and the rows in host memory.

    The rows are those that go to each rank and come from it, (2, ranks). Only here the host waits for
    the device: the device computes the sizes of the messages.
    """
    group: dist.ProcessGroup = _resolve_process_group(cast(Any, group_name))
    counts_from = torch.empty_like(counts_to)
    dist.all_to_all_single(counts_from, counts_to.contiguous(), group=group)
    sizes = torch.stack([counts_to.sum(1), counts_from.sum(1)])
    return counts_from, sizes if sizes.is_meta else sizes.cpu()


@_exchange_counts.register_fake
def _(counts_to: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    device = "meta" if counts_to.is_meta else "cpu"
    return torch.empty_like(counts_to), counts_to.new_empty(2, len(counts_to), device=device)


def _row_counts(sizes: Tensor, rows: int) -> list[list[int]]:
    """Return how many rows go to each rank, and come from it. On meta the load is even."""
    if sizes.is_meta:
        ranks = sizes.shape[1]
        return 2 * [[rows // ranks + (i < rows % ranks) for i in range(ranks)]]
    return sizes.tolist()


def _transposed(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the order by column of rows that lie by row of ``counts``, and the order back.

    Rows of one rank for one expert stay together. So all of them move equally far, and nothing is
    sorted.
    """
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    transposed = counts.t().flatten()
    moves = starts - (transposed.cumsum(0) - transposed).view_as(counts.t()).t()
    numbers = torch.arange(rows, device=counts.device)
    # The size is known. Without it the device would be asked once more.
    order = numbers + moves.t().flatten().repeat_interleave(transposed, output_size=rows)
    places = numbers - moves.flatten().repeat_interleave(counts.flatten(), output_size=rows)
    return order, places


class _Permute(torch.autograd.Function):
    """A new order of rows. The gradient takes the way back.

    It does what indexing does. But no row is added to another in backward, so no atomic operations are
    needed.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


def _gather_sequence(
    group: dist.ProcessGroup, inner: Callable[[Tensor], Tensor], tensor: Tensor
) -> Tensor:
    tensor = inner(tensor).contiguous()
    return torch.cat(gathered(tensor, group), 1)


class Router(Protocol):
    """A router, as the rest of the toolkit uses it.

    Its forward returns a named tuple. The fields are ``experts`` (B, L, k), their ``weights`` (B, L,
    k), the ``margin`` (B, L) of the choice, and ``kept`` (B, L, k): the rows that are not dropped.
    ``kept`` is None if no row is dropped. A router without a capacity may leave out ``kept`` and
    ``keep``.
    """

    tokens_per_step: int | Tensor | None
    """Tokens of the whole batch without padding, by which it divides its auxiliary losses; set before
    forward."""
    loss_scale: float
    """The factor of its auxiliary losses' gradients; set before forward."""
    tally: Tensor
    """The counts of backward since the last ``finish_step``; 1-D, float64."""
    last: Mapping[str, Tensor]
    """Its report of the last step: scalars by name."""

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts (B, L, k) by scores (B, L, E), and return them with their margin (B, L).

        The margin is how far the last chosen expert is ahead of the next one, as a share of its score.
        """
        ...

    def keep(self, chosen: Tensor, scores: Tensor, everyone: Tensor) -> tuple[Tensor, Tensor]:
        """Return which rows are kept (B, L, k), where experts have a capacity, and their margins.

        ``chosen`` and ``scores`` are (B, L, k), and ``everyone`` the experts chosen in the whole
        sequences, (B, S, k). A margin is how far a kept row is ahead of the first dropped one, or a
        dropped row behind the last kept one, as a share of its score.
        """
        ...

    def finish_step(self, tally: Tensor) -> None:
        """Act on the tally of the whole batch, set ``tally`` to zero, and fill ``last``."""
        ...


def routers(model: nn.Module) -> dict[str, Router]:
    """Return the routers of ``model`` by name; in a pipeline those of this rank's stages."""
    # The class is asked: a module takes long to find that it lacks an attribute, and this runs in
    # each step.
    results = {name: m for name, m in model.named_modules() if hasattr(type(m), "finish_step")}
    return cast(dict[str, Router], results)


def begin_step(model: nn.Module, tokens: int | Tensor, loss_scale: float) -> None:
    """Tell every router how many tokens the whole batch has, and how its losses are scaled."""
    for router in routers(model).values():
        router.tokens_per_step, router.loss_scale = tokens, loss_scale


def finish_step(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum what routers counted over all ranks, in one message, and let the routers act on the sums."""
    result = list(routers(model).values())
    if not result:
        return
    sizes = [len(router.tally) for router in result]
    tallies = sum_over(torch.cat([router.tally for router in result]), mesh, _TOKEN_AXES)
    for router, tally in zip(result, tallies.split(sizes), strict=True):
        router.finish_step(tally)


class RoutingMetrics:
    """The reports of every router of the whole model of a step."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model, self.mesh = model, mesh
        self.stages: list[_Reported] = []  # of each rank of pp, once they have asked each other

    def __call__(self) -> dict[str, dict[str, float]]:
        """Return it by name of the router; a collective.

        In a pipeline the first call comes after a step: from then on the names are known.

        The router of models/layers/router.py reports load (of the busiest expert, over the mean),
        dropped (rows), balance_loss and z_loss (means over tokens), and bias_change.
        """
        last = {name: router.last for name, router in routers(self.model).items()}
        values = [value.double() for report in last.values() for value in report.values()]
        # One copy for all: the host waits for the device once.
        numbers = torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)
        reported = {name: list(report) for name, report in last.items()}
        if axis_size(self.mesh, "pp") == 1:
            return _named(reported, numbers.tolist())
        group = self.mesh.get_group("pp")
        if not self.stages:  # objects take several messages, and on a GPU each of them is waited for
            self.stages = gathered_objects(reported, group)
        longest = max(sum(map(len, each.values())) for each in self.stages)
        if not longest:
            return {}
        padded = F.pad(numbers.to(self.mesh.device_type), (0, longest - len(numbers)))
        result = zip(self.stages, torch.stack(gathered(padded, group)).tolist(), strict=True)
        return {name: report for each, row in result for name, report in _named(each, row).items()}


def _named(reported: _Reported, numbers: list[float]) -> dict[str, dict[str, float]]:
    left = iter(numbers)
    return {name: {key: next(left) for key in keys} for name, keys in reported.items()}
