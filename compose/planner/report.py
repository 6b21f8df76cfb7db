"""The result of a search as data, text and a file to start from; a prediction against a run."""

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from compose.config import rules
from compose.config.json_files import Count, read_json
from compose.config.toml import load
from compose.errors import ConfigError, Fraction, read_own, refuse_link_out, toml_value
from compose.parallel.mesh import AXES, crosses_nodes
from compose.planner.cluster import LEAST, MOST, Cluster, Rate
from compose.planner.estimate import Estimate, RankPeak, estimate
from compose.planner.memory import CATEGORIES
from compose.planner.quick_estimate import ModelShape, QuickEstimate, micro_batches, quick
from compose.planner.search import (
    DEGREES,
    TRIED,
    Candidate,
    Space,
    capacity,
    fits,
    shape_for,
    with_keys,
)

_GIB = 2**30
_SHOWN = 4  # pipeline ranks whose memory is told in words
_KINDS = {"F": "forward", "B": "backward", "I": "inputs' gradients", "W": "weights' gradients"}


def as_data(space: Space, recorded: Sequence[Candidate]) -> dict[str, Any]:
    """Return the result as plain data, for JSON."""
    train = space.config.train
    return {
        "cluster": space.cluster.name,
        "world_size": space.world_size,
        "model": f"{space.config.model.name} {space.config.model.preset}",
        "global_batch": train.global_batch,
        "seq_len": train.seq_len,
        "capacity": capacity(space.cluster),
        "candidates": [_candidate(space, c, i == 0) for i, c in enumerate(recorded)],
    }


def _keys(candidate: Candidate) -> dict[str, Any]:
    """Return all keys that the search looks at, also those that are fixed."""
    keys = [*DEGREES, *TRIED, "parallel.offload"]
    if candidate.config.parallel.pp == 1:
        keys.remove("parallel.pp_schedule")
    tables = {key: key.partition(".") for key in keys}
    return {key: getattr(getattr(candidate.config, t), name) for key, (t, _, name) in tables.items()}


def _candidate(space: Space, candidate: Candidate, best: bool) -> dict[str, Any]:
    estimate = candidate.estimate
    assert estimate is not None
    fullest = max(estimate.peaks, key=lambda p: p.reserved)
    data: dict[str, Any] = {
        "keys": _keys(candidate),
        "fits": fits(space, candidate),
        "step_seconds": estimate.step_seconds,
        "tokens_per_second_per_device": estimate.tokens_per_second_per_device,
        "mfu": estimate.mfu,
        "bubble": estimate.bubble,
        "exposed": dict(estimate.exposed),
        "memory": {**_bytes(fullest), "by_stage": [_bytes(p) for p in estimate.peaks]},
        "why": crosses_nodes(candidate.config.parallel, space.cluster.node),
    }
    if best:
        data["timeline"] = [
            {
                "rank": slot.rank,
                "stream": "compute",
                "name": f"{_KINDS[slot.action.kind]} {slot.action.micro_batch}"
                f" of stage {slot.action.stage}",
                "start": float(slot.start),
                "end": slot.end,
            }
            for slot in estimate.slots
        ]
    return data


def _bytes(peak: RankPeak) -> dict[str, Any]:
    return {
        "allocated": peak.allocated,
        "reserved": peak.reserved,
        "by_category": {c: peak.by_category.get(c, 0) for c in CATEGORIES},
    }


