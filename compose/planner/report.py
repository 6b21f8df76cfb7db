"""The result of a search as data, text and a file to start from, and its figures and keys in words."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compose.config.addons import provided
from compose.config.job import make_job
from compose.config.models import find_model
from compose.config.tables import Config, value_of
from compose.errors import in_columns, toml_value
from compose.parallel.mesh import AXES, crosses_nodes
from compose.planner.candidates import (
    DEGREES,
    FREED,
    REFINED,
    TRIED,
    Candidate,
    Space,
    capacity,
    fits,
    lack_of_node,
    shape_for,
)
from compose.planner.costs import for_ranks
from compose.planner.estimate import RankPeak
from compose.planner.memory import CATEGORIES

GIB = 2**30
_SHOWN = 4  # pipeline ranks whose memory is told in words
# Keys that have columns of their own in a table, or say how a schedule is laid out.
_SHOWN_KEYS = {
    "parallel.speeds",
    *(f"parallel.{key}" for key in (*AXES, "ep", "zero", "zero3_reshard")),
    *(f"parallel.pp_{key}" for key in ("schedule", "virtual_stages", "layers")),
    *(f"activation_checkpoint.{key}" for key in ("mode", "every", "budget", "segment")),
    "train.micro_batch",
}
TIMES = "\u00d7"
COUNTED = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas",
    "dp_shard": "data-parallel shards",
    "cp": "parts of each sequence",
    "tp": "tensor-parallel ranks",
    "ep": "expert-parallel ranks",
}
"""The words for the ranks of each axis, in the order in which a mesh is told."""
PHRASES = {
    "parallel.zero": "ZeRO-{}",
    "parallel.pp_schedule": "schedule {}",
    "parallel.pp_virtual_stages": "{} virtual stages a rank",
    "train.micro_batch": "micro-batches of {}",
    "activation_checkpoint.mode": "recomputation: {}",
}
"""Settings that have words of their own; others are shown as they are written."""
_KINDS = {"F": "forward", "B": "backward", "I": "input-gradients", "W": "weight-gradients"}


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    candidates: list[Candidate]
    """The recorded candidates, the best first."""
    let_through: int
    """Legal candidates that may fit by their quick estimates."""
    capped: bool = False
    """Whether a limit of time or Ctrl-C ended the search before its own end."""
    certain: bool = True
    """Whether it is sure that no candidate fits, if none of the recorded ones does."""


def as_data(space: Space, recorded: Sequence[Candidate]) -> dict[str, Any]:
    """Return the result as plain data, for JSON."""
    train, model = space.config.train, space.config.model
    size = model.preset
    if find_model(model.name).presets.get(size) != model.config:  # some sizes are its own
        count = sum(p.numel() for p in shape_for(space).job.model.parameters())
        size = f"of {count / 1e9:,.3g}B parameters"
    return {
        "cluster": space.cluster.name,
        "world_size": space.world_size,
        "model": f"{model.name} {size}",
        "global_batch": train.global_batch,
        "seq_len": train.seq_len,
        "capacity": capacity(space.cluster),
        "candidates": [_candidate(space, c, i == 0) for i, c in enumerate(recorded)],
    }


def _keys(candidate: Candidate) -> dict[str, Any]:
    """Return all keys that the search looks at, also those that are fixed, and what it has refined."""
    keys = [*DEGREES, *TRIED, "parallel.offload"]
    keys += [key for key in (*REFINED, *FREED) if key in candidate.keys]
    if candidate.config.parallel.pp == 1:
        keys.remove("parallel.pp_schedule")
    return {key: value_of(candidate.config, key) for key in keys}


def _candidate(space: Space, candidate: Candidate, best: bool) -> dict[str, Any]:
    estimate = candidate.recorded
    data: dict[str, Any] = {
        "keys": _keys(candidate),
        "fits": fits(space, candidate),
        "lacks": lack_of_node(space, candidate),
        "step_seconds": estimate.step_seconds,
        "tokens_per_second_per_device": estimate.tokens_per_second_per_device,
        "mfu": estimate.mfu,
        "bubble": estimate.bubble,
        "exposed": dict(estimate.exposed),
        "memory": {**_bytes(estimate.fullest), "by_stage": [_bytes(p) for p in estimate.peaks]},
        "host_bytes": estimate.host_bytes,
        "kwh": estimate.kwh,
        "why": crosses_nodes(candidate.config.parallel, space.node),
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


def describe(candidate: Candidate) -> str:
    """Return a candidate in one line."""
    parallel = candidate.config.parallel
    parts = [f"{a} {getattr(parallel, a)}" for a in (*AXES, "ep") if getattr(parallel, a) > 1]
    parts.append(f"zero {parallel.zero}")
    if parallel.pp > 1:
        parts.append(parallel.pp_schedule)
    parts.append(f"recompute {candidate.config.activation_checkpoint.mode}")
    parts.append(f"micro_batch {candidate.config.train.micro_batch}")
    parts += [f"{key} {value}" for key, value in candidate.keys.items() if key in (*REFINED, *FREED)]
    if parallel.offload != "none":
        parts.append(f"offload {parallel.offload}")
    text = ", ".join(parts)
    if candidate.estimate:
        text += f": {candidate.estimate.step_seconds:.3f} s, {candidate.reserved / 2**30:.1f} GiB"
    return text


def table(space: Space, recorded: Sequence[Candidate]) -> str:
    """Return the candidates as a table of text.

    A key of no column of its own has one if some candidate changes it.
    """
    axes = [a for a in (*AXES, "ep") if any(getattr(c.config.parallel, a) > 1 for c in recorded)]
    names = dict.fromkeys(name for c in recorded for name in c.keys if name not in _SHOWN_KEYS)
    usual = Config()
    more = [n for n in names if any(value_of(c.config, n) != value_of(usual, n) for c in recorded)]
    figures = ("step s", "tokens/s", "MFU", "bubble", "GiB", "")
    rows = [[*axes, "zero", "schedule", "recompute", "micro", *map(short_name, more), *figures]]
    for candidate in recorded:
        estimate, parallel = candidate.recorded, candidate.config.parallel
        warnings = ["" if fits(space, candidate) else "does not fit", lack_of_node(space, candidate)]
        rows.append(
            [
                *(str(getattr(parallel, axis)) for axis in axes),
                str(parallel.zero),
                parallel.pp_schedule if parallel.pp > 1 else "-",
                recomputation(candidate.config),
                str(candidate.config.train.micro_batch),
                *(str(value_of(candidate.config, name)) for name in more),
                f"{estimate.step_seconds:.3f}",
                f"{estimate.tokens_per_second_per_device:,.0f}",
                f"{estimate.mfu:.1%}",
                f"{estimate.bubble:.1%}",
                f"{candidate.reserved / GIB:.1f}",
                "; ".join(filter(None, [*warnings, crosses_nodes(parallel, space.node)])),
            ]
        )
    return "\n".join(in_columns(rows))


def recomputation(config: Config) -> str:
    """Return what backward computes again, as "full" or "budget 0.5"."""
    again = config.activation_checkpoint
    detail = {"every_k": f" {again.every}", "budget": f" {again.budget:g}"}
    if again.mode == "full" and again.segment > 1:
        return f"full of {again.segment}"
    return f"{again.mode}{detail.get(again.mode, '')}"


def short_name(key: str) -> str:
    """Return the name of a key "table.key" without its table, but for the optimizer's."""
    return key if key.startswith("optimizer.") else key.rpartition(".")[2]


