"""What must hold between keys: one table of rules, each with its condition, its reason and a cure.

Checks run before any process group is started, and nothing else refuses a composition.
``docs/composition.md`` is printed from this table by ``python -m compose.legality``.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from compose.config import Config
from compose.errors import ConfigError
from compose.legality.degrees import DEGREES
from compose.legality.profile import PROFILE
from compose.legality.rule import Case, Rule, micro_batches
from compose.legality.step import STEP
from compose.mesh import AXES, resolve_degrees
from compose.pipeline_split import balanced
from compose.plan import resolve
from compose.registry import build_model, find_model
from compose.schedules import placement

__all__ = ["RULES", "Case", "Rule", "check", "meshes", "micro_batches", "problems_of", "survey"]

RULES = DEGREES + STEP + PROFILE


def problems_of(case: Case) -> list[tuple[Rule, str]]:
    """All that is wrong with a case, by the rule that says so."""
    found = []
    for rule in RULES:
        try:
            rule.check(case)
        except ConfigError as error:
            found += [(rule, problem) for problem in error.problems]
    return found


def check(config: Config, world_size: int) -> tuple[Config, list[str]]:
    """``config`` with its degrees and the layers of its stages resolved, and all the problems."""
    try:
        degrees = resolve_degrees(config.parallel, world_size)
    except ConfigError as error:
        return config, error.problems
    config = replace(config, parallel=degrees)
    try:
        model, plan = build_model(config)
        resolve(plan, model)
    except ConfigError as error:
        return config, error.problems
    case = Case(config, model, plan, world_size)
    problems = list(dict.fromkeys(problem for _, problem in problems_of(case)))
    if not problems and degrees.pp > 1 and not degrees.pp_layers:
        config, problems = _with_layers(case)
    return config, problems


def _with_layers(case: Case) -> tuple[Config, list[str]]:
    config, degrees = case.config, case.degrees
    stages = len(placement(degrees.pp_schedule, degrees.pp, degrees.pp_virtual_stages))
    assert case.plan.pipeline is not None
    try:
        layers = balanced(case.model, case.plan.pipeline, stages, config.train.seq_len)
    except ConfigError as error:
        return config, error.problems
    return replace(config, parallel=replace(degrees, pp_layers=layers)), []


def meshes(world_size: int) -> Iterator[dict[str, int]]:
    """Every assignment of degrees to the axes whose product is ``world_size``."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    for degrees in itertools.product(divisors, repeat=len(AXES)):
        if math.prod(degrees) == world_size:
            yield dict(zip(AXES, degrees, strict=True))


def survey(config: Config, world_size: int) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Each mesh of so many ranks, with what the table has against ``config`` on it."""
    folder = find_model(config.model.name)
    model, _ = build_model(config)
    for degrees in meshes(world_size):
        parallel = replace(config.parallel, **degrees)
        here = replace(config, parallel=parallel)
        try:
            plan = folder.plan(config.model.config, parallel)
        except ConfigError as error:
            yield degrees, error.problems
            continue
        yield degrees, [problem for _, problem in problems_of(Case(here, model, plan, world_size))]
