"""Context parallel: one sequence over many ranks, by ring, all-gather or all-to-all (Ulysses).

Every rank holds a part of each sequence through the whole model. Only attention needs the other parts.
L = S / cp is the length that a rank holds. All three methods compute the same:

    ring       Keys and values travel round the ranks. A rank attends to those that it has while the
               next ones arrive (Liu et al. 2023, arXiv:2310.01889). Memory is O(L). Per layer each
               rank sends 2 (cp - 1) L G K elements forward and (4 cp - 2) L G K backward, for G
               key/value heads of width K.
    allgather  Every rank gathers all keys and values (Llama team 2024, arXiv:2407.21783, section
               3.3.2). They take O(S) memory. A rank sends as many elements as by ring forward, and
               4 (cp - 1) L G K backward, in one collective.
    ulysses    Ranks exchange sequence parts for heads, and back (Jacobs et al. 2023,
               arXiv:2309.14509). Each rank sends L (2 H + 2 G) K (cp - 1) / cp. The ranks must
               divide the heads.

Causal attention costs more for later queries. ``headtail`` levels the cost: it cuts the sequence in
2 cp chunks and gives rank r the r-th chunk from the front and the r-th from the back. ``none`` gives
each rank one piece.
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
    """Anything that tells documents apart by ``ids``."""

    ids: Tensor
    """This rank's part (B, L); the tokens of one document are a run of equal ids."""


def chunks_of(rank: int, cp: int, balance: Balance) -> list[int]:
    """Return the chunks of the sequence that a rank holds, in order.

    Args:
        rank: The rank on the cp axis.
        cp: Ranks on the cp axis.
        balance: How chunks are dealt to ranks.

    Returns:
        Indices of chunks.
    """
    return [rank, 2 * cp - 1 - rank] if balance == "headtail" else [rank]


def chunk_count(cp: int, balance: Balance) -> int:
    """Return how many chunks the sequence is cut into.

    Args:
        cp: Ranks on the cp axis.
        balance: How chunks are dealt to ranks.

    Returns:
        2 cp for ``headtail``, cp for ``none``.
    """
    return 2 * cp if balance == "headtail" else cp


