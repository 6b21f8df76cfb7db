"""Blocks cover exactly what may attend; the style alone; memory linear in the length."""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.context import peak_bytes
from compose import AttentionOptions, ConfigError, Documents
from compose.ops.attention_kernels import band
from compose.ops.attention_layout import Block, Pieces, blocks, task_of
from compose.ops.batch import IGNORE
from compose.parallel import ring_attention
from compose.parallel.context_parallel import (
    Balance,
    ContextParallel,
    Method,
    check_ulysses,
    chunk_count,
    chunks_of,
    shard_sequence,
)
from models.layers.attention import AttentionCore
from tests.support.plain_attention import plain
from tests.support.pool import Pool

METHODS: list[Method] = ["ring", "allgather", "ulysses"]


def random_ids(rows: int, length: int, seed: int) -> Tensor:
    generator = random.Random(seed)
    chance = generator.choice([0.0, 0.05, 0.3, 1.0])
    ends = torch.tensor([[generator.random() < chance for _ in range(length)] for _ in range(rows)])
    return ends.long().cumsum(1)


def row_starts(ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """Where the documents of each row begin."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return tuple(tuple(row.nonzero().flatten().tolist()) for row in begins)


def drawn(block: Block, window: int) -> Tensor:
    """The pairs of a block, (Lq, Lk)."""
    lengths = (block.q.stop - block.q.start, block.k.stop - block.k.start)
    assert min(lengths) > 0
    if block.shift is not None:
        return (band(lengths, block.shift, window, torch.float32) == 0).long()
    pairs = torch.ones(lengths, dtype=torch.long)
    return pairs.tril() if block.causal else pairs


@pytest.mark.parametrize("window", [0, 1, 3, 7, 1000])
@pytest.mark.parametrize("balance", ["headtail", "none"])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_blocks_cover_each_pair_once(cp: int, balance: Balance, window: int) -> None:
    """The blocks of all pairs of ranks, drawn into a mask, are the documents' mask."""
    size = 5
    for seed in range(8):
        ids = random_ids(3, size * chunk_count(cp, balance), seed)
        length = ids.shape[1]
        seen = torch.zeros(3, length, length, dtype=torch.long)
        held = {rank: chunks_of(rank, cp, balance) for rank in range(cp)}
        assert sorted(itertools.chain(*held.values())) == list(range(chunk_count(cp, balance)))
        starts = {rank: tuple(c * size for c in chunks) for rank, chunks in held.items()}
        for q_rank, k_rank in itertools.product(range(cp), repeat=2):
            places = [
                torch.cat([torch.arange(c * size, (c + 1) * size) for c in held[r]])
                for r in (q_rank, k_rank)
            ]
            layout = Pieces(starts[q_rank], starts[k_rank], True, window)
            for b in blocks(layout, (len(places[0]), len(places[1])), row_starts(ids)):
                rows = torch.arange(3)[b.rows]
                q, k = places[0][b.q], places[1][b.k]
                seen[rows[:, None, None], q[None, :, None], k[None, None, :]] += drawn(b, window)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        expected = Documents(ids).mask[:, 0] & (distance < (window or length))
        assert torch.equal(seen, expected.long())


@pytest.mark.parametrize("window", [3, 64, 100])
def test_a_windows_blocks_are_linear_in_the_length(window: int) -> None:
    """Twice the length has twice the work; each tile computes at most three windows' keys."""

    def area(length: int) -> int:
        found = blocks(Pieces((0,), (0,), True, window), (length, length), ((0,),))
        return sum((b.q.stop - b.q.start) * (b.k.stop - b.k.start) for b in found)

    assert area(4096) / area(2048) < 2.05
    assert area(4096) <= 4096 * (window + max(window, 64))


def test_excluded_blocks_are_not_computed() -> None:
    """Documents that end with their chunk leave squares alone: none of the 6 rectangles is run."""
    layout = Pieces((0, 4, 8, 12), (0, 4, 8, 12))

    def sizes(*starts: tuple[int, ...]) -> list[tuple[int, int, bool]]:
        found = blocks(layout, (16, 16), starts)
        return sorted((b.q.stop - b.q.start, b.k.stop - b.k.start, b.causal) for b in found)

    assert sizes(*[(0, 4, 8, 12)] * 2) == [(4, 4, True)] * 4
    assert sizes(*[(0,)] * 2) == sorted([(4, 4, True)] * 4 + [(4, 4, False)] * 6)
    # Documents of 3, 3 and 10: the second spans two chunks, the third the last three.
    calls = sizes((0, 3, 6))
    assert (2, 1, False) in calls
    assert len([c for c in calls if not c[2]]) == 4


def _core(
    method: Method, balance: Balance, seed: int, shape: tuple[int, int, int], keys: dict[str, Any]
) -> float:
    """Largest relative error, against one process, of a plain module's output and gradients."""
    torch.manual_seed(seed)
    heads, kv_heads, length = shape
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = AttentionOptions(**{"window": None, **keys})
    shapes = [(2, length, h, width) for h, width in ((heads, 8), (kv_heads, 8), (kv_heads, 5))]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True) if seed % 2 else None
    ids = random_ids(2, length, seed) if seed else None
    whole_sinks = [sinks] if sinks is not None else []
    expected = plain(q, k, v, ids, sinks, options)[0]
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), [q, k, v, *whole_sinks])
    core = parallelize_module(AttentionCore(options), mesh, ContextParallel(method, balance))
    whole = {"q": q, "k": k, "v": v, "weight": weight, "expected": expected.detach()}
    whole |= {"ids": ids} if ids is not None else {}
    whole |= {f"d{i}": gradient for i, gradient in enumerate(wanted[:3])}
    mine = shard_sequence(whole, mesh, balance)
    inputs = [*(mine[name].detach().requires_grad_() for name in "qkv"), *whole_sinks]
    # The documents of whole sequences, and the older form: this rank's ids.
    documents = (
        None if ids is None else Documents(ids) if seed % 2 else SimpleNamespace(ids=mine["ids"])
    )
    output = core(*inputs[:3], documents, sinks)
    found = torch.autograd.grad((output * mine["weight"]).sum(), inputs)
    compared = [(output, mine["expected"]), *((found[i], mine[f"d{i}"]) for i in range(3))]
    if sinks is not None:
        dist.all_reduce(found[3])
        compared.append((found[3], wanted[3]))
    return max(float((a - b).norm() / b.norm().clamp(min=1.0)) for a, b in compared)


