"""This room starts the process group of a command, and watches over its ranks.

It exports what a run reports and raises while it goes on.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.runtime.processes import (
        TrainingError,
        process_group,
        set_timeout,
        start_timeout,
    )
    from compose.runtime.stragglers import Stragglers, report_phase

__all__ = [
    "Stragglers",
    "TrainingError",
    "process_group",
    "report_phase",
    "set_timeout",
    "start_timeout",
]

export(
    __name__,
    {
        "Stragglers": "compose.runtime.stragglers",
        "TrainingError": "compose.runtime.processes",
        "process_group": "compose.runtime.processes",
        "report_phase": "compose.runtime.stragglers",
        "set_timeout": "compose.runtime.processes",
        "start_timeout": "compose.runtime.processes",
    },
)
