"""The compositions that the search may take, each with a quick estimate."""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compose.config.job import make_job
from compose.config.tables import Config
from compose.parallel.mesh import AXES
from compose.pipeline.schedules import stages_per_rank
from compose.planner.cluster import Cluster
from compose.planner.estimate import Estimate
from compose.planner.quick_estimate import (
    MEMORY_ERROR,
    ModelShape,
    QuickEstimate,
    micro_batches,
    quick,
    shape_of,
)


@dataclass(frozen=True)
class Space:
    """The keys that the search may change, and its objective."""

    config: Config
    """The config of the file and the command line."""
    cluster: Cluster
    world_size: int
    fixed: Collection[str] = ()
    """Keys that stay as they are."""
    objective: str = "time"
    """"time", "memory" or "devices"."""
    islands: int = 1
    """Islands of the job; all else here is of one of them."""
    cache: Path | None = None
    """The folder of records that were made before; None: none is used."""


@dataclass(frozen=True)
class Candidate:
    """One composition with its estimates."""

    config: Config
    keys: dict[str, Any]
    rough: QuickEstimate
    estimate: Estimate | None = None
    """From a record; None if none was made."""

    @property
    def reserved(self) -> int:
        """Bytes that the allocator of the fullest rank has from the device."""
        return (
            max(p.reserved for p in self.estimate.peaks) if self.estimate else round(self.rough.memory)
        )


def capacity(cluster: Cluster) -> int:
    """Return the bytes of a device that a process can allocate."""
    return cluster.device.memory - cluster.device.context - cluster.nccl_bytes


def order(
    space: Space, candidate: Candidate, size_factor: float = 1.0, step_factor: float = 1.0
) -> tuple[Any, ...]:
    """Return what candidates are sorted by: those that fit come first."""
    room, size = capacity(space.cluster), candidate.reserved * size_factor
    step = candidate.estimate.step_seconds if candidate.estimate else candidate.rough.step
    step *= step_factor
    too_large = size > room
    if too_large or space.objective == "memory":
        return (too_large, size, step)
    return (False, step, size)


def fits(space: Space, candidate: Candidate) -> bool:
    """Return whether the fullest rank of a candidate fits on a device."""
    return candidate.reserved <= capacity(space.cluster)


DEGREES = (*(f"parallel.{axis}" for axis in AXES), "parallel.ep")
# The values that are tried of a free key. The degrees come from the number of ranks.
TRIED: dict[str, tuple[Any, ...]] = {
    "parallel.zero": (3, 2, 1),
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "train.micro_batch": (1, 2, 4, 8),
    "parallel.pp_schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
}
_MOST_TP = 2  # nodes over which tp is tried
_LEAST_TOKENS = 2048  # of a sequence on each rank of cp


def candidates(
    space: Space, shape: ModelShape, offload: bool = False, anyway: bool = False
) -> Iterator[Candidate]:
    """Yield the candidates whose quick estimate says that they may fit."""
    room = capacity(space.cluster)
    for keys in _keys(space, shape):
        if offload:
            if keys.get("parallel.zero", space.config.parallel.zero) != 3:
                continue
            keys["parallel.offload"] = "cpu"
        config = with_keys(space.config, keys)
        if not micro_batches(config):
            continue
        if config.parallel.pp > 1 and not _pipelines(config, shape):
            continue
        rough = quick(shape, config, space.cluster)
        if anyway or rough.memory / MEMORY_ERROR <= room:
            yield Candidate(config, keys, rough)


def _pipelines(config: Config, shape: ModelShape) -> bool:
    """Return whether there are layers for all stages, and micro-batches for all ranks."""
    parallel = config.parallel
    stages = parallel.pp * stages_per_rank(parallel.pp_schedule, parallel.pp_virtual_stages)
    return stages - 2 <= shape.count and micro_batches(config) >= parallel.pp


def candidate_of(space: Space, shape: ModelShape, config: Config) -> Candidate:
    """Return a config with known degrees as a candidate."""
    keys = {}
    for name in (*DEGREES, *TRIED, "parallel.offload"):
        table, _, key = name.partition(".")
        value = getattr(getattr(config, table), key)
        if name in DEGREES or value != getattr(getattr(space.config, table), key):
            keys[name] = value
    return Candidate(config, keys, quick(shape, config, space.cluster))


