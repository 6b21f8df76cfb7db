"""Ring attention as one operator of PyTorch (Liu et al. 2023, arXiv:2310.01889).

Each rank has the queries of its part of the sequence. Keys and values travel round the ranks, and a
rank attends to those that it has while the next ones arrive. A compiler sees one operator, so a layer
with it is one graph.

With a window most parts are never reached. Then nothing travels round: a rank gets the tokens that its
queries reach from the ranks that hold them, and sends the gradients straight back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.flop_counter import register_flop_formula

from compose.ops.attention import (
    GradientParts,
    MergedOutput,
    backward_by,
    empty_result,
    finish,
    parts_of,
    save_for_backward,
)
from compose.ops.attention_layout import AttentionTask, pairs_of, task_of
from compose.ops.operators import operator
from compose.parallel.mesh import begin_messages, wait_for


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, and what each holds."""

    group: dist.ProcessGroup
    starts: list[tuple[int, ...]]
    """The first tokens of each rank's chunks."""
    length: int
    """Tokens of a row that a rank holds."""

    @property
    def cp(self) -> int:
        """The number of ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.length // len(self.starts[0])

    def reached(self, rank: int, source: int, window: int) -> tuple[int, ...]:
        """Return which chunks of ``source`` the queries of another rank reach."""
        return tuple(
            place
            for place, k in enumerate(self.starts[source])
            if any(k < q and q - (k + self.size - 1) < window for q in self.starts[rank])
        )


_Arrival = tuple[int, tuple[int, ...], Tensor]
"""The rank that holds keys and values, their first tokens, and keys and values (B, S, G, K + V)."""


def _round(ring: Ring, kv: Tensor) -> Iterator[_Arrival]:
    """Yield the keys and values of one rank after another, while the next ones travel."""
    after, before = (ring.rank + 1) % ring.cp, (ring.rank - 1) % ring.cp
    for hop in range(ring.cp):
        source = (ring.rank - hop) % ring.cp
        arriving, works = kv, []
        if hop < ring.cp - 1:
            arriving = torch.empty_like(kv)
            works = begin_messages(ring.group, [(kv, after)], [(arriving, before)], tag=0)
        yield source, ring.starts[source], kv
        wait_for(works)
        kv = arriving


class _WindowMessages:
    """The messages of a window: the ends of those chunks that queries of other ranks reach."""

    def __init__(self, ring: Ring, window: int) -> None:
        self.ring, self.tail = ring, min(ring.size, window - 1)
        others = [(ring.rank + offset) % ring.cp for offset in range(1, ring.cp)]
        wanted = {rank: ring.reached(rank, ring.rank, window) for rank in others}
        given = {rank: ring.reached(ring.rank, rank, window) for rank in others}
        self.to = {rank: places for rank, places in wanted.items() if places}
        """Which of this rank's chunks go where."""
        self.sources = {rank: places for rank, places in given.items() if places}
        """Which chunks come from where."""

    def ends(self, kv: Tensor, places: Sequence[int]) -> list[Tensor]:
        """Return views of the ends of some of this rank's chunks, along dim 1."""
        size = self.ring.size
        return [kv[:, (place + 1) * size - self.tail : (place + 1) * size] for place in places]

    def buffers(self, like: Tensor, of: dict[int, tuple[int, ...]]) -> dict[int, Tensor]:
        """Return a buffer for each rank of ``of``."""
        rows, _, *others = like.shape
        return {
            rank: like.new_empty((rows, self.tail * len(places), *others))
            for rank, places in of.items()
        }

    def arrivals(self, kv: Tensor) -> Iterator[_Arrival]:
        """Yield this rank's own keys and values, and then those that its queries reach."""
        ring, got = self.ring, self.buffers(kv, self.sources)
        sent = [(torch.cat(self.ends(kv, places), 1), rank) for rank, places in self.to.items()]
        works = begin_messages(ring.group, sent, [(x, rank) for rank, x in got.items()], tag=0)
        yield ring.rank, ring.starts[ring.rank], kv
        wait_for(works)
        for rank, places in self.sources.items():
            firsts = (ring.starts[rank][place] + ring.size - self.tail for place in places)
            yield rank, tuple(firsts), got[rank]

    def bring_home(self, mine: Tensor, gradients: dict[int, Tensor]) -> None:
        """Send the gradients of other ranks' keys back, and add others' to ``mine``."""
        back = self.buffers(mine, self.to)
        sent = [(x, rank) for rank, x in gradients.items()]
        wait_for(begin_messages(self.ring.group, sent, [(x, rank) for rank, x in back.items()], tag=1))
        for rank, places in self.to.items():
            parts = back[rank].split(self.tail, 1)
            for end, part in zip(self.ends(mine, places), parts, strict=True):
                end += part


def _ring(
    q: Tensor, group_name: str, starts: Sequence[int], window: int
) -> tuple[Ring, _WindowMessages | None]:
    group = cast(dist.ProcessGroup, _resolve_process_group(cast(Any, group_name)))
    each = len(starts) // group.size()
    chunks = [tuple(starts[i : i + each]) for i in range(0, len(starts), each)]
    ring = Ring(group, chunks, q.shape[1])
    return ring, _WindowMessages(ring, window) if 0 < window < ring.length * ring.cp else None


def _with_keys(task: AttentionTask, starts: tuple[int, ...]) -> AttentionTask:
    return replace(task, pieces=replace(task.pieces, k_starts=starts))


