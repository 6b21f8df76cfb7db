"""The result of a search as data, text and a file to start from."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compose.errors import toml_value
from compose.parallel.mesh import AXES, crosses_nodes
from compose.planner.candidates import (
    DEGREES,
    TRIED,
    Candidate,
    Space,
    capacity,
    fits,
    shape_for,
    with_keys,
)
from compose.planner.estimate import RankPeak
from compose.planner.memory import CATEGORIES
from compose.planner.quick_estimate import ModelShape, QuickEstimate, micro_batches, quick

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
