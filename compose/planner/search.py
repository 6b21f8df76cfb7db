"""The search: every candidate gets a quick estimate, and the best of them get a record."""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compose.config import rules
from compose.config.job import make_job
from compose.config.tables import Config
from compose.errors import ConfigError
from compose.parallel.mesh import AXES, resolve_degrees
from compose.pipeline.schedules import stages_per_rank
from compose.planner.cluster import Cluster
from compose.planner.estimate import Estimate, estimate, stream_of
from compose.planner.quick_estimate import ModelShape, QuickEstimate, micro_batches, quick, shape_of


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


_OF_A_MESH = 2  # candidates of one mesh that are recorded before those of other meshes
_Traits = tuple[object, ...]


class RecordQueue:
    """The candidates that wait for a record.

    A quick estimate can be wrong by a factor, which those of one kind have in common: a schedule that
    holds more, a way to recompute. So each record corrects the estimates of all that are like it, and
    the next candidate is the best by corrected figures.
    """

    def __init__(self, space: Space, every: Sequence[Candidate]) -> None:
        self._space = space
        self._left = list(every)
        self._seen: dict[_Traits, int] = {}

    def next(self, recorded: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate whose turn it is."""
        if not self._left:
            return None
        factors: dict[_Traits, tuple[float, float]] = {}

        def place(number: int) -> tuple[object, ...]:
            candidate = self._left[number]
            kind = _kind(candidate)
            if kind not in factors:
                factors[kind] = _factors(kind, recorded)
            late = self._seen.get(_mesh(candidate), 0) >= _OF_A_MESH
            return (late, *order(self._space, candidate, *factors[kind]))

        candidate = self._left.pop(min(range(len(self._left)), key=place))
        mesh = _mesh(candidate)
        self._seen[mesh] = self._seen.get(mesh, 0) + 1
        return candidate


def _mesh(candidate: Candidate) -> _Traits:
    parallel = candidate.config.parallel
    return parallel.pp, parallel.cp, parallel.tp, parallel.ep, parallel.zero


def _kind(candidate: Candidate) -> _Traits:
    """Return what quick estimates that err alike have in common."""
    parallel, config = candidate.config.parallel, candidate.config
    return (
        parallel.pp_schedule if parallel.pp > 1 else "",
        config.activation_checkpoint.mode,
        parallel.zero,
        parallel.offload,
        config.train.micro_batch,
        parallel.cp > 1,
        parallel.tp > 1,
        parallel.ep > 1,
    )


def _factors(kind: _Traits, recorded: Sequence[Candidate]) -> tuple[float, float]:
    """Return what the records nearest in kind have over their quick estimates: in bytes, in seconds."""
    if not recorded:
        return 1.0, 1.0

    def equal(candidate: Candidate) -> int:
        return sum(a == b for a, b in zip(kind, _kind(candidate), strict=True))

    most = max(map(equal, recorded))
    near = [candidate for candidate in recorded if equal(candidate) == most]
    size = sum(math.log(c.reserved / c.rough.memory) for c in near) / len(near)
    steps = [(c.estimate.step_seconds, c.rough.step) for c in near if c.estimate]
    step = sum(math.log(one / other) for one, other in steps) / len(near)
    return math.exp(size), math.exp(step)


DEGREES = (*(f"parallel.{axis}" for axis in AXES), "parallel.ep")
# The values that are tried of a free key. The degrees come from the number of ranks.
TRIED: dict[str, tuple[Any, ...]] = {
    "parallel.zero": (3, 2, 1),
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "train.micro_batch": (1, 2, 4, 8),
    "parallel.pp_schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
}
# The memory that a rank needs at least, as a share of the quick estimate of its memory.
_SURELY = 0.75
_SHORT = 3  # candidates that are recorded if nothing fits
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
        if anyway or rough.memory * _SURELY <= room:
            yield Candidate(config, keys, rough)


def _pipelines(config: Config, shape: ModelShape) -> bool:
    """Return whether there are layers for all stages, and micro-batches for all ranks."""
    parallel = config.parallel
    stages = parallel.pp * stages_per_rank(parallel.pp_schedule, parallel.pp_virtual_stages)
    return stages - 2 <= shape.count and micro_batches(config) >= parallel.pp


def with_keys(config: Config, keys: dict[str, Any]) -> Config:
    """Return ``config`` with other values of some keys."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in keys.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    changed = {table: replace(getattr(config, table), **values) for table, values in tables.items()}
    return replace(config, **changed)


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


def own(space: Space) -> Candidate:
    """Return the candidate of the config's own mesh."""
    degrees = resolve_degrees(space.config.parallel, space.world_size)
    config = replace(space.config, parallel=degrees)
    keys = {key: getattr(degrees, key.partition(".")[2]) for key in DEGREES}
    job = rules.check(config, space.world_size)
    rough = quick(shape_for(space), job.config, space.cluster)
    return Candidate(job.config, keys, rough, estimate(job, space.cluster))


def search(
    space: Space,
    most: int = 12,
    seconds: float = 60.0,
    progress: Callable[[str], None] = lambda text: None,
    workers: int = 2,
) -> list[Candidate]:
    """Return the best candidates, the best first."""
    began, shape = time.monotonic(), shape_for(space)
    every = sorted(candidates(space, shape), key=lambda c: order(space, c))
    if not any(fits(space, c) for c in every) and "parallel.offload" not in space.fixed:
        every = sorted([*candidates(space, shape, offload=True), *every], key=lambda c: order(space, c))
    if not every:  # the least short ones tell by how much
        every = sorted(candidates(space, shape, anyway=True), key=lambda c: c.rough.memory)
        most = min(most, _SHORT)
    for axis in ("tp", "cp", "pp"):
        if axis not in shape.axes:
            progress(f"the plan of {space.config.model.name} cannot cut {axis}: it is left out")
    progress(f"{len(every)} candidates may fit; the best {most} are recorded")
    results: list[Candidate] = []
    refused: list[str] = []
    streams: dict[Any, Any] = {}
    try:
        turns = RecordQueue(space, every)
        while candidate := turns.next(results):
            if len(results) >= most or (results and time.monotonic() - began > seconds):
                break
            try:
                job = rules.check(candidate.config, space.world_size)
            except ConfigError as error:
                refused += error.problems
                continue
            stream, parallel = None, job.degrees
            train, precision = job.config.train, job.config.precision
            if parallel.pp > 1:
                # These decide what a pipeline's stages send.
                key = parallel.cp, parallel.tp, parallel.sequence, train.micro_batch, precision.param
                stream = streams[key] = streams.get(key) or stream_of(job, space.cluster)
            estimated = estimate(job, space.cluster, workers, stream)
            measured = replace(candidate, config=job.config, estimate=estimated)
            results.append(measured)
            progress(f"{len(results)}: {describe(measured)}")
    except KeyboardInterrupt:
        progress("interrupted: these are the best so far")
    if not results and not every:
        return []
    if not results:
        raise ConfigError(*dict.fromkeys(refused))
    return sorted(results, key=lambda c: order(space, c))


def fewest(
    space: Space, tokens: float, days: float, progress: Callable[[str], None] = lambda text: None
) -> tuple[Space, list[Candidate]]:
    """Find the fewest devices that hold the model and see enough tokens in time.

    The search tries 1, 2, 4 ... devices, up to the space's ranks. A number is searched if a quick
    estimate says that it may do. The first number that does by its record is taken.
    """
    needed, ranks = tokens / (days * 86400), 1
    shape, train = shape_for(space), space.config.train
    while ranks <= space.world_size:
        here = replace(space, world_size=ranks, objective="time")
        rough = [c for c in candidates(here, shape) if fits(here, c)]
        best = min((c.rough.step for c in rough), default=float("inf"))
        if train.global_batch * train.seq_len / best >= needed / 2:
            results = [c for c in search(here, most=4, progress=progress) if fits(here, c)]
            if results and results[0].estimate:
                rate = results[0].estimate.tokens_per_second_per_device * ranks
                progress(f"{ranks} devices: {rate:,.0f} tokens/s of {needed:,.0f}")
                if rate >= needed:
                    return here, results
        ranks *= 2
    return space, []


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
