"""Blocks cover exactly what may attend; the style alone; memory linear in the length."""

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import compose.parallel.attention_blocks
from benchmarks.context import peak_bytes
from compose import ConfigError
from compose.loss.cross_entropy import IGNORE
from compose.parallel.attention_blocks import Merged, blocks, document_starts
from compose.parallel.context_parallel import (
    Balance,
    ContextParallel,
    Exchange,
    Method,
    _Ring,
    check_ulysses,
    chunk_count,
    chunks_of,
    shard_sequence,
)
from models.layers.attention import AttentionCore, Documents
from tests.pool import Pool

METHODS: list[Method] = ["ring", "allgather", "ulysses"]


def random_ids(rows: int, length: int, seed: int) -> Tensor:
    generator = random.Random(seed)
    chance = generator.choice([0.0, 0.05, 0.3, 1.0])
    ends = torch.tensor([[generator.random() < chance for _ in range(length)] for _ in range(rows)])
    return ends.long().cumsum(1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("balance", ["headtail", "none"])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_blocks_cover_each_pair_once(cp: int, balance: Balance, seed: int) -> None:
    """The blocks of all pairs of ranks, drawn into a mask, are the documents' mask."""
    size = 5
    ids = random_ids(3, size * chunk_count(cp, balance), seed)
    starts = document_starts(ids)
    seen = torch.zeros(3, ids.shape[1], ids.shape[1], dtype=torch.long)
    held = {rank: chunks_of(rank, cp, balance) for rank in range(cp)}
    assert sorted(itertools.chain(*held.values())) == list(range(chunk_count(cp, balance)))
    for q_rank, k_rank in itertools.product(range(cp), repeat=2):
        places = [
            torch.cat([torch.arange(c * size, (c + 1) * size) for c in held[r]])
            for r in (q_rank, k_rank)
        ]
        for b in blocks(held[q_rank], held[k_rank], size, starts):
            rows = torch.arange(3)[b.rows]
            q, k = places[0][b.q], places[1][b.k]
            pairs = torch.ones(len(q), len(k), dtype=torch.long)
            assert len(q)
            assert len(k)
            seen[rows[:, None, None], q[None, :, None], k[None, None, :]] += (
                pairs.tril() if b.causal else pairs
            )
    assert torch.equal(seen, Documents(ids).mask[:, 0].long())


def test_excluded_blocks_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end with their chunk leave squares alone: none of the 6 rectangles is run."""
    calls: list[tuple[int, int, bool]] = []
    real = compose.parallel.attention_blocks._forward

    def spy(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        calls.append((q.shape[2], k.shape[2], causal))
        return real(q, k, v, causal)

    monkeypatch.setattr(compose.parallel.attention_blocks, "_forward", spy)
    x = torch.randn(2, 1, 16, 4)
    for ids, expected in [
        (torch.arange(4).repeat_interleave(4).expand(2, -1), [(4, 4, True)] * 4),
        (torch.zeros(2, 16), [(4, 4, True)] * 4 + [(4, 4, False)] * 6),
        # Documents of 3, 3 and 10: the second spans two chunks, the third the last three.
        (torch.tensor([[0] * 3 + [1] * 3 + [2] * 10]), None),
    ]:
        calls.clear()
        starts = document_starts(ids)
        Merged(x[: len(ids)]).add(x[: len(ids)], x[: len(ids)], blocks(range(4), range(4), 4, starts))
        if expected is not None:
            assert sorted(calls) == sorted(expected)
        else:
            assert (2, 1, False) in calls
            assert len([c for c in calls if not c[2]]) == 4


def _core(method: Method, balance: Balance, seed: int, heads: int, kv_heads: int, length: int) -> float:
    """Largest relative error, against one process, of a plain module's output and gradients."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = [(2, length, h, 8) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    ids = random_ids(2, length, seed) if seed else None
    expected = AttentionCore()(q, k, v, None if ids is None else Documents(ids))
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    core = parallelize_module(AttentionCore(), mesh, ContextParallel(method, balance))
    whole = {"q": q, "k": k, "v": v, "weight": weight, "expected": expected.detach()}
    whole |= {"ids": ids} if ids is not None else {}
    whole |= {f"d{i}": gradient for i, gradient in enumerate(wanted)}
    mine = shard_sequence(whole, mesh, balance)
    inputs = [mine[name].detach().requires_grad_() for name in "qkv"]
    output = core(*inputs, None if ids is None else Documents(mine["ids"]))
    found = torch.autograd.grad((output * mine["weight"]).sum(), inputs)
    compared = [(output, mine["expected"]), *((g, mine[f"d{i}"]) for i, g in enumerate(found))]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in compared)


def _cores(method: Method, balance: Balance, heads: int, kv_heads: int, length: int) -> float:
    """Over several sets of documents, the first of which is none."""
    return max(_core(method, balance, seed, heads, kv_heads, length) for seed in range(4))


@pytest.mark.parametrize("balance", ["headtail", "none"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "length"),
    [(1, 4, 2, 12), (2, 4, 2, 12), (4, 8, 2, 40), (3, 3, 3, 18)],
)
def test_style_in_a_plain_module(
    pool: Pool, method: Method, balance: Balance, ranks: int, heads: int, kv_heads: int, length: int
) -> None:
    errors = pool.run(_cores, ranks, method, balance, heads, kv_heads, length)
    assert max(errors) < 1e-12


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


class _OneOfMany(Exchange):
    """The last of ``cp`` ranks, whose neighbours send what they would have: (2, B, L, G, K) each."""

    def __init__(self, everyone: list[Tensor]) -> None:
        self.cp, self.rank, self.balance, self.method = len(everyone), len(everyone) - 1, "none", "ring"
        self.chunks = [chunks_of(rank, self.cp, self.balance) for rank in range(self.cp)]
        self.everyone, self.hop = everyone, 0

    def pass_on(self, tensor: Tensor, tag: int) -> tuple[Tensor, list[dist.Work]]:
        if tag == 1:  # gradients of keys, on their way home
            return tensor, []
        self.hop = self.hop % (self.cp - 1) + 1
        return self.everyone[self.rank - self.hop], []


def test_a_ring_sums_the_gradient_of_queries_in_float32() -> None:
    """Over 32 hops in bfloat16: within 3 roundings of the whole sequence's; summed in bfloat16, 5."""
    torch.manual_seed(0)
    cp, length = 32, 4
    keys, values = torch.randn(2, 1, cp * length, 2, 8).bfloat16()
    q, grad = torch.randn(2, 1, length, 2, 8).bfloat16()
    parts = zip(keys.chunk(cp, 1), values.chunk(cp, 1), strict=True)
    exchange = _OneOfMany([torch.stack(part) for part in parts])
    mine = q.clone().requires_grad_()
    _Ring.apply(mine, *exchange.everyone[-1], exchange, [[0]]).backward(grad)  # type: ignore[union-attr]

    whole = q.double().requires_grad_()
    heads_first = [x.double().transpose(1, 2) for x in (whole, keys, values)]
    mask = torch.ones(length, cp * length).tril((cp - 1) * length).bool()
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask)
    out.transpose(1, 2).backward(grad.double())
    assert whole.grad is not None
    assert mine.grad is not None
    rounding = (whole.grad.bfloat16() - whole.grad).norm()
    assert (mine.grad - whole.grad).norm() < 3 * rounding
