"""A row of the table of faults: a run, what is broken in it, and what the report must then say."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.support.mutation import mutated

Keys = dict[str, object]
SHARDED: Keys = {"parallel__dp_shard": 2, "train__global_batch": 8}
TP: Keys = {"parallel__tp": 2, "train__global_batch": 4}
CP: Keys = {"parallel__cp": 2, "train__global_batch": 4}
TIED: Keys = {"model__tie_embeddings": True}
FEW: Keys = {"train__seq_len": 16, "model__n_layers": 2, "train__global_batch": 8}


@dataclass(frozen=True)
class Row:
    """One fault, in the text of one function.

    keys: of the run, as ``prove_case`` takes them. place, old, new: as ``mutated`` takes
    them. quantity, names: at least one row of the report with this quantity, and a name that matches,
    must have failed. untouched: all rows with this quantity, and a name that matches, must not have.
    raises: what the proof ends with instead, where the fault lets no step begin. islands: if there are
    several, their outer loop is proved, with ``ranks`` in all.
    """

    name: str
    keys: Mapping[str, object]
    place: str
    old: str
    new: str
    quantity: str
    names: str = "*"
    untouched: tuple[str, str] | None = None
    ranks: int = 2
    raises: str = ""
    islands: int = 1

    def fault(self) -> AbstractContextManager[None]:
        return mutated(self.place, self.old, self.new)
