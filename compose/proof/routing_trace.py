"""The decisions of routers, recorded on two runs and compared.

A router decides the experts of each token, and which of the token's rows are dropped. If two scores are
as close as rounding, two correct runs may decide differently, and all later results differ. So the one
process follows the other run in such cases, and the proof reports them. A difference by more than
rounding is a failure of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compose.composition import Composition
from compose.parallel.context_parallel import shard_sequence
from compose.parallel.expert_parallel import routers
from compose.parallel.mesh import Share, axis_size, rows_of


@dataclass(frozen=True)
class Drops:
    """The rows that one router dropped in one step."""

    experts: Tensor
    """The experts of each token's rows, (T, k)."""
    kept: Tensor
    """Which rows the experts took, (T, k)."""
    margins: Tensor
    """The margins of these decisions, (T, k)."""


@dataclass(frozen=True)
class Choices:
    """The experts that one router chose in one step."""

    ids: Tensor
    """Ids of the tokens, (T,)."""
    experts: Tensor
    """The experts of each token, (T, k)."""
    margins: Tensor
    """The margins of the choices, (T,)."""
    drops: Drops | None = None
    """Which rows were dropped, if experts have a capacity. In a run that follows another, these experts
    are the other run's.
    """

    def places(self, ids: Tensor) -> Tensor:
        """Return where the tokens ``ids`` are, in choices of all tokens."""
        place = torch.empty_like(self.ids)
        place[self.ids] = torch.arange(len(place))
        return place[ids]


@dataclass(frozen=True)
class Difference:
    """The tokens for which a router decided differently than one process, in one step."""

    router: str
    step: int
    tokens: int
    of: int
    margin: float
    """The greatest margin by which one process decided for one of these tokens."""
    kind: Literal["routing", "capacity"] = "routing"
    """"routing": the choice of experts. "capacity": the choice of rows beyond an expert's capacity."""

    def __str__(self) -> str:
        what = "chose other experts" if self.kind == "routing" else "had other rows dropped"
        return (
            f"{self.router}, step {self.step}: {self.tokens} of {self.of} tokens {what}"
            f" than one process would, for a margin of at most {self.margin:.1e}"
        )


class _RouterCall(NamedTuple):
    experts: Tensor
    margin: Tensor
    kept: Tensor | None


