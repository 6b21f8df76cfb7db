"""Why other compositions lose: differences between records."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from compose.config import rules
from compose.config.tables import Config, value_of
from compose.errors import ConfigError
from compose.parallel.mesh import AXES, resolve_degrees
from compose.planner.candidates import (
    DEGREES,
    TRIED,
    Candidate,
    Space,
    capacity,
    dividing,
    fits,
    lack_of_node,
    shape_for,
    with_keys,
)
from compose.planner.estimate import Estimate
from compose.planner.quick_estimate import quick
from compose.planner.quick_memory import micro_batches
from compose.planner.quick_units import ModelShape
from compose.planner.report import GIB, seconds
from compose.planner.search import record_all

_MADE = 2  # neighbours of which records are made
_SHOWN = 0.1  # the least part of a difference that is told
_WAITS = {
    "tp": "messages of tp",
    "cp": "messages of cp",
    "ep": "messages to experts",
    "pp": "messages of the pipeline",
    "optimizer": "the optimizer",
    "issue": "the host that issues kernels",
}
_REST = "waiting in the pipeline"


def explain(space: Space, recorded: Sequence[Candidate]) -> list[str]:
    """Return one line for each recorded candidate but the best, and for two neighbours of the best.

    All figures are of records. The neighbours are those that look best by their quick estimates; their
    records are made here.
    """
    best, *others = recorded
    lines = [f"{differences(best, other)}: {against_best(space, best, other)}" for other in others]
    chosen = _promising(space, recorded)
    made = record_all(space, [config for _, config in chosen])
    for (name, _), result in zip(chosen, made, strict=True):
        if isinstance(result, ConfigError):
            lines.append(f"{name}: not legal: {result.problems[0]}")
        else:
            lines.append(f"{name}: {against_best(space, best, result)}")
    return lines


def why_no_mesh(space: Space) -> str:
    """Return why FSDP over what the pinned degrees leave is not legal, where no other mesh is."""
    keys = {key: value_of(space.config, key) if key in space.fixed else 1 for key in DEGREES}
    if "parallel.dp_shard" not in space.fixed:
        keys["parallel.dp_shard"] = -1
    if "train.micro_batch" not in space.fixed:
        keys["train.micro_batch"] = 1
    config, batch = with_keys(space.config, keys), space.config.train.global_batch
    try:
        degrees = resolve_degrees(config.parallel, space.world_size)
        rules.check(replace(config, parallel=degrees), space.world_size, space.cluster.target)
    except ConfigError as error:
        return error.problems[0]
    return f"none divides train.global_batch = {batch} and the model's heads and layers"


def against_best(space: Space, best: Candidate, other: Candidate) -> str:
    """Return by how much a recorded candidate is slower than the best, or does not fit, and why."""
    one, two = best.recorded, other.recorded
    if not fits(space, other) and fits(space, best):
        held, now = two.fullest.by_category, one.fullest.by_category
        most = max(held, key=lambda name: held[name] - now.get(name, 0))
        more = (held[most] - now.get(most, 0)) / GIB
        if lack := lack_of_node(space, other):
            return f"does not fit: {lack}"
        over = (other.reserved - capacity(space.cluster)) / GIB
        why = f" ({most} {more:+.1f} GiB)" if more > 0.05 else ""
        return f"does not fit by {over:.1f} GiB{why}"
    change = two.step_seconds - one.step_seconds
    of_one, of_two = seconds_by_part(one), seconds_by_part(two)
    moved = {part: of_two.get(part, 0.0) - of_one.get(part, 0.0) for part in {**of_one, **of_two}}
    # Parts that go the other way do not explain the change.
    told = [part for part in moved if change and moved[part] / change > _SHOWN]
    most = sorted(told, key=lambda part: -abs(moved[part]))
    shown = [f"{part} {signed(moved[part])}" for part in most[:2]]
    text = f"{signed(change)} a step ({change / one.step_seconds:+.1%})"
    return f"{text}: {', '.join(shown)}" if shown else text


def signed(value: float) -> str:
    """Return a difference of durations with its sign."""
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def seconds_by_part(estimate: Estimate) -> dict[str, float]:
    """Return the seconds of a step by what the slowest rank does in them; their sum is the step."""
    work = sum(estimate.work.get(kind, 0.0) for kind in ("product", "attention", "memory"))
    parts = {"computation": work}
    for name, waited in estimate.exposed.items():
        part = _WAITS.get(name, "messages of data parallel" if name.startswith("dp") else name)
        parts[part] = parts.get(part, 0.0) + waited
    parts[_REST] = estimate.step_seconds - sum(parts.values())
    return parts


def differences(best: Candidate, other: Candidate) -> str:
    """Return the keys in which a candidate differs from the best, as "tp 2, micro_batch 4"."""
    names = list(dict.fromkeys([*best.keys, *other.keys, *TRIED]))
    kept = [name for name in names if name not in ("parallel.dp_shard", "parallel.pp_layers")]
    if other.config.parallel.pp == 1:
        kept = [name for name in kept if not name.startswith("parallel.pp_")]
    parts = [
        _named(name, value_of(other.config, name))
        for name in kept
        if value_of(other.config, name) != value_of(best.config, name)
    ]
    return ", ".join(parts) or "the same keys"


def _named(name: str, value: Any) -> str:
    key = name.rpartition(".")[2]
    if key in (*AXES, "ep") and value == 1:
        return f"no {key}"
    return f"{'recompute' if name == 'activation_checkpoint.mode' else key} {value}"


def _promising(space: Space, recorded: Sequence[Candidate]) -> list[tuple[str, Config]]:
    """Return the neighbours of the best candidate that look best, one of each axis."""
    best, shape, near = recorded[0], shape_for(space), []
    # A record has filled in the layers of stages.
    known = [with_keys(one.config, {"parallel.pp_layers": ()}) for one in recorded]
    for name, keys in neighbours(space, best.config):
        config = with_keys(best.config, {"parallel.pp_layers": (), **keys})
        if micro_batches(config) and config not in known:
            near.append((name, config))
    near.sort(key=lambda pair: promise(space, shape, best, pair[1]))
    results: dict[str, tuple[str, Config]] = {}
    for name, config in near:
        results.setdefault(name.removeprefix("no ").partition(" ")[0], (name, config))
    return list(results.values())[:_MADE]


def promise(space: Space, shape: ModelShape, best: Candidate, config: Config) -> tuple[bool, float]:
    """Return what compositions near the best one are sorted by, from quick estimates.

    Their memory is corrected by what the record of the best one has over its own quick estimate.
    """
    rough = quick(shape, config, space.cluster)
    size = rough.memory * best.reserved / max(1.0, best.rough.memory)
    too_large = size > capacity(space.cluster)
    return too_large, size if too_large else rough.step


def neighbours(space: Space, config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the changes of one option that a person would ask about, of keys that are free."""
    fixed = set(space.fixed)
    yield from (pair for pair in _changes(space, config) if not fixed & set(pair[1]))


def _changes(space: Space, config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    parallel, node = config.parallel, space.cluster.node
    for axis in ("tp", "cp", "pp", "dp_replicate"):
        degree = getattr(parallel, axis)
        if axis == "dp_replicate" and parallel.zero < 3:
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
        if mode != config.activation_checkpoint.mode:
            yield f"recompute {mode}", {"activation_checkpoint.mode": mode}
    if parallel.offload == "none":
        yield "offload", {"parallel.offload": "cpu", "parallel.zero": 3}
    micro = config.train.micro_batch
    for size in reversed(dividing(config, (micro * 2, micro, micro // 2))):
        if size != micro:
            yield f"micro_batch {size}", {"train.micro_batch": size}
