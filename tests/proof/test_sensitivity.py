"""How sensitive the proof is: one table of single faults over every technique and precision, each of
which the report must name."""

import inspect
import textwrap
from fnmatch import fnmatchcase

import pytest

from tests.diloco.cases import proof
from tests.proof.sensitivity import (
    comm,
    context,
    data_tensor,
    diffusion,
    optimizer,
    outer,
    pipeline_experts,
    precision,
    steps,
)
from tests.proof.sensitivity.row import Row
from tests.support.helpers import prove_case, prove_whole, tier
from tests.support.mutation import function_at
from tests.support.pool import Pool

TABLE: dict[str, list[Row]] = {
    group: rows
    for faults in (
        comm,
        data_tensor,
        context,
        pipeline_experts,
        precision,
        optimizer,
        steps,
        outer,
        diffusion,
    )
    for group, rows in faults.FAULTS.items()
}
# They are cheap and differ in kind; the slow tier has some more, and `-m full` the others.
QUICK = {
    "ZeRO 1 never reduces",
    "LocalNorm: its gradient stays a part",
    "ring: the last block's dk counts",
    "gradients of rows go to other places",
    "padding counts among the tokens of a step",
    "another beta2, bfloat16",
    "the gradient stays scaled",
    "routers' biases stay apart",
    "frozen weights are exchanged",
    "what arrives in int8 is doubled",
    "PowerSGD doubled",
    "no layer runs again",
    "the mean of a rank's own targets, not of all",
    "a patch is lost at each border of cp",
}
SLOW = {
    "no residual is added to blocks",
    "the residual of blocks is doubled",
    "no weight decay of 0.01, float32",
    "by the rules norms decay",
    "LoRA leaves norms trained",
    "patches attend to padding",
    "a sample's time is cut with its patches",
    "LocalLinear: its gradient stays a part",
    "the modulation's gradient stays a part",
}
TECHNIQUES = {
    "apply",
    "compression",
    "diloco",
    "memory",
    "ops",
    "optim",
    "parallel",
    "pipeline",
    "train",
    "weights",
}
ROWS = [
    pytest.param(
        row,
        id=f"{group}-{row.name}",
        marks=tier(slow=row.name in SLOW, full=row.name not in QUICK | SLOW),
    )
    for group, rows in TABLE.items()
    for row in rows
]


def _proved(row: Row) -> tuple[str, list[tuple[str, str, bool]], str]:
    """Return the error that ended the proof; (quantity, name, whether it is right) of rows; all."""
    try:
        with row.fault():
            if row.islands > 1:
                report = proof(row.islands, dict(row.keys))
            else:
                prove = prove_whole if row.quantity.startswith("float64") else prove_case
                report = prove(dict(row.keys))
    except RuntimeError as error:
        if not row.raises:
            raise
        return str(error), [], ""
    rows = [(row.quantity, row.name, row.ok and row.state != "unused") for row in report.rows]
    return "", rows, str(report)


@pytest.mark.parametrize("row", ROWS)
def test_fault_is_named(pool: Pool, row: Row) -> None:
    raised, result, report = pool.run(_proved, row.ranks, row, islands=row.islands)[0]
    if row.raises:
        assert row.raises in raised
        return
    assert False in _like(result, row.quantity, row.names), report
    if row.untouched:
        right = _like(result, *row.untouched)
        assert right
        assert all(right), report


def _like(found: list[tuple[str, str, bool]], quantity: str, names: str) -> list[bool]:
    return [ok for what, name, ok in found if what == quantity and fnmatchcase(name, names)]


def test_the_table_is_whole() -> None:
    names = [row.name for rows in TABLE.values() for row in rows]
    assert len(names) == len(set(names)) >= 60
    assert set(names) >= QUICK | SLOW
    precisions = [row for key in TABLE if key.startswith("precision.") for row in TABLE[key]]
    reduced = [row for row in precisions if any("precision__" in key for key in row.keys)]
    assert len(reduced) >= 12
    packages = {row.place.split(".")[1].partition(":")[0] for rows in TABLE.values() for row in rows}
    assert packages >= TECHNIQUES


def test_every_fault_has_its_place() -> None:
    """The text that a fault changes stands in the function once, so the table is as new as the code."""
    for row in (row for rows in TABLE.values() for row in rows):
        source = textwrap.dedent(inspect.getsource(function_at(row.place)))
        assert source.count(row.old) == 1, (row.name, row.place)
