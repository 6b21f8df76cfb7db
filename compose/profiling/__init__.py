"""This room answers where a run's time and memory go: traces of some steps, and a summary of them."""

from typing import TYPE_CHECKING

from compose.base.lazy import export

if TYPE_CHECKING:
    from compose.profiling.profiler import Profiler
    from compose.profiling.trace import span

__all__ = ["Profiler", "span"]

export(__name__, {"Profiler": "compose.profiling.profiler", "span": "compose.profiling.trace"})
