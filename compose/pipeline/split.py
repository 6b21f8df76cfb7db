"""The cut of a pipeline: the layers of each stage, and what a rank keeps.

A stage is the model's own forward with the identity in place of what other stages hold; whether that
computes what the model does is tried before the first step (stand_ins.py).
"""

import copy
from collections.abc import Iterable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compose.errors import ConfigError
from compose.ops.batch import Sample, on_meta
from compose.ops.tensors import held_tensors, tied_names
from compose.parallel.name_patterns import parent
from compose.pipeline import stand_ins

if TYPE_CHECKING:
    from compose.plan import Pipeline


@dataclass(frozen=True)
class Stage:
    """One stage of this rank."""

    index: int
    module: nn.Module
    """The model without what other stages run; its modules are the model's own."""
    absent: frozenset[str]
    """The names of the modules that it lacks."""


_OF_MODULES = frozenset(vars(nn.Module())) | {"forward", "train", "_compiled_call_impl"}
"""Attributes of nn.Module itself, and those of which each stage has its own."""


class Attributes:
    """Brings what a loop sets on a model to its stages, which copy the modules around the layers."""

    def __init__(self, model: nn.Module, stages: Iterable[nn.Module]) -> None:
        """Take a model as it was cut."""
        whole = dict(model.named_modules())
        self.pairs = [
            (whole[name], part)
            for stage in stages
            for name, part in stage.named_modules()
            if name in whole and whole[name] is not part and type(whole[name]) is type(part)
        ]
        self.known = [_attributes(module) for module, _ in self.pairs]

    def bring(self) -> None:
        """Set on stages what is another object on the model than it was the last time."""
        for number, (module, part) in enumerate(self.pairs):
            now, before = _attributes(module), self.known[number]
            for name, value in now.items():
                if name not in before or before[name] is not value:
                    setattr(part, name, value)
            self.known[number] = now


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


@dataclass(frozen=True)
class Tied:
    """One parameter of the whole model that several stages hold a copy of."""

    name: str
    """Its first name in the whole model."""
    holders: tuple[tuple[int, str], ...]
    """(stage, a name it has there), in the order of stages."""


def layer_names(model: nn.Module, pipeline: "Pipeline") -> list[str]:
    """Return the layers' names within their container, in the order they run."""
    return [name for name, _ in model.get_submodule(pipeline.layers).named_children()]


def stages_of(model: nn.Module, pipeline: "Pipeline", layers: Sequence[int]) -> dict[str, int]:
    """Return the stage of every module that stages share out, by name."""
    ends = dict.fromkeys(pipeline.first, 0) | dict.fromkeys(pipeline.last, len(layers) - 1)
    names = [f"{pipeline.layers}.{name}" for name in layer_names(model, pipeline)]
    # Another rule asks whether they add up; these may be any numbers.
    numbers = (stage for stage, count in enumerate(layers) for _ in range(count))
    return ends | dict(zip(names, numbers, strict=False))


def check_layers(layers: Sequence[int], stages: int, n_layers: int) -> None:
    """Raise ConfigError unless ``layers`` gives each stage its layers and leaves no stage idle.

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
    """Raise ConfigError unless the model has enough layers for all stages.

    The first and the last stage need none.
    """
    if n_layers < stages - 2:
        per_rank = max(1, stages // pp)
        each = f"{per_rank} stage{'s' if per_rank > 1 else ''}"
        most = (n_layers + 2) // per_rank
        raise ConfigError(
            f"parallel.pp: {pp} ranks of {each} need {stages - 2}"
            f" layers between the ends; the model has {n_layers}; use at most {most}"
        )


def _made_to_fit(layers: Sequence[int], n_layers: int) -> list[int]:
    fitted = [min(count, n_layers) for count in layers]
    while sum(fitted) != n_layers:
        more = sum(fitted) < n_layers
        stage = fitted.index(min(fitted) if more else max(fitted))
        fitted[stage] += 1 if more else -1
    return fitted


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """Return what two layers have in common if they cost equally much."""
    modules = tuple(
        # Attention has options, and a window costs less than all keys.
        (name, type(module).__name__, getattr(module, "options", None))
        for name, module in layer.named_modules()
    )
    weights = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, weights


def balanced(
    model: nn.Module, pipeline: "Pipeline", stages: int, seq_len: Sample, speeds: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the layers of each stage such that the slowest stage is done soonest.

    FLOPs are counted as the model runs on meta tensors. They include those of attention and of the
    output projection. An embedding's look-up costs none. For a model that cannot run so, the weights of
    its matrices count in their place. A stage's sum is divided by its speed, if ``speeds`` are given.
    """
    first, layers, last = _costs(model, pipeline, seq_len)
    return fewest_at_most(first, layers, last, stages, speeds)


