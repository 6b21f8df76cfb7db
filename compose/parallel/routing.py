"""Routing that no mesh can change: routers count tokens on each rank, and act on counts of the batch.

A router is any module whose class has ``finish_step``, and with it the other attributes of
:class:`Router`; models/layers/router.py has one.
"""

from collections.abc import Mapping
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.parallel.mesh import axis_size, sum_over

# The axes over which tokens differ.
_TOKEN_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


class Router(Protocol):
    """What is asked of a router, whose forward returns a named tuple with ``experts`` (B, L, k), their
    ``weights`` (B, L, k), the ``margin`` (B, L) of the choice, and the rows that are ``kept``
    (B, L, k; None: all are).

    choose(scores): of (B, L, E), those experts, and by how much of its score the last was ahead of
    the next.
    keep(chosen, scores, everyone): where experts have a capacity, those rows, and by how much of its
    score each was ahead of the first that is dropped, or behind the last that is kept.
    tokens_per_step: of the whole batch, by which it divides its auxiliary losses; set before forward.
    loss_scale: by which it multiplies their gradients; set before forward.
    tally: what it counted in backward since the last ``finish_step``; 1-D, float64.
    finish_step(tally): acts on the tally of the whole batch, sets ``tally`` to zero, and leaves in
    ``last`` what is to be reported, scalars by name.
    """

    tokens_per_step: int | None
    loss_scale: float
    tally: Tensor
    last: Mapping[str, Tensor]

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]: ...

    def keep(self, chosen: Tensor, scores: Tensor, everyone: Tensor) -> tuple[Tensor, Tensor]: ...

    def finish_step(self, tally: Tensor) -> None: ...


def routers(model: nn.Module) -> dict[str, Router]:
    """The routers of ``model`` (of this rank's stages, in a pipeline), by name."""
    # Of the class: modules that lack an attribute take long to say so, and this is asked in each step.
    found = {name: m for name, m in model.named_modules() if hasattr(type(m), "finish_step")}
    return cast(dict[str, Router], found)


def begin_step(model: nn.Module, tokens: int, loss_scale: float) -> None:
    """Tell every router how many tokens the whole batch has, and how its losses are scaled."""
    for router in routers(model).values():
        router.tokens_per_step, router.loss_scale = tokens, loss_scale


def finish_step(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum what routers counted over all ranks, in one message, and have them act on it."""
    found = list(routers(model).values())
    if not found:
        return
    sizes = [len(router.tally) for router in found]
    tallies = sum_over(torch.cat([router.tally for router in found]), mesh, _TOKEN_AXES)
    for router, tally in zip(found, tallies.split(sizes), strict=True):
        router.finish_step(tally)


def routing_metrics(model: nn.Module, mesh: DeviceMesh) -> dict[str, dict[str, float]]:
    """What every router of the whole model reported of the last step, by its name; a collective.

    For models/layers/router.py's: load (of the busiest expert, over the mean), dropped (rows),
    balance_loss and z_loss (means over tokens), bias_change. The same on every rank.
    """
    here = {
        name: {key: float(value) for key, value in router.last.items()}
        for name, router in routers(model).items()
    }
    if axis_size(mesh, "pp") == 1:
        return here
    stages: list[dict[str, dict[str, float]]] = [{} for _ in range(axis_size(mesh, "pp"))]
    dist.all_gather_object(stages, here, group=mesh.get_group("pp"))
    return {name: values for stage in stages for name, values in stage.items()}
