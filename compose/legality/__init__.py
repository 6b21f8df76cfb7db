"""This room answers whether the keys of a config fit together, before a process group is started.

It exports one table of rules, and the check that returns the job of a config.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.composition.setup import Rule
    from compose.legality.job import Job, make_job
    from compose.legality.table import RULES, check, meshes, problems_of, survey

__all__ = [
    "RULES",
    "Job",
    "Rule",
    "check",
    "make_job",
    "meshes",
    "problems_of",
    "survey",
]

export(
    __name__,
    {
        "Job": "compose.legality.job",
        "RULES": "compose.legality.table",
        "Rule": "compose.composition.setup",
        "check": "compose.legality.table",
        "make_job": "compose.legality.job",
        "meshes": "compose.legality.table",
        "problems_of": "compose.legality.table",
        "survey": "compose.legality.table",
    },
)
