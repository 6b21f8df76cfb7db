"""Context parallel: one sequence over many ranks, by ring, all-gather or all-to-all (Ulysses).

Every rank holds a part of each sequence through the whole model; attention alone looks further. With
L = S / cp the length held, all three methods compute the same:

    ring       keys and values travel round the ranks, one hop while the last ones are attended to (Liu
               et al. 2023, arXiv:2310.01889). Memory O(L); per layer each rank sends 2 (cp - 1) L G K
               elements forward and (4 cp - 2) L G K backward, for G key/value heads of width K.
    allgather  all keys and values on every rank (Llama team 2024, arXiv:2407.21783, section 3.3.2).
               Memory O(S) for them; as many elements (4 (cp - 1) L G K backward), in one collective.
    ulysses    sequence for heads and back (Jacobs et al. 2023, arXiv:2309.14509). Each rank sends
               L (2 H + 2 G) K (cp - 1) / cp; the heads must divide.

Causal attention costs more for later queries. ``headtail`` cuts the sequence in 2 cp chunks and gives
rank r the r-th from the front and the r-th from the back, which levels the cost; ``none`` gives each
rank one piece.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from compose.base.batch import IGNORE
from compose.base.torch_versions import ALL_GATHER, REDUCE_SCATTER
from compose.errors import ConfigError
from compose.parallel.attention_blocks import Block, Gradients, Merged, blocks, document_starts

_all_gather = getattr(dist, ALL_GATHER)
_reduce_scatter = getattr(dist, REDUCE_SCATTER)

Method = Literal["ring", "allgather", "ulysses"]
Balance = Literal["headtail", "none"]


class HasIds(Protocol):
    """What tells documents apart: ``ids`` (B, L), this rank's part, one run of equal ids each."""

    ids: Tensor


def chunks_of(rank: int, cp: int, balance: Balance) -> list[int]:
    """The chunks of the sequence that ``rank`` holds, in order."""
    return [rank, 2 * cp - 1 - rank] if balance == "headtail" else [rank]


def chunk_count(cp: int, balance: Balance) -> int:
    """Into how many chunks the sequence is cut."""
    return 2 * cp if balance == "headtail" else cp


def shard_sequence(
    batch: Mapping[str, Tensor], mesh: DeviceMesh, balance: Balance, multiple: int = 1
) -> dict[str, Tensor]:
    """This rank's part of every tensor (B, S, ...), for the 1-D cp ``mesh``.

    A length that the chunks do not divide is padded at the end (each part to a multiple of
    ``multiple``), where no token sees it: targets with IGNORE, ``document_ids`` with a document of
    its own, ``positions`` with -1.
    """
    cp, rank = mesh.size(), mesh.get_local_rank()
    count = chunk_count(cp, balance)
    # Every part holds as many chunks, so this makes parts divisible too.
    unit = count * multiple
    result = {}
    for name, value in batch.items():
        missing = -value.shape[1] % unit
        if missing:
            filler = value[:, -1:].expand(-1, missing, *value.shape[2:]).clone()
            if name == "targets":
                filler.fill_(IGNORE)
            elif name == "document_ids":
                filler += 1
            elif name == "positions":
                filler.fill_(-1)
            value = torch.cat([value, filler], 1)
        pieces = value.chunk(count, 1)
        result[name] = torch.cat([pieces[i] for i in chunks_of(rank, cp, balance)], 1)
    return result


class ContextParallel(ParallelStyle):
    """For a module ``core(q, k, v, documents=None)`` that computes causal attention.

    q: (B, L, H, K), k and v: (B, L, G, K), this rank's part as :func:`shard_sequence` cuts it;
    ``documents`` has ``ids`` (B, L), or is None where each row is one document. Returns (B, L, H, K).
    v, and with it what is returned, may be narrower than k: the flash kernels are given zeros there.
    The module's own forward is replaced. Raises ConfigError where ulysses cannot divide the heads. On
    an axis of one rank it only spares the mask of documents, (B, L, L).
    """

    def __init__(self, method: Method = "ring", balance: Balance = "headtail") -> None:
        super().__init__()
        self.method: Method = method
        self.balance: Balance = balance

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = partial(_attend, Exchange(device_mesh, self.method, self.balance))
        return module

    def __repr__(self) -> str:
        return f"ContextParallel(method={self.method!r}, balance={self.balance!r})"


