"""Coded activations of tp and ep: their codes, their messages, their proof and their bytes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from compose import ConfigError, forward_backward
from compose.build import build
from compose.compression.activations import Activations, RowCode, Sends, send_stream
from compose.compression.gather import Traffic
from compose.compression.proof import ActivationAccount, expected_of_rows
from compose.data.samples import random_batch
from compose.parallel.mesh import batch_share
from compose.parallel.stream_messages import send_plain
from compose.planner.trace import sent_bytes
from compose.proof.comparison import whole
from compose.proof.report import Report
from tests.compression.cases import EXPERTS, INT8, Keys, given
from tests.support.helpers import agreed, make_config, make_job, prove_case, tier
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh

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
    # A row's codes do not depend on the other rows.
    assert torch.equal(code.encode(rows[3:4, 1:]), codes[3:4, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_strange_rows(kind: Any) -> None:
    code = RowCode(kind, 16)
    rows = torch.randn(6, 24)
    rows[0] = 0
    rows[1] *= 1e-30
    rows[2] *= 1e30
    rows[3, 5] = torch.inf
    rows[4, 5] = torch.nan
    found = code.decode(code.encode(rows), 24)
    assert torch.equal(found[0], rows[0])
    for i in (1, 2, 5):
        assert (found[i] - rows[i]).double().norm() < 0.05 * rows[i].double().norm()
    # A step with such values is skipped, so they must stay such.
    assert not found[3].isfinite().all()
    assert not found[4].isfinite().all()
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
    """Each message and that of its gradient, against what each rank's codes hold."""
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
        place, x = Sends(activations, "layer", "tp"), every[rank].clone().requires_grad_()
        found = send_stream(place.key, message, "keep", group, x)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
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
        own = torch.ops.compose.send_coded(every[rank], message, group, place.key, False)
        assert own.is_contiguous()
        # While the account is open, messages are plain to the last bit.
        activations.observer = account = ActivationAccount()
        plain = send_plain(every[rank], message, group)  # type: ignore[arg-type]
        noted = send_stream(place.key, message, "keep", group, every[rank])  # type: ignore[arg-type]
        assert torch.equal(noted, plain)
        (lost,) = account.by_module.values()
        assert lost.lost == pytest.approx(float((expected - plain).double().square().sum()), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages(pool: Pool, kind: str, ranks: int) -> None:
    pool.run(_messages, ranks, kind)


def activations(kind: str = "int8", **more: object) -> Keys:
    return {"comm__activations": kind, **more}


CASES: dict[str, tuple[int, Keys]] = {
    "tp": (2, {"parallel__tp": 2, "parallel__sequence": False, **activations()}),
    "tp 4, odd, float8": (
        4,
        {"parallel__tp": 4, "parallel__sequence": False, "train__seq_len": 31, **activations("float8")},
    ),
    "tp and sequence, float8": (2, {"parallel__tp": 2, **activations("float8")}),
    "tp x zero 3, all int8": (4, {"parallel__tp": 2, "parallel__dp_shard": 2, **activations(), **INT8}),
    "tp, compiled": (2, {"parallel__tp": 2, "compile__mode": "block", **activations()}),
    "tp x pp, recomputed": (
        4,
        {
            "parallel__tp": 2,
            "parallel__pp": 2,
            "parallel__dp_shard": 1,
            "activation_checkpoint__mode": "full",
            **activations(comm__block=16),
        },
    ),
    "tp, bfloat16": (2, {"parallel__tp": 2, "precision__param": "bfloat16", **activations()}),
    "tp, float16": (2, {"parallel__tp": 2, "precision__param": "float16", **activations()}),
    "tp x cp": (4, {"parallel__tp": 2, "parallel__cp": 2, "parallel__dp_shard": 1, **activations()}),
    "experts": (2, {"parallel__dp_shard": 2, "parallel__ep": 2, **EXPERTS, **activations()}),
    "experts x tp, float8": (
        4,
        {
            "parallel__dp_shard": 2,
            "parallel__tp": 2,
            "parallel__ep": 4,
            "model__name": "qwen3",
            "model__preset": "debug_moe",
            **activations("float8"),
        },
    ),
}
IN_THE_SUITE = ("experts",)
SLOW = ("tp 4, odd, float8", "tp and sequence, float8", "tp x pp, recomputed")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=tier(slow=n in SLOW, full=n not in IN_THE_SUITE and n not in SLOW))
        for n in CASES
    ],
)
def test_equals_one_process(pool: Pool, name: str) -> None:
    ranks, keys = CASES[name]
    report = agreed(pool.run(prove_case, ranks, given(keys)))
    assert report.ok, str(report)
    for what in ("lost of activations", "lost of activations' gradients"):
        rows = [row for row in report.rows if row.quantity.endswith(what)]
        assert rows
        # The limit is 1.25 times what is expected, and a little more for few elements.
        assert all(row.error > row.tolerance / 3 for row in rows), str(report)


def test_one_process_takes_the_same_steps(pool: Pool) -> None:
    """Else AdamW would step otherwise where bfloat16 gradients are only rounding."""
    ranks, keys = CASES["tp, bfloat16"]
    small: Keys = {"model__n_layers": 1, "train__seq_len": 16, "train__global_batch": 2}
    report = agreed(pool.run(prove_case, ranks, given(keys) | small))
    assert report.ok, str(report)
    assert max(row.error for row in report.rows if row.quantity == "update") < 1e-3, str(report)


FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    "a neighbour's scale": (
        "tp 4, odd, float8",
        "compose.compression.activations:_decoded_float8",
        "* scales",
        "* scales.roll(1, 0)",
        "lost of activations",
    ),
    "a neighbour's rows": (
        "tp 4, odd, float8",
        "compose.compression.activations:_sum",
        "list(codes)",
        "list(codes.roll(1, 0))",
        "lost of activations",
    ),
    "a rank left out": (
        "tp 4, odd, float8",
        "compose.compression.activations:_sum",
        "got[1:]",
        "got[2:]",
        "lost of activations",
    ),
    "a gradient that is summed twice": (
        "experts",
        "compose.compression.activations:_exchange_rows",
        "found = code.decode(",
        "found = (1 + gradient) * code.decode(",
        "lost of activations' gradients",
    ),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=tier(slow=name != "a rank left out")) for name in FAULTS]
)
def test_faults_are_named(pool: Pool, fault: str) -> None:
    case, place, old, new, quantity = FAULTS[fault]
    ranks, keys = CASES[case]
    report = pool.run(_with_fault, ranks, place, old, new, given(keys))[0]
    assert not report.ok
    assert any(row.quantity.endswith(quantity) for row in report.failed), str(report)


def _with_fault(place: str, old: str, new: str, keys: Keys) -> Report:
    with mutated(place, old, new):
        return prove_case(keys)


def _step(keys: Keys) -> tuple[dict[tuple[str, str], int], dict[str, Tensor], float]:
    """What a second step sends, its gradients and its loss."""
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    index, count = batch_share(composition.mesh)
    samples, length = job.config.train.global_batch, job.config.train.seq_len
    loss = torch.zeros(())
    for step in range(2):
        for parameter in composition.model.parameters():
            parameter.grad = None
        if composition.compression:
            composition.compression.traffic.take()
        batch = random_batch(samples, length, job.config.model.config.vocab_size, seed=step)
        share = {
            k: v[index * samples // count : (index + 1) * samples // count] for k, v in batch.items()
        }
        loss = forward_backward(composition, share, micro_batch=job.config.train.micro_batch)
    sent = composition.compression.traffic.take() if composition.compression else {}
    return sent, {name: whole(p.grad) for name, p in composition.named_parameters()}, float(loss)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.04), ("float8", 0.12)])
def test_a_step_computes_with_codes(pool: Pool, kind: str, most: float) -> None:
    """Not with the plain results, as a proof does; and every rank has the same gradients."""
    keys = given({"parallel__tp": 2, "parallel__sequence": False})
    plain = pool.run(_step, 2, keys)[0]
    one, other = pool.run(_step, 2, keys | activations(kind))
    assert not plain[0], "nothing is counted, as nothing is coded"
    for name, right in plain[1].items():
        assert torch.equal(one[1][name], other[1][name]), name
        error = float((one[1][name] - right).norm() / right.norm())
        assert 1e-4 < error < most, (name, error)
    assert one[2] == other[2] != plain[2]
    assert one[2] == pytest.approx(plain[2], rel=1e-2)


FORETOLD: dict[str, tuple[int, Keys]] = {
    "tp": (2, {"parallel__tp": 2, "parallel__sequence": False, **activations()}),
    "tp x zero 3, recomputed": (
        4,
        {
            "parallel__tp": 2,
            "parallel__dp_shard": 2,
            "activation_checkpoint__mode": "full",
            **activations("float8"),
            **INT8,
        },
    ),
    "tp x pp": (4, {"parallel__tp": 2, "parallel__pp": 2, "parallel__dp_shard": 1, **activations()}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=tier(slow=True, full="recomputed" in n)) for n in FORETOLD]
)
def test_bytes_are_foretold(pool: Pool, name: str) -> None:
    ranks, keys = FORETOLD[name]
    keys = given(keys) | {"model__vocab_size": 256}
    counted = [sent for sent, _, _ in pool.run(_step, ranks, keys)]
    assert [sent_bytes(make_job(ranks, **keys), rank) for rank in range(ranks)] == counted
    for sent in counted:
        # Rows of 64 elements: 66 bytes in place of 256.
        assert sent["activations", "tp"] * 256 <= 66 * sent["activations", "plain"]


REFUSED: dict[str, tuple[Keys, list[str]]] = {
    "no activations are sent": (
        {"parallel__dp_shard": 4, **activations()},
        [
            'comm.activations: "int8", and parallel.tp and parallel.ep are 1, so that no activations'
            ' are sent; use comm.activations = "off"'
        ],
    ),
    "float8": (
        {"parallel__tp": 4, "precision__float8": "rowwise", **activations()},
        [
            'comm.activations: "int8", and with parallel.tp = 4 precision.float8 = "rowwise" has'
            ' messages of its own; use comm.activations = "off"'
        ],
    ),
    "styles of PyTorch": (
        {"parallel__dp_shard": 2, "parallel__tp": 2, **EXPERTS, **activations("float8")},
        [
            'comm.activations: "float8", and plan.tensor gives layers.0.attention a style of PyTorch,'
            " whose messages have no code; use LocalInput or LocalRowwise, or use comm.activations ="
            ' "off"'
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str) -> None:
    keys, lines = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        make_config(4, **keys)
    assert caught.value.problems == lines


def test_no_such_code() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(2, parallel__tp=2, **activations("int4"))
    assert caught.value.problems == [
        'command line: comm.activations: expected "off" | "int8" | "float8", got "int4"'
    ]
