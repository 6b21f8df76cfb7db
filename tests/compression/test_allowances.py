"""The proof's float64 run allows the rounding of codes where something is coded, and nowhere else."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from compose.compression.packing import FEWEST
from compose.proof.observers import CODES
from compose.proof.prove import prove
from compose.proof.report import Report
from tests.compression.cases import Keys, comm, given
from tests.support.helpers import agreed, make_job, prove_case, prove_whole, tier
from tests.support.mutation import mutated
from tests.support.pool import Pool, make_mesh

# Faults of one in 10^8 and of one in 10^5, in the sums of what travels plain and of codes.
TINY: dict[str, tuple[str, str, str]] = {
    "plain": (
        "compose.compression.packing:Packing._write",
        "terms.sum(0, dtype=out.dtype)",
        "terms.sum(0, dtype=out.dtype) * (1 + 1e-8)",
    ),
    "coded": (
        "compose.compression.codec:decode_into",
        "add else total)",
        "add else total * (1 + 1e-5 * (len(terms) > 1)))",
    ),
}


@pytest.mark.parametrize(
    ("fault", "pp"),
    [
        pytest.param(fault, pp, marks=tier(slow=pp > 1 or fault != "plain"))
        for fault in ("", *TINY)
        for pp in (1, 2)
    ],
)
def test_only_what_is_coded_may_be_rounded(pool: Pool, fault: str, pp: int) -> None:
    """Also where the first rank, whose rows count, holds none of it."""
    keys = given(comm("int8", block=64)) | {"parallel__dp_shard": 2, "parallel__pp": pp}
    keys |= {"model__n_layers": 1, "model__hidden_dim": 96, "train__global_batch": 4}
    report = pool.run(_with_tiny_fault, 2 * pp, fault, keys)[0]
    whole = make_job(2 * pp, **keys).model.named_parameters()
    coded = {name for name, p in whole if p.ndim > 1 and p.numel() >= FEWEST}
    rows = [row for row in report.rows if row.quantity == "float64 gradient"]
    assert coded < {row.name for row in rows}
    assert {row.name for row in rows if row.tolerance == CODES} == coded, str(report)
    wrong = {row.name for row in rows if (row.name in coded) == (fault == "coded")} if fault else set()
    assert {row.name for row in rows if not row.ok} == wrong, str(report)


def _with_tiny_fault(fault: str, keys: Keys) -> Report:
    with mutated(*TINY[fault]) if fault else nullcontext():
        job = make_job(dist.get_world_size(), **keys)
        return prove(job, make_mesh(job.degrees), torch.device("cpu"), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["powersgd", "top_k", "int4"])
def test_remainders_of_replicas_in_float64(pool: Pool, code: str) -> None:
    """The account's sum over replicas once changed what a remainder was compared with."""
    keys = given(comm(code)) | {"parallel__dp_replicate": 2, "model__n_layers": 1}
    report = agreed(pool.run(prove_whole, 2, keys))
    assert report.ok, str(report)


def test_remainders_of_gradients_in_bfloat16(pool: Pool) -> None:
    """The account once rounded what was sent to the type of gradients, which remainders do not do."""
    keys = given(comm("int4", block=16)) | {"parallel__dp_shard": 2, "model__n_layers": 1}
    keys |= {"precision__param": "bfloat16", "precision__reduce": "bfloat16"}
    report = agreed(pool.run(prove_case, 2, keys))
    assert any(row.quantity == "lost of remainders" for row in report.rows)
    assert report.ok, str(report)