def in_words(space: Space, best: Candidate) -> str:
    """Return the best candidate's memory and time in words."""
    estimate, room = best.recorded, capacity(space.cluster)
    devices = " + ".join(f"{ranks} x {cluster.device.name}" for cluster, ranks in space.devices)
    lines = [f"{devices}, {room / GIB:.1f} GiB of each for a process"]
    fullest = sorted(range(len(estimate.peaks)), key=lambda i: -estimate.peaks[i].reserved)[:_SHOWN]
    for rank in sorted(fullest):
        p = estimate.peaks[rank]
        parts = ", ".join(
            f"{c} {p.by_category[c] / GIB:.1f}" for c in CATEGORIES if p.by_category.get(c, 0) > 2**26
        )
        lines.append(
            f"  pipeline rank {rank}: allocated {p.allocated / GIB:.1f} GiB, reserved"
            f" {p.reserved / GIB:.1f}{parts and f' ({parts})'}"
        )
    if len(estimate.peaks) > _SHOWN:
        lines.append(f"  the other {len(estimate.peaks) - _SHOWN} pipeline ranks hold no more")
    if estimate.host_bytes:
        has = for_ranks(space.cluster, space.world_size).host_memory
        of = f"of {has / GIB:,.1f} GiB" if has else "GiB; what it has is unknown"
        lines.append(f"  host memory of a node: {estimate.host_bytes / GIB:,.1f} {of}")
    waits = sorted(estimate.exposed.items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in waits if seconds > 0.0005)
    lines.append(
        f"  step {estimate.step_seconds:.3f} s: bubble {estimate.bubble:.1%}; the slowest rank waits"
        f" for: {shown or 'nothing'}"
    )
    return "\n".join(lines)


def between_islands(space: Space, outer: Any, best: Candidate) -> list[str]:
    """Return what islands send each other, and how long training waits for it."""
    job, cluster = make_job(best.config, space.world_size), for_ranks(space.cluster, space.all_ranks)
    link = cluster.between if space.all_ranks > cluster.node else cluster.within
    given = (job, outer, space.islands, link, best.recorded.step_seconds)
    return [line for _, lines in provided("between_workers") for line in lines(*given)]


