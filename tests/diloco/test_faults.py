"""A fault of one island alone, which islands see themselves; sensitivity/outer.py has the others."""

from compose.parallel.islands import current
from compose.parallel.processes import TrainingError
from tests.diloco.cases import STREAMING, proof
from tests.support.helpers import Keys
from tests.support.mutation import mutated
from tests.support.pool import Pool

END = "compose.diloco.loop:OuterLoop._end"


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