@operator("compose::ring_attention_forward")
def ring_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    extents: Tensor | None,
    sinks: Tensor | None,
    group_name: str,
    starts: Sequence[int],
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, L, H, V) and log-sum-exp (B, L, H) of this rank's queries over all keys.

    Queries, keys and values are those of this rank's chunks. ``starts`` are the first tokens
    of the chunks of all ranks, in order. The rest is as for
    :func:`compose.ops.attention.attention_forward`.
    """
    ring, windowed = _ring(q, group_name, starts, window)
    here = (ring.starts[ring.rank], (0,))
    task = task_of((bounds, extents), here, (causal, window, scale, softcap))
    return finish(*_output(task, ring, windowed, (q, k, v)), sinks, q.dtype)


def _output(
    task: AttentionTask,
    ring: Ring,
    windowed: _WindowMessages | None,
    qkv: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp without a sink."""
    q, k, v = qkv[0].transpose(1, 2), *qkv[1:]
    total, kv = MergedOutput(q, v.shape[-1]), torch.cat([k, v], -1)
    for _, starts, arrived in windowed.arrivals(kv) if windowed else _round(ring, kv):
        k_here, v_here = (x.transpose(1, 2) for x in _split(arrived, k))
        for part in parts_of(_with_keys(task, starts), q, k_here, v_here).forward(q, k_here, v_here):
            total.add(*part)
    return total.out.transpose(1, 2), total.lse.transpose(1, 2)


def _split(kv: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]


ring_attention_forward.register_fake(empty_result)


@operator("compose::ring_attention_backward")
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor | None,
    extents: Tensor | None,
    group_name: str,
    starts: Sequence[int],
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`ring_attention_forward` for q, k and v.

    The gradients of a rank's keys travel with the keys. One more hop brings them home.
    """
    ring, windowed = _ring(q, group_name, starts, window)
    here = (ring.starts[ring.rank], (0,))
    task = task_of((bounds, extents), here, (causal, window, scale, softcap))
    return _gradients(task, ring, windowed, (grad, q, k, v, out, lse))


def _gradients(
    task: AttentionTask, ring: Ring, windowed: _WindowMessages | None, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out, lse = tensors
    grad_q, q = grad.transpose(1, 2), q.transpose(1, 2)
    result = (out.transpose(1, 2), lse.transpose(1, 2))
    of_q = GradientParts([q], once=False)

    def here(starts: tuple[int, ...], kv: Tensor) -> Tensor:
        """Add these keys' part to the queries' gradient; return the gradients of keys and values."""
        k_here, v_here = (x.transpose(1, 2) for x in _split(kv, k))
        of_kv = GradientParts([k_here, v_here], once=False)
        parts = parts_of(_with_keys(task, starts), q, k_here, v_here)
        for at_q, at_k, (dq, dk, dv) in parts.backward(grad_q, (q, k_here, v_here), result):
            of_q.add(at_q, [dq])
            of_kv.add(at_k, [dk, dv])
        return torch.cat([d.transpose(1, 2) for d in of_kv.of], -1)

    kv = torch.cat([k, v], -1)
    if windowed:
        results = {source: here(starts, part) for source, starts, part in windowed.arrivals(kv)}
        mine = results.pop(ring.rank)
        windowed.bring_home(mine, results)
    else:
        after, before = (ring.rank + 1) % ring.cp, (ring.rank - 1) % ring.cp
        dkv: Tensor | None = None
        returning: list[dist.Work] = []
        for _, starts, part in _round(ring, kv):
            made = here(starts, part)
            wait_for(returning)
            leaving = made if dkv is None else made + dkv
            dkv = torch.empty_like(leaving)
            returning = begin_messages(ring.group, [(leaving, after)], [(dkv, before)], tag=1)
        wait_for(returning)
        assert dkv is not None
        mine = dkv
    # Copies: of one token the parts are contiguous as they are, and an operator returns no views.
    dk, dv = (
        like.new_empty(like.shape).copy_(x) for like, x in zip((k, v), _split(mine, k), strict=True)
    )
    return of_q.of[0].transpose(1, 2).to(q.dtype).contiguous(), dk, dv


@ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save_for_backward(ctx, inputs, output)
    ctx.mark_non_differentiable(output[1])


_backward = backward_by(lambda grad, grad_lse, *rest: ring_attention_backward(grad, *rest))
ring_attention_forward.register_autograd(_backward, setup_context=_save)


def _pairs(q: Any, k: Any, others: Sequence[Any]) -> float:
    group_name, starts, causal, window = others[:4]
    ring, _ = _ring(torch.empty(q, device="meta"), group_name, starts, window)
    whole = (k[0], k[1] * ring.cp, *k[2:])
    return pairs_of(q, whole, ring.starts[ring.rank], causal, window)


@register_flop_formula(torch.ops.compose.ring_attention_forward)
def _forward_flops(q: Any, k: Any, v: Any, *others: Any, **kwargs: Any) -> int:
    return round(2 * _pairs(q, k, others[3:]) * (q[3] + v[3]))


@register_flop_formula(torch.ops.compose.ring_attention_backward)
def _backward_flops(grad: Any, q: Any, k: Any, v: Any, *others: Any, **kwargs: Any) -> int:
    return round(2 * _pairs(q, k, others[4:]) * (3 * q[3] + 2 * v[3]))
