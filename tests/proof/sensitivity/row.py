"""A row of the table of faults: a run, what is broken in it, and what the report must then say."""

import re
import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

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


def table(text: str, keys: Mapping[str, Any], **defaults: Any) -> dict[str, list[Row]]:
    """Read faults, in groups.

    ``keys`` holds sets of keys by name, besides those above, and ``defaults`` are fields that all rows
    have. The text is::

        [group]
        name | keys of the run, as SHARDED comm__block=64 | quantity, or - | names
            in module:function with ranks=4 untouched='gradient/*'
            what stands there => what stands there instead

    Where these take several lines, or white space at an end counts, their lines begin with - or +.
    """
    keys = globals() | dict(keys)
    groups: dict[str, list[Row]] = {}
    rows: list[Row] = []
    for part in re.split(r"\n(?=\S)", text.strip("\n")):
        head, *lines = part.split("\n")
        if head.startswith("["):
            rows = groups.setdefault(head.strip("[]"), [])
        elif not head.startswith("#"):
            name, run, *expected = head.split(" | ")
            place, _, more = lines[0].strip().removeprefix("in ").partition(" with ")
            old, arrow, new = lines[1].strip().partition(" => ")
            if not arrow:
                old, new = (
                    "\n".join(line[6:] for line in lines if line[4:5] == mark) for mark in ("-", "+")
                )
            fields: dict[str, Any] = {**defaults}
            for word in shlex.split(more):
                field, _, value = word.partition("=")
                fields[field] = value
            if isinstance(untouched := fields.get("untouched"), str):
                what, _, which = untouched.partition("/")
                fields["untouched"] = (what, which) if untouched else None
            fields["ranks"] = int(fields.get("ranks", 2))
            quantity, names = (*expected, "*")[:2]
            run_keys = _run(run, keys)
            rows.append(Row(name, run_keys, place, old, new, quantity.strip("-"), names, **fields))
    return groups


def _run(text: str, keys: Mapping[str, Any]) -> Keys:
    results: Keys = {}
    for word in shlex.split(text):
        key, is_one, value = word.partition("=")
        results |= {key: _value(value)} if is_one else keys[key]
    return results


def _value(text: str) -> object:
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text
