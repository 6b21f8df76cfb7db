"""Coded messages: what was lost makes results exact, faults are named, bytes are counted."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from compose import ConfigError, forward_backward
from compose.build import build
from compose.config.job import Job
from compose.data.samples import random_batch
from compose.ops.torch_versions import ALL_GATHER
from compose.parallel.mesh import batch_share
from compose.proof.comparison import whole
from compose.proof.report import Report
from tests.compression.cases import EXPERTS, INT4, INT8, Keys, comm, given
from tests.support.helpers import agreed, make_config, make_job, prove_case, tier
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh

CASES: dict[str, tuple[int, Keys]] = {
    "zero 3, int8": (4, {"parallel__dp_shard": 4, **INT8}),
    "zero 3 uneven, int4": (3, {"parallel__dp_shard": 3, "train__global_batch": 6, **INT4}),
    "zero 2, bfloat16": (2, {"parallel__dp_shard": 2, "parallel__zero": 2, **comm("bfloat16")}),
    "zero 1 x tp, powersgd": (
        4,
        {"parallel__dp_shard": 2, "parallel__tp": 2, "parallel__zero": 1, **comm("powersgd", "int8")},
    ),
    "zero 3, top_k": (2, {"parallel__dp_shard": 2, **comm("top_k", "int4_diff")}),
    "ddp, int4": (4, {"parallel__dp_replicate": 4, "parallel__zero": 0, **comm("int4")}),
    "ddp near 2, int4": (4, {"parallel__dp_replicate": 4, "parallel__zero": 0, **comm("int4", near=2)}),
    "ddp, powersgd": (2, {"parallel__dp_replicate": 2, "parallel__zero": 0, **comm("powersgd")}),
    "ddp, top_k": (
        3,
        {"parallel__dp_replicate": 3, "train__global_batch": 6, "parallel__zero": 0, **comm("top_k")},
    ),
    "hsdp, int4": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, **INT4}),
    "hsdp, top_k": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, **comm("top_k")}),
    "hsdp zero 1, powersgd": (
        4,
        {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, "parallel__zero": 1, **comm("powersgd")},
    ),
    "near 2, int4": (4, {"parallel__dp_shard": 4, **INT4, "comm__near": 2}),
    "hpz, int8": (4, {"parallel__dp_shard": 4, "parallel__zero3_reshard": 2, **INT8}),
    "bfloat16, int4": (2, {"parallel__dp_shard": 2, "precision__param": "bfloat16", **INT4}),
    "float16, int4": (2, {"parallel__dp_shard": 2, "precision__param": "float16", **INT4}),
    "bfloat16 reduction, int8": (
        2,
        {
            "parallel__dp_shard": 2,
            "precision__param": "bfloat16",
            "precision__reduce": "bfloat16",
            **INT8,
        },
    ),
    "offload, int8": (2, {"parallel__dp_shard": 2, "parallel__offload": "cpu", **INT8}),
    "muon, int4": (2, {"parallel__dp_shard": 2, "optimizer__name": "muon", **INT4}),
    "chunked loss, recomputed, int4": (
        2,
        {
            "parallel__dp_shard": 2,
            "train__loss_chunk": 16,
            "activation_checkpoint__mode": "selective",
            **INT4,
        },
    ),
    "compiled, int8": (2, {"parallel__dp_shard": 2, "compile__mode": "block", **INT8}),
    "cp, int4": (4, {"parallel__dp_shard": 2, "parallel__cp": 2, **INT4}),
    "tied over a V, int4": (
        4,
        {
            "parallel__dp_shard": 2,
            "parallel__pp": 2,
            "parallel__pp_schedule": "ZBVZeroBubble",
            "model__n_layers": 4,
            "model__tie_embeddings": True,
            **INT4,
        },
    ),
    "tied in one unit, int8": (
        2,
        {"parallel__dp_shard": 2, "parallel__zero": 2, "model__tie_embeddings": True, **INT8},
    ),
    "experts, hsdp, int4": (
        4,
        {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, "parallel__ep": 2, **EXPERTS, **INT4},
    ),
    "experts x tp, int8": (
        4,
        {"parallel__dp_shard": 2, "parallel__tp": 2, "parallel__ep": 2, **EXPERTS, **INT8},
    ),
}
IN_THE_SUITE = ("ddp, top_k", "tied in one unit, int8")
SLOW = (
    "zero 3 uneven, int4",
    "hsdp zero 1, powersgd",
    "zero 3, int8",
    "near 2, int4",
    "tied over a V, int4",
    "float16, int4",
)


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


FAULTS: dict[str, tuple[str, str, str, str, str]] = {
    "a neighbour's scale": (
        "near 2, int4",
        "compose.compression.codec:read_steps",
        "= codes[..., -SCALE_BYTES:]",
        "= codes[..., -SCALE_BYTES:].roll(1, -2)",
        "lost of gradients",
    ),
    "a block off by one": (
        "zero 3, int8",
        "compose.compression.packing:Packing._write",
        ".unflatten(-1, (self.blocks, width))",
        ".unflatten(-1, (self.blocks, width)).roll(1, -2)",
        "lost of",
    ),
    "integer sums": (
        "zero 3, int8",
        "compose.compression.codec:_decode_into",
        "out.add_(found)",
        "out.add_(found.sign())",
        "gradient",
    ),
    "a sum that is a mean": (
        "zero 3, int8",
        "compose.compression.codec:decode_into",
        "_sum_into(place, terms, bits, add, compiled)",
        "_sum_into(place, terms, bits, add, compiled).div_(len(terms))",
        "gradient",
    ),
    "feedback added twice": (
        "zero 3 uneven, int4",
        "compose.compression.codec:_round_with_residual",
        ".mul_(kept_steps * scale)",
        ".mul_(2 * kept_steps * scale)",
        "lost of remainders",
    ),
    "what was sent stays in the remainder": (
        "zero 3 uneven, int4",
        "compose.compression.codec:_round_with_residual",
        "rest.add_(x).sub_(rounded * steps)",
        "rest.add_(x).sub_(rounded * steps * (1 - ADDED))",
        "lost of remainders",
    ),
    "a stale base": (
        "zero 3 uneven, int4",
        "compose.compression.gather:DifferenceGather.fill",
        'self.kept["base"], self.sent = base, True',
        "self.kept['base'] = self.__dict__.setdefault('first', base.clone()).clone(); self.sent = True",
        "gradient",
    ),
    "own weights that stay exact": (
        "zero 3 uneven, int4",
        "compose.compression.gather:DifferenceGather.fill",
        "base[group.rank()], self.writes_base = self.own, False",
        "self.writes_base = False",
        "gradient",
    ),
    "replicas left out": (
        "hsdp zero 1, powersgd",
        "compose.compression.compressor:ReplicaSum.hook",
        "    self.sum(flat)",
        "    pass",
        "gradient",
    ),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=tier(slow=name != "feedback added twice")) for name in FAULTS]
)
def test_faults_are_named(pool: Pool, fault: str) -> None:
    case, place, old, new, quantity = FAULTS[fault]
    ranks, keys = CASES[case]
    report = pool.run(_with_fault, ranks, place, old, new, given(keys))[0]
    assert not report.ok
    assert any(row.quantity.startswith(quantity) for row in report.failed), str(report)


def _with_fault(place: str, old: str, new: str, keys: Keys) -> Report:
    with mutated(place, old, new):
        return prove_case(keys)


# Bytes.
LARGE: Keys = {
    "train__global_batch": 4,
    "train__micro_batch": 1,
    "train__seq_len": 16,
    "model__vocab_size": 1024,
    "model__dim": 256,
    "model__hidden_dim": 768,
    "model__n_layers": 2,
}


def _step(keys: Keys, steps: int = 1) -> dict[str, Any]:
    """What the last of some steps sent, by the counter and by the collectives, and its gradients."""
    job: Job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    index, count = batch_share(composition.mesh)
    seen = {"to_all": 0, "all_gather": 0}
    to_all, gather = dist.all_to_all_single, getattr(dist, ALL_GATHER)

    def all_to_all(out: Any, x: Any, *args: Any, **more: Any) -> Any:
        ranks = more["group"].size()
        seen["to_all"] += x.nbytes // ranks * (ranks - 1)
        return to_all(out, x, *args, **more)

    def all_gather(out: Any, x: Any, group: Any = None, async_op: bool = False) -> Any:
        seen["all_gather"] += x.nbytes * (out.nbytes // x.nbytes - 1)
        return gather(out, x, group, async_op)

    batch = random_batch(4, 16, job.config.model.config.vocab_size, seed=0)
    share = {k: v[index * 4 // count : (index + 1) * 4 // count] for k, v in batch.items()}
    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(dist, ALL_GATHER, all_gather),
    ):
        for _ in range(steps):
            for parameter in composition.model.parameters():
                parameter.grad = None
            seen = dict.fromkeys(seen, 0)
            if composition.compression:
                composition.compression.traffic.take()
            forward_backward(composition, share, micro_batch=1)
    coded = composition.compression
    sent = dict(coded.traffic.sent) if coded else {}
    gradients = {name: whole(p.grad) for name, p in composition.named_parameters()}  # type: ignore[arg-type]
    return {"sent": sent, "seen": seen, "gradients": gradients, "coded": coded is not None}


def ratio(sent: dict[tuple[str, str], int], purpose: str) -> float:
    return (
        sum(n for (what, level), n in sent.items() if what == purpose and level != "plain")
        / sent[purpose, "plain"]
    )


@pytest.mark.parametrize(
    ("kinds", "ideal"),
    [(INT8, (8 * 256 + 16) / 256 / 32), (INT4, (4 * 256 + 16) / 256 / 32)],
    ids=["int8", "int4"],
)
def test_bytes_are_ideal_and_counted(pool: Pool, kinds: Keys, ideal: float) -> None:
    keys = LARGE | kinds | {"parallel__dp_shard": 4, "parallel__zero": 2}
    for found in pool.run(_step, 4, keys, 2):
        for purpose in ("weights", "gradients"):
            assert 1 <= ratio(found["sent"], purpose) / ideal <= 1.03
        assert found["sent"]["gradients", "far"] == found["seen"]["to_all"]
        assert found["sent"]["weights", "far"] == found["seen"]["all_gather"]


def test_bytes_between_nodes(pool: Pool) -> None:
    """Nodes of two ranks: against plain bfloat16 ZeRO-3, 3.9 and 5.7 times fewer."""
    mesh = {"parallel__dp_shard": 4, "precision__param": "bfloat16", "precision__reduce": "bfloat16"}
    ranks_far = 2
    plain: int = 0
    for kinds, times in (
        ({**comm("int4", "int8"), "parallel__zero3_reshard": 2}, 3.9),
        (comm("int4", "int4_diff"), 5.7),
    ):
        near: Keys = {"comm__near": 2}
        found = pool.run(_step, 4, LARGE | mesh | kinds | near, 2)[0]["sent"]
        far = found["weights", "far"] + found["gradients", "far"]
        if not plain:
            # Two gathers and a reduction of each unit, but for the last unit's second gather.
            rows = pool.run(_rows, 4, LARGE | mesh)[0]
            plain = ranks_far * (2 * sum(rows) + sum(rows) - rows[-1])
        assert plain / far >= times


def _rows(keys: Keys) -> list[int]:
    """Bytes of each unit's row on a rank."""
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    sizes = []
    for unit in job.plan.shard:
        names = [unit] if isinstance(unit, str) else list(unit)
        for layer in range(job.config.model.config.n_layers if "*" in names[0] else 1):
            modules = [composition.model.get_submodule(n.replace("*", str(layer))) for n in names]
            parameters = [p for module in modules for p in module.parameters()]
            sizes.append(sum(2 * -(-p.shape[0] // 4) * p[0].numel() for p in parameters))
    return sizes


@pytest.mark.parametrize(
    "name", [pytest.param("zero 3 uneven, int4", marks=pytest.mark.slow), "ddp, powersgd"]
)
def test_twice_is_bitwise_the_same(pool: Pool, name: str) -> None:
    ranks, keys = CASES[name]
    shape = {"train__global_batch": 12, "train__seq_len": 16}
    one, other = (pool.run(_thrice, ranks, given(keys) | shape)[0] for _ in range(2))
    assert all(torch.equal(one[n], other[n]) for n in one)


def _thrice(keys: Keys) -> Any:
    job = make_job(dist.get_world_size(), **keys)
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    index, count = batch_share(composition.mesh)
    for step in range(3):
        batch = random_batch(12, 16, job.config.model.config.vocab_size, seed=step)
        share = {k: v[index * 12 // count : (index + 1) * 12 // count] for k, v in batch.items()}
        forward_backward(composition, share, micro_batch=1)
    return {name: whole(p.grad) for name, p in composition.named_parameters()}  # type: ignore[arg-type]


def test_off_is_what_it_was(pool: Pool) -> None:
    """Nothing of it is attached, and until start_step gradients are bitwise those of plain messages."""
    mesh = {"parallel__dp_shard": 2}
    plain = pool.run(_step, 2, LARGE | mesh)[0]
    later = pool.run(_step, 2, LARGE | mesh | comm("int4", start_step=5))[0]
    assert not plain["sent"]
    assert not plain["coded"]
    for name, gradient in plain["gradients"].items():
        assert torch.equal(gradient, later["gradients"][name])


REFUSED: dict[str, tuple[Keys, list[str]]] = {
    "near": (
        {"parallel__dp_shard": 4, **comm("int4", near=3)},
        ["comm.near: 3 does not divide dp_shard x cp = 4, the ranks of data parallel; nearest: 2"],
    ),
    "near with replicas": (
        {"parallel__dp_replicate": 2, "parallel__dp_shard": 2, **comm("int8", near=2)},
        [
            "comm.near: 2, and with parallel.dp_replicate = 2 the ranks of dp_shard are the neighbours;"
            " use comm.near = 1"
        ],
    ),
    "offload": (
        {"parallel__dp_shard": 4, "parallel__offload": "cpu", **comm("off", "int4_diff")},
        [
            'comm.weights: "int4_diff" keeps what it sent last on the device, and parallel.offload ='
            ' "cpu" is to keep weights off it; use comm.weights = "int8"'
        ],
    ),
    "kept twice": (
        {"parallel__dp_shard": 4, "parallel__zero3_reshard": 2, **comm("off", "int4_diff")},
        [
            'comm.weights: "int4_diff" keeps weights near by comm.near, and parallel.zero3_reshard = 2'
            " would keep them twice; use parallel.zero3_reshard = 0"
        ],
    ),
    "bytes": (
        {"parallel__dp_shard": 4, "precision__float8": "tensorwise", **comm("off", "int8")},
        [
            'comm.weights: "int8" codes numbers, and precision.float8 = "tensorwise" sends weights as'
            ' bytes; use comm.weights = "off", or precision.float8 = "rowwise"'
        ],
    ),
    "block": (
        {"parallel__dp_shard": 4, **comm("int8", block=100)},
        ["comm.block: 100 is no power of two from 16; nearest: 128"],
    ),
    "no weights are sent": (
        {"parallel__dp_shard": 4, "parallel__zero": 0, **comm("int8", "int8")},
        [
            'comm.weights: "int8", and parallel.zero = 0 sends no weights; use comm.weights = "off"',
        ],
    ),
    "one rank": (
        {"parallel__tp": 4, "parallel__dp_shard": 1, **INT8},
        [
            'comm.weights: "int8", and dp_shard x cp is 1, and no weights are sent; use comm.weights ='
            ' "off"',
            'comm.gradients: "int8", and dp_replicate x dp_shard x cp is 1, so that no gradients are'
            ' sent; use comm.gradients = "off"',
        ],
    ),
    "read by others": (
        {"parallel__dp_shard": 4, **comm("int8", rank=2, density=0.5)},
        [
            'comm.rank: 2 is read with other messages; set comm.gradients = "powersgd"',
            'comm.density: 0.5 is read with other messages; set comm.gradients = "top_k"',
        ],
    ),
    "no gradients": (
        {"parallel__dp_shard": 4, **comm("off", "int8", start_step=3)},
        ["comm.start_step: 3 is for compressed gradients; set comm.gradients"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str) -> None:
    keys, lines = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        make_config(4, **keys)
    assert caught.value.problems == lines


def test_a_parameter_without_gradient_is_named(pool: Pool) -> None:
    assert "one of them has no gradient" in pool.run(_unused, 2)[0]


def _unused() -> str:
    job = make_job(dist.get_world_size(), **given({"parallel__dp_shard": 2, **comm("int8")}))
    composition = build(job, make_mesh(job.degrees), torch.device("cpu"))
    batch = random_batch(1, 16, job.config.model.config.vocab_size, seed=0)
    norm = composition.model.get_submodule("layers.0.ffn_norm")
    norm.forward = lambda x: x * 1.0  # type: ignore[method-assign]
    try:
        forward_backward(composition, batch)
    except RuntimeError as error:
        return str(error)
    return ""
