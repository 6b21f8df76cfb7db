"""Context parallel: one sequence over many ranks, by ring, all-gather or all-to-all (Ulysses).

Every rank holds a part of each sequence through the whole model. Only attention needs the other parts.
All three methods compute the same; docs/context.md has what each sends and holds:

    ring       Keys and values travel round the ranks. A rank attends to those that it has while the
               next ones arrive (Liu et al. 2023, arXiv:2310.01889).
    allgather  Every rank gathers all keys and values (Llama team 2024, arXiv:2407.21783, section
               3.3.2).
    ulysses    Ranks exchange sequence parts for heads, and back (Jacobs et al. 2023,
               arXiv:2309.14509). The ranks must divide the heads.

The ring is one operator (compose/parallel/ring_attention.py). The other two are collectives of
torch.distributed around ``compose.attention``, which a compiler traces. So a layer is one graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compose.errors import ConfigError
from compose.ops.attention import (
    AttentionOptions,
    attention_backward,
    attention_forward,
    check,
    check_documents,
    sink_gradient,
    tensors_of,
)
from compose.ops.batch import Documents, ignore_all
from compose.ops.tensors import arrived
from compose.ops.torch_versions import functional_all_gather, functional_reduce_scatter
from compose.parallel.ring_attention import ring_attention_forward
from compose.parallel.stream_messages import Style

Balance = Literal["headtail", "none"]
"""How the sequence is dealt to ranks. Causal attention costs more for later queries. headtail levels
the cost: it cuts the sequence in 2 cp chunks and gives rank r the r-th chunk from the front and the
r-th from the back. none gives each rank one piece."""
Method = Literal["ring", "allgather", "ulysses"]


class ContextParallel(Style):
    """A style for a module ``core(q, k, v, documents=None, sinks=None)`` that computes attention.

    It replaces the module's own forward. q is (B, L, H, K), k is (B, L, G, K) and v (B, L, G, V): this
    rank's part, as ``shard_sequence`` cuts it. ``documents`` are those of the whole sequences
    (compose.Documents), or None if each row is one. ``sinks`` (H,) has one for each head. The forward
    returns (B, L, H, V). If the module has ``options`` (compose.AttentionOptions), they count; else
    attention is causal.

    The forward raises ConfigError if the method is ulysses and the heads do not divide.
    """

    def __init__(self, method: Method = "ring", balance: Balance = "headtail") -> None:
        super().__init__()
        self.method: Method = method
        self.balance: Balance = balance

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # A class, and no function of one module: compiled layers share a graph.
        module.__class__ = _contextual(type(module))
        cast(_Contextual, module).exchange = SequenceExchange(
            device_mesh.get_group().group_name,
            device_mesh.size(),
            device_mesh.get_local_rank(),
            self.method,
            self.balance,
        )
        return module


def is_causal(core: nn.Module) -> bool:
    """Return whether the attention of a module that ContextParallel takes is causal."""
    return (getattr(core, "options", None) or AttentionOptions()).causal


@dataclass(frozen=True)
class SequenceExchange:
    """The layout of the sequence over the ranks, and the messages between them."""

    group: str
    cp: int
    rank: int
    method: Method
    balance: Balance

    @property
    def order(self) -> list[int]:
        """The chunks of all ranks, in the order of ranks."""
        return [c for rank in range(self.cp) for c in chunks_of(rank, self.cp, self.balance)]

    def in_order(self, parts: Tensor) -> Tensor:
        """Return the parts (cp, B, L, ...) of all ranks as the whole sequence (B, S, ...)."""
        order = self.order
        pieces = [p for part in parts.unbind() for p in part.chunk(len(order) // self.cp, 1)]
        return torch.cat([pieces[order.index(i)] for i in range(len(order))], 1)

    def out_of_order(self, whole: Tensor) -> Tensor:
        """Return the whole sequence as the parts of all ranks, the inverse of :meth:`in_order`."""
        order = self.order
        pieces = whole.chunk(len(order), 1)
        held = len(order) // self.cp
        return torch.stack(
            [torch.cat([pieces[i] for i in order[r : r + held]], 1) for r in range(0, len(order), held)]
        )

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return the whole sequence (B, S, ...) of this rank's part (B, L, ...)."""
        parts = functional_all_gather(tensor.contiguous(), 0, cast(Any, self.group))
        return self.in_order(arrived(parts).unflatten(0, (self.cp, -1)))

    def summed(self, whole: Tensor) -> Tensor:
        """Return this rank's part (B, L, ...) of the sum over ranks of whole sequences (B, S, ...)."""
        parts = self.out_of_order(whole).flatten(0, 1)
        mine = functional_reduce_scatter(parts, "sum", 0, cast(Any, self.group))
        return arrived(mine)

    def exchanged(self, parts: Tensor) -> Tensor:
        """Send the i-th part of (cp, ...) to rank i; the result's i-th part came from rank i."""
        got = funcol.all_to_all_single(parts.contiguous(), None, None, cast(Any, self.group))
        return arrived(got)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange this rank's sequence part (B, L, H, K) for its heads (B, S, H / cp, K)."""
        return self.in_order(self.exchanged(x.unflatten(2, (self.cp, -1)).movedim(2, 0)))

    def to_sequence(self, x: Tensor) -> Tensor:
        """Exchange this rank's heads for its sequence part, the inverse of :meth:`to_heads`."""
        return self.exchanged(self.out_of_order(x)).movedim(0, 2).flatten(2, 3)