def _cores(method: Method, balance: Balance, shape: tuple[int, int, int], window: int | None) -> float:
    """Over several sets of documents, the first of which is none."""
    return max(_core(method, balance, seed, shape, {"window": window}) for seed in range(4))


@pytest.mark.parametrize("window", [None, 1, 3, 17])
@pytest.mark.parametrize("balance", ["headtail", "none"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "length"),
    [(1, 4, 2, 12), (2, 4, 2, 12), (4, 8, 2, 40), (3, 3, 3, 18)],
)
def test_style_in_a_plain_module(
    pool: Pool,
    method: Method,
    balance: Balance,
    window: int | None,
    ranks: int,
    heads: int,
    kv_heads: int,
    length: int,
) -> None:
    errors = pool.run(_cores, ranks, method, balance, (heads, kv_heads, length), window)
    assert max(errors) < 1e-12


def _options(method: Method, keys: dict[str, Any]) -> float:
    return _core(method, "headtail", 1, (4, 2, 16), keys)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keys", [{"causal": False}, {"softcap": 2.0, "scale": 0.7, "window": 6}])
def test_other_options(pool: Pool, method: Method, keys: dict[str, Any]) -> None:
    assert max(pool.run(_options, 2, method, keys)) < 1e-12


def _sent(window: int | None, balance: Balance) -> list[tuple[int, int]]:
    """The ranks that this one sends keys to, and the elements of each message."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    style = ContextParallel("ring", balance)
    core = parallelize_module(AttentionCore(AttentionOptions(window=window)), mesh, style)
    found, real = [], dist.batch_isend_irecv

    def spy(operations: list[dist.P2POp]) -> list[dist.Work]:
        found.extend((x.group_peer, x.tensor.numel()) for x in operations if x.op is dist.isend)
        return real(operations)

    with mock.patch.object(dist, "batch_isend_irecv", spy), torch.no_grad():
        core(*(torch.randn(1, 16, 2, 4) for _ in range(3)))
    return found


def test_a_ring_passes_only_what_a_window_reaches(pool: Pool) -> None:
    """Keys and values of a token are 2 x 2 x 4 elements; a window of 3 reaches two earlier tokens."""
    assert pool.run(_sent, 4, None, "none") == [[((r + 1) % 4, 256)] * 3 for r in range(4)]
    assert pool.run(_sent, 4, 3, "none") == [[(1, 32)], [(2, 32)], [(3, 32)], []]
    # Chunks of 8 in the order 0 1 2 3 3 2 1 0: ends are passed to both neighbours.
    assert pool.run(_sent, 4, 3, "headtail") == [
        [(1, 32)],
        [(2, 32), (0, 32)],
        [(3, 32), (1, 32)],
        [(2, 32)],
    ]
    assert pool.run(_sent, 4, 1, "headtail") == [[]] * 4


def _shard(length: int, balance: Balance) -> dict[str, list[list[int]]]:
    mesh = init_device_mesh("cpu", (2,))
    batch = {name: torch.arange(length)[None] for name in ("tokens", "targets", "document_ids")}
    return {name: value.tolist() for name, value in shard_sequence(batch, mesh, balance).items()}


def test_shard_sequence(pool: Pool) -> None:
    assert [part["tokens"] for part in pool.run(_shard, 2, 8, "headtail")] == [
        [[0, 1, 6, 7]],
        [[2, 3, 4, 5]],
    ]
    assert [part["tokens"] for part in pool.run(_shard, 2, 8, "none")] == [
        [[0, 1, 2, 3]],
        [[4, 5, 6, 7]],
    ]
    padded = pool.run(_shard, 2, 5, "none")
    assert padded[1] == {
        "tokens": [[3, 4, 4]],
        "targets": [[3, 4, IGNORE]],
        "document_ids": [[3, 4, 5]],
    }


def _peak(method: Method, part: int) -> int:
    """Bytes at the peak of one rank's attention that holds ``part`` tokens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    core = parallelize_module(AttentionCore(), mesh, ContextParallel(method))
    return peak_bytes(core, part * dist.get_world_size())