def with_keys(config: Config, keys: dict[str, Any]) -> Config:
    """Return ``config`` with other values of some keys."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in keys.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    changed = {table: replace(getattr(config, table), **values) for table, values in tables.items()}
    return replace(config, **changed)


def value_of(config: Config, name: str) -> Any:
    """Return the value of a key "table.key"."""
    table, _, key = name.partition(".")
    return getattr(getattr(config, table), key)


def _keys(space: Space, shape: ModelShape) -> Iterator[dict[str, Any]]:
    config, fixed = space.config, set(space.fixed)
    for degrees in _meshes(space, shape):
        pp, data = degrees["parallel.pp"], degrees["parallel.dp_shard"] * degrees["parallel.cp"]
        data *= degrees["parallel.dp_replicate"]
        free = {
            key: values
            for key, values in TRIED.items()
            if key not in fixed
            and not (key == "parallel.pp_schedule" and pp == 1)
            and not (key == "parallel.zero" and data == 1)
        }
        for values in itertools.product(*free.values()):
            keys = {**degrees, **dict(zip(free, values, strict=True))}
            if keys.get("parallel.zero") in (1, 2) and degrees["parallel.dp_replicate"] > 1:
                continue
            if "parallel.pp_schedule" in keys and "parallel.pp_virtual_stages" not in fixed:
                keys["parallel.pp_virtual_stages"] = 0
            if "parallel.pp_layers" not in fixed:
                keys["parallel.pp_layers"] = ()
            if config.parallel.zero3_reshard and "parallel.zero3_reshard" not in fixed:
                keys["parallel.zero3_reshard"] = 0
            yield keys


def _meshes(space: Space, shape: ModelShape) -> Iterator[dict[str, int]]:
    """Yield the degrees that may be legal: cheap rules first, since there are many meshes."""
    config, cluster, fixed = space.config, space.cluster, set(space.fixed)
    routed = [experts for kind in shape.layers for experts, _, _ in kind.experts]
    most = {
        "tp": _MOST_TP * cluster.node,
        "cp": max(1, config.train.seq_len // _LEAST_TOKENS),
        "pp": shape.count + 2,
        "dp_replicate": config.train.global_batch,
        "dp_shard": config.train.global_batch,
    }

    def allowed(axis: str) -> list[int]:
        if axis in ("tp", "cp", "pp") and axis not in shape.axes:
            return [1]
        own = getattr(config.parallel, axis)
        if f"parallel.{axis}" in fixed and own != -1:
            return [own]
        upto = min(most[axis], space.world_size)
        return [d for d in range(1, upto + 1) if space.world_size % d == 0]

    for pp, dp_replicate, cp, tp in itertools.product(
        *map(allowed, ("pp", "dp_replicate", "cp", "tp"))
    ):
        dp_shard, rest = divmod(space.world_size, pp * dp_replicate * cp * tp)
        if rest or dp_shard not in allowed("dp_shard"):
            continue
        # Replicas are for weights that are sharded over at least a node.
        few = dp_shard * cp * tp < cluster.node or dp_shard == 1
        if "parallel.dp_replicate" not in fixed and dp_replicate > 1 and few:
            continue
        inner = dp_replicate * dp_shard * cp * tp
        eps = [1]
        if routed and "parallel.ep" in fixed:
            eps = [config.parallel.ep]
        elif routed:
            eps = [d for d in range(1, min(routed) + 1) if inner % d == 0 and min(routed) % d == 0]
            eps = [d for d in eps if d & (d - 1) == 0]
        for ep in eps:
            yield {
                "parallel.pp": pp,
                "parallel.dp_replicate": dp_replicate,
                "parallel.dp_shard": dp_shard,
                "parallel.cp": cp,
                "parallel.tp": tp,
                "parallel.ep": ep,
            }


def shape_for(space: Space) -> ModelShape:
    """Return the shape of the space's model."""
    one = with_keys(space.config, dict.fromkeys(DEGREES, 1))
    return shape_of(make_job(one, 1))


def describe(candidate: Candidate) -> str:
    """Return a candidate in one line."""
    parallel = candidate.config.parallel
    parts = [f"{a} {getattr(parallel, a)}" for a in (*AXES, "ep") if getattr(parallel, a) > 1]
    parts.append(f"zero {parallel.zero}")
    if parallel.pp > 1:
        parts.append(parallel.pp_schedule)
    parts.append(f"recompute {candidate.config.activation_checkpoint.mode}")
    parts.append(f"micro_batch {candidate.config.train.micro_batch}")
    text = ", ".join(parts)
    if candidate.estimate:
        text += f": {candidate.estimate.step_seconds:.3f} s, {candidate.reserved / 2**30:.1f} GiB"
    return text