def _costs(model: nn.Module, pipeline: "Pipeline", sample: Sample) -> tuple[float, list[float], float]:
    """Return the forward FLOPs of one sample, or weights: before the layers, of each, after them."""
    layers = [f"{pipeline.layers}.{name}" for name in layer_names(model, pipeline)]
    spent = dict.fromkeys([*pipeline.first, *layers, *pipeline.last], 0.0)
    counter = FlopCounterMode(display=False)

    def count(name: str, sign: int, *unused: Any) -> None:
        spent[name] += sign * counter.get_total_flops()

    first_of: dict[Any, str] = {}
    equal = {name: first_of.setdefault(kind_of(model.get_submodule(name)), name) for name in layers}
    held = held_tensors(model).items()
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in held}
    try:
        with ExitStack() as hooks, counter, torch.no_grad():
            for name in spent:
                module = model.get_submodule(name)
                hooks.enter_context(module.register_forward_pre_hook(partial(count, name, -1)))
                hooks.enter_context(module.register_forward_hook(partial(count, name, 1)))
                if equal.get(name, name) != name:  # one of equal layers runs for all
                    own = {key: one for key, one in vars(module).items() if key == "forward"}
                    module.forward = lambda stream, *args, **kwargs: stream
                    hooks.callback(vars(module).update, own)
                    hooks.callback(delattr, module, "forward")
            torch.func.functional_call(model, tensors, *on_meta(sample), tie_weights=False)
    except Exception:  # not every model runs on meta, nor on any number of tokens
        spent = {name: _weights(model.get_submodule(name)) for name in spent}
    spent |= {name: spent[equal[name]] for name in layers}
    first, last = (sum(spent[name] for name in part) for part in (pipeline.first, pipeline.last))
    return first, [spent[name] for name in layers], last


def _weights(module: nn.Module) -> float:
    """Return the weights that a token is multiplied with; it looks one row up in an embedding."""
    parts = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
    return float(sum(p.numel() for part in parts for p in part.parameters(recurse=False) if p.ndim > 1))


