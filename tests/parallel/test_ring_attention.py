"""A ring of keys and values: what it passes on, its memory, and its sums."""

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
from compose import AttentionOptions
from compose.ops.attention_layout import task_of
from compose.parallel import ring_attention
from compose.parallel.context_parallel import Balance, ContextParallel, Method
from models.layers.attention import AttentionCore
from tests.support.pool import Pool


def _sent(window: int | None, balance: Balance) -> list[tuple[int, int]]:
    """The ranks that this one sends keys to, and the elements of each message."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    style = ContextParallel("ring", balance)
    core = parallelize_module(AttentionCore(AttentionOptions(window=window)), mesh, style)
    result, real = [], dist.batch_isend_irecv

    def spy(operations: list[dist.P2POp]) -> list[dist.Work]:
        result.extend((x.group_peer, x.tensor.numel()) for x in operations if x.op is dist.isend)
        return real(operations)

    with mock.patch.object(dist, "batch_isend_irecv", spy), torch.no_grad():
        core(*(torch.randn(1, 16, 2, 4) for _ in range(3)))
    return result


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


def _of_one_token() -> float:
    """The gradient of a value, of one head, where each rank holds one token."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    core = parallelize_module(AttentionCore(), mesh, ContextParallel("ring", "none"))
    q, k, v = (torch.ones(1, 1, 1, width, requires_grad=True) for width in (2, 2, 3))
    core(q, k, v).sum().backward()
    assert v.grad is not None
    return float(v.grad.abs().max())


def test_a_rank_may_hold_one_token(pool: Pool) -> None:
    """Both tokens attend to the first, the second with half of its weight."""
    assert pool.run(_of_one_token, 2) == [pytest.approx(1.5), pytest.approx(0.5)]


def _peak(method: Method, part: int) -> int:
    """Bytes at the peak of one rank's attention that holds ``part`` tokens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    core = parallelize_module(AttentionCore(), mesh, ContextParallel(method))
    return peak_bytes(core, part * dist.get_world_size())


@pytest.mark.slow
def test_ring_memory_is_linear_in_the_part_held(pool: Pool) -> None:
    small, large = (max(pool.run(_peak, 2, "ring", n)) for n in (256, 512))
    assert small > 0
    assert large / small < 2.2
    # Twice the ranks and twice the sequence, the same part held: no more memory. That of
    # all-gather grows with the sequence.
    ring4, ring8, gather4, gather8 = (
        max(pool.run(_peak, ranks, method, 256)) for method in ("ring", "allgather") for ranks in (4, 8)
    )
    assert ring8 < 1.1 * ring4
    assert gather8 > 1.3 * gather4


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
        result = ring_attention._gradients(task, ring, None, given)[0]

    whole = q.double().requires_grad_()
    heads_first = [x.double().transpose(1, 2) for x in (whole, keys, values)]
    mask = torch.ones(length, cp * length).tril((cp - 1) * length).bool()
    F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2).backward(grad.double())
    assert whole.grad is not None
    rounding = (whole.grad.bfloat16() - whole.grad).norm()
    assert (result - whole.grad).norm() < 3 * rounding
