"""Messages of DiLoCo workers: codes by their definitions, and the bytes that a dry run foretells."""

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from compose.build import build
from compose.cli.train import describe
from compose.compression.codec import Blocks
from compose.diloco import ROW, Outer
from compose.diloco.messages import BLOCK, E3M0, BlockCode, Code, TopKCode, WorkerExchange, code_of
from compose.diloco.proof import received
from compose.proof.observers import allowed
from compose.train.processes import TrainingError
from compose.train.workers import Worker, this_worker
from tests.diloco.cases import INSIDE, loop_of, outer
from tests.support.helpers import Keys, make_job, ranks_in, tiered
from tests.support.pool import Pool, make_mesh

CODES: dict[str, Code] = {
    "float32": code_of(Outer(every=1), torch.float32),
    "bfloat16": code_of(Outer(every=1, dtype="bfloat16"), torch.float32),
    "int8": BlockCode(Blocks(8, BLOCK), torch.float32),
    "e3m0": E3M0(),
    "top_k": TopKCode(64),
}
LENGTHS = (0, 1, 7, 255, 256, 257, 4096, 4097, 140_001)


def drawn(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator) * torch.rand(length, generator=generator) ** 4


def sent(code: Code, x: Tensor) -> Tensor:
    codes = code.encode(x)
    assert codes.dtype == torch.uint8
    assert len(codes) == code.size(len(x))
    result = code.decode(codes, x)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    return result


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CODES)
def test_is_what_the_proof_expects(name: str, length: int) -> None:
    """Bit for bit, and with the loss that it expects; also where blocks are zeros."""
    options = Outer(every=1, dtype=name)  # type: ignore[arg-type]
    assert not sent(CODES[name], torch.zeros(length)).any()
    x = drawn(length).double()
    x[300:900] = 0
    right, expected = received(options, x)
    result = sent(code_of(options, torch.float64), x)
    assert torch.equal(result, right)
    if length > 4000:
        lost, whole = float((x - result).norm()), float(expected.sum()) ** 0.5
        assert whole / 1.25 <= lost <= allowed(whole, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_e3m0_takes_the_nearest_of_its_values(length: int) -> None:
    x = drawn(length)
    result = sent(E3M0(), x)
    for begin in range(0, length, BLOCK):
        block = x[begin : begin + BLOCK]
        top = block.abs().max().to(torch.bfloat16).float()
        grid = torch.tensor([0.0, *(2.0**-e for e in range(7))]) * top
        right = (block.abs()[:, None] - grid).abs().amin(1)
        got = (block - result[begin : begin + BLOCK]).abs()
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("length", LENGTHS[1:])
@pytest.mark.parametrize("kept", [4, 64, 128])
def test_top_k_sends_the_largest(length: int, kept: int) -> None:
    x = drawn(length)
    result = sent(TopKCode(kept), x)
    for begin in range(0, length, ROW):
        row, got = x[begin : begin + ROW], result[begin : begin + ROW]
        largest = row.abs().topk(min(kept, len(row))).indices.sort().values
        assert got.nonzero().flatten().tolist() == largest.tolist()
        assert torch.equal(got.sign()[largest], row.sign()[largest])
        assert len(got[largest].abs().unique()) <= 2


def test_top_k_sends_the_means_of_the_small_and_the_large() -> None:
    x = torch.zeros(ROW)
    x[:4] = torch.tensor([1.0, -2.0, 8.0, -8.0])
    assert sent(TopKCode(4), x)[:4].tolist() == [1.5, -1.5, 8.0, -8.0]


def test_top_k_with_fewer_elements_than_it_may_send() -> None:
    x = torch.zeros(2 * ROW)
    x[5], x[ROW + 7] = 3.0, -3.0
    assert torch.equal(sent(TopKCode(64), x), x)


def test_top_k_leaves_rows_of_zeros() -> None:
    x = drawn(4 * ROW)
    x[ROW : 2 * ROW] = 0.0
    result = sent(TopKCode(64), x).view(4, ROW)
    assert (result != 0).sum(1).tolist() == [64, 0, 64, 64]


def test_bytes_are_the_published_ones() -> None:
    """4 bits with a scale for 256; 64 of 4,096 elements in 14 bits are 146 times less than float32."""
    many = 2**20
    assert E3M0().size(many) * 8 / many == 4 + 16 / 256
    assert TopKCode(64).size(many) / (4 * many) == pytest.approx(1 / 146, rel=1e-3)
    assert CODES["int8"].size(many) / many == 1 + 2 / 256


ODD: Keys = {"model__n_layers": 5, "model__hidden_dim": 90, "train__global_batch": 24}


def _sent(keys: Keys) -> list[int]:
    """Return this rank's bytes of each fragment."""
    job = make_job(**keys)  # type: ignore[arg-type]
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    loop = loop_of(job, composition, job.config.outer, this_worker(), 1000)
    loop.start(0)
    results = []
    for step in range(1, job.config.outer.every + 1):
        loop.after_update(step)
        if size := loop.metrics()["outer"]["bytes"]:
            results.append(int(size))
    loop.close(failed=False)
    return results


def _said(keys: Keys, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Return the dry run's bytes in a round, and at once."""
    describe(make_job(**keys))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("bytes that a rank sends to"))
    return [int(lines[begin + i][22:].split()[0].replace(",", "")) for i in (1, 2)]


def _compare(pool: Pool, inside: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = INSIDE[inside]
    ranks = ranks_in(mesh)
    islands = 2 if ranks == 4 else 3
    keys: dict[str, Any] = {"world_size": islands * ranks, "parallel__dp_replicate": islands}
    keys |= {"train__micro_batch": 1, **outer(every=6, fragments=2, dtype=code), **ODD, **mesh}
    if "model__name" in mesh:
        del keys["model__hidden_dim"]
    if "parallel__pp" in mesh:
        keys |= {"model__tie_embeddings": True}
    sent = pool.run(_sent, islands * ranks, keys, islands=islands)
    most = max(sent, key=sum)
    assert len(most) == 3
    assert _said(keys, capsys) == [sum(most), max(most)]


@pytest.mark.parametrize("inside", tiered(INSIDE, INSIDE.keys() - {"tp x zero 3"}))
def test_as_sent_from_each_mesh(pool: Pool, inside: str, capsys: pytest.CaptureFixture[str]) -> None:
    _compare(pool, inside, "int8", capsys)


@pytest.mark.parametrize("code", CODES)
def test_as_sent_in_each_code(pool: Pool, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    _compare(pool, "zero 3", code, capsys)


def _slower(exchanges: int) -> tuple[list[list[int]], int]:
    """The workers of each exchange, and the most messages that wait to be read; the last is slower."""
    worker, most, took_part = this_worker(), 0, []
    exchange = WorkerExchange(worker, dist.get_rank(), timedelta(seconds=60), grace=0.05)
    for number in range(exchanges):
        if worker.index == worker.count - 1:
            time.sleep(0.5)
            if number % 3 < 2:  # the others go on
                worker.store.wait([f"there/{number}"], timedelta(seconds=60))
        message = torch.full((8,), worker.index, dtype=torch.uint8)
        received = exchange.begin(str(number), message).result()
        took_part.append([i for i, m in enumerate(received) if m is not None])
        assert all(m is None or bool((m == i).all()) for i, m in enumerate(received))
        most = max(most, len(exchange._unread))
    exchange.close()
    return took_part, most


def test_a_slower_island_is_waited_for_after_two_exchanges(pool: Pool) -> None:
    """Messages that it has not read would need more memory with each exchange."""
    first, last = pool.run(_slower, 2, 6, islands=2)
    assert first == ([[0], [0], [0, 1]] * 2, 3)  # with the message of the last exchange of both
    assert last == (first[0], 1)


def test_other_ranks_only_ask_for_what_the_first_decides() -> None:
    store = mock.Mock()
    store.check.side_effect = [False, False, True]
    store.get.return_value = b"0 2"
    exchange = WorkerExchange(Worker(0, 1, store), 1, timedelta(seconds=1), grace=0.05)
    exchange.worker.count = 3
    assert exchange._present("name", 0.05) == {0, 2}
    assert store.check.call_args_list == [mock.call(["there/name"])] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_an_island_that_never_comes_is_named(rank: int) -> None:
    """It has missed two exchanges, so it is waited for, but not for ever."""
    worker = Worker(0, 1, dist.HashStore())
    exchange = WorkerExchange(worker, rank, timedelta(seconds=0.05), grace=0.01)
    worker.count, exchange._missed = 3, [0, 0, 2]
    for island in (0, 1):
        worker.store.set(f"ready/12.0/{island}", "")
    line = "the exchange after step 12 has waited 0 s for these islands: 2"
    with pytest.raises(TrainingError, match=line):
        exchange._present("12.0", 0.01)
