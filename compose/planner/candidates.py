"""The compositions that the search may take, each with a quick estimate."""

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compose.config.tables import Config, value_of
from compose.parallel.mesh import AXES, Parallel, divisors
from compose.pipeline.schedules import ASYNCHRONOUS, ZERO_BUBBLE, stages_per_rank
from compose.planner.cluster import Cluster
from compose.planner.costs import for_ranks
from compose.planner.estimate import Estimate, Kinds, lack_of_host
from compose.planner.quick_estimate import MEMORY_ERROR, QuickEstimate, quick
from compose.planner.quick_memory import micro_batches
from compose.planner.quick_units import ModelShape, shape_of


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
    freed: Collection[str] = ()
    """Keys of FREED that the search may change."""
    cache: Path | None = None
    """The folder of records that were made before; None: none is used."""
    kinds: Kinds = ()
    """The kinds of device, of which ``cluster`` is the weakest; empty: all are of ``cluster``."""

    @property
    def node(self) -> int:
        """Ranks of a node."""
        return min(self.cluster.node, self.world_size)

    @property
    def devices(self) -> Kinds:
        """The kinds of device with the ranks of each, also if there is one."""
        return self.kinds or ((self.cluster, self.world_size),)

    @property
    def all_ranks(self) -> int:
        """Ranks of all islands."""
        return self.world_size * self.islands


@dataclass(frozen=True)
class Candidate:
    """One composition with its estimates."""

    config: Config
    keys: dict[str, Any]
    rough: QuickEstimate
    estimate: Estimate | None = None
    """From a record; None if none was made."""

    @property
    def recorded(self) -> Estimate:
        """The estimate of a candidate that was recorded."""
        assert self.estimate is not None
        return self.estimate

    @property
    def reserved(self) -> int:
        """Bytes that the allocator of the fullest rank has from the device."""
        if self.estimate is None:
            return round(self.rough.memory)
        return self.estimate.fullest.reserved


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
    step /= candidate.config.train.global_batch / space.config.train.global_batch
    too_large = size > room or bool(lack_of_node(space, candidate))
    if too_large or space.objective == "memory":
        return (too_large, False, size, step)
    return (False, size > TIGHT * room, step, size)


TIGHT = 0.95
"""The part of a device's capacity above which a candidate comes after those below: assumed, since the
predicted peak is within 1.3% and other programs and libraries hold memory too."""


def fits(space: Space, candidate: Candidate) -> bool:
    """Return whether the fullest rank of a candidate fits on a device, and its node in host memory.

    Host memory that is not known is taken to be enough.
    """
    return candidate.reserved <= capacity(space.cluster) and not lack_of_node(space, candidate)


def lack_of_node(space: Space, candidate: Candidate) -> str:
    """Return what host memory a candidate lacks, in words; empty if it lacks none."""
    needed = candidate.rough.host * space.node
    if candidate.estimate:
        needed = candidate.estimate.host_bytes
    return lack_of_host(for_ranks(space.cluster, space.world_size), needed)


DEGREES = (*(f"parallel.{axis}" for axis in AXES), "parallel.ep")
# The values that are tried of a free key. The degrees come from the number of ranks.
TRIED: dict[str, tuple[Any, ...]] = {
    "parallel.zero": (3, 2, 1),
    "activation_checkpoint.mode": ("none", "selective", "full"),
    "train.micro_batch": (1, 2, 4, 8, 16, 32, 64),
    "parallel.pp_schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
}
# More values, which are tried of the best few recorded.
REFINED: dict[str, tuple[Any, ...]] = {
    "activation_checkpoint.budget": (0.3, 0.5, 0.7, 0.9),
    "activation_checkpoint.every": (2, 3),
    "activation_checkpoint.segment": (2, 4),
    "train.loss_chunk": (2048,),
    "optimizer.offload": ("cpu",),
}
# Values of keys that change what a run learns, which are tried if they are freed. Those of global_batch
# are factors.
FREED: dict[str, tuple[Any, ...]] = {
    "train.global_batch": (0.5, 2, 4),
    "comm.weights": ("int8",),
    "comm.gradients": ("bfloat16", "int8"),
    "comm.activations": ("int8",),
}
# The few of all these values by which many meshes are ranked before they are looked at in full.
_FEW: dict[str, tuple[Any, ...]] = {
    "parallel.zero": (3, 1),
    "parallel.offload": ("none", "cpu"),
    "activation_checkpoint.mode": ("none", "full"),
    "train.micro_batch": (1, 4),
    "parallel.pp_schedule": ("1F1B",),
}
_MESHES = 100  # meshes that are looked at in full
_MOST_TP = 2  # nodes over which tp is tried
_LEAST_TOKENS = 2048  # of a sequence on each rank of cp