class Exchange:
    """Who holds which part of the sequence, and how to reach them."""

    def __init__(self, mesh: DeviceMesh, method: Method, balance: Balance) -> None:
        self.group = mesh.get_group()
        self.cp, self.rank = mesh.size(), mesh.get_local_rank()
        self.method, self.balance = method, balance
        self.chunks = [chunks_of(rank, self.cp, balance) for rank in range(self.cp)]

    def starts(self, batch: int, length: int, documents: HasIds | None) -> list[list[int]]:
        """Where documents begin in the whole sequence, of each row: gathered once a forward pass."""
        if documents is None:
            return [[0]] * batch
        known = getattr(documents, "_starts", None)
        if known is None:
            known = document_starts(self.in_order(self.gathered(documents.ids)))
            documents._starts = known  # type: ignore[attr-defined]
        return known

    def gathered(self, tensor: Tensor) -> Tensor:
        """(cp, ...): every rank's tensor."""
        everyone = tensor.new_empty((self.cp * len(tensor), *tensor.shape[1:]))
        _all_gather(everyone, tensor.contiguous(), group=self.group)
        return everyone.unflatten(0, (self.cp, -1))

    def in_order(self, parts: Tensor) -> Tensor:
        """(cp, B, L, ...) of all ranks as the whole sequence (B, S, ...)."""
        held = [chunk for chunks in self.chunks for chunk in chunks]
        pieces = [p for part in parts for p in part.chunk(len(self.chunks[0]), 1)]
        return torch.cat([pieces[held.index(i)] for i in range(len(held))], 1)

    def out_of_order(self, whole: Tensor) -> Tensor:
        """The inverse of :meth:`in_order`."""
        pieces = whole.chunk(self.cp * len(self.chunks[0]), 1)
        return torch.stack([torch.cat([pieces[i] for i in chunks], 1) for chunks in self.chunks])

    def blocks(self, length: int, source: int, starts: Sequence[Sequence[int]]) -> list[Block]:
        """What this rank's queries attend to of ``source``'s keys."""
        size = length // len(self.chunks[0])
        return blocks(self.chunks[self.rank], self.chunks[source], size, starts)

    def pass_on(self, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        """Start sending to the next rank; what the previous one sends, valid after the waits."""
        received = torch.empty_like(tensor)
        after, before = (self.rank + 1) % self.cp, (self.rank - 1) % self.cp
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=after, tag=tag),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before, tag=tag),
        ]
        return received, dist.batch_isend_irecv(operations)


def _attend(
    exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, documents: HasIds | None = None
) -> Tensor:
    if v.shape[-1] < k.shape[-1]:
        padded = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        return _attend(exchange, q, k, padded, documents)[..., : v.shape[-1]]
    starts = exchange.starts(q.shape[0], q.shape[1], documents)
    if exchange.cp == 1:
        return cast(Tensor, _Local.apply(q, k, v, starts))
    if exchange.method == "ulysses":
        return _ulysses(exchange, q, k, v, starts)
    method = _Ring if exchange.method == "ring" else _AllGather
    return cast(Tensor, method.apply(q, k, v, exchange, starts))


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(-3, -2)


