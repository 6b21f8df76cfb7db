"""Whether a composition equals one process. compose.verify is for a model of one's own, prove.py for a
config. Exports the trial that is proved and the report that comes back."""

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
