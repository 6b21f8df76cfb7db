"""The rules between keys: one table. Each rule has a condition, a reason and a cure.

The checks run before any process group is started. ``compose.apply`` checks the rules of the
composition again, for users who call it without a config. Nothing else refuses a composition.
``python -m compose.config.rules_page`` prints ``docs/composition.md`` from this table.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from compose.config import rule as setup
from compose.config.addons import brought
from compose.config.composition_rules import COMPOSITION
from compose.config.job import Job, make_job
from compose.config.models import find_model
from compose.config.rule import Rule
from compose.config.run_rules import RUN, check_adapters
from compose.config.tables import Config
from compose.errors import ConfigError
from compose.parallel.mesh import AXES, resolve_degrees
from compose.pipeline.schedules import placement
from compose.pipeline.split import balanced

__all__ = ["RULES", "Rule", "check", "meshes", "problems_of", "survey"]

_OF_RUN: list[Rule[Job]] = RUN + [rule for _, rules in brought("run_rules") for rule in rules()]
RULES: list[Rule[Any]] = [*COMPOSITION, *_OF_RUN]


def problems_of(job: Job) -> list[str]:
    """Return all problems of a job, one line each."""
    return [
        *setup.problems_of(COMPOSITION, job.setup),
        *setup.problems_of(_OF_RUN, job),
    ]


def check(config: Config, world_size: int) -> Job:
    """Work out the job of ``config``, and check it against the table.

    Args:
        config: The config. One degree may still be -1, and the layers of the stages may be unknown.
        world_size: Number of ranks.

    Returns:
        The job; the degrees and layers in its config are known.

    Raises:
        ConfigError: The config is not legal, with all problems.
    """
    degrees = resolve_degrees(config.parallel, world_size)
    job = make_job(replace(config, parallel=degrees), world_size)
    if problems := problems_of(job):
        raise ConfigError(*problems)
    if degrees.pp == 1:
        return job
    job = job if degrees.pp_layers else _with_layers(job)
    check_adapters(job)
    return job


def _with_layers(job: Job) -> Job:
    config, degrees = job.config, job.degrees
    stages = len(placement(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages))
    assert job.plan.pipeline is not None
    layers = balanced(job.model, job.plan.pipeline, stages, job.options.sample)
    return replace(job, config=replace(config, parallel=replace(degrees, pp_layers=layers)))


def meshes(world_size: int) -> Iterator[dict[str, int]]:
    """Yield every assignment of degrees to the axes whose product is ``world_size``."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    for degrees in itertools.product(divisors, repeat=len(AXES)):
        if math.prod(degrees) == world_size:
            yield dict(zip(AXES, degrees, strict=True))


def survey(config: Config, world_size: int) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Yield each mesh with its problems.

    Args:
        config: The config to check on each mesh.
        world_size: Number of ranks.

    Returns:
        An iterator over (degrees by axis, lines of problems).
    """
    model = find_model(config.model.name).on_meta(config.model.config)
    for degrees in meshes(world_size):
        try:
            parallel = replace(config.parallel, **degrees)
            job = make_job(replace(config, parallel=parallel), world_size, model)
        except ConfigError as error:
            yield degrees, error.problems
            continue
        yield degrees, problems_of(job)