class RoutingRecorder:
    """A record of what every router of a model decided, in the order of its forward calls."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[int, _RouterCall]]] = {}
        self.count = 0

    def choices(self, ids: Mapping[str, Sequence[Tensor]]) -> dict[str, Choices]:
        """Return the choices by router, and clear the record.

        ``ids`` are the tokens' ids of each router's calls, in order; -1 marks padding.
        """
        result = {}
        for name, calls in self.calls.items():
            # Backward recorded the calls, in its own order.
            calls.sort(key=lambda call: call[0])
            result[name] = _choices(ids[name], [call for _, call in calls])
        self.calls = {}
        return result


def _choices(ids: Sequence[Tensor], calls: Sequence[_RouterCall]) -> Choices:
    """Return the calls' choices in host memory, as another rank's device will compare them."""
    tokens = torch.cat([x.flatten() for x in ids])
    real = tokens >= 0
    experts = torch.cat([call.experts.flatten(0, 1) for call in calls]).cpu()[real]
    margins = torch.cat([call.margin.flatten() for call in calls]).cpu()[real]
    drops = None
    if calls[0].kept is not None:
        kept = torch.cat([cast(Tensor, call.kept).flatten(0, 1) for call in calls]).cpu()[real]
        # The margins of the other run's drops are not used.
        drops = Drops(experts, kept, torch.zeros(kept.shape))
    return Choices(tokens[real], experts, margins, drops)


@contextmanager
def watch(model: nn.Module) -> Iterator[RoutingRecorder]:
    """Record what the routers of ``model`` choose, in forwards that backward follows."""
    recorder = RoutingRecorder()

    def see(name: str, module: nn.Module, inputs: Any, routing: Any) -> Any:
        recorder.count += 1
        # A router of the user's own may return no ``kept``.
        kept = getattr(routing, "kept", None)
        call = _RouterCall(routing.experts, routing.margin, kept)
        if not routing.weights.requires_grad:  # no adapter is before it, and no backward will come
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                recorder.calls.setdefault(name, []).append((recorder.count, call))
            return routing
        seen = (name, recorder.count, call)
        # Recomputation runs this hook again, but backward goes through the first call only.
        return routing._replace(weights=_NotedWeights.apply(routing.weights, recorder, seen))

    with ExitStack() as hooks:
        for name, router in routers(model).items():
            hook = partial(see, name)
            hooks.enter_context(cast(nn.Module, router).register_forward_hook(hook))
        yield recorder


class _NotedWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, recorder: RoutingRecorder, seen: tuple[str, int, _RouterCall]
    ) -> Any:
        ctx.recorder, ctx.seen = recorder, seen
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        name, *call = ctx.seen
        ctx.recorder.calls.setdefault(name, []).append(tuple(call))
        return grads[0], None, None


def ids_of_calls(
    composition: Composition, shape: torch.Size, micro_batch: int | None, share: Share | None = None
) -> dict[str, list[Tensor]]:
    """Return the ids of the tokens that each router's calls on this rank see; -1 marks padding.

    ``shape`` is that of the global batch, (B, S), whose tokens are numbered row by row.
    """
    mesh, pipeline = composition.mesh, composition.pipeline
    ids = torch.arange(shape.numel()).view(shape)
    ids = ids[rows_of(mesh, {"ids": ids}, share)]
    if share:
        ids = torch.cat([ids, ids.new_full((share.padding, *ids.shape[1:]), -1)])
        micro_batch = share.micro_batch
    if axis_size(mesh, "cp") > 1:
        tp = axis_size(mesh, "tp")
        # shard_sequence marks padding under this name, with -1.
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
    model: nn.Module, composed: Mapping[str, Sequence[Choices]], ids: Sequence[Tensor], within: float
) -> Iterator[dict[str, Choices]]:
    """Let the routers of a whole model decide as another run did, where their own margin is small."""
    natural: dict[str, Choices] = {}
    followers = {
        name: _Follower(router, _joined(composed[name]) if composed.get(name) else None, ids, within)
        for name, router in routers(model).items()
    }
    try:
        yield natural
    finally:
        for name, follower in followers.items():
            follower.stop()
            if follower.choices:
                natural[name] = _joined(follower.choices)


class _Follower:
    """Decides in place of ``router``; ``choices`` holds the router's own decisions by call."""

    def __init__(
        self, router: object, composed: Choices | None, ids: Sequence[Tensor], within: float
    ) -> None:
        self.router, self.composed, self.within = cast(Any, router), composed, within
        self.calls = iter(ids)
        self.place = torch.full((sum(x.numel() for x in ids),), -1)
        if composed is not None:
            self.place[composed.ids] = torch.arange(len(composed.ids))
        self.choices: list[Choices] = []
        self.own_choose = self.router.choose
        self.router.choose = self.choose
        # A router of the user's own may have no capacity, and then no ``keep``.
        self.own_keep = getattr(self.router, "keep", None)
        if self.own_keep:
            self.router.keep = self.keep

    def stop(self) -> None:
        """Let the router use its own methods again."""
        del self.router.choose
        if self.own_keep:
            del self.router.keep

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts as the other run did where the margin is small."""
        experts, margin = self.own_choose(scores)
        ids = next(self.calls).flatten()
        self.choices.append(Choices(ids, experts.flatten(0, 1).cpu(), margin.flatten().cpu()))
        if self.composed is not None:
            place = self.place[ids]
            other = self.composed.experts[place].view_as(experts).to(experts.device)
            seen = (place >= 0).view(margin.shape).to(margin.device)
            experts = torch.where((seen & (margin <= self.within))[..., None], other, experts)
        return experts, margin

    def keep(self, chosen: Tensor, scores: Tensor, everyone: Tensor) -> tuple[Tensor, Tensor]:
        """Keep rows as the other run did where the margin is small."""
        assert self.own_keep
        kept, margins = self.own_keep(chosen, scores, everyone)
        rows = [x.flatten(0, 1).cpu() for x in (chosen, kept, margins)]
        call = self.choices[-1]
        self.choices[-1] = replace(call, drops=Drops(*rows))
        if self.composed is not None and self.composed.drops is not None:
            place = self.place[call.ids]
            other, seen = _kept_by_other(self.composed.drops, place, rows[0])
            seen &= (place >= 0)[:, None] & (rows[2] <= self.within)
            kept = torch.where(seen, other, rows[1]).view(kept.shape).to(kept.device)
        return kept, margins


def _kept_by_other(drops: Drops, place: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether another run kept each row, and whether it had that row: (T, k) each.

    A row is a token and an expert; the other run may list a token's experts in another order. ``place``
    holds the tokens' places in ``drops``.
    """
    same = experts[:, :, None] == drops.experts[place][:, None, :]
    return (same & drops.kept[place][:, None, :]).any(-1), same.any(-1)


def gathered(chosen: Mapping[str, Choices]) -> dict[str, list[Choices]]:
    """Return the choices of all ranks, by router, on the first rank; on others nothing."""
    everyone: list[Mapping[str, Choices]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(chosen, everyone if dist.get_rank() == 0 else None)
    return {
        name: [held[name] for held in everyone if name in held]
        for name in dict.fromkeys(name for held in everyone for name in held)
    }


def _joined(choices: Sequence[Choices]) -> Choices:
    def joined(parts: Sequence[Choices | Drops], *names: str) -> list[Tensor]:
        return [torch.cat([getattr(part, name) for part in parts]) for name in names]

    drops = [c.drops for c in choices if c.drops is not None]
    dropped = Drops(*joined(drops, "experts", "kept", "margins")) if drops else None
    ids, experts, margins = joined(choices, "ids", "experts", "margins")
    return Choices(ids, experts, margins, dropped)


def compare_choices(
    router: str, step: int, expected: Choices, composed: Sequence[Choices]
) -> list[Difference]:
    """Compare what ranks decided with what one process would have decided."""
    of = len(expected.ids)
    if not composed:
        return [Difference(router, step, of, of, torch.inf)]
    joined = _joined(composed)
    lost = len(set(expected.ids.tolist()) - set(joined.ids.tolist()))
    at = expected.places(joined.ids)
    differs = (expected.experts[at].sort(1).values != joined.experts.sort(1).values).any(1)
    margin = float(expected.margins[at][differs].max()) if differs.any() else 0.0
    tokens = int(joined.ids[differs].unique().numel()) + lost
    result = [Difference(router, step, tokens, of, torch.inf if lost else margin)]
    if expected.drops is not None and joined.drops is not None:
        own = expected.drops
        kept, had = _kept_by_other(joined.drops, torch.arange(len(at)), own.experts[at])
        other = had & (kept != own.kept[at])
        margin = float(own.margins[at][other].max()) if other.any() else 0.0
        tokens = int(joined.ids[other.any(1)].unique().numel())
        result.append(Difference(router, step, tokens, of, margin, "capacity"))
    return result
