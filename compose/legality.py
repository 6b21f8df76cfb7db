"""What must hold between keys: one table of rules, each with its condition and its reason.

A rule's check returns None, or the problem with the nearest legal change. Checks run before any
process group is started; nothing else refuses a composition.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from compose.config import Config, Parallel
from compose.errors import ConfigError
from compose.mesh import resolve_degrees
from compose.plan import resolve
from compose.registry import build_model


@dataclass(frozen=True)
class Rule:
    """condition: what must hold. reason: why. check: the problem in one line, or None."""

    condition: str
    reason: str
    check: Callable[[Config, Parallel], str | None]


def _not_built(axis: str, technique: str) -> Callable[[Config, Parallel], str | None]:
    def check(config: Config, degrees: Parallel) -> str | None:
        degree = getattr(degrees, axis)
        if degree == 1:
            return None
        return f"parallel.{axis}: {degree} asks for {technique}, which is not built yet; use 1"

    return check


def _global_batch(config: Config, degrees: Parallel) -> str | None:
    train, ranks = config.train, degrees.dp_replicate * degrees.dp_shard
    unit = ranks * train.micro_batch
    if train.global_batch % unit == 0:
        return None
    nearest = max(1, round(train.global_batch / unit)) * unit
    return (
        f"train.global_batch: {train.global_batch} is not a multiple of dp_replicate x dp_shard x"
        f" train.micro_batch = {ranks} x {train.micro_batch} = {unit}; nearest: {nearest}"
        + _smaller_micro_batch(train.global_batch, ranks, train.micro_batch)
    )


def _smaller_micro_batch(global_batch: int, ranks: int, micro_batch: int) -> str:
    if global_batch % ranks:
        return ""
    share = global_batch // ranks
    best = max(size for size in range(1, micro_batch + 1) if share % size == 0)
    return f", or train.micro_batch = {best}"


def _sequence(config: Config, degrees: Parallel) -> str | None:
    seq_len, tp = config.train.seq_len, degrees.tp
    if not degrees.sequence or seq_len % tp == 0:
        return None
    nearest = max(1, round(seq_len / tp)) * tp
    return (
        f"train.seq_len: {seq_len} is not a multiple of parallel.tp {tp}, which parallel.sequence"
        f" needs; nearest: {nearest}, or parallel.sequence = false"
    )


NOT_BUILT = [
    Rule("ep = 1", "expert parallel is not built yet", _not_built("ep", "expert parallel")),
]
RULES = [
    Rule(
        "global_batch is a multiple of dp_replicate x dp_shard x micro_batch",
        "every rank runs the same number of equal micro-batches, since collectives must match",
        _global_batch,
    ),
    Rule(
        "with sequence, seq_len is a multiple of tp",
        "a local tensor carries no global shape, so every rank must hold an equal part",
        _sequence,
    ),
]


def check(config: Config, world_size: int) -> tuple[Config, list[str]]:
    """``config`` with its degrees resolved, and all the problems there are."""
    missing = [problem for rule in NOT_BUILT if (problem := rule.check(config, config.parallel))]
    if missing:
        return config, missing
    try:
        degrees = resolve_degrees(config.parallel, world_size)
    except ConfigError as error:
        return config, error.problems
    config = replace(config, parallel=degrees)
    problems = [problem for rule in RULES if (problem := rule.check(config, degrees))]
    try:
        model, plan = build_model(config)
        resolve(plan, model)
    except ConfigError as error:
        problems += error.problems
    return config, problems
