"""Faults of the outer loop, each of which its proof names."""

import pytest

from compose.runtime.islands import current
from compose.runtime.processes import TrainingError
from tests.helpers import Keys, tier
from tests.mutation import mutated
from tests.outer.cases import STREAMING, outer, proof
from tests.pool import Pool

LOOP = "compose.outer.loop:OuterLoop"
END, STEP, SPREAD = f"{LOOP}._end", f"{LOOP}._step", f"{LOOP}._spread"
WEIGHTS = {"outer weight", "island's weight"}
FAULTS: dict[str, tuple[Keys, str, str, str, set[str]]] = {
    "an island left out of the average": (
        STREAMING,
        END,
        "for message in there:",
        "for message in there[1:]:",
        WEIGHTS,
    ),
    "a fragment applied twice": (
        STREAMING,
        END,
        "self._spread(fragment, mean.to(theta.dtype))",
        "[*self._spread(fragment, mean.to(theta.dtype))] * 2",
        WEIGHTS,
    ),
    "the next fragment's turn": (
        STREAMING,
        f"{LOOP}.after_step",
        "(step // self.between - 1) % many",
        "step // self.between % many",
        WEIGHTS,
    ),
    "one step late": (
        STREAMING,
        f"{LOOP}.after_step",
        "step >= min(self.pending.due, last)",
        "step > min(self.pending.due, last)",
        WEIGHTS,
    ),
    "momentum without Nesterov": (
        STREAMING,
        STEP,
        "new -= self.lr * self.options.momentum * momentum.double()",
        "pass",
        WEIGHTS,
    ),
    "momentum that is not kept": (
        STREAMING,
        STEP,
        "self.options.momentum * momentum.double() + (wide - mean)",
        "wide - mean",
        WEIGHTS,
    ),
    "mixed the other way around": (
        STREAMING | outer(mix=0.25),
        STEP,
        "flat[begin:end].to(common.dtype), mix)",
        "flat[begin:end].to(common.dtype), 1 - mix)",
        WEIGHTS,
    ),
    "a neighbour's part": (
        STREAMING | {"parallel__tp": 2},
        SPREAD,
        "for one in everyone]",
        "for one in reversed(everyone)]",
        WEIGHTS,
    ),
    "what was lost is added twice": (
        STREAMING | outer(dtype="top_k"),
        f"{LOOP}._begin",
        "DECAY * self.lost",
        "2 * DECAY * self.lost",
        WEIGHTS,
    ),
    "a neighbour's scale": (
        STREAMING | outer(dtype="e3m0"),
        END,
        "self.code.decode(message[CHECK:end].to(theta.device), theta)",
        "self.code.decode(message[CHECK:end].view(-1, self.code.width)[:, list(range(128)) + [129,"
        " 128]].flatten(), theta)",
        WEIGHTS,
    ),
}
QUICK = ("an island left out of the average", "a fragment applied twice")


def _failed(fault: str) -> set[str]:
    """Quantities that the proof finds wrong with a fault."""
    keys, place, old, new, _ = FAULTS[fault]
    whole: Keys = {"train__global_batch": 8, "train__micro_batch": 1, "parallel__dp_shard": -1, **keys}
    with mutated(place, old, new):
        try:
            report = proof(2, whole)
        except TrainingError as error:
            return {str(error)}
    return {row.quantity for row in report.failed}


@pytest.mark.parametrize("fault", [pytest.param(n, marks=tier(slow=n not in QUICK)) for n in FAULTS])
def test_is_named(pool: Pool, fault: str) -> None:
    for found in pool.run(_failed, 4, fault, islands=2):
        assert found == FAULTS[fault][-1]


def _one_island_alone() -> str:
    keys: Keys = {"train__global_batch": 8, "train__micro_batch": 1, **STREAMING}
    if current().index == 0:
        return _message(keys)
    with mutated(END, "for message in there:", "for message in there[1:]:"):
        return _message(keys)


def _message(keys: Keys) -> str:
    try:
        proof(2, keys)
    except TrainingError as error:
        return str(error)
    return ""


def test_islands_that_differ_stop_the_run(pool: Pool) -> None:
    """The next exchange of that fragment sees it."""
    said = pool.run(_one_island_alone, 2, islands=2)
    assert (
        said
        == ["the outer weights of islands differ: silent corruption; go on from the last checkpoint"]
        * 2
    )