def candidates(
    space: Space, shape: ModelShape, offload: bool = False, anyway: bool = False
) -> Iterator[Candidate]:
    """Yield the candidates whose quick estimate says that they may fit; with ``anyway``: all.

    If meshes are many, the best by a few of their candidates are looked at in full. Where less
    recomputation surely fits, more of it is left out.
    """
    meshes = list(_meshes(space, shape))
    if len(meshes) > _MESHES:
        meshes = _promising(space, shape, meshes, offload, anyway)
    for degrees in meshes:
        yield from _of_mesh(space, shape, degrees, _free(space, degrees, offload), anyway)


def all_by_estimates(space: Space, shape: ModelShape) -> list[Candidate]:
    """Return the candidates that may fit, the best first; with offload, if none fits without it."""
    every = list(candidates(space, shape))
    if not any(fits(space, c) for c in every) and "parallel.offload" not in space.fixed:
        every = [*candidates(space, shape, offload=True), *every]
    if not every:  # a pipeline with fewer micro-batches than ranks is legal too
        most = capacity(space.cluster) * MEMORY_ERROR
        every = [c for c in candidates(space, shape, anyway=True) if c.rough.memory <= most]
    return sorted(every, key=lambda c: order(space, c))


def least_short(space: Space, shape: ModelShape) -> list[Candidate]:
    """Return the candidates if none may fit: first those that need least of the device."""
    ways = (False,) if "parallel.offload" in space.fixed else (False, True)
    every = [c for offload in ways for c in candidates(space, shape, offload, anyway=True)]
    return sorted(every, key=lambda c: c.rough.memory)


def _promising(
    space: Space, shape: ModelShape, meshes: list[dict[str, int]], offload: bool, anyway: bool
) -> list[dict[str, int]]:
    """Return the meshes with the best candidates among a few of each, plain FSDP and the textbook's."""
    ranked: list[tuple[Any, ...]] = []
    for number, degrees in enumerate(meshes):
        free = _free(space, degrees, offload)
        few = {key: [v for v in values if v in _FEW[key]] or values for key, values in free.items()}
        own = _of_mesh(space, shape, degrees, few, anyway)
        best = min((order(space, candidate) for candidate in own), default=None)
        if best:
            named = {key.partition(".")[2]: degree for key, degree in degrees.items()}
            known = known_as(space, replace(space.config.parallel, zero=3, offload="none", **named))
            ranked.append((not known, *best, number))
    return [meshes[number] for *_, number in heapq.nsmallest(_MESHES, ranked)]


PLAIN, TEXTBOOK, HYBRID, OFFLOADED = "plain FSDP", "textbook", "FSDP in nodes", "offloaded FSDP"


def known_as(space: Space, parallel: Parallel) -> str:
    """Return the name that readers know a mesh by, or "".

    It is FSDP over all ranks, its shards in host memory or not; the textbook's mesh, with tp within
    nodes, and pp and data parallel between them; or FSDP within nodes, and replicas between them.
    """
    node, shards, offloaded = space.cluster.node, parallel.dp_shard, parallel.offload != "none"
    if parallel.ep == 1 and shards == space.world_size and parallel.zero == 3:
        return OFFLOADED if offloaded else PLAIN
    if offloaded:
        return ""
    if parallel.tp == node and parallel.cp == parallel.dp_replicate == 1:
        return TEXTBOOK
    over = shards * parallel.dp_replicate == space.world_size and parallel.ep == 1
    return HYBRID if over and shards == node else ""


