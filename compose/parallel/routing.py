"""Routing that does not depend on the mesh: routers count on each rank, and act on the batch's counts.

A router is any module whose class has ``finish_step`` and the other attributes of :class:`Router`.
models/layers/router.py has one.
"""

from collections.abc import Mapping
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.parallel.mesh import axis_size, sum_over

# The axes over which tokens differ.
_TOKEN_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
_Layout = dict[str, list[str]]  # the names of what a rank's routers report, by router
_LAYOUTS: "WeakKeyDictionary[nn.Module, list[_Layout]]" = WeakKeyDictionary()


class Router(Protocol):
    """A router, as the rest of the toolkit uses it.

    Its forward returns a named tuple. The fields are ``experts`` (B, L, k), their ``weights`` (B, L,
    k), the ``margin`` (B, L) of the choice, and ``kept`` (B, L, k): the rows that are not dropped.
    ``kept`` is None if no row is dropped. A router without a capacity may leave out ``kept`` and
    ``keep``.
    """

    tokens_per_step: int | None
    """Tokens of the whole batch, by which it divides its auxiliary losses; set before forward."""
    loss_scale: float
    """The factor of its auxiliary losses' gradients; set before forward."""
    tally: Tensor
    """What it counted in backward since the last ``finish_step``; 1-D, float64."""
    last: Mapping[str, Tensor]
    """What it reports of the last step: scalars by name."""

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
    found = {name: m for name, m in model.named_modules() if hasattr(type(m), "finish_step")}
    return cast(dict[str, Router], found)


def begin_step(model: nn.Module, tokens: int, loss_scale: float) -> None:
    """Tell every router how many tokens the whole batch has, and how its losses are scaled."""
    for router in routers(model).values():
        router.tokens_per_step, router.loss_scale = tokens, loss_scale


def finish_step(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum what routers counted over all ranks, in one message, and let the routers act on the sums."""
    found = list(routers(model).values())
    if not found:
        return
    sizes = [len(router.tally) for router in found]
    tallies = sum_over(torch.cat([router.tally for router in found]), mesh, _TOKEN_AXES)
    for router, tally in zip(found, tallies.split(sizes), strict=True):
        router.finish_step(tally)


def routing_metrics(model: nn.Module, mesh: DeviceMesh) -> dict[str, dict[str, float]]:
    """Return what every router of the whole model reported of the last step; a collective.

    In a pipeline the first call comes after a step: from then on the names are known.

    The router of models/layers/router.py reports load (of the busiest expert, over the mean), dropped
    (rows), balance_loss and z_loss (means over tokens), and bias_change.
    """
    last = {name: router.last for name, router in routers(model).items()}
    values = [value.double() for report in last.values() for value in report.values()]
    # One copy for all: the host waits for the device once.
    numbers = torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)
    layout = {name: list(report) for name, report in last.items()}
    if axis_size(mesh, "pp") == 1:
        return _named(layout, numbers.tolist())
    layouts = _layouts_of_stages(model, layout, mesh.get_group("pp"))
    longest = max(sum(map(len, each.values())) for each in layouts)
    if not longest:
        return {}
    padded = F.pad(numbers.to(mesh.device_type), (0, longest - len(numbers)))
    everyone = [torch.empty_like(padded) for _ in layouts]
    dist.all_gather(everyone, padded, group=mesh.get_group("pp"))
    found = zip(layouts, torch.stack(everyone).tolist(), strict=True)
    return {name: report for each, row in found for name, report in _named(each, row).items()}


def _named(layout: _Layout, numbers: list[float]) -> dict[str, dict[str, float]]:
    left = iter(numbers)
    return {name: {key: next(left) for key in keys} for name, keys in layout.items()}


def _layouts_of_stages(model: nn.Module, own: _Layout, group: dist.ProcessGroup) -> list[_Layout]:
    """Return the layout of every rank of a pipeline; they ask each other once in a run.

    Objects take several messages, and on a GPU each of them is waited for.
    """
    if model not in _LAYOUTS:
        everyone: list[_Layout] = [{} for _ in range(group.size())]
        dist.all_gather_object(everyone, own, group=group)
        _LAYOUTS[model] = everyone
    return _LAYOUTS[model]
