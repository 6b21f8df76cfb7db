"""This room starts the process group of a command, and watches over its ranks.

It exports what a run reports and raises while it goes on.
"""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.runtime.processes import (
        Notes,
        TrainingError,
        note,
        process_group,
        set_timeout,
        start_timeout,
    )

__all__ = ["Notes", "TrainingError", "note", "process_group", "set_timeout", "start_timeout"]

export(
    __name__,
    {
        "Notes": "compose.runtime.processes",
        "TrainingError": "compose.runtime.processes",
        "note": "compose.runtime.processes",
        "process_group": "compose.runtime.processes",
        "set_timeout": "compose.runtime.processes",
        "start_timeout": "compose.runtime.processes",
    },
)
