"""A profile's summary for a person."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compose.profiling.memory import CATEGORIES
from compose.profiling.shares import KINDS


def as_text(summary: Mapping[str, Any], folder: Path) -> str:
    """Return the lines that ``Profiler`` prints."""
    first, last = summary["steps"]
    lines = [f"profile of steps {first} to {last}, in {folder}"]
    times, memories = [["time, %", "s/step", *KINDS]], [["memory, MiB", "all", *CATEGORIES]]
    for result in summary["ranks"]:
        rank = f"rank {result['rank']}"
        if "problem" in result:
            lines.append(f"  {rank}: not written: {result['problem']}")
            continue
        shares, memory = result["time"], result["memory"]
        times.append(
            [rank, f"{result['seconds_per_step']:.3f}", *(f"{100 * shares[k]:.1f}" for k in KINDS)]
        )
        at_peak, most = ([_mib(memory[key][c]) for c in CATEGORIES] for key in ("at_peak", "most"))
        memories += [
            [f"{rank}, at peak", _mib(memory["peak"]), *at_peak],
            ["  most of each", "", *most],
        ]
    for table in (times, memories):
        lines += _aligned(table) if len(table) > 1 else []
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"  {row[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"
