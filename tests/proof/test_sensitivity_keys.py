"""For every key of a table of train.toml there is a fault that verify names, or a reason why not."""

from dataclasses import fields
from types import ModuleType

import pytest

from compose.compression.proof import SILENT
from compose.diloco import Outer
from compose.memory.activation_checkpointing import ActivationCheckpoint
from compose.memory.precision import Precision
from compose.optim.optimizers import Optimizer
from compose.parallel.comm import Comm
from tests.proof.sensitivity import comm, optimizer, outer, precision, steps

# BY_KEY of a module holds faults by key, as "comm.rank". SILENT holds the keys that change no number,
# each with the reason.
TABLES: dict[str, tuple[type, ModuleType]] = {
    "comm": (Comm, comm),
    "outer": (Outer, outer),
    "optimizer": (Optimizer, optimizer),
    "precision": (Precision, precision),
    "activation_checkpoint": (ActivationCheckpoint, steps),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_key_has_a_fault(table: str) -> None:
    options, module = TABLES[table]
    keys = {f"{table}.{field.name}" for field in fields(options)}
    assert {key for key in keys if not module.BY_KEY.get(key)} == set(module.SILENT)
    in_table = {row.name for rows in module.FAULTS.values() for row in rows}
    assert {row.name for rows in module.BY_KEY.values() for row in rows} <= in_table
    assert all(module.SILENT.values())


def test_verify_passes_over_the_same_keys() -> None:
    assert {f"comm.{key}" for key in SILENT} == set(comm.SILENT)
