"""Which experts each token was sent to, recorded on two runs and compared.

Routing is a choice: where two experts' scores for a token are as close as rounding, two correct runs
may choose otherwise, and all that follows differs. So the one process follows the other run there, and
the proof says where that was; what differs by more than rounding is a failure of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compose.composition.state import Composition
from compose.parallel.context_parallel import shard_sequence
from compose.parallel.mesh import axis_size, batch_share
from compose.parallel.routing import routers


@dataclass(frozen=True)
class Choices:
    """Of one router and one step: ids of tokens (T,), their experts (T, k), and their margins (T,)."""

    ids: Tensor
    experts: Tensor
    margins: Tensor


@dataclass(frozen=True)
class Difference:
    """Of one router and one step: tokens of which other experts were chosen than one process did.

    margin: the greatest by which one process chose for one of them.
    """

    router: str
    step: int
    tokens: int
    of: int
    margin: float

    def __str__(self) -> str:
        return (
            f"{self.router}, step {self.step}: {self.tokens} of {self.of} tokens chose other experts"
            f" than one process would, for a margin of at most {self.margin:.1e}"
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
            # In host memory, as ids are: what a GPU's rank finds, another's compares.
            experts = torch.cat([experts.flatten(0, 1) for _, experts, _ in calls]).cpu()
            margins = torch.cat([margins.flatten() for _, _, margins in calls]).cpu()
            real = tokens >= 0
            result[name] = Choices(tokens[real], experts[real], margins[real])
        self.calls = {}
        return result


@contextmanager
def watch(model: nn.Module) -> Iterator[Witness]:
    """Record what the routers of ``model`` choose, in forwards that backward follows."""
    witness, handles = Witness(), []
    for name, router in routers(model).items():

        def see(module: nn.Module, inputs: Any, routing: Any, name: str = name) -> Any:
            witness.count += 1
            seen = (name, witness.count, routing.experts, routing.margin)
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
    composition: Composition, shape: torch.Size, micro_batch: int | None
) -> dict[str, list[Tensor]]:
    """Return which tokens of a global batch (B, S), numbered row by row, each router's calls on this
    rank see, as ``forward_backward`` cuts it."""
    mesh, pipeline = composition.mesh, composition.pipeline
    index, count = batch_share(mesh)
    ids = torch.arange(shape.numel()).view(shape).chunk(count)[index]
    if axis_size(mesh, "cp") > 1:
        tp = axis_size(mesh, "tp")
        # Under this name padding is marked.
        ids = shard_sequence({"positions": ids}, mesh["cp"], composition.balance, tp)["positions"]
    parts = list(ids.split(micro_batch or len(ids)))
    if axis_size(mesh, "tp") > 1:
        parts = [x.chunk(axis_size(mesh, "tp"), 1)[mesh["tp"].get_local_rank()] for x in parts]
    orders = pipeline.forward_order(len(parts)) if pipeline else {}
    return {
        name: [parts[i] for i in orders.get(name, range(len(parts)))]
        for name in routers(composition.model)
    }


@contextmanager
def follow(
    model: nn.Module, found: Mapping[str, Sequence[Choices]], ids: Sequence[Tensor], within: float
) -> Iterator[dict[str, Choices]]:
    """Have the routers of a whole ``model`` choose as another run did where their own margin is at most
    ``within``; what they would have chosen, filled in as they run.

    found: by router, what ranks chose of the tokens that each saw. ids: of the tokens of each call.
    """
    tokens = sum(x.numel() for x in ids)
    natural: dict[str, Choices] = {}
    for name, router in routers(model).items():
        calls = iter(ids)
        given: Tensor | None = None
        for choices in found.get(name, ()):
            if given is None:
                given = torch.full((tokens, choices.experts.shape[1]), -1)
            given[choices.ids] = choices.experts

        def choose(
            scores: Tensor,
            name: str = name,
            own: Any = router.choose,
            calls: Iterator[Tensor] = calls,
            given: Tensor | None = given,
        ) -> tuple[Tensor, Tensor]:
            experts, margin = own(scores)
            here = next(calls)
            seen = Choices(here.flatten(), experts.flatten(0, 1).cpu(), margin.flatten().cpu())
            before = natural.get(name)
            natural[name] = seen if before is None else _joined([before, seen])
            if given is not None:
                other = given[here].to(experts.device)
                tie = (margin <= within) & (other[..., 0] >= 0)
                experts = torch.where(tie[..., None], other, experts)
            return experts, margin

        cast(Any, router).choose = choose
    try:
        yield natural
    finally:
        for router in routers(model).values():
            del cast(Any, router).choose


def gathered(found: Mapping[str, Choices]) -> dict[str, list[Choices]]:
    """What each rank ``found``, by router; nothing on ranks other than the first."""
    everyone: list[Mapping[str, Choices]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(found, everyone if dist.get_rank() == 0 else None)
    return {
        name: [held[name] for held in everyone if name in held]
        for name in dict.fromkeys(name for held in everyone for name in held)
    }


def _joined(choices: Sequence[Choices]) -> Choices:
    return Choices(
        torch.cat([c.ids for c in choices]),
        torch.cat([c.experts for c in choices]),
        torch.cat([c.margins for c in choices]),
    )


def compare_choices(router: str, step: int, expected: Choices, found: Sequence[Choices]) -> Difference:
    """``found``: what ranks chose of the tokens that each saw; if none saw one, the margin is inf."""
    joined = _joined(found)
    lost = len(set(expected.ids.tolist()) - set(joined.ids.tolist()))
    place = torch.empty_like(expected.ids)
    place[expected.ids] = torch.arange(len(place))
    at = place[joined.ids]
    differs = (expected.experts[at].sort(1).values != joined.experts.sort(1).values).any(1)
    margin = float(expected.margins[at][differs].max()) if differs.any() else 0.0
    tokens = int(joined.ids[differs].unique().numel()) + lost
    return Difference(router, step, tokens, len(expected.ids), torch.inf if lost else margin)
