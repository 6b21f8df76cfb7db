"""The profile of a run's time and memory."""

from typing import Any

from compose.profiling.options import PROFILE, Profile

TABLES = {"profile": Profile}
RUN_RULES = PROFILE


def hooks(trainer: Any) -> list[Any]:
    """Return the profiler, if steps are to be profiled."""
    from compose.profiling.profiler import Profiler

    return [Profiler(trainer)] if trainer.config.profile.steps else []
