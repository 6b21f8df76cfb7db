"""Which experts each token was sent to, recorded on two runs and compared.

Routing is a choice: where two experts' scores for a token are as close as rounding, two correct runs
may choose otherwise, and all that follows differs. A proof has to say so, not report the rest alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.applied import applied_to
from compose.context_parallel import shard_sequence
from compose.mesh import batch_share
from compose.routing import routers


@dataclass(frozen=True)
class Choices:
    """Of one router and one step: ids of tokens (T,), their experts (T, k), and the scores (T, E)."""

    ids: Tensor
    experts: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Difference:
    """Of one router and one step: tokens of which other experts were chosen than one process did.

    gap: by how much one process scored what it chose above what the other run chose, at most.
    """

    router: str
    step: int
    tokens: int
    of: int
    gap: float

    def __str__(self) -> str:
        return (
            f"{self.router}, step {self.step}: {self.tokens} of {self.of} tokens chose other experts"
            f" than on one process, which scored them at most {self.gap:.1e} apart"
        )


class Witness:
    """What every router of a model chose, in the order of its forward calls."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        self.count = 0

    def choices(self, ids: Mapping[str, Sequence[Tensor]]) -> dict[str, Choices]:
        """By router, and start anew. ``ids``: of the tokens of its calls in order, -1 for padding."""
        result = {}
        for name, calls in self.calls.items():
            # Backward recorded them, in an order of its own.
            calls.sort(key=lambda call: call[0])
            tokens = torch.cat([x.flatten() for x in ids[name]])
            experts = torch.cat([experts.flatten(0, 1) for _, experts, _ in calls])
            scores = torch.cat([scores.flatten(0, 1) for _, _, scores in calls])
            real = tokens >= 0
            result[name] = Choices(tokens[real], experts[real], scores[real])
        self.calls = {}
        return result


@contextmanager
def watch(model: nn.Module) -> Iterator[Witness]:
    """Record what the routers of ``model`` choose, in forwards that backward follows."""
    witness, handles = Witness(), []
    for name, router in routers(model).items():

        def see(module: nn.Module, inputs: Any, routing: Any, name: str = name) -> Any:
            witness.count += 1
            seen = (name, witness.count, routing.experts, routing.scores)
            # Recomputation runs this again, but backward goes through the first.
            return routing._replace(weights=_Seen.apply(routing.weights, witness, seen))

        handles.append(cast(nn.Module, router).register_forward_hook(see))
    try:
        yield witness
    finally:
        for handle in handles:
            handle.remove()


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, witness: Witness, seen: tuple[str, int, Tensor, Tensor]
    ) -> Any:
        ctx.witness, ctx.seen = witness, seen
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        name, *call = ctx.seen
        ctx.witness.calls.setdefault(name, []).append(tuple(call))
        return grads[0], None, None


def ids_of_calls(
    model: nn.Module, shape: torch.Size, mesh: DeviceMesh, micro_batch: int | None
) -> dict[str, list[Tensor]]:
    """Which tokens of a global batch (B, S), numbered row by row, each router's calls on this rank see,
    as ``forward_backward`` cuts it over ``mesh``."""
    applied = applied_to(model)
    index, count = batch_share(mesh)
    ids = torch.arange(shape.numel()).view(shape).chunk(count)[index]
    if mesh["cp"].size() > 1:
        tp = mesh["tp"].size()
        # Under this name padding is marked.
        ids = shard_sequence({"positions": ids}, mesh["cp"], applied.balance, tp)["positions"]
    parts = list(ids.split(micro_batch or len(ids)))
    if mesh["tp"].size() > 1:
        parts = [x.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()] for x in parts]
    orders = applied.pipeline.forward_order(len(parts)) if applied.pipeline else {}
    return {name: [parts[i] for i in orders.get(name, range(len(parts)))] for name in routers(model)}


def compare_choices(router: str, step: int, expected: Choices, found: Sequence[Choices]) -> Difference:
    """``found``: what ranks chose of the tokens that each saw; of one that none saw the gap is inf."""
    ids = torch.cat([choices.ids for choices in found])
    experts = torch.cat([choices.experts for choices in found])
    lost = len(set(expected.ids.tolist()) - set(ids.tolist()))
    place = torch.empty_like(expected.ids)
    place[expected.ids] = torch.arange(len(place))
    at = place[ids]
    scores = expected.scores[at]
    chosen, other = (
        torch.zeros_like(scores, dtype=torch.bool).scatter(1, choice, True)
        for choice in (expected.experts[at], experts)
    )
    differs = (chosen != other).any(1)
    # The best that was given up over the worst that was taken for it.
    given_up = scores.masked_fill(~(chosen & ~other), -torch.inf).amax(1)
    taken = scores.masked_fill(~(other & ~chosen), torch.inf).amin(1)
    gap = float((given_up - taken)[differs].max()) if differs.any() else 0.0
    return Difference(
        router, step, int(differs.sum()) + lost, len(expected.ids), torch.inf if lost else gap
    )