def _free(space: Space, degrees: dict[str, int], offload: bool) -> dict[str, tuple[Any, ...]]:
    """Return the values of the free keys that are tried with a mesh."""
    pp, replicas = degrees["parallel.pp"], degrees["parallel.dp_replicate"]
    free = {key: values for key, values in TRIED.items() if key not in space.fixed}
    if pp == 1:
        free.pop("parallel.pp_schedule", None)
    if "parallel.zero" in free:
        kinds, alone = space.config.precision, pp * degrees["parallel.tp"] == space.world_size
        if offload or replicas > 1:
            free["parallel.zero"] = (3,)
        elif alone and kinds.param == kinds.reduce == kinds.master:
            del free["parallel.zero"]  # no ranks share anything, and no weights are cast
    if offload or "parallel.offload" not in space.fixed:
        free["parallel.offload"] = ("cpu",) if offload else ("none",)
    return free


def _of_mesh(
    space: Space,
    shape: ModelShape,
    degrees: dict[str, int],
    free: Mapping[str, Sequence[Any]],
    anyway: bool,
) -> Iterator[Candidate]:
    config, room = space.config, capacity(space.cluster)
    most = math.inf if anyway else room * MEMORY_ERROR
    of_parallel = [key for key in free if key.startswith("parallel.")]
    modes = free.get("activation_checkpoint.mode", (config.activation_checkpoint.mode,))
    micros: Sequence[int] = (config.train.micro_batch,)
    if "train.micro_batch" in free:
        micros = dividing(with_keys(config, degrees), free["train.micro_batch"])
    for values in itertools.product(*(free[key] for key in of_parallel)):
        keys = {**degrees, **dict(zip(of_parallel, values, strict=True)), **_reset(space, free)}
        parallel = with_keys(config, keys)
        if parallel.parallel.offload == "cpu" and parallel.parallel.zero != 3:
            continue
        sure: set[int] = set()
        tried = modes
        if "parallel.pp_schedule" in free and parallel.parallel.pp_schedule in ZERO_BUBBLE:
            # Every group of weights would recompute its layer (docs/parallelism.md).
            tried = tuple(mode for mode in modes if mode == "none")
        for mode in tried:
            for micro in micros:
                named = {"activation_checkpoint.mode": mode, "train.micro_batch": micro}
                one = with_keys(parallel, named)
                if micro in sure or not _divides(one, shape, anyway):
                    continue
                rough = quick(shape, one, space.cluster, most)
                if math.isinf(rough.memory):  # another micro-batch may be possible
                    continue
                if rough.memory > most:
                    break  # a larger micro-batch takes more
                if rough.memory * MEMORY_ERROR <= room and space.objective != "memory":
                    sure.add(micro)
                yield Candidate(one, keys | {k: v for k, v in named.items() if k in free}, rough)


def dividing(config: Config, sizes: Iterable[int]) -> list[int]:
    """Return the micro-batches that divide a rank's samples; in place of others the next one below."""
    share = config.train.global_batch // max(1, config.parallel.data_ranks)
    whole = divisors(share) if share else []
    return sorted({max(n for n in whole if n <= size) for size in sizes if size and whole})


def _reset(space: Space, free: Collection[str]) -> dict[str, Any]:
    """Return the keys of the file's own mesh that other meshes do without."""
    keys: dict[str, Any] = {}
    if "parallel.pp_schedule" in free:
        keys["parallel.pp_virtual_stages"] = 0
    if space.config.parallel.pp_layers:
        keys["parallel.pp_layers"] = ()
    if space.config.parallel.zero3_reshard:
        keys["parallel.zero3_reshard"] = 0
    return {key: value for key, value in keys.items() if key not in space.fixed}


