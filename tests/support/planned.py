"""Candidates of the planner with figures that a test chooses, in place of records."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compose.config.tables import Config
from compose.config.toml import without_file
from compose.errors import ConfigError
from compose.planner.candidates import Candidate, Space, candidate_of, shape_for, with_keys
from compose.planner.cluster import load_cluster
from compose.planner.estimate import Estimate, RankPeak
from compose.planner.quick_estimate import quick

GIB = 2**30


def space_of(ranks: int = 16, cluster: str = "a100_40gb", pinned: Sequence[str] = ()) -> Space:
    """A space of a small Llama; ``pinned`` keys stay as they are."""
    keys = [("train.global_batch", "64"), ("train.seq_len", "64"), ("precision.param", "bfloat16")]
    return Space(without_file(keys), load_cluster(cluster), ranks, frozenset(pinned))


def recorded(
    space: Space,
    step: float,
    size: float,
    exposed: Mapping[str, float] | None = None,
    **keys: Any,
) -> Candidate:
    """A candidate of ``size`` GiB whose step takes ``step`` seconds; keys have __ for the dot."""
    degrees = dict.fromkeys(("pp", "dp_replicate", "cp", "tp", "ep"), 1)
    own = {name.removeprefix("parallel__"): n for name, n in keys.items() if name[10:] in degrees}
    shared = space.world_size
    for axis, n in own.items():
        shared //= 1 if axis == "ep" else n
    named = {f"parallel.{axis}": n for axis, n in {**degrees, **own, "dp_shard": shared}.items()}
    named |= {name.replace("__", "."): value for name, value in keys.items()}
    config = with_keys(space.config, named)
    waits = dict(exposed or {})
    peak = RankPeak(
        round(size * 0.9 * GIB), round(size * GIB), {"activations": round(size * 0.9 * GIB)}
    )
    train = config.train
    rate = train.global_batch * train.seq_len / step / space.world_size
    work = {"product": step - sum(waits.values()), "attention": 0.0, "memory": 0.0}
    estimate = Estimate([peak], step, rate, 0.5, 0.0, work, waits, [])
    return Candidate(config, named, quick(shape_for(space), config, space.cluster), estimate)


class Records:
    """Stands for record_all: each composition takes ``step`` seconds and ``size`` GiB."""

    def __init__(self, step: float = 1.0, size: float = 10.0, refused: str = "") -> None:
        self.step, self.size, self.refused = step, size, refused
        self.asked: list[tuple[Space, Config]] = []

    def __call__(self, space: Space, configs: Sequence[Config]) -> list[Candidate | ConfigError]:
        """Return a candidate for each config, or the refusal."""
        self.asked += [(space, config) for config in configs]
        if self.refused:
            return [ConfigError(self.refused) for _ in configs]
        base = recorded(space, self.step, self.size)
        shape = shape_for(space)
        return [replace(candidate_of(space, shape, c), estimate=base.estimate) for c in configs]
