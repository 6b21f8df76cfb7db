"""Rules that say which optimizer trains a parameter, and how fast, by its name in the whole model."""

import math
from collections.abc import Callable, Sequence

from torch import nn

from compose.errors import ConfigError
from compose.ops.tensors import tied_names
from compose.optim.optimizers import OPTIMIZERS, Optimizer, ParameterRule
from compose.parallel.expert_parallel import routers
from compose.parallel.name_patterns import inside, matching
from compose.plan import Plan


def parameter_rules(model: nn.Module, plan: Plan, options: Optimizer) -> dict[str, ParameterRule]:
    """Return the rule of every parameter of the whole model, under each of its names if it is tied.

    Matrices are 2-dim weights, and 3-dim weights are stacks of them. In the modules of ``plan.expert``,
    which hold stacks alone, 2-dim weights are stacks of vectors. An optimizer of matrices trains those
    in the plan's layers (``plan.pipeline.layers``) except those of embeddings and of routers. AdamW
    trains everything else. Weights with two or more dims decay by ``optimizer.weight_decay``, but no
    stacks of vectors. Patterns are those of a Plan. They name parameters, or modules, which stands for
    all parameters inside. If several match, the last one counts.
    """
    names = {name: [name] for name, _ in model.named_parameters(remove_duplicate=False)}
    for tied in tied_names(model):
        names |= dict.fromkeys(tied, tied)
    known = [name for name, _ in model.named_modules() if name] + list(names)
    problems: list[str] = []

    def find(key: str, pattern: str) -> list[str]:
        """Return the parameters that ``pattern`` names, by all their names."""
        result, near = matching(pattern, known)
        if not result:
            problems.append(
                f"optimizer.{key}: pattern {pattern!r} matches no module or parameter{near}"
            )
        meant = [name for name in names if name in result or inside(name, set(result))]
        return [other for name in meant for other in names[name]]

    lr_scale = _scales("lr_scale", options.lr_scale, find, problems)
    decay = _scales("weight_decay_scale", options.weight_decay_scale, find, problems)
    excepted = {name for pattern in options.muon_except for name in find("muon_except", pattern)}
    stacks = {name for pattern in plan.expert for name in matching(pattern, known)[0]}
    vectors = {name for name in names if model.get_parameter(name).ndim < 2 + inside(name, stacks)}
    own = set(names)
    if OPTIMIZERS[options.name].of_matrices:
        own = _layers_matrices(model, plan, names) - excepted - vectors
        if not problems and not own:
            problems.append(
                f"optimizer.name: {options.name} trains matrices in layers, and finds none"
                ' (Plan.pipeline names the layers); use "adamw"'
            )
    if problems:
        raise ConfigError(*problems)
    return {
        name: ParameterRule(
            options.name if name in own else "adamw",
            lr_scale.get(name, 1.0),
            options.weight_decay * decay.get(name, float(name not in vectors)),
        )
        for name, _ in model.named_parameters(remove_duplicate=False)
    }


def _layers_matrices(model: nn.Module, plan: Plan, names: dict[str, list[str]]) -> set[str]:
    if plan.pipeline is None:
        return set()
    layers = {plan.pipeline.layers}
    others = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    # A router's gradient may be nearly zero. Muon would make a full step of its rounding errors.
    others |= set(routers(model))
    return {
        name
        for name, all_names in names.items()
        if model.get_parameter(name).ndim in (2, 3)
        and model.get_parameter(name).shape[-2] > 1  # else it is a vector
        and all(inside(one, layers) and not inside(one, others) for one in all_names)
    }


def _scales(
    key: str, given: Sequence[str], find: Callable[[str, str], list[str]], problems: list[str]
) -> dict[str, float]:
    """Return the number of each parameter that the lines "PATTERN=NUMBER" in ``given`` name."""
    scales: dict[str, float] = {}
    for text in given:
        pattern, _, number = text.rpartition("=")
        try:
            scale = float(number)
        except ValueError:
            scale = -1.0
        if not pattern or not 0 <= scale < math.inf:
            problems.append(
                f'optimizer.{key}: {text!r} is not "PATTERN=NUMBER", as "output=0.5", with a number'
                " of at least 0"
            )
            continue
        scales |= dict.fromkeys(find(key, pattern.strip()), scale)
    return scales