def _divides(config: Config, shape: ModelShape, few: bool = False) -> bool:
    """Return whether ranks divide the batch, and the pipeline has layers and micro-batches enough.

    With ``few``, a pipeline may have fewer micro-batches than ranks, which then wait for half of the
    time or more. ``pp_layers`` that the search must keep are of one number of stages.
    """
    parallel, count = config.parallel, micro_batches(config)
    if not count or parallel.pp == 1:
        return bool(count) and not parallel.pp_layers
    stages = parallel.pp * stages_per_rank(parallel.pp_schedule, parallel.pp_virtual_stages)
    if len(parallel.pp_layers) not in (0, stages):
        return False
    fewest = 1 if few or parallel.pp_schedule in ASYNCHRONOUS else parallel.pp
    return stages - 2 <= shape.count and count >= fewest


def candidate_of(space: Space, shape: ModelShape, config: Config) -> Candidate:
    """Return a config with known degrees as a candidate."""
    names = (*DEGREES, *TRIED, *REFINED, *FREED, "parallel.offload")
    values = {name: value_of(config, name) for name in names}
    keys = {n: v for n, v in values.items() if n in DEGREES or v != value_of(space.config, n)}
    return Candidate(config, keys, quick(shape, config, space.cluster))


def complexity(candidate: Candidate) -> int:
    """Return how many things a person has to understand of a composition, beyond plain FSDP."""
    config, parallel = candidate.config, candidate.config.parallel
    return sum(
        (
            sum(getattr(parallel, axis) > 1 for axis in (*AXES, "ep") if axis != "dp_shard"),
            parallel.pp > 1,  # its micro-batches, and its bubble
            parallel.pp > 1 and parallel.pp_schedule != "1F1B",
            2 * (parallel.offload != "none"),
            config.optimizer.offload != "none",
            config.activation_checkpoint.mode in ("budget", "every_k"),
            config.activation_checkpoint.segment > 1,
            config.train.loss_chunk > 0,
            sum(getattr(config.comm, key) != "off" for key in ("weights", "gradients", "activations")),
        )
    )


def with_keys(config: Config, keys: dict[str, Any]) -> Config:
    """Return ``config`` with other values of some keys, which nothing checks here."""
    tables: dict[str, dict[str, Any]] = {}
    for name, value in keys.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    changed = {table: replace(getattr(config, table), **values) for table, values in tables.items()}
    return replace(config, **changed)


def _meshes(space: Space, shape: ModelShape) -> Iterator[dict[str, int]]:
    """Yield the degrees that may be legal: cheap rules first, since there are many meshes."""
    config, cluster, fixed = space.config, space.cluster, set(space.fixed)
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
        return [d for d in divisors(space.world_size) if d <= upto]

    tried = map(allowed, ("pp", "dp_replicate", "cp", "tp"))
    for pp, dp_replicate, cp, tp in itertools.product(*tried):
        dp_shard, rest = divmod(space.world_size, pp * dp_replicate * cp * tp)
        if rest or dp_shard not in allowed("dp_shard"):
            continue
        # Replicas are for weights that are sharded over at least a node.
        few = dp_shard * cp * tp < cluster.node or dp_shard == 1
        if "parallel.dp_replicate" not in fixed and dp_replicate > 1 and few:
            continue
        inner = dp_replicate * dp_shard * cp * tp
        eps = [config.parallel.ep if "parallel.ep" in fixed else 1]
        if shape.stacks and "parallel.ep" not in fixed:
            eps = divisors(math.gcd(inner, *(stack[0] for stack in shape.stacks)))
        for ep in eps:
            yield dict(zip(DEGREES, (pp, dp_replicate, dp_shard, cp, tp, ep), strict=True))


def shape_for(space: Space) -> ModelShape:
    """Return the shape of the space's model."""
    return shape_of(space.config, space.cache)
