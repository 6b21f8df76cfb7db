"""Messages that bring other bits than were sent are named; rounding and undisturbed runs are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from compose.ops.torch_versions import ALL_GATHER, REDUCE_SCATTER
from compose.parallel import message_checks
from compose.parallel.message_checks import MessageChecks
from compose.train.hooks import MessageCheck
from tests.support.helpers import Keys, keys_in, make_job, refused, tier
from tests.support.pool import Pool
from tests.support.small_models import DEEPSEEK
from tests.support.training import keys_for, trainer_of

SIZE = 2000  # elements: a whole block and a part of one


def _gather(own: Tensor) -> Tensor:
    out = own.new_empty(dist.get_world_size() * len(own))
    getattr(dist, ALL_GATHER)(out, own, async_op=True).wait()
    return out


def _gather_lists(own: Tensor) -> Tensor:
    outs = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, own)
    return outs[0]


def _exchange(own: Tensor) -> Tensor:
    out = torch.empty_like(own)
    dist.all_to_all_single(out, own)
    return out


def _uneven(own: Tensor) -> Tensor:
    """Rank r sends r + 1 elements to the first rank, and the rest to the other."""
    rank, few = dist.get_rank(), [1, 2]
    sent = [rank + 1, len(own) - rank - 1]
    got = few if rank == 0 else [len(own) - each for each in few]
    out = own.new_empty(sum(got))
    dist.all_to_all_single(out, own, got, sent)
    return out


def _broadcast(own: Tensor) -> Tensor:
    dist.broadcast(own, src=0)
    return own


def _ring(own: Tensor) -> Tensor:
    out, rank, ranks = torch.empty_like(own), dist.get_rank(), dist.get_world_size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, out, (rank - 1) % ranks),
        ]
    )
    for work in works:
        work.wait()
    return out


def _sum(own: Tensor) -> Tensor:
    dist.all_reduce(own)
    return own


def _functional(own: Tensor) -> Tensor:
    assert dist.group.WORLD is not None
    return funcol.all_reduce(own, "sum", dist.group.WORLD) + 0


def _scatter(own: Tensor) -> Tensor:
    out = own.new_empty(len(own) // dist.get_world_size())
    getattr(dist, REDUCE_SCATTER)(out, own)
    return out


BYTES = {
    "_allgather_base": _gather,
    "allgather": _gather_lists,
    "alltoall_base": _exchange,
    "broadcast": _broadcast,
    "recv": _ring,
}
SUMS = {"allreduce": _sum, "_reduce_scatter_base": _scatter}


class _Noisy:
    """A backend; on the second rank, a bit of what the message ``name`` brings is flipped."""

    def __init__(self, backend: Any, name: str, bit: int, place: int) -> None:
        self.backend, self.name, self.bit, self.place = backend, name, bit, place

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.backend, name)
        if name != self.name or dist.get_rank() != 1:
            return real

        def call(out: Any, *args: Any) -> Any:
            real_work, work = real(out, *args), mock.Mock()
            while isinstance(out, list):
                out = out[0]

            def wait(timeout: Any) -> None:
                real_work.wait(timeout)
                number = 1 << self.bit if self.bit < 31 else -(2**31)
                out.view(-1).view(torch.int32)[self.place] ^= number

            work.wait = wait
            return work

        return call


def _problems(name: str, bits: list[int], place: int = 3) -> list[tuple[list[str], list[str]]]:
    """What is said of an undisturbed message, and of one with a flipped bit, for each of ``bits``."""
    message: Callable[[Tensor], Tensor] = {**BYTES, **SUMS}[name]
    results, real = [], message_checks._opened
    checks = MessageChecks()
    try:
        for bit in bits:
            torch.manual_seed(dist.get_rank())
            message(torch.randn(SIZE))
            clean = checks.problems()

            def opened(group: Any, bit: int = bit) -> Any:
                ranks, backend = real(group)
                return ranks, backend if checks.paused else _Noisy(backend, name, bit, place)

            with mock.patch.object(message_checks, "_opened", opened):
                message(torch.randn(SIZE))
                results.append((clean, checks.problems()))
    finally:
        checks.close()
    return results


@pytest.mark.parametrize("name", BYTES)
def test_every_bit_of_bytes_that_are_sent_on_is_seen(pool: Pool, name: str) -> None:
    others, own = pool.run(_problems, 2, name, list(range(32)))
    assert others == [([], [])] * 32
    assert own == [([], ["rank 1 has got other bytes than rank 0 sent"])] * 32


def test_what_a_rank_in_the_middle_gathers_is_seen(pool: Pool) -> None:
    """It looks at the parts before and after its own."""
    for place, source in ((3, 0), (-3, 2)):
        of_ranks = pool.run(_problems, 3, "_allgather_base", [0], place)
        line = f"rank 1 has got other bytes than rank {source} sent"
        assert of_ranks == [[([], [])], [([], [line])], [([], [])]]


def _alone() -> list[str]:
    checks = MessageChecks()
    try:
        _gather(torch.randn(SIZE))
        return checks.problems()
    finally:
        checks.close()


def test_a_group_of_one_rank_sends_nothing(pool: Pool) -> None:
    assert pool.run(_alone, 1) == [[]]


@pytest.mark.parametrize("name", SUMS)
def test_the_upper_bits_of_a_sum_are_seen(pool: Pool, name: str) -> None:
    """The sign, the exponent but for what makes a number smaller, and upper bits of the fraction."""
    bits = [31, 23, 22, 18, 14]
    others, own = pool.run(_problems, 2, name, bits)
    assert others == [([], [])] * len(bits)
    assert own == [([], ["rank 1 has got another sum than ranks 0, 1 gave"])] * len(bits)


def _rounded(dtype: torch.dtype) -> list[str]:
    """Add up numbers whose sums cancel out, are of many sizes, or underflow."""
    checks, generator = MessageChecks(), torch.Generator().manual_seed(dist.get_rank())
    try:
        for turn in range(30):
            own = torch.randn(SIZE, generator=generator) * 10.0 ** (turn - 25 if turn < 20 else 0)
            if turn % 3 == 0:
                own = own.abs()
            own[::7] *= 1e4
            own = own.to(dtype)
            if turn % 2 and dist.get_rank():
                own = -own
            for message in (_sum, _scatter, _functional):
                message(own.clone())
        return checks.problems()
    finally:
        checks.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_rounding_gives_no_alarm(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(_rounded, 4, dtype) == [[]] * 4


def _other_messages() -> list[str]:
    checks = MessageChecks()
    try:
        _uneven(torch.randn(10))
        own = torch.randn(3)
        dist.all_reduce(own, dist.ReduceOp.MAX)
        dist.all_reduce(torch.full((5,), float("nan")))
        dist.all_reduce(torch.full((5,), 4e4, dtype=torch.float16))  # the sum is inf
        dist.all_reduce(torch.empty(0))
        dist.all_gather_object([None, None], "an object")
        return checks.problems()
    finally:
        checks.close()


def test_uneven_parts_maxima_and_what_is_not_finite_give_no_alarm(pool: Pool) -> None:
    assert pool.run(_other_messages, 2) == [[]] * 2


def _trained(keys: Keys) -> list[tuple[bool, bool]]:
    """Train, and tell for each step whether messages of bytes, and of sums, were compared."""
    trainer, seen = trainer_of(keys), []
    check = next(hook for hook in trainer.hooks if isinstance(hook, MessageCheck))
    real = check.messages.problems

    def problems() -> list[str]:
        seen.append((bool(check.messages.sent), bool(check.messages.sums)))
        return real()

    with mock.patch.object(check.messages, "problems", problems):
        trainer.run()
    return seen


MESHES = {
    "zero 3": ("dp_shard=2", {}),
    "replicas": ("dp_replicate=2", {}),
    "tp": ("tp=2", {}),
    "stages": ("pp=2", {}),
    "ring": ("cp=2", {}),
    "experts": ("dp_shard=2 ep=2", DEEPSEEK),
}


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=tier(slow=mesh != "zero 3")) for mesh in MESHES]
)
def test_an_undisturbed_run_gives_no_alarm(pool: Pool, tmp_path: Path, mesh: str) -> None:
    line, more = MESHES[mesh]
    keys = keys_for(tmp_path, train__stop_after=3, train__seq_len=16, comm__check_messages=True)
    keys |= keys_in(line) | {"model__n_layers": 2, "checkpoint__interval": 2} | more
    for seen in pool.run(_trained, 2, keys):
        assert len(seen) == 5
        updates = [seen[0], seen[1], seen[3]]  # two saves look too
        assert [sums for _, sums in updates] == [True] * 3
        assert mesh == "replicas" or [sent for sent, _ in updates] == [True] * 3


def test_messages_of_an_update_are_compared_before_a_save(pool: Pool, tmp_path: Path) -> None:
    """Muon sends matrices to and from the ranks that orthogonalize them."""
    keys = keys_for(tmp_path, train__stop_after=2, train__seq_len=16, comm__check_messages=True)
    keys |= keys_in("dp_shard=2") | {"model__n_layers": 2, "checkpoint__interval": 1}
    for seen in pool.run(_trained, 2, keys | {"optimizer__name": "muon"}):
        assert [sent for sent, _ in seen] == [True] * 4


def test_a_gpu_has_no_messages_to_look_at() -> None:
    keys: Keys = {"comm__check_messages": True, "run__device": "cuda"}
    with mock.patch("torch.cuda.is_available", return_value=True):
        assert refused(make_job, 1, **keys)[0].startswith(
            "comm.check_messages: true looks at gloo's messages"
        )