def write_toml(
    space: Space, best: Candidate, source: str, overrides: Mapping[str, Any], target: Path
) -> str:
    """Return the text of a file that runs the best candidate; it extends ``source``, unless empty."""
    base = os.path.relpath(source, target.parent) if source else ""
    why = reasons(space, best)
    tables: dict[str, list[str]] = {}
    for name, value in {**overrides, **best.keys, **_of_islands(space, best)}.items():
        head, _, key = name.partition(".")
        reason = f"  # {why[name]}" if name in why and name in best.keys else ""
        tables.setdefault(head, []).append(f"{key} = {toml_value(value)}{reason}")
    blocks = ["\n".join([f"[{name}]", *lines, ""]) for name, lines in tables.items()]
    head = f"# Planned for {space.all_ranks} ranks of {space.cluster.name}.\n"
    return "\n".join([f"{head}extends = {toml_value(base)}\n" if base else head, *blocks])


def _of_islands(space: Space, best: Candidate) -> dict[str, int]:
    """Return the keys of all islands, in place of those of the one that was planned."""
    keys = {"parallel.dp_replicate": space.islands} if space.islands > 1 else {}
    if keys and "train.global_batch" in best.keys:
        keys["train.global_batch"] = space.islands * best.config.train.global_batch
    return keys


def command_line(space: Space, best: Candidate, file: str, overrides: Mapping[str, Any]) -> str:
    """Return the command that runs the best candidate on all nodes; ``file``: a TOML file, or ""."""
    ranks, node = space.all_ranks, space.cluster.node // space.cluster.machines
    several = f" --nnodes {-(-ranks // node)} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    changed = {key: value for key, value in best.keys.items() if value_of(space.config, key) != value}
    words = [
        shlex.quote(f"--{key}={value if isinstance(value, str) else toml_value(value)}")
        for key, value in {**overrides, **changed, **_of_islands(space, best)}.items()
    ]
    program = "train.py" if Path("train.py").exists() else "-m compose train"
    each, rest = min(ranks, node), ranks % node if ranks > node else 0
    start = f"torchrun{several if ranks > node else ''} --nproc-per-node {each} {program}"
    note = [f" # --nproc-per-node {rest} on the last node"] if rest else []
    return " ".join([start, *([shlex.quote(file)] if file else []), *words, *note])


def reasons(space: Space, best: Candidate) -> dict[str, str]:
    """Return a reason for each key of the best candidate, by the key."""
    parallel, node = best.config.parallel, space.node
    room = capacity(space.cluster) / GIB
    within, most = node % parallel.tp == 0, "leanest" if space.objective == "memory" else "fastest"
    return {
        "parallel.tp": "inside a node of " + str(node) if within else f"over nodes of {node}",
        "parallel.cp": "ranks that share a sequence",
        "parallel.pp": "stages of the model",
        "parallel.dp_shard": "what is left, so that the state is shared",
        "parallel.dp_replicate": "copies of the sharded state",
        "parallel.ep": "ranks that share the experts",
        "parallel.zero": f"the {most} stage that fits",
        "parallel.pp_schedule": f"the {most} of those that fit",
        "activation_checkpoint.mode": f"{best.reserved / GIB:.1f} of {room:.1f} GiB are used",
        **({"parallel.offload": "nothing else fits"} if parallel.offload != "none" else {}),
        "train.micro_batch": "samples of one forward",
    }


def digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    size = abs(value)
    places = 0 if size >= 99.95 or value == 0 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3
    return f"{value:,.{places}f}"


def seconds(value: float) -> str:
    """Return a duration in s, ms or µs."""
    if value == 0 or abs(value) >= 0.9995:
        return f"{digits(value)} s"
    return f"{digits(value * 1e3)} ms" if abs(value) >= 0.9995e-3 else f"{digits(value * 1e6)} µs"


def memory(value: float) -> str:
    """Return bytes in GiB, or in MiB below one GiB."""
    if value == 0 or abs(value) >= GIB:
        return f"{digits(value / GIB)} GiB"
    return f"{digits(value / 2**20)} MiB"


def shown_value(value: Any) -> str:
    """Return a setting's value as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown_value(each) for each in value) or "none"
    return str(value)


def mesh_of(keys: Mapping[str, Any]) -> str:
    """Return a mesh in short: the axes that have more than one rank, with their sizes."""
    degrees = _degrees(keys)
    return f" {TIMES} ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "one rank"


def _degrees(keys: Mapping[str, Any]) -> dict[str, int]:
    degrees = {axis: keys.get(f"parallel.{axis}", 1) for axis in COUNTED}
    return {axis: degree for axis, degree in degrees.items() if degree > 1}


def words_of(keys: Mapping[str, Any]) -> str:
    """Return a candidate's mesh in words, and its other settings."""
    degrees = [f"{degree} {COUNTED[axis]}" for axis, degree in _degrees(keys).items()]
    others = [
        PHRASES[key].format(shown_value(value)) if key in PHRASES else f"{key} = {shown_value(value)}"
        for key, value in keys.items()
        if key.removeprefix("parallel.") not in COUNTED
    ]
    return "; ".join([", ".join(degrees) or "One rank", *others])
