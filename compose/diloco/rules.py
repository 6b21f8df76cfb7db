"""Rules of islands: what [outer] needs of the mesh, the model and its own keys."""

import math

from compose.config.job import Job
from compose.config.rule import Rule, all_keys_read
from compose.diloco.options import ROW
from compose.errors import ConfigError


def _several(job: Job) -> None:
    every = job.config.outer.every
    if every and job.islands == 1:
        raise ConfigError(
            f"outer.every: {every} is for islands, the ranks of parallel.dp_replicate, which is 1; use"
            " parallel.dp_replicate = 2 or more, or outer.every = 0"
        )


def _fragments(job: Job) -> None:
    outer, layers = job.config.outer, len(job.resolved.checkpoint)
    if not outer.every:
        return
    count = math.ceil(layers / outer.fragments) if outer.fragments and layers else 1
    if outer.every % count:
        nearest = max(1, round(outer.every / count)) * count
        raise ConfigError(
            f"outer.every: {outer.every} is not a multiple of the {count} fragments that"
            f" outer.fragments = {outer.fragments} makes of {layers} layers; nearest: {nearest}"
        )
    if outer.delay >= outer.every // count:
        raise ConfigError(
            f"outer.delay: {outer.delay} is not less than the {outer.every // count} steps from one"
            f" exchange to the next (outer.every / fragments, of which there are {count}); nearest:"
            f" {outer.every // count - 1}"
        )


def _density(job: Job) -> None:
    density = job.config.outer.density
    kept = density * ROW
    if kept % 4:
        nearest = max(1, round(kept / 4)) * 4 / ROW
        raise ConfigError(
            f"outer.density: {density} is {kept:g} of {ROW} elements, and {ROW} are cut into fours;"
            f" nearest: {nearest!r}"
        )


ISLANDS: list[Rule[Job]] = [
    Rule(
        "with outer.every, dp_replicate is 2 or more",
        "its ranks are the islands, and one alone has none to exchange with",
        _several,
    ),
    Rule(
        "the other keys of [outer] go with outer.every, and density with top_k",
        "a key that changes nothing would look like one that works",
        all_keys_read("outer", lambda job: job.config.outer),
    ),
    Rule(
        "outer.every is a multiple of the fragments, and outer.delay is less than the steps between two"
        " exchanges",
        "fragments take turns, and one exchange ends before the next begins",
        _fragments,
    ),
    Rule(
        "outer.density is a multiple of 4 / 4,096",
        "what is sent of a row fills whole bytes",
        _density,
    ),
]
