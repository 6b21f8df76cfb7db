"""The Plan: a model's whole parallelization as one value, and its strict resolution.

A pattern names modules by their path, with ``*`` for one part of it: ``layers.*.attention.wq``. It
is the notation of ``torch.distributed.tensor.parallel.parallelize_module``, which takes
``Plan.tensor`` unchanged; but where that only warns, here a pattern that matches nothing and a
parameter that no pattern covers are errors.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
)

from compose.base.tied import tied_names
from compose.errors import ConfigError, did_you_mean
from compose.parallel import local_parallel

# Styles that only lay out activations: a parameter under them is not placed by them.
_ACTIVATION_STYLES = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)

_CURE = "; give its module a style, or list it in replicate if its input is the same on all tp ranks"


@dataclass(frozen=True)
class Pipeline:
    """How a model can be cut into stages.

    layers: the container (ModuleList, ModuleDict) whose children run one after another, each on the
        stream that the one before returned; stages share them out. first: modules that only the stage
        before the layers runs. last: modules that only the stage behind them runs.

    A stage is the model's own forward with the missing modules replaced by the identity: its first
    argument is then the stream, of one shape between all layers, and the others come to every stage.
    """

    first: Sequence[str]
    layers: str
    last: Sequence[str]


@dataclass(frozen=True)
class Plan:
    """What is particular to one model's parallelization.

    tensor: styles on the tp axis.
    replicate: modules whose parameters stay whole on the tp axis and whose input is the same on
        every tp rank. With a non-empty ``tensor`` every parameter is placed by one of the two.
    shard: FSDP units in order of use; a list of patterns is one unit of several modules. Empty: the
        model is one unit. Otherwise every parameter belongs to exactly one unit.
    context: styles on the cp axis.
    checkpoint: activation-checkpoint units.
    compile: what torch.compile makes one graph of, each.
    float8: linear layers that may compute in float8; and modules whose PrepareModuleInput then casts
        what it gathers, all that reads it being listed here too.
    float8_except: modules that it leaves as they are, with all that is in them.
    pipeline: how the model can be cut into stages; None where it cannot.
    heads: query and key/value heads of each attention, which tp and ulysses divide.
    expert: styles on the ep axis. What they name is placed by them alone, not by ``tensor``.
    output: the projection onto the vocabulary (an nn.Linear without bias), of which forward returns the
        output as it is; empty where there is none. A loss in chunks acts there.
    """

    tensor: Mapping[str, ParallelStyle] = field(default_factory=dict)
    replicate: Sequence[str] = ()
    context: Mapping[str, ParallelStyle] = field(default_factory=dict)
    shard: Sequence[str | Sequence[str]] = ()
    checkpoint: Sequence[str] = ()
    compile: Sequence[str] = ()
    float8: Sequence[str] = ()
    float8_except: Sequence[str] = ()
    pipeline: Pipeline | None = None
    heads: tuple[int, int] | None = None
    expert: Mapping[str, ParallelStyle] = field(default_factory=dict)
    output: str = ""

    def __str__(self) -> str:
        rows = [("tensor", key, repr(style)) for key, style in self.tensor.items()]
        rows += [("replicate", key, "") for key in self.replicate]
        rows += [("expert", key, repr(style)) for key, style in self.expert.items()]
        rows += [("context", key, repr(style)) for key, style in self.context.items()]
        rows += [
            ("shard", unit if isinstance(unit, str) else " + ".join(unit), "") for unit in self.shard
        ]
        rows += [("checkpoint", key, "") for key in self.checkpoint]
        rows += [("compile", key, "") for key in self.compile]
        rows += [("float8", key, "") for key in self.float8]
        rows += [("", f"but not in {key}", "") for key in self.float8_except]
        if self.pipeline:
            ends = (self.pipeline.first, [f"{self.pipeline.layers}.*"], self.pipeline.last)
            rows.append(("pipeline", " | ".join(" + ".join(end) for end in ends), ""))
        if self.heads:
            rows.append(("heads", f"{self.heads[0]} query, {self.heads[1]} key/value", ""))
        if self.output:
            rows.append(("output", self.output, ""))
        wide = max(map(len, [*self.tensor, *self.expert, *self.context]), default=0)
        return "\n".join(f"{kind:<11}{key:<{wide + 2}}{style}".rstrip() for kind, key, style in rows)


@dataclass(frozen=True)
class Resolved:
    """A plan met with a model: module names in place of patterns."""

    tensor: list[tuple[str, ParallelStyle]]
    replicate: list[str]
    context: list[tuple[str, ParallelStyle]]
    shard: list[list[str]]
    checkpoint: list[str]
    compile: list[str]
    float8: list[str]
    float8_except: list[str]
    pipeline: Pipeline | None
    heads: tuple[int, int] | None
    expert: list[tuple[str, ParallelStyle]]
    output: str

    def without(self, modules: Iterable[str]) -> "Resolved":
        """What is left where ``modules``, and all that is in them, are elsewhere."""
        gone = frozenset(modules)

        def here(name: str) -> bool:
            return name not in gone and not inside(name, gone)

        units = [[name for name in unit if here(name)] for unit in self.shard]
        return Resolved(
            [(name, style) for name, style in self.tensor if here(name)],
            [name for name in self.replicate if here(name)],
            [(name, style) for name, style in self.context if here(name)],
            [unit for unit in units if unit],
            [name for name in self.checkpoint if here(name)],
            [name for name in self.compile if here(name)],
            [name for name in self.float8 if here(name)],
            [name for name in self.float8_except if here(name)],
            self.pipeline,
            self.heads,
            [(name, style) for name, style in self.expert if here(name)],
            self.output,
        )


def resolve(plan: Plan, model: nn.Module) -> Resolved:
    """Match every pattern of ``plan``. Raises ConfigError with all that is wrong, in one go."""
    names = [name for name, _ in model.named_modules() if name]
    problems: list[str] = []

    def match(part: str, pattern: str) -> list[str]:
        found, near = matching(pattern, names)
        if not found:
            problems.append(f"plan.{part}: pattern {pattern!r} matches no module{near}")
        return found

    tensor = [(n, s) for pattern, s in plan.tensor.items() for n in match("tensor", pattern)]
    replicate = [n for pattern in plan.replicate for n in match("replicate", pattern)]
    context = [(n, s) for pattern, s in plan.context.items() for n in match("context", pattern)]
    expert = [(n, s) for pattern, s in plan.expert.items() for n in match("expert", pattern)]
    shard: list[list[str]] = []
    for unit in plan.shard:
        if isinstance(unit, str):
            shard += [[name] for name in match("shard", unit)]
        else:
            shard.append([name for pattern in unit for name in match("shard", pattern)])
    checkpoint = [n for pattern in plan.checkpoint for n in match("checkpoint", pattern)]
    compiled = [n for pattern in plan.compile for n in match("compile", pattern)]
    float8 = [n for pattern in plan.float8 for n in match("float8", pattern)]
    excepted = [n for pattern in plan.float8_except for n in match("float8_except", pattern)]
    output = match("output", plan.output) if plan.output else []

    if problems:  # what a mistyped pattern leaves uncovered is no news
        raise ConfigError(*problems)
    problems += _twice("tensor or replicate", [n for n, _ in tensor] + replicate)
    problems += _twice("context", [n for n, _ in context])
    problems += _twice("expert", [n for n, _ in expert])
    problems += _twice("shard", [n for unit in shard for n in unit])
    if plan.tensor:
        placing = [n for n, s in tensor if not isinstance(s, _ACTIVATION_STYLES)] + replicate
        problems += _uncovered("tensor", _CURE, placing + [n for n, _ in expert], model)
        problems += _unfit_styles(tensor, model)
        problems += local_parallel.unfit(model, tensor)
    if plan.shard:
        problems += _uncovered("shard", "", [n for unit in shard for n in unit], model)
        problems += _unfit_units(shard, model)
    if plan.pipeline:
        problems += _unfit_pipeline(plan.pipeline, model)
    problems += _twice("float8", float8)
    problems += _unfit_float8(float8, excepted, dict(tensor), model)
    problems += _unfit_output(output, model)
    if problems:
        raise ConfigError(*problems)
    return Resolved(
        tensor,
        replicate,
        context,
        shard,
        checkpoint,
        compiled,
        float8,
        excepted,
        plan.pipeline,
        plan.heads,
        expert,
        output[0] if output else "",
    )


def matching(pattern: str, names: Sequence[str]) -> tuple[list[str], str]:
    """The names that ``pattern`` matches; if there are none, a hint at the nearest."""
    found = [name for name in names if _matches(name, pattern)]
    return found, "" if found else did_you_mean(pattern, _as_patterns(names, pattern))


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _as_patterns(names: Iterable[str], pattern: str) -> list[str]:
    """``names`` with ``*`` wherever ``pattern`` has it, so that the nearest can be suggested."""
    stars = [part == "*" for part in pattern.split(".")]
    starred = {
        ".".join("*" if star else part for star, part in zip(stars, name.split("."), strict=False))
        for name in names
        if name.count(".") + 1 == len(stars)
    }
    return sorted(starred | set(names))


def _unfit_styles(styles: Iterable[tuple[str, ParallelStyle]], model: nn.Module) -> list[str]:
    """One line per module that PyTorch's column and row styles cannot cut."""
    cut = (ColwiseParallel._apply, RowwiseParallel._apply)
    problems = []
    for name, style in styles:
        module = model.get_submodule(name)
        if type(style)._apply in cut and not isinstance(module, (nn.Linear, nn.Embedding)):
            problems.append(
                f"plan.tensor: {name} is {type(module).__name__}, and {type(style).__name__} cuts"
                " nn.Linear and nn.Embedding alone; list it in replicate, or give it another style"
            )
    return problems


