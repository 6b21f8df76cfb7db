"""Where a pipeline is cut: the layers of each stage, and the parts of a model that are left of it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compose.base.tied import tied_names
from compose.errors import ConfigError
from compose.plan import Pipeline


@dataclass(frozen=True)
class Stage:
    """One stage of this rank.

    module: the model without what other stages run; its modules are the model's own. absent: names of
    what it lacks.
    """

    index: int
    module: nn.Module
    absent: frozenset[str]


@dataclass(frozen=True)
class Tied:
    """One parameter of the whole model that several stages hold a copy of.

    name: the first it had in the whole model. holders: (stage, a name it has there), in their order.
    """

    name: str
    holders: tuple[tuple[int, str], ...]


def layer_names(model: nn.Module, pipeline: Pipeline) -> list[str]:
    """The layers' names within their container, in the order they run."""
    return [name for name, _ in model.get_submodule(pipeline.layers).named_children()]


def check_layers(layers: Sequence[int], stages: int, n_layers: int) -> None:
    """Raise ConfigError unless ``layers`` deals ``n_layers`` out to ``stages``, none idle.

    The first and the last stage may hold no layer, since they hold the model's ends.
    """
    shown = f"parallel.pp_layers: {list(layers)}"
    if len(layers) != stages:
        raise ConfigError(f"{shown} is for {len(layers)} stages; this pipeline has {stages}")
    if sum(layers) != n_layers:
        raise ConfigError(
            f"{shown} adds up to {sum(layers)} layers; the model has {n_layers}; nearest:"
            f" {_made_to_fit(layers, n_layers)}"
        )
    idle = [stage for stage in range(1, stages - 1) if layers[stage] == 0]
    if idle:
        raise ConfigError(f"{shown} leaves stage {idle[0]} nothing to do; give it a layer")


def check_stages(stages: int, pp: int, n_layers: int) -> None:
    """Raise ConfigError unless ``n_layers`` suffice for the ``stages`` of ``pp`` ranks.

    The first and the last can do with none.
    """
    if n_layers < stages - 2:
        per_rank = stages // pp
        each = f"{per_rank} stage{'s' if per_rank > 1 else ''}"
        most = (n_layers + 2) // per_rank
        raise ConfigError(
            f"parallel.pp: {pp} ranks of {each} need {stages - 2}"
            f" layers between the ends; the model has {n_layers}; use at most {most}"
        )


def _made_to_fit(layers: Sequence[int], n_layers: int) -> list[int]:
    fitted = list(layers)
    while sum(fitted) != n_layers:
        more = sum(fitted) < n_layers
        stage = fitted.index(min(fitted) if more else max(fitted))
        fitted[stage] += 1 if more else -1
    return fitted