def shard_sequence(
    batch: Mapping[str, Tensor], mesh: DeviceMesh, balance: Balance, multiple: int = 1
) -> dict[str, Tensor]:
    """Cut this rank's part of the sequence out of every tensor of a batch.

    A length that cannot be cut evenly is padded at the end, where no token attends to it. Targets are
    padded with IGNORE, ``document_ids`` with a document of its own, and ``positions`` with -1.

    Args:
        batch: Tensors (B, S, ...), by name.
        mesh: The 1-D mesh of cp.
        balance: How chunks are dealt to ranks.
        multiple: Each chunk's length is padded to a multiple of this number.

    Returns:
        This rank's parts (B, L, ...), by name.
    """
    cp, rank = mesh.size(), mesh.get_local_rank()
    count = chunk_count(cp, balance)
    # Every rank holds equally many chunks, so this makes its part divisible too.
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
    """A style for a module ``core(q, k, v, documents=None)`` that computes causal attention.

    It replaces the module's own forward. q is (B, L, H, K), k and v are (B, L, G, K): this rank's part,
    as :func:`shard_sequence` cuts it. ``documents`` has ``ids`` (B, L), or is None if each row is one
    document. The forward returns (B, L, H, K). v may be narrower than k; then it is padded with zeros
    for the flash kernels, and the output is as narrow as v. On an axis of one rank the style only saves
    the mask of documents, (B, L, L). The forward raises ConfigError if the method is ulysses and the
    heads do not divide.
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
    """The layout of the sequence over the ranks, and the messages between them."""

    def __init__(self, mesh: DeviceMesh, method: Method, balance: Balance) -> None:
        self.group = mesh.get_group()
        self.cp, self.rank = mesh.size(), mesh.get_local_rank()
        self.method, self.balance = method, balance
        self.chunks = [chunks_of(rank, self.cp, balance) for rank in range(self.cp)]

    def starts(self, batch: int, length: int, documents: HasIds | None) -> list[list[int]]:
        """Return where the documents of each row begin in the whole sequence.

        The ids are gathered once in a forward pass, and the result is kept on ``documents``.

        Args:
            batch: Rows of the batch.
            length: Tokens of a row that this rank holds.
            documents: This rank's ids; None if each row is one document.

        Returns:
            A list of places for each row.
        """
        if documents is None:
            return [[0]] * batch
        known = getattr(documents, "_starts", None)
        if known is None:
            known = document_starts(self.in_order(self.gathered(documents.ids)))
            documents._starts = known  # type: ignore[attr-defined]
        return known

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, stacked: (cp, ...)."""
        everyone = tensor.new_empty((self.cp * len(tensor), *tensor.shape[1:]))
        _all_gather(everyone, tensor.contiguous(), group=self.group)
        return everyone.unflatten(0, (self.cp, -1))

    def in_order(self, parts: Tensor) -> Tensor:
        """Return the parts (cp, B, L, ...) of all ranks as the whole sequence (B, S, ...)."""
        held = [chunk for chunks in self.chunks for chunk in chunks]
        pieces = [p for part in parts for p in part.chunk(len(self.chunks[0]), 1)]
        return torch.cat([pieces[held.index(i)] for i in range(len(held))], 1)

    def out_of_order(self, whole: Tensor) -> Tensor:
        """Return the whole sequence as the parts of all ranks, the inverse of :meth:`in_order`."""
        pieces = whole.chunk(self.cp * len(self.chunks[0]), 1)
        return torch.stack([torch.cat([pieces[i] for i in chunks], 1) for chunks in self.chunks])

    def blocks(self, length: int, source: int, starts: Sequence[Sequence[int]]) -> list[Block]:
        """Return the blocks between this rank's queries and the keys of rank ``source``.

        Args:
            length: Tokens of a row that a rank holds.
            source: The rank that holds the keys.
            starts: Where the documents of each row begin.

        Returns:
            The blocks.
        """
        size = length // len(self.chunks[0])
        return blocks(self.chunks[self.rank], self.chunks[source], size, starts)

    def pass_on(self, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        """Start to send ``tensor`` to the next rank, and to receive the previous rank's.

        Args:
            tensor: What is sent; it has the same shape on every rank.
            tag: Tells messages of different kinds apart.

        Returns:
            The received tensor, valid after the waits, and the works to wait for.
        """
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
    """Return the output of a forward pass, and save what its backward needs."""
    out = merged.out.to(q.dtype)
    ctx.save_for_backward(q, k, v, out, merged.lse)
    return _heads_first(out)


def _begin(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Gradients]:
    """Return what :func:`_finish` saved, and gradients that are still zero."""
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
        # The gradients of a rank's keys travel with the keys. One more hop brings them home.
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
        # Keys are gathered again and not saved: between the passes only this rank's part takes memory.
        found = [
            gradients.add(kv[0], kv[1], exchange.blocks(q.shape[1], source, ctx.starts))
            for source, kv in enumerate(_gathered(k, v, exchange))
        ]
        mine = torch.empty_like(found[0])
        _reduce_scatter(mine, torch.cat(found), group=exchange.group)
        dk, dv = _heads_first(mine).to(k.dtype)
        return _heads_first(gradients.dq).to(q.dtype), dk, dv, None, None


def _gathered(k: Tensor, v: Tensor, exchange: Exchange) -> Tensor:
    """Return the keys and values of every rank: (cp, 2, B, G, L, K)."""
    return _heads_first(exchange.gathered(torch.stack([k, v])))


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def check_ulysses(n_heads: int, n_kv_heads: int, cp: int, tp: int = 1) -> None:
    """Raise ConfigError unless each of cp x tp ranks can hold whole heads.

    Args:
        n_heads: Query heads.
        n_kv_heads: Key/value heads.
        cp: Ranks on the cp axis.
        tp: Ranks on the tp axis.

    Raises:
        ConfigError: The heads do not divide.
    """
    heads, kv_heads = n_heads // tp, max(1, n_kv_heads // tp)
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        raise ConfigError(
            f"parallel.cp_method: ulysses cannot divide {n_heads} query heads with {n_kv_heads}"
            f" key/value heads over cp {cp} x tp {tp}; ring and allgather can"
        )


def _ulysses(exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, starts: list[list[int]]) -> Tensor:
    check_ulysses(q.shape[2], k.shape[2], exchange.cp)
    # With fewer key/value heads than ranks, each head goes to all the ranks that need it.
    copies = max(1, exchange.cp // k.shape[2])
    q, k, v = (
        _to_heads(exchange, x)
        for x in (q, k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2))
    )
    return _to_sequence(exchange, cast(Tensor, _Local.apply(q, k, v, starts)))


class _Local(torch.autograd.Function):
    """The attention of one rank over the whole sequence, in the same blocks."""

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
    """Send the i-th part of ``x`` (cp, ...) to rank i; the result's i-th part came from rank i."""
    return all_to_all_single_autograd(x.contiguous(), None, None, exchange.group)


def _to_heads(exchange: Exchange, x: Tensor) -> Tensor:
    """Exchange this rank's sequence part (B, L, H, K) for its heads (B, S, H / cp, K)."""
    parts = x.unflatten(2, (exchange.cp, -1)).movedim(2, 0)
    return exchange.in_order(_all_to_all(exchange, parts))


def _to_sequence(exchange: Exchange, x: Tensor) -> Tensor:
    """Exchange this rank's heads for its sequence part, the inverse of :func:`_to_heads`."""
    parts = _all_to_all(exchange, exchange.out_of_order(x))
    return parts.movedim(0, 2).flatten(2, 3)