class _Contextual(nn.Module):
    exchange: SequenceExchange

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        exchange, options = self.exchange, getattr(self, "options", None) or AttentionOptions()
        check(q, k, v, sinks, options)
        rows, length = q.shape[:2]
        check_documents(documents, rows, length * exchange.cp)
        tensors, scores = tensors_of(documents), options.given(q)
        if exchange.cp == 1:
            return attention_forward(q, k, v, *tensors, sinks, (0,), (0,), *scores)[0]
        if exchange.method == "ulysses":
            return _ulysses(exchange, (q, k, v), tensors, sinks, scores)
        if exchange.method == "ring":
            cp, balance = exchange.cp, exchange.balance
            starts = [start for rank in range(cp) for start in chunk_starts(rank, cp, balance, length)]
            return ring_attention_forward(q, k, v, *tensors, sinks, exchange.group, starts, *scores)[0]
        return cast(Tensor, _AllGather.apply(q, k, v, *tensors, sinks, exchange, scores))


@cache
def _contextual(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a core whose sequence is over several ranks."""
    return type(f"ContextParallel{kind.__name__}", (_Contextual, kind), {})


_Scores = tuple[bool, int, float, float]  # causal, window, scale, softcap


class _AllGather(torch.autograd.Function):
    """Attention to gathered keys and values.

    They are gathered again in backward and not saved: between the passes only this rank's part takes
    memory.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        bounds, extents, sinks, exchange, scores = given
        starts = chunk_starts(exchange.rank, exchange.cp, exchange.balance, q.shape[1])
        kv = exchange.gathered(torch.cat([k, v], -1)).split([k.shape[-1], v.shape[-1]], -1)
        out, lse = attention_forward(q, *kv, bounds, extents, sinks, starts, (0,), *scores)
        ctx.save_for_backward(q, k, v, bounds, extents, sinks, out, lse)
        ctx.exchange, ctx.scores = exchange, scores
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, extents, sinks, out, lse = ctx.saved_tensors
        exchange: SequenceExchange = ctx.exchange
        starts = chunk_starts(exchange.rank, exchange.cp, exchange.balance, q.shape[1])
        widths = [k.shape[-1], v.shape[-1]]
        whole = exchange.gathered(torch.cat([k, v], -1)).split(widths, -1)
        given = (out, lse, bounds, extents, starts, (0,), *ctx.scores)
        dq, dk, dv = attention_backward(grads[0], None, q, *whole, *given, wide=True)
        mine = exchange.summed(torch.cat([dk, dv], -1)).to(k.dtype).split(widths, -1)
        of_sinks = None if sinks is None else sink_gradient((grads[0], None), (out, lse), sinks)
        return dq, *mine, None, None, of_sinks, None, None


def check_ulysses(n_heads: int, n_kv_heads: int, cp: int, tp: int = 1) -> None:
    """Raise ConfigError unless each of cp x tp ranks can hold whole heads."""
    heads, kv_heads = n_heads // tp, max(1, n_kv_heads // tp)
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        raise ConfigError(
            f"parallel.cp_method: ulysses cannot divide {n_heads} query heads with {n_kv_heads}"
            f" key/value heads over cp {cp} x tp {tp}; ring and allgather can"
        )


def _ulysses(
    exchange: SequenceExchange,
    qkv: Sequence[Tensor],
    tensors: tuple[Tensor | None, Tensor | None],
    sinks: Tensor | None,
    scores: _Scores,
) -> Tensor:
    q, k, v = qkv
    check_ulysses(q.shape[2], k.shape[2], exchange.cp)
    # With fewer key/value heads than ranks, each head goes to all the ranks that need it.
    copies = max(1, exchange.cp // k.shape[2])
    q, k, v = (
        cast(Tensor, _Swap.apply(x, exchange, True))
        for x in (q, k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2))
    )
    mine = None if sinks is None else sinks.unflatten(0, (exchange.cp, -1))[exchange.rank]
    out, _ = attention_forward(q, k, v, *tensors, mine, (0,), (0,), *scores)
    return cast(Tensor, _Swap.apply(out, exchange, False))


class _Swap(torch.autograd.Function):
    """The exchange of sequence parts for heads, or back; each is the backward of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: SequenceExchange, heads: bool) -> Tensor:
        ctx.exchange, ctx.heads = exchange, heads
        return exchange.to_heads(x) if heads else exchange.to_sequence(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        exchange: SequenceExchange = ctx.exchange
        x = grads[0]
        return exchange.to_sequence(x) if ctx.heads else exchange.to_heads(x), None, None


def chunks_of(rank: int, cp: int, balance: Balance) -> list[int]:
    """Return the chunks of the sequence that a rank holds, in order."""
    return [rank, 2 * cp - 1 - rank] if balance == "headtail" else [rank]


def chunk_count(cp: int, balance: Balance) -> int:
    """Return how many chunks the sequence is cut into."""
    return 2 * cp if balance == "headtail" else cp


def chunk_starts(rank: int, cp: int, balance: Balance, length: int) -> tuple[int, ...]:
    """Return the first tokens of a rank's chunks."""
    chunks = chunks_of(rank, cp, balance)
    return tuple(chunk * (length // len(chunks)) for chunk in chunks)


def pad_sequence(batch: Mapping[str, Tensor], unit: int) -> dict[str, Tensor]:
    """Pad every sequence of a batch at the end, where no causal attention sees it.

    Nothing is learnt from the targets of padding. ``document_ids`` are padded with a document of its
    own, and ``positions`` with -1. A tensor (B,) is of whole samples, and stays as it is.
    """
    result = {}
    for name, value in batch.items():
        missing = -value.shape[1] % unit if value.ndim > 1 else 0
        if missing:
            filler = value[:, -1:].expand(-1, missing, *value.shape[2:]).clone()
            if name == "targets":
                ignore_all(filler)
            elif name == "document_ids":
                filler += 1
            elif name == "positions":
                filler.fill_(-1)
            value = torch.cat([value, filler], 1)
        result[name] = value
    return result


def shard_sequence(
    batch: Mapping[str, Tensor], mesh: DeviceMesh, balance: Balance, multiple: int = 1
) -> dict[str, Tensor]:
    """Cut this rank's part of the sequence out of every tensor of a batch.

    A length that cannot be cut evenly is padded, as :func:`pad_sequence` does it.
    """
    cp, rank = mesh.size(), mesh.get_local_rank()
    count = chunk_count(cp, balance)
    # Every rank holds equally many chunks, so this makes its part divisible too.
    result = {}
    for name, value in pad_sequence(batch, count * multiple).items():
        if value.ndim == 1:
            result[name] = value
            continue
        pieces = value.chunk(count, 1)
        result[name] = torch.cat([pieces[i] for i in chunks_of(rank, cp, balance)], 1)
    return result