def _unfit_units(units: list[list[str]], model: nn.Module) -> list[str]:
    """One line per unit that ``fully_shard`` would refuse, or would quietly do wrong."""
    problems = []
    unit_of = {name: unit for unit in units for name in unit}
    for name in unit_of:
        if isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
            problems.append(f"plan.shard: {name} is a list of modules; name them: {name}.*")
        outer = [other for other in unit_of if name.startswith(other + ".")]
        problems += [f"plan.shard: {name} is inside {other}, another unit" for other in outer]
    for names in tied_names(model):
        here = [unit_of[m] for name in names for m in unit_of if name.startswith(m + ".")]
        if any(unit is not here[0] for unit in here):
            problems.append(
                f"plan.shard: {' and '.join(names)} are one tied parameter;"
                " put their modules in one unit"
            )
    return problems


def _unfit_pipeline(pipeline: Pipeline, model: nn.Module) -> list[str]:
    """One line per module that is not there, and per parameter that no stage would hold."""
    names = {name for name, _ in model.named_modules() if name}
    given = [*pipeline.first, pipeline.layers, *pipeline.last]
    problems = [
        f"plan.pipeline: there is no module {name!r}{did_you_mean(name, names)}"
        for name in given
        if name not in names
    ]
    if problems:
        return problems
    if not list(model.get_submodule(pipeline.layers).children()):
        return [f"plan.pipeline: {pipeline.layers} holds no layers"]
    return [
        f"plan.pipeline: parameter {name} is of no stage; name its module in first or last"
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not inside(name, set(given))
    ]


