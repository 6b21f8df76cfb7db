"""The table [profile]."""

from dataclasses import dataclass

from compose.errors import NonNegative


@dataclass(frozen=True)
class Profile:
    """The table [profile]."""

    steps: tuple[NonNegative, ...] = ()
    """First and last step to profile, as [11, 13]; empty is off. Files are in run.dir/traces."""
    ranks: tuple[NonNegative, ...] = (0,)
    """Ranks that are profiled; empty: all."""
    memory: bool = False
    """Write a memory snapshot beside each trace, for pytorch.org/memory_viz."""