def _finish(ctx: Any, merged: Merged, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of a forward pass, with what its backward needs kept."""
    out = merged.out.to(q.dtype)
    ctx.save_for_backward(q, k, v, out, merged.lse)
    return _heads_first(out)


def _begin(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Gradients]:
    """What :func:`_finish` kept, and gradients that are still zero."""
    q, k, v, out, lse = ctx.saved_tensors
    return q, k, v, Gradients(_heads_first(grad), _heads_first(q), out, lse)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, starts: list[list[int]]
    ) -> Tensor:
        merged = Merged(_heads_first(q))
        kv = torch.stack([k, v])
        for hop in range(exchange.cp):
            source = (exchange.rank - hop) % exchange.cp
            last = hop == exchange.cp - 1
            arriving, waits = (kv, []) if last else exchange.pass_on(kv, tag=0)
            here = _heads_first(kv)
            merged.add(here[0], here[1], exchange.blocks(q.shape[1], source, starts))
            _wait(waits)
            kv = arriving
        ctx.exchange, ctx.starts = exchange, starts
        return _finish(ctx, merged, q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gradients = _begin(ctx, grads[0])
        exchange: Exchange = ctx.exchange
        kv = torch.stack([k, v])
        # The gradients of a rank's keys travel with them, and one hop further, home.
        dkv: Tensor | None = None
        returning: list[dist.Work] = []
        for hop in range(exchange.cp):
            source = (exchange.rank - hop) % exchange.cp
            last = hop == exchange.cp - 1
            arriving, waits = (kv, []) if last else exchange.pass_on(kv, tag=0)
            here = _heads_first(kv)
            found = gradients.add(here[0], here[1], exchange.blocks(q.shape[1], source, ctx.starts))
            _wait(returning)
            dkv, returning = exchange.pass_on(found if dkv is None else found + dkv, tag=1)
            _wait(waits)
            kv = arriving
        _wait(returning)
        assert dkv is not None
        dk, dv = _heads_first(dkv).to(k.dtype)
        return _heads_first(gradients.dq).to(q.dtype), dk, dv, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, starts: list[list[int]]
    ) -> Tensor:
        merged = Merged(_heads_first(q))
        for source, kv in enumerate(_gathered(k, v, exchange)):
            merged.add(kv[0], kv[1], exchange.blocks(q.shape[1], source, starts))
        ctx.exchange, ctx.starts = exchange, starts
        return _finish(ctx, merged, q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gradients = _begin(ctx, grads[0])
        exchange: Exchange = ctx.exchange
        # Gathered again rather than kept: between the passes memory is that of this rank's part.
        found = [
            gradients.add(kv[0], kv[1], exchange.blocks(q.shape[1], source, ctx.starts))
            for source, kv in enumerate(_gathered(k, v, exchange))
        ]
        mine = torch.empty_like(found[0])
        _reduce_scatter(mine, torch.cat(found), group=exchange.group)
        dk, dv = _heads_first(mine).to(k.dtype)
        return _heads_first(gradients.dq).to(q.dtype), dk, dv, None, None


def _gathered(k: Tensor, v: Tensor, exchange: Exchange) -> Tensor:
    """Keys and values of every rank: (cp, 2, B, G, L, K)."""
    return _heads_first(exchange.gathered(torch.stack([k, v])))


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def check_ulysses(n_heads: int, n_kv_heads: int, cp: int, tp: int = 1) -> None:
    """Raise ConfigError unless each of cp x tp ranks can hold whole heads."""
    heads, kv_heads = n_heads // tp, max(1, n_kv_heads // tp)
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        raise ConfigError(
            f"parallel.cp_method: ulysses cannot divide {n_heads} query heads with {n_kv_heads}"
            f" key/value heads over cp {cp} x tp {tp}; ring and allgather can"
        )


def _ulysses(exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, starts: list[list[int]]) -> Tensor:
    check_ulysses(q.shape[2], k.shape[2], exchange.cp)
    # Fewer key/value heads than ranks: each goes to all the ranks that need it.
    copies = max(1, exchange.cp // k.shape[2])
    q, k, v = (
        _to_heads(exchange, x)
        for x in (q, k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2))
    )
    return _to_sequence(exchange, cast(Tensor, _Local.apply(q, k, v, starts)))


class _Local(torch.autograd.Function):
    """Attention of one rank over the whole sequence, in the same blocks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: list[list[int]]) -> Tensor:
        ctx.parts = blocks([0], [0], q.shape[1], starts)
        merged = Merged(_heads_first(q))
        merged.add(_heads_first(k), _heads_first(v), ctx.parts)
        return _finish(ctx, merged, q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gradients = _begin(ctx, grads[0])
        found = gradients.add(_heads_first(k), _heads_first(v), ctx.parts)
        dk, dv = _heads_first(found).to(k.dtype)
        return _heads_first(gradients.dq).to(q.dtype), dk, dv, None


def _all_to_all(exchange: Exchange, x: Tensor) -> Tensor:
    """(cp, ...): the i-th part goes to rank i; the result's i-th came from it."""
    return all_to_all_single_autograd(x.contiguous(), None, None, exchange.group)


def _to_heads(exchange: Exchange, x: Tensor) -> Tensor:
    """(B, L, H, K) of this rank's sequence to (B, S, H / cp, K) of its heads."""
    parts = x.unflatten(2, (exchange.cp, -1)).movedim(2, 0)
    return exchange.in_order(_all_to_all(exchange, parts))


def _to_sequence(exchange: Exchange, x: Tensor) -> Tensor:
    """The inverse of :func:`_to_heads`."""
    parts = _all_to_all(exchange, exchange.out_of_order(x))
    return parts.movedim(0, 2).flatten(2, 3)