def _unfit_float8(
    names: list[str], excepted: list[str], styles: Mapping[str, ParallelStyle], model: nn.Module
) -> list[str]:
    """One line per module that has no product to take in float8, and no input to cast; and per one
    that is excepted from nothing."""
    problems = [
        f"plan.float8: {name} is {type(model.get_submodule(name)).__name__}: neither an nn.Linear nor a"
        " module with PrepareModuleInput"
        for name in names
        if not isinstance(model.get_submodule(name), nn.Linear)
        and not isinstance(styles.get(name), PrepareModuleInput)
    ]
    listed = {part for name in names for part in (name, *_around(name))}
    return problems + [
        f"plan.float8_except: {name} has nothing that plan.float8 names"
        for name in excepted
        if name not in listed
    ]


def _unfit_output(names: list[str], model: nn.Module) -> list[str]:
    """One line if it is several modules, or not what a loss in chunks can stand in for."""
    if len(names) > 1:
        return [f"plan.output: {' and '.join(names)} are several modules; name one"]
    modules = [model.get_submodule(name) for name in names]
    return [
        f"plan.output: {name} is no nn.Linear without bias: {module}"
        for name, module in zip(names, modules, strict=True)
        if not isinstance(module, nn.Linear) or module.bias is not None
    ]


def inside(name: str, modules: Set[str]) -> bool:
    """Whether the module or parameter ``name`` is somewhere in one of ``modules``."""
    return any(outer in modules for outer in _around(name))


def _around(name: str) -> list[str]:
    """The names of the modules that ``name`` is in, but for the root."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _twice(part: str, names: list[str]) -> list[str]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    return [f"plan.{part}: {name} is matched by more than one pattern" for name in repeated]


def _uncovered(part: str, also: str, modules: list[str], model: nn.Module) -> list[str]:
    """One line per parameter that is in none of ``modules``, under any of its (tied) names."""
    within, covered = set(modules), set[int]()
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name.setdefault(id(parameter), name)
        if inside(name, within):
            covered.add(id(parameter))
    # What the root module itself owns no pattern can name; FSDP's root unit takes it.
    own = {id(p) for p in model.parameters(recurse=False)} if part == "shard" else set()
    lost = [name for key, name in first_name.items() if key not in covered | own]
    # Layers that are alike make one line.
    alike = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in lost)
    return [
        f"plan.{part}: parameter {name}{f' ({count} of them)' if count > 1 else ''} is matched by no"
        f" pattern{also}"
        for name, count in alike.items()
    ]