@pytest.mark.slow
def test_ring_memory_is_linear_in_the_part_held(pool: Pool) -> None:
    small, large = (max(pool.run(_peak, 2, "ring", n)) for n in (512, 1024))
    assert small > 0
    assert large / small < 2.2
    # Twice the ranks and twice the sequence, the same part held: no more memory. That of
    # all-gather grows with the sequence.
    ring4, ring8, gather4, gather8 = (
        max(pool.run(_peak, ranks, method, 512)) for method in ("ring", "allgather") for ranks in (4, 8)
    )
    assert ring8 < 1.1 * ring4
    assert gather8 > 1.3 * gather4


def test_check_ulysses() -> None:
    for heads, kv_heads, cp, tp in [(8, 2, 4, 1), (8, 2, 2, 2), (8, 1, 8, 1), (32, 8, 4, 8)]:
        check_ulysses(heads, kv_heads, cp, tp)
    for heads, kv_heads, cp, tp in [(8, 2, 3, 1), (8, 2, 8, 2), (12, 6, 4, 1)]:
        with pytest.raises(ConfigError) as caught:
            check_ulysses(heads, kv_heads, cp, tp)
        assert str(caught.value) == (
            f"parallel.cp_method: ulysses cannot divide {heads} query heads with {kv_heads} key/value"
            f" heads over cp {cp} x tp {tp}; ring and allgather can"
        )


def test_repr_names_method_and_balance() -> None:
    style: Any = ContextParallel("allgather", "none")
    assert repr(style) == "ContextParallel(method='allgather', balance='none')"


def test_a_ring_sums_the_gradient_of_queries_in_float32() -> None:
    """Over 32 hops in bfloat16: within 3 roundings of the whole sequence's; summed in bfloat16, 5."""
    torch.manual_seed(0)
    cp, length = 32, 4
    keys, values = torch.randn(2, 1, cp * length, 2, 8).bfloat16()
    q, grad = torch.randn(2, 1, length, 2, 8).bfloat16()
    everyone = torch.cat([keys, values], -1).chunk(cp, 1)
    group = SimpleNamespace(size=lambda: cp, rank=lambda: cp - 1)
    ring = ring_attention.Ring(group, [(i * length,) for i in range(cp)], length)  # type: ignore[arg-type]
    task = task_of((None, None), (ring.starts[-1], (0,)), (True, 0, 8**-0.5, 0.0))

    def arrive(*args: Any) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
        for source in reversed(range(cp)):
            yield source, ring.starts[source], everyone[source]

    mine = [x.chunk(cp, 1)[-1] for x in (keys, values)]
    with (
        mock.patch.object(ring_attention, "_round", arrive),
        mock.patch.object(ring_attention, "begin_messages", return_value=[]),
    ):
        out, lse = ring_attention._output(task, ring, None, (q, mine[0], mine[1]))
        given = (grad, q, *mine, out.to(q.dtype), lse)
        found = ring_attention._gradients(task, ring, None, given)[0]

    whole = q.double().requires_grad_()
    heads_first = [x.double().transpose(1, 2) for x in (whole, keys, values)]
    mask = torch.ones(length, cp * length).tril((cp - 1) * length).bool()
    F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2).backward(grad.double())
    assert whole.grad is not None
    rounding = (whole.grad.bfloat16() - whole.grad).norm()
    assert (found - whole.grad).norm() < 3 * rounding
