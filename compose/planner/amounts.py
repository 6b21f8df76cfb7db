"""Amounts as people read them: a number of a few digits, and its unit."""

import math
from typing import Any

GIB = 2**30
DASH = "\u2013"
"""Stands where there is no number."""
TIMES = "\u00d7"


def number(value: Any) -> float | None:
    """Return a finite number, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    size = abs(value)
    places = 0 if size >= 99.95 or value == 0 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3
    return f"{value:,.{places}f}"


def seconds(value: Any) -> str:
    """Return a duration in s, ms or µs; a dash for no number."""
    found = number(value)
    if found is None:
        return DASH
    if found == 0 or abs(found) >= 0.9995:
        return f"{digits(found)} s"
    return f"{digits(found * 1e3)} ms" if abs(found) >= 0.9995e-3 else f"{digits(found * 1e6)} µs"


def memory(value: Any) -> str:
    """Return bytes in GiB, or in MiB below one GiB; a dash for no number."""
    found = number(value)
    if found is None:
        return DASH
    if found == 0 or abs(found) >= GIB:
        return f"{digits(found / GIB)} GiB"
    return f"{digits(found / 2**20)} MiB"


def percent(value: Any) -> str:
    """Return a fraction in percent; a dash for no number."""
    found = number(value)
    return DASH if found is None else f"{found * 100:.1f}%"


def count(value: Any) -> str:
    """Return a whole number with commas; a dash for no number."""
    found = number(value)
    return DASH if found is None else f"{found:,.0f}"
