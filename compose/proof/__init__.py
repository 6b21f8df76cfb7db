"""This room answers whether a composition equals one process.

compose.verify proves a model of one's own, and prove.py a config. It exports the trial and the report.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.proof.report import Report, Tolerance
    from compose.proof.verify import Trial

__all__ = ["Report", "Tolerance", "Trial"]

export(
    __name__,
    {
        "Report": "compose.proof.report",
        "Tolerance": "compose.proof.report",
        "Trial": "compose.proof.verify",
    },
)