def balanced(model: nn.Module, pipeline: Pipeline, stages: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each stage such that the slowest stage does the fewest FLOPs, at ``seq_len`` tokens.

    FLOPs are counted as the model runs on meta tensors: those of attention and of the output
    projection too; an embedding's look-up costs none. Raises ConfigError if there are fewer layers than
    ``stages`` need, or if the model's first argument is not a tensor of token ids (B, L).
    """
    check_stages(stages, stages, len(layer_names(model, pipeline)))
    first, layers, last = _costs(model, pipeline, seq_len)
    return _fewest_at_most(first, layers, last, stages)


def _costs(model: nn.Module, pipeline: Pipeline, seq_len: int) -> tuple[float, list[float], float]:
    """Forward FLOPs of one sample: before the layers, of each layer, behind them."""
    layers = [f"{pipeline.layers}.{name}" for name in layer_names(model, pipeline)]
    spent = dict.fromkeys([*pipeline.first, *layers, *pipeline.last], 0.0)
    counter = FlopCounterMode(display=False)

    def count(name: str, sign: int, *unused: Any) -> None:
        spent[name] += sign * counter.get_total_flops()

    handles = []
    for name in spent:
        module = model.get_submodule(name)
        handles += [
            module.register_forward_pre_hook(partial(count, name, -1)),
            module.register_forward_hook(partial(count, name, 1)),
        ]
    tensors = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    tokens = torch.empty((1, seq_len), dtype=torch.int64, device="meta")
    try:
        with counter, torch.no_grad():
            torch.func.functional_call(model, tensors, (tokens,), tie_weights=True)
    except Exception as error:
        raise ConfigError(
            f"parallel.pp_layers: cannot count the FLOPs of {type(model).__name__}"
            f" ({str(error).splitlines()[0]}); give the layers of each stage"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    first, last = (sum(spent[name] for name in part) for part in (pipeline.first, pipeline.last))
    return first, [spent[name] for name in layers], last


def _fewest_at_most(first: float, layers: Sequence[float], last: float, stages: int) -> tuple[int, ...]:
    """The cut with the smallest greatest cost, then with the smallest sum of squares."""
    n = len(layers)
    before = [0.0]
    for cost in layers:
        before.append(before[-1] + cost)
    # best[k][i]: (greatest, sum of squares, cut) of the first i layers on the first k stages.
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for stage in range(stages):
        ends = stage in (0, stages - 1)
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (greatest, squares, cut) in best[-1].items():
            stops = [n] if stage == stages - 1 else range(start + (not ends), n + 1)
            for stop in stops:
                cost = before[stop] - before[start]
                cost += (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
                option = (max(greatest, cost), squares + cost**2, (*cut, stop - start))
                if stop not in found or option < found[stop]:
                    found[stop] = option
        best.append(found)
    return best[-1][n][2]


def split(
    model: nn.Module, pipeline: Pipeline, layers: Sequence[int], mine: Sequence[int]
) -> tuple[list[Stage], list[Tied]]:
    """Take from ``model``, in place, what is not of the stages ``mine``; these, and what they share.

    What a stage lacks between its ends is replaced by the identity, so that the model's own forward,
    given the stream in place of its first argument, is the stage's.
    """
    names = layer_names(model, pipeline)
    last = len(layers) - 1
    stage_of = dict.fromkeys(pipeline.first, 0) | dict.fromkeys(pipeline.last, last)
    start = 0
    for stage, count in enumerate(layers):
        stage_of |= {f"{pipeline.layers}.{name}": stage for name in names[start : start + count]}
        start += count
    ties = _untie(model, stage_of)
    _remove(model, {name for name, stage in stage_of.items() if stage not in mine}, pipeline)
    stages = []
    for stage in mine:
        absent = frozenset(name for name, other in stage_of.items() if other != stage)
        module = _twin(model, "", {pipeline.layers, *map(_parent, stage_of)})
        _remove(module, absent, pipeline)
        stages.append(Stage(stage, module, absent))
    return stages, ties


def _untie(model: nn.Module, stage_of: dict[str, int]) -> list[Tied]:
    """Give each stage a copy of its own of what several hold."""
    ties = []
    for names in tied_names(model):
        by_stage: dict[int, list[str]] = {}
        for name in names:
            stage = next(s for module, s in stage_of.items() if name.startswith(module + "."))
            by_stage.setdefault(stage, []).append(name)
        if len(by_stage) == 1:
            continue
        shared = model.get_parameter(names[0])
        for stage, held in by_stage.items():
            if stage != min(by_stage):
                own = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
                for name in held:
                    path, _, leaf = name.rpartition(".")
                    model.get_submodule(path).register_parameter(leaf, own)
        holders = tuple((stage, held[0]) for stage, held in sorted(by_stage.items()))
        ties.append(Tied(names[0], holders))
    return ties


def _remove(model: nn.Module, names: set[str] | frozenset[str], pipeline: Pipeline) -> None:
    for name in names:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        if path == pipeline.layers:
            parent._modules.pop(leaf, None)
        else:
            parent._modules[leaf] = nn.Identity()


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _twin(module: nn.Module, path: str, changing: set[str]) -> nn.Module:
    """``module`` again, with the same children, but for those on the way to ``changing``."""
    twin = copy.copy(module)
    for key, value in vars(module).items():
        # Its hooks and children are its own; parameters and buffers stay one with the other's.
        if isinstance(value, dict) and key not in ("_parameters", "_buffers"):
            vars(twin)[key] = value.copy()
    for name, child in module.named_children():
        full = f"{path}{name}."
        if any(f"{other}.".startswith(full) for other in changing):
            twin._modules[name] = _twin(child, full, changing)
    return twin
