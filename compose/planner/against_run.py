"""The prediction of a run that was made against what the run measured."""

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from compose.config import rules
from compose.config.json_files import Count, read_json
from compose.config.toml import load
from compose.errors import (
    ConfigError,
    Fraction,
    in_columns,
    or_say,
    read_own,
    refuse_link_out,
    refused_in,
)
from compose.planner.cluster import LEAST, MOST, Cluster, Rate
from compose.planner.estimate import Estimate, check_counted, estimate

_FIRST = 2  # steps that start things up, and are left out
# The names of a profile's shares by those of the planner.
_SHARES = {"product": "matmul", "attention": "attention", "other": "other", "optimizer": "optimizer"}
_WORK = {"other": "memory"}
_NO_MESSAGES = ("optimizer", "copy", "host", "issue")  # waits that no profile calls communication
# A profile's category of memory, and the planner's categories that it holds.
_CATEGORIES = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "communication": ("gathered", "communication"),
    "activations": ("activations", "temporaries", "logits"),
}


@dataclass(frozen=True)
class _TimeShares:
    matmul: Fraction
    attention: Fraction
    communication: Fraction
    optimizer: Fraction
    other: Fraction


@dataclass(frozen=True)
class _BytesByPurpose:
    weights: Count
    gradients: Count
    optimizer: Count
    communication: Count
    activations: Count


@dataclass(frozen=True)
class _Memory:
    peak: Count
    at_peak: _BytesByPurpose


@dataclass(frozen=True)
class _RankProfile:
    seconds_per_step: Rate
    time: _TimeShares
    memory: _Memory


@dataclass(frozen=True)
class _Summary:
    """The used part of a profile's summary."""

    ranks: Annotated[list[_RankProfile], Field(min_length=1)]


@dataclass(frozen=True)
class MeasuredFigure:
    """A figure of a run, and its prediction."""

    name: str
    predicted: float
    measured: float
    unit: str
    """"s" or "bytes"."""

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else math.nan


def against(folder: Path, cluster: Cluster) -> list[MeasuredFigure]:
    """Predict a run that was made, and compare."""
    file = str(folder / "config.toml")
    config = load(file, alone=True)
    with refused_in(file):
        check_counted(config)
    job, rate = rules.check(config, config.parallel.ranks, cluster.target), _rate(folder)
    tokens = config.train.global_batch * config.train.seq_len
    traces = folder / "traces"
    refuse_link_out(traces, folder)
    summaries = list(traces.glob("*_summary.json"))
    # Step 100 comes after step 5.
    summaries.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    profile = read_json(summaries[-1], _Summary, own=True) if summaries else None
    predicted = estimate(job, cluster)
    rows = [MeasuredFigure("step", predicted.step_seconds, tokens / rate, "s")]
    return rows + (_profiled(predicted, profile.ranks) if profile else [])


def _rate(folder: Path) -> float:
    """Return the median of the tokens per second, without the first steps."""
    path = folder / "metrics.jsonl"
    with or_say(f"{path}: cannot be read"):
        lines = read_own(path).splitlines()
    rates = []
    for number, line in enumerate(lines, 1):
        try:
            rate: Any = json.loads(line.decode("utf-8"))["tokens_per_second"] if line else None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{path}: line {number} is no step") from None
        if line and (type(rate) not in (int, float) or not LEAST <= rate <= MOST):
            raise ConfigError(f"{path}: line {number}: tokens_per_second is {rate!r}, and no rate")
        rates += [rate] if line else []
    if len(rates) <= _FIRST:
        raise ConfigError(f"{path}: holds {len(rates)} steps; more than {_FIRST} are needed")
    return statistics.median(rates[_FIRST:])


def _profiled(predicted: Estimate, ranks: Sequence[_RankProfile]) -> list[MeasuredFigure]:
    slowest = max(ranks, key=lambda r: r.seconds_per_step * (1 - r.time.communication))
    whole, shares = slowest.seconds_per_step, slowest.time
    rows = [
        MeasuredFigure(name, predicted.work[_WORK.get(name, name)], whole * getattr(shares, share), "s")
        for name, share in _SHARES.items()
    ]
    waits = sum(v for name, v in predicted.exposed.items() if name not in _NO_MESSAGES)
    rows.append(MeasuredFigure("exposed communication", waits, whole * shares.communication, "s"))
    fullest = max((r.memory for r in ranks), key=lambda memory: memory.peak)
    peak = max(predicted.peaks, key=lambda p: p.allocated)
    rows.append(MeasuredFigure("peak memory", peak.allocated, fullest.peak, "bytes"))
    for name, parts in _CATEGORIES.items():
        size = sum(peak.by_category.get(part, 0) for part in parts)
        rows.append(MeasuredFigure(f"memory: {name}", size, getattr(fullest.at_peak, name), "bytes"))
    return rows


def corrected(cluster: Cluster, rows: list[MeasuredFigure]) -> Cluster:
    """Return a cluster that would have predicted the run's computation.

    Only figures of the device change: the rates of products, of attention and of the memory. Without a
    profile all three change by one factor.
    """
    ratios = {row.name: row.ratio for row in rows if row.unit == "s" and row.measured > 0}
    slower = {
        name: next(r for r in (ratios.get(name), ratios["step"], 1.0) if r and LEAST <= r <= MOST)
        for name in ("product", "attention", "other")
    }
    known, measured = cluster.efficiencies, cluster.measured
    if measured.products:
        rescaled = replace(
            measured,
            products=tuple(_slower(row, slower["product"]) for row in measured.products),
            attention=tuple(_slower(row, slower["attention"]) for row in measured.attention),
            copies=tuple(_slower(row, slower["other"]) for row in measured.copies),
        )
        return replace(cluster, measured=rescaled)
    return replace(
        cluster,
        efficiencies=replace(
            known,
            memory=_share(known.memory / slower["other"]),
            products={t: _share(share / slower["product"]) for t, share in known.products.items()},
            attention_forward=_share(known.attention_forward / slower["attention"]),
            attention_backward=_share(known.attention_backward / slower["attention"]),
            attention={
                kernel: tuple(_share(share / slower["attention"]) for share in shares)
                for kernel, shares in known.attention.items()
            },
        ),
    )


def _slower(row: Any, factor: float) -> Any:
    return replace(row, seconds=min(MOST, max(LEAST, row.seconds * factor)))


def _share(value: float) -> float:
    return min(1.0, max(1e-6, value))


def comparison_table(rows: list[MeasuredFigure]) -> str:
    """Return the comparison as a table."""
    cells = [["", "predicted", "measured", "measured / predicted"]]
    for row in rows:
        values = row.predicted, row.measured
        shown = [f"{v:.4f} s" if row.unit == "s" else f"{v / 2**20:,.1f} MiB" for v in values]
        ratio = "-" if math.isnan(row.ratio) else f"{row.ratio:.3f}"
        cells.append([row.name, *shown, ratio])
    return "\n".join(in_columns(cells, left=1))
