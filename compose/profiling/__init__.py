"""What uses a run's time and memory."""

from typing import Any

from compose.profiling.options import Profile

TABLES = {"profile": Profile}


def run_rules() -> list[Any]:
    """Return the rules of [profile]."""
    from compose.profiling.rules import PROFILE

    return PROFILE
