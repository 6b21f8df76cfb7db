"""Activations of tp and ep in 8 bits: their codec and their messages."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from compose.compression.activations import Activations, ModuleMessages, RowCode, send_rows, send_stream
from compose.compression.gather import Traffic
from compose.compression.losses import ActivationAccount, expected_of_rows, most_of_rows
from compose.parallel.stream_messages import send_plain
from tests.support.pool import Pool

KINDS = ("int8", "float8")
# Relative errors of normal values in blocks of 256.
STATED = {"int8": 0.0070, "float8": 0.0261}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 5, 100, 256, 300, 1000])
def test_rows_lose_what_is_expected(kind: Any, width: int) -> None:
    code, rows = RowCode(kind, 256), torch.randn(7, 5000 // width, width, dtype=torch.float64)
    codes = code.encode(rows)
    assert codes.shape == (*rows.shape[:-1], code.bytes(width))
    lost = (code.decode(codes, width) - rows).norm()
    sure = 1.25 if width < 100 else 1.05
    assert lost < sure * expected_of_rows(code, rows).sqrt()
    if width >= 100:
        assert lost > expected_of_rows(code, rows).sqrt() / 1.05
        assert lost < 1.1 * STATED[kind] * rows.norm()
        result, most = code.decode(codes, width), most_of_rows(code, rows)
        assert 0.9 < float(((result - rows).abs() / most).max()) <= 1
        assert float(((1.02 * result - rows).abs() / most).max()) > 1.1
    # A row's codes do not depend on the other rows.
    assert torch.equal(code.encode(rows[3:4, 1:]), codes[3:4, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_strange_rows(kind: Any) -> None:
    code = RowCode(kind, 16)
    rows = torch.randn(7, 24)
    rows[0] = rows[6] = 0
    rows[1] *= 1e-30
    rows[2] *= 1e30
    rows[3, 5] = torch.inf
    rows[4, 5] = torch.nan
    rows[6, 5] = 1e-37  # the inverse of its scale is infinite
    result = code.decode(code.encode(rows), 24)
    assert torch.equal(result[0], rows[0])
    for i in (1, 2, 5):
        assert (result[i] - rows[i]).double().norm() < 0.05 * rows[i].double().norm()
    assert result[6].abs().max() < 2e-37
    # A step with such values is skipped, so they must stay such.
    assert not result[3].isfinite().all()
    assert not result[4].isfinite().all()
    assert code.decode(code.encode(rows[:0]), 24).shape == (0, 24)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_codes_are_bitwise_the_same(kind: Any) -> None:
    eager, compiled = RowCode(kind, 256), RowCode(kind, 256, compiled=True)
    rows = torch.randn(65, 300)
    codes = eager.encode(rows)
    assert torch.equal(compiled.encode(rows), codes)
    assert torch.equal(compiled.decode(codes, 300), eager.decode(codes, 300))


def _messages(kind: Any) -> None:
    """Compare messages and those of gradients with the ranks' dequantized rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = init_device_mesh("cpu", (size,)).get_group().group_name
    code = RowCode(kind, 4)
    every = torch.randn(size, 3, size * 5, 7, generator=torch.Generator().manual_seed(0))
    held = code.decode(code.encode(every), 7)
    parts = held.sum(0).chunk(size, 1)
    # The rows of all samples in one, shared by the ranks, in which the last rank's may be fewer.
    rows = held.sum(0).flatten(0, 1)
    again = code.decode(code.encode(rows), 7).view(3, -1, 7)
    wanted = {"gather": torch.cat(list(held), 1), "scatter": parts[rank], "sum": again}
    for message, expected in wanted.items():
        activations = Activations(code, Traffic())
        place, x = ModuleMessages(activations, "layer", "tp"), every[rank].clone().requires_grad_()
        result = send_stream(place.key, message, "keep", group, x)  # type: ignore[arg-type]
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
        sent = activations.traffic.take()
        rows_of = {"gather": 15 * size * (size - 1), "scatter": 15 * (size - 1)}
        # The sum pads the rows of all samples to a multiple of the ranks.
        rows_of["sum"] = 2 * -(-15 * size // size) * (size - 1)
        assert sent == {
            ("activations", "tp"): rows_of[message] * code.bytes(7),
            ("activations", "plain"): rows_of[message] * 28,
        }
        # The gradient's message, after a forward that sends nothing.
        like = {"gather": "scatter", "scatter": "gather", "sum": "keep"}[message]
        x = every[rank].clone().requires_grad_()
        if message == "gather":
            x = x.repeat(1, size, 1).detach().requires_grad_()
        elif message == "scatter":
            x = x[:, :5].detach().clone().requires_grad_()
        y = send_stream(place.key, like, message, group, x)  # type: ignore[arg-type]
        (seen,) = torch.autograd.grad(y, x, every[rank])
        torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)
        # A graph takes the strides of its operator's fake, and a row's last block is padded.
        own = torch.ops.compose.send_compressed(every[rank], message, group, place.key, False)
        assert own.is_contiguous()
        # While the account is open, messages are plain to the last bit.
        activations.observer = account = ActivationAccount()
        plain = send_plain(every[rank], message, group)  # type: ignore[arg-type]
        noted = send_stream(place.key, message, "keep", group, every[rank])  # type: ignore[arg-type]
        assert torch.equal(noted, plain)
        (lost,) = account.by_module.values()
        assert lost.loss == pytest.approx(float((expected - plain).double().square().sum()), rel=1e-4)
        assert 0.5 < lost.worst <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages(pool: Pool, kind: str, ranks: int) -> None:
    pool.run(_messages, ranks, kind)


def _rows(kind: Any) -> None:
    """Rows for experts: rank r sends r + s + 1 of them to rank s."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    counts = torch.arange(size)[:, None] + torch.arange(size) + 1
    draws = torch.Generator().manual_seed(0)
    each = [torch.randn(int(n), 7, generator=draws) for n in counts.sum(1)]
    code, sent, received = RowCode(kind, 4), counts[rank].tolist(), counts[:, rank].tolist()
    activations = Activations(code, Traffic())
    x = each[rank].clone().requires_grad_()
    result = send_rows(ModuleMessages(activations, "experts", "ep"), x, received, sent, group)
    held = [code.decode(code.encode(rows), 7) for rows in each]
    parts = [rows.split(to.tolist())[rank] for rows, to in zip(held, counts, strict=True)]
    torch.testing.assert_close(result, torch.cat(parts), rtol=0, atol=0)
    others = sum(sent) - sent[rank]
    message = {("activations", "ep"): others * code.bytes(7), ("activations", "plain"): others * 28}
    assert activations.traffic.take() == message
    # The gradient of what came from a rank goes back to it.
    (back,) = torch.autograd.grad(result, x, result.detach())
    torch.testing.assert_close(back, code.decode(code.encode(held[rank]), 7), rtol=1e-6, atol=1e-6)
    others = sum(received) - received[rank]
    assert activations.traffic.take()["activations", "plain"] == others * 28


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_experts(pool: Pool, kind: str) -> None:
    pool.run(_rows, 3, kind)
