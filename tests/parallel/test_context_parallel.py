"""The style alone, in a plain module; sequences that are cut; what ulysses cannot divide."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from compose import AttentionOptions, Documents
from compose.ops.batch import IGNORE
from compose.parallel.context_parallel import (
    Balance,
    ContextParallel,
    Method,
    SequenceExchange,
    check_ulysses,
    shard_sequence,
)
from models.layers.attention import AttentionCore
from tests.support.helpers import refusal, refused, tier
from tests.support.plain_attention import plain, random_ids
from tests.support.pool import Pool

METHODS: list[Method] = ["ring", "allgather", "ulysses"]


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
    whole |= {f"d{i}": gradient for i, gradient in enumerate(wanted[:3])}
    mine = shard_sequence(whole, mesh, balance)
    inputs = [*(mine[name].detach().requires_grad_() for name in "qkv"), *whole_sinks]
    documents = None if ids is None else Documents(ids)
    output = core(*inputs[:3], documents, sinks)
    result = torch.autograd.grad((output * mine["weight"]).sum(), inputs)
    compared = [(output, mine["expected"]), *((result[i], mine[f"d{i}"]) for i in range(3))]
    if sinks is not None:
        dist.all_reduce(result[3])
        compared.append((result[3], wanted[3]))
    return max(float((a - b).norm() / b.norm().clamp(min=1.0)) for a, b in compared)


def _cores(method: Method, balance: Balance, shape: tuple[int, int, int], window: int | None) -> float:
    """Over several sets of documents, the first of which is none."""
    return max(_core(method, balance, seed, shape, {"window": window}) for seed in range(4))


# Ranks, and the heads of queries and of keys, and the length.
SHAPES = [(1, (4, 2, 12)), (2, (4, 2, 12)), (4, (8, 2, 40)), (3, (3, 3, 18))]
# Every second case of the product has each pair of its values; the full tier runs the others.
PLAIN = [
    pytest.param(
        *(METHODS[method], balance, window, *SHAPES[shape]),
        marks=tier(full=(method + (balance == "none") + place + shape) % 2 == 1),
    )
    for method in range(len(METHODS))
    for balance in ("headtail", "none")
    for place, window in enumerate((None, 1, 3, 17))
    for shape in range(len(SHAPES))
]


@pytest.mark.parametrize(("method", "balance", "window", "ranks", "shape"), PLAIN)
def test_style_in_a_plain_module(
    pool: Pool, method: Method, balance: Balance, window: int | None, ranks: int, shape: Any
) -> None:
    assert max(pool.run(_cores, ranks, method, balance, shape, window)) < 1e-12


def _options(method: Method, keys: dict[str, Any]) -> float:
    return _core(method, "headtail", 1, (4, 2, 16), keys)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keys", [{"causal": False}, {"softcap": 2.0, "scale": 0.7, "window": 6}])
def test_other_options(pool: Pool, method: Method, keys: dict[str, Any]) -> None:
    assert max(pool.run(_options, 2, method, keys)) < 1e-12


def _other_documents(method: Method) -> str:
    """Documents of this rank's part alone, in place of those of the whole sequences."""
    core = parallelize_module(AttentionCore(), init_device_mesh("cpu", (2,)), ContextParallel(method))
    part = torch.ones(1, 4, 2, 8)
    return refusal(core, part, part, part, Documents(torch.zeros(1, 4, dtype=torch.int64)))


@pytest.mark.parametrize("method", METHODS)
def test_documents_of_a_part_are_refused(pool: Pool, method: Method) -> None:
    line = "attention: documents of 1 x 4 tokens, and keys of 1 x 8"
    assert pool.run(_other_documents, 2, method) == [line] * 2


def _types_of_sums() -> list[torch.dtype]:
    """The types in which ranks sum the gradients of keys and values in bfloat16."""
    core = parallelize_module(
        AttentionCore(), init_device_mesh("cpu", (2,)), ContextParallel("allgather")
    )
    results, real = list[torch.dtype](), SequenceExchange.summed

    def summed(exchange: SequenceExchange, whole: torch.Tensor) -> torch.Tensor:
        results.append(whole.dtype)
        return real(exchange, whole)

    with mock.patch.object(SequenceExchange, "summed", summed):
        core(*(torch.randn(1, 4, 2, 8).bfloat16().requires_grad_() for _ in range(3))).sum().backward()
    return results


def test_allgather_sums_the_gradients_of_keys_in_float32(pool: Pool) -> None:
    assert pool.run(_types_of_sums, 2) == [[torch.float32]] * 2


def _shard(length: int, balance: Balance) -> dict[str, list[list[int]]]:
    mesh = init_device_mesh("cpu", (2,))
    batch = {name: torch.arange(length)[None] for name in ("tokens", "targets", "document_ids")}
    return {name: value.tolist() for name, value in shard_sequence(batch, mesh, balance).items()}


def test_shard_sequence(pool: Pool) -> None:
    headtail, none, padded = (
        pool.run(_shard, 2, *case) for case in ((8, "headtail"), (8, "none"), (5, "none"))
    )
    assert [part["tokens"] for part in headtail] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert [part["tokens"] for part in none] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    tokens, targets, ids = [[3, 4, 4]], [[3, 4, IGNORE]], [[3, 4, 5]]
    assert padded[1] == {"tokens": tokens, "targets": targets, "document_ids": ids}


def test_check_ulysses() -> None:
    for heads, kv_heads, cp, tp in [(8, 2, 4, 1), (8, 2, 2, 2), (8, 1, 8, 1), (32, 8, 4, 8)]:
        check_ulysses(heads, kv_heads, cp, tp)
    for heads, kv_heads, cp, tp in [(8, 2, 3, 1), (8, 2, 8, 2), (12, 6, 4, 1)]:
        assert refused(check_ulysses, heads, kv_heads, cp, tp) == [
            f"parallel.cp_method: ulysses cannot divide {heads} query heads with {kv_heads} key/value"
            f" heads over cp {cp} x tp {tp}; ring and allgather can"
        ]


def test_repr_names_method_and_balance() -> None:
    style: Any = ContextParallel("allgather", "none")
    assert repr(style) == "ContextParallel(method='allgather', balance='none')"
