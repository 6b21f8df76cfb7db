"""What a run's time and memory go into: traces of some steps, and a summary of them."""

from compose.profiling.profiler import Profiler
from compose.profiling.trace import span

__all__ = ["Profiler", "span"]