def table(space: Space, recorded: Sequence[Candidate]) -> str:
    """Return the candidates as a table of text."""
    axes = [a for a in (*AXES, "ep") if any(getattr(c.config.parallel, a) > 1 for c in recorded)]
    figures = ("step s", "tokens/s", "MFU", "bubble", "GiB", "")
    rows = [[*axes, "zero", "schedule", "recompute", "micro", *figures]]
    for candidate in recorded:
        estimate, parallel = candidate.estimate, candidate.config.parallel
        assert estimate is not None
        warnings = [] if fits(space, candidate) else ["does not fit"]
        rows.append(
            [
                *(str(getattr(parallel, axis)) for axis in axes),
                str(parallel.zero),
                parallel.pp_schedule if parallel.pp > 1 else "-",
                candidate.config.activation_checkpoint.mode,
                str(candidate.config.train.micro_batch),
                f"{estimate.step_seconds:.3f}",
                f"{estimate.tokens_per_second_per_device:,.0f}",
                f"{estimate.mfu:.1%}",
                f"{estimate.bubble:.1%}",
                f"{candidate.reserved / _GIB:.1f}",
                "; ".join(filter(None, [*warnings, crosses_nodes(parallel, space.cluster.node)])),
            ]
        )
    return in_columns(rows)


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts as columns, each to the right."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{c:>{w}}" for c, w in zip(row, wide, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def in_words(space: Space, best: Candidate) -> str:
    """Return the best candidate's memory and time in words."""
    estimate = best.estimate
    assert estimate is not None
    room = capacity(space.cluster)
    lines = [
        f"{space.world_size} x {space.cluster.device.name}, {room / _GIB:.1f} GiB of each for a process"
    ]
    fullest = sorted(range(len(estimate.peaks)), key=lambda i: -estimate.peaks[i].reserved)[:_SHOWN]
    for rank, p in enumerate(estimate.peaks):
        if rank not in fullest:
            continue
        parts = ", ".join(
            f"{c} {p.by_category[c] / _GIB:.1f}" for c in CATEGORIES if p.by_category.get(c, 0) > 2**26
        )
        lines.append(
            f"  pipeline rank {rank}: allocated {p.allocated / _GIB:.1f} GiB, reserved"
            f" {p.reserved / _GIB:.1f} ({parts})"
        )
    if len(estimate.peaks) > _SHOWN:
        lines.append(f"  the other {len(estimate.peaks) - _SHOWN} pipeline ranks hold less")
    waits = sorted(estimate.exposed.items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in waits if seconds > 0.0005)
    lines.append(
        f"  step {estimate.step_seconds:.3f} s: bubble {estimate.bubble:.1%}; the slowest rank waits"
        f" for: {shown or 'nothing'}"
    )
    return "\n".join(lines)


def write_toml(
    space: Space, best: Candidate, source: str, overrides: Mapping[str, Any], target: Path
) -> str:
    """Return the text of a file that runs the best candidate."""
    base = os.path.relpath(source, target.parent)
    why = reasons(space, best)
    tables: dict[str, list[str]] = {}
    islands = {"parallel.dp_replicate": space.islands} if space.islands > 1 else {}
    for name, value in {**overrides, **best.keys, **islands}.items():
        head, _, key = name.partition(".")
        reason = f"  # {why[name]}" if name in why and name in best.keys else ""
        tables.setdefault(head, []).append(f"{key} = {toml_value(value)}{reason}")
    blocks = ["\n".join([f"[{name}]", *lines, ""]) for name, lines in tables.items()]
    head = f"# Planned for {space.world_size * space.islands} ranks of {space.cluster.name}.\n"
    return "\n".join([f"{head}extends = {toml_value(base)}\n", *blocks])


_WORDS = {
    "compute": "more computation",
    "tp": "messages of tp",
    "cp": "messages of cp that attention does not hide",
    "ep": "messages to experts",
    "bubble": "the pipeline's bubble",
    "dp": "messages of data parallel that computation does not hide",
    "optimizer": "the optimizer",
    "offload": "copies from and to host memory",
}


def alternatives(space: Space, best: Candidate) -> list[str]:
    """Return one line for each neighbour of the best candidate.

    The differences are those of the quick estimates, which are rough.
    """
    shape = shape_for(space)
    now = quick(shape, best.config, space.cluster)
    lines = []
    for name, keys in _neighbours(space, best):
        config = with_keys(best.config, {"parallel.pp_layers": (), **keys})
        if not micro_batches(config):
            lines.append(f"{name}: its ranks do not divide the global batch")
            continue
        lines.append(f"{name}: {_difference(space, shape, now, quick(shape, config, space.cluster))}")
    return lines


def _difference(space: Space, shape: ModelShape, now: QuickEstimate, other: QuickEstimate) -> str:
    room = capacity(space.cluster)
    if other.memory > room >= now.memory:
        over = (other.memory - room) / 2**30
        most = max(other.bytes, key=lambda k: other.bytes[k] - now.bytes[k])
        more = (other.bytes[most] - now.bytes[most]) / 2**30
        return f"does not fit by {over:.1f} GiB ({most} +{more:.1f} GiB)"
    change = other.step - now.step
    part = max(other.seconds, key=lambda k: _more(now, other, k) * (1 if change >= 0 else -1))
    of_part = _more(now, other, part)
    each = of_part / max(1, shape.count) * 1000
    return (
        f"{change:+.2f} s a step; most of it {_WORDS[part]}: {of_part:+.2f} s, {each:+.1f} ms a layer"
    )


def _more(now: QuickEstimate, other: QuickEstimate, part: str) -> float:
    return other.seconds.get(part, 0.0) - now.seconds.get(part, 0.0)


def _neighbours(space: Space, best: Candidate) -> Iterator[tuple[str, dict[str, Any]]]:
    parallel, node = best.config.parallel, space.cluster.node
    for axis in ("tp", "cp", "pp", "dp_replicate"):
        degree = getattr(parallel, axis)
        if f"parallel.{axis}" in space.fixed:
            continue
        if parallel.dp_shard % 2 == 0:
            leaves = " leaves the node" if axis == "tp" and degree * 2 > node >= degree else ""
            yield (
                f"{axis} {degree * 2}{leaves}",
                {f"parallel.{axis}": degree * 2, "parallel.dp_shard": parallel.dp_shard // 2},
            )
        for less in dict.fromkeys([1] if degree % 2 else [degree // 2, 1]):
            if less < degree:
                keys = {
                    f"parallel.{axis}": less,
                    "parallel.dp_shard": parallel.dp_shard * degree // less,
                }
                yield f"no {axis}" if less == 1 else f"{axis} {less}", keys
    for zero in (1, 2, 3):
        if zero != parallel.zero and parallel.dp_shard * parallel.cp > 1:
            yield f"zero {zero}", {"parallel.zero": zero}
    for mode in ("none", "selective", "full"):
        if mode != best.config.activation_checkpoint.mode:
            yield f"recompute {mode}", {"activation_checkpoint.mode": mode}
    if parallel.offload == "none":
        yield "offload", {"parallel.offload": "cpu", "parallel.zero": 3}
    micro = best.config.train.micro_batch
    yield f"micro_batch {micro * 2}", {"train.micro_batch": micro * 2}
    if micro > 1:
        yield f"micro_batch {micro // 2}", {"train.micro_batch": micro // 2}


def reasons(space: Space, best: Candidate) -> dict[str, str]:
    """Return a reason for each key of the best candidate, by the key."""
    parallel, node = best.config.parallel, space.cluster.node
    room = capacity(space.cluster) / 2**30
    within = parallel.tp <= node
    return {
        "parallel.tp": "inside a node of " + str(node) if within else f"over nodes of {node}",
        "parallel.cp": "ranks that share a sequence",
        "parallel.pp": "stages of the model",
        "parallel.dp_shard": "what is left, so that the state is shared",
        "parallel.dp_replicate": "copies of the sharded state",
        "parallel.ep": "ranks that share the experts",
        "parallel.zero": "the fastest stage that fits",
        "parallel.pp_schedule": "the smallest bubble of those that fit",
        "activation_checkpoint.mode": f"{best.reserved / 2**30:.1f} of {room:.1f} GiB are used",
        "parallel.offload": "nothing else fits",
        "train.micro_batch": "samples of one forward",
    }


_FIRST = 2  # steps that start things up, and are left out
# The names of a profile's shares by those of the planner.
_SHARES = {"product": "matmul", "attention": "attention", "other": "other", "optimizer": "optimizer"}
_WORK = {"other": "memory"}
# A profile's category of memory, and the planner's categories that it holds.
_CATEGORIES = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "communication": ("gathered", "communication"),
    "activations": ("activations", "temporaries", "logits"),
}


@dataclass(frozen=True)
class _Shares:
    matmul: Fraction
    attention: Fraction
    communication: Fraction
    optimizer: Fraction
    other: Fraction


@dataclass(frozen=True)
class _Bytes:
    weights: Count
    gradients: Count
    optimizer: Count
    communication: Count
    activations: Count


@dataclass(frozen=True)
class _Memory:
    peak: Count
    at_peak: _Bytes


@dataclass(frozen=True)
class _Profile:
    seconds_per_step: Rate
    time: _Shares
    memory: _Memory


@dataclass(frozen=True)
class _Summary:
    """The used part of a profile's summary."""

    ranks: Annotated[list[_Profile], Field(min_length=1)]


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
    config = load(str(folder / "config.toml"), alone=True)
    ranks = math.prod(getattr(config.parallel, axis) for axis in AXES)
    job, rate = rules.check(config, ranks), _rate(folder)
    tokens = config.train.global_batch * config.train.seq_len
    traces = folder / "traces"
    refuse_link_out(traces, folder)
    summaries = sorted(traces.glob("*_summary.json"))
    profile = read_json(summaries[-1], _Summary, own=True) if summaries else None
    predicted = estimate(job, cluster)
    rows = [MeasuredFigure("step", predicted.step_seconds, tokens / rate, "s")]
    return rows + (_profiled(predicted, profile.ranks) if profile else [])


def _rate(folder: Path) -> float:
    """Return the median of the tokens per second, without the first steps."""
    path = folder / "metrics.jsonl"
    try:
        lines = read_own(path).splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
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


def _profiled(predicted: Estimate, ranks: Sequence[_Profile]) -> list[MeasuredFigure]:
    slowest = max(ranks, key=lambda r: r.seconds_per_step * (1 - r.time.communication))
    whole, shares = slowest.seconds_per_step, slowest.time
    rows = [
        MeasuredFigure(name, predicted.work[_WORK.get(name, name)], whole * getattr(shares, share), "s")
        for name, share in _SHARES.items()
    ]
    waits = sum(v for name, v in predicted.exposed.items() if name != "optimizer")
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
    profile all three change alike.
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
        ),
    )


def _slower(row: Any, factor: float) -> Any:
    return replace(row, seconds=min(MOST, max(LEAST, row.seconds * factor)))


def _share(value: float) -> float:
    return min(1.0, max(1e-6, value))


def comparison_table(rows: list[MeasuredFigure]) -> str:
    """Return the comparison as a table."""
    wide = max(len(row.name) for row in rows)
    cells = [[" " * wide, "predicted", "measured", "measured / predicted"]]
    for row in rows:
        values = row.predicted, row.measured
        shown = [f"{v:.4f} s" if row.unit == "s" else f"{v / 2**20:,.1f} MiB" for v in values]
        ratio = "-" if math.isnan(row.ratio) else f"{row.ratio:.3f}"
        cells.append([f"{row.name:<{wide}}", *shown, ratio])
    return in_columns(cells)
