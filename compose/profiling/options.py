"""The table [profile]."""

from dataclasses import dataclass
from typing import Annotated

from compose.errors import NonNegative, ReadWith

_WITH_STEPS = ReadWith("is never read; set {} too", steps=())


@dataclass(frozen=True)
class Profile:
    """The table [profile]."""

    steps: tuple[NonNegative, ...] = ()
    """First and last step to profile, as [11, 13]; empty is off. Files are in run.dir/traces."""
    ranks: Annotated[tuple[NonNegative, ...], _WITH_STEPS] = (0,)
    """Ranks that are profiled; empty: all."""
    memory: Annotated[bool, _WITH_STEPS] = False
    """Write a memory snapshot beside each trace, for pytorch.org/memory_viz."""