def fewest_at_most(
    first: float, layers: Sequence[float], last: float, stages: int, speeds: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the cut with the smallest greatest cost, and among these the smallest sum of squares."""
    n = len(layers)
    before = [0.0]
    for cost in layers:
        before.append(before[-1] + cost)
    # best[k][i]: (greatest, sum of squares, cut) of the first i layers on the first k stages.
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for stage in range(stages):
        ends = stage in (0, stages - 1)
        results: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (greatest, squares, cut) in best[-1].items():
            stops = [n] if stage == stages - 1 else range(start + (not ends), n + 1)
            for stop in stops:
                cost = before[stop] - before[start]
                cost += (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
                cost /= speeds[stage] if speeds else 1.0
                option = (max(greatest, cost), squares + cost**2, (*cut, stop - start))
                if stop not in results or option < results[stop]:
                    results[stop] = option
        best.append(results)
    return best[-1][n][2]


def split(
    model: nn.Module, pipeline: "Pipeline", layers: Sequence[int], mine: Sequence[int]
) -> tuple[list[Stage], list[Tied], stand_ins.CutTrial]:
    """Remove from ``model``, in place, all that is not part of this rank's stages.

    The identity, which returns its first input, replaces what a stage lacks between its ends. So the
    model's own forward runs the stage, if it gets the stream in place of its first argument.
    """
    stage_of, last = stages_of(model, pipeline, layers), len(layers) - 1
    ties = _untie(model, stage_of)
    container = model.get_submodule(pipeline.layers)
    fixed = iter(
        [(key, stand_ins.FixedOutputLayer(layer)) for key, layer in container.named_children()]
    )
    by_stage = [dict(islice(fixed, count)) for count in layers]
    _remove(model, {name for name, stage in stage_of.items() if stage not in mine}, pipeline)

    def without(absent: Set[str], later: bool, hands_on: bool) -> nn.Module:
        module = _twin(model, "", {pipeline.layers, *map(parent, stage_of)})
        _remove(module, absent, pipeline)
        if pipeline.whole_forward:
            module.forward = stand_ins.stage_forward(module, pipeline.layers, later, hands_on)
        return module

    stages = []
    for stage in mine:
        absent = frozenset(name for name, other in stage_of.items() if other != stage)
        stages.append(Stage(stage, without(absent, stage > 0, stage < last), absent))
    return stages, ties, stand_ins.CutTrial(without(stage_of.keys(), True, True), pipeline, by_stage)


def _untie(model: nn.Module, stage_of: dict[str, int]) -> list[Tied]:
    """Give each stage its own copy of a parameter that several stages hold."""
    _give_own_modules(model, stage_of)
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


def _give_own_modules(model: nn.Module, stage_of: dict[str, int]) -> None:
    """Let stages hold copies of a module that several of them run, with the same parameters."""
    first: dict[int, int] = {}
    for part, stage in stage_of.items():
        inner = model.get_submodule(part).named_modules(prefix=part, remove_duplicate=False)
        for name, module in [*inner]:
            if first.setdefault(id(module), stage) != stage:
                path, _, leaf = name.rpartition(".")
                model.get_submodule(path)._modules[leaf] = _copy_of(module)


def _copy_of(module: nn.Module, shared: Sequence[str] = ()) -> nn.Module:
    """Return a module with the same parameters and children, in dicts of its own but for ``shared``."""
    own = copy.copy(module)
    copied = {k: v.copy() for k, v in vars(module).items() if isinstance(v, dict) and k not in shared}
    vars(own).update(copied)
    return own


def _remove(model: nn.Module, names: Set[str], pipeline: "Pipeline") -> None:
    for name in names:
        path, _, leaf = name.rpartition(".")
        holder = model.get_submodule(path)
        if path == pipeline.layers and not pipeline.whole_forward:
            holder._modules.pop(leaf, None)
            continue
        module, kind = holder.get_submodule(leaf), stand_ins.OtherStageModule
        if path == pipeline.layers:
            kind = stand_ins.OtherStageLayer
        elif pipeline.whole_forward and isinstance(module, (nn.Embedding, stand_ins.ZeroEmbedding)):
            holder._modules[leaf] = stand_ins.ZeroEmbedding(module.embedding_dim)
            continue
        # A new one each time: the loss replaces forward of the model's own.
        holder._modules[leaf] = kind(module)


def _twin(module: nn.Module, path: str, changing: set[str]) -> nn.Module:
    """Return a second ``module`` with the same children, except those on the way to ``changing``."""
    # It has its own hooks and children, and shares parameters and buffers with the original.
    if "forward" in vars(module):
        name = path.rstrip(".") or type(module).__name__
        raise ConfigError(
            f"plan.pipeline: the forward of {name} was set on that object, and stages run that of its"
            f" class; write it as a method of a subclass of {type(module).__name__}, or use parallel.pp"
            " = 1"
        )
    twin = _copy_of(module, ("_parameters", "_buffers"))
    for name, child in module.named_children():
        full = f"{path}{name}."
        if any(f"{other}.".startswith(full) for other in changing):
            twin._modules[name] = _twin(child, full, changing)
    return twin
