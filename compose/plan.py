"""The Plan: a model's whole parallelization as one value, and its strict resolution.

A pattern names modules by their path, as in ``layers.*.attention.wq``, where ``*`` matches any text
within one part. ``torch.distributed.tensor.parallel.parallelize_module`` has the same notation, and
takes ``Plan.tensor`` unchanged. It only warns about mistakes. Here a pattern that matches nothing is an
error, and so is a parameter that no pattern covers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor, nn, strided
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
)
from torch.utils._pytree import tree_leaves

from compose.errors import ConfigError, did_you_mean
from compose.ops.tensors import tied_names
from compose.parallel import local_parallel
from compose.parallel.name_patterns import around, inside, matching

# Styles that only lay out activations. They do not place the parameters of their module.
_ACTIVATION_STYLES = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)

_LISTS = (nn.ParameterList, nn.ParameterDict)
_CURE = "; give its module a style, or list it in replicate if its input is the same on all tp ranks"


@dataclass(frozen=True)
class Pipeline:
    """A description of how a model can be cut into stages.

    A stage runs the model's own forward, in which the identity replaces the modules of other stages. In
    later stages the first argument is the residual stream. It must have the same shape between all
    layers. Every stage also gets the model's other arguments.
    """

    first: Sequence[str]
    """Modules that only the stage before the layers runs."""
    layers: str
    """The container (ModuleList, ModuleDict) of the layers, which are divided among the stages.

    Its children run one after another, each on the stream that the previous one returned.
    """
    last: Sequence[str]
    """Modules that only the stage after the layers runs."""
    two_parts: bool = True
    """Whether backward can run in two parts, for inputs and then for weights. It cannot if a value that
    is computed from a weight alone enters the stream at several successive places."""
    whole_forward: bool = False
    """Whether each stage runs the whole forward on the token ids, and receives and sends the stream at
    its layers. Then forward may do more outside of modules: masks by a layer's number, positions that
    are added to the embedding, a cap of the logits. In later stages embeddings return zeros."""


@dataclass(frozen=True)
class Plan:
    """The parallelization of one model."""

    tensor: Mapping[str, ParallelStyle] = field(default_factory=dict)
    """Styles on the tp axis."""
    replicate: Sequence[str] = ()
    """Modules whose parameters stay whole on the tp axis.

    Their input must be the same on every tp rank. If ``tensor`` is not empty, ``tensor`` and
    ``replicate`` together must place every parameter.
    """
    context: Mapping[str, ParallelStyle] = field(default_factory=dict)
    """Styles on the cp axis."""
    shard: Sequence[str | Sequence[str]] = ()
    """FSDP units in order of use; a list of patterns is one unit of several modules.

    If it is empty, the model is one unit. Otherwise every parameter must belong to exactly one unit.
    """
    checkpoint: Sequence[str] = ()
    """Activation-checkpoint units."""
    compile: Sequence[str] = ()
    """Modules that torch.compile compiles, one graph each."""
    float8: Sequence[str] = ()
    """Linear layers that may compute in float8.

    It may also name modules whose PrepareModuleInput then casts what it gathers. Every layer that reads
    the input of such a module must be listed here too.
    """
    float8_except: Sequence[str] = ()
    """Modules that float8 leaves as they are, with everything inside them."""
    pipeline: Pipeline | None = None
    """How the model can be cut into stages; None if it cannot."""
    heads: tuple[int, int] | None = None
    """Query and key/value heads of each attention, which tp and ulysses divide."""
    expert: Mapping[str, ParallelStyle] = field(default_factory=dict)
    """Styles on the ep axis. They alone place the modules that they name; ``tensor`` does not."""
    output: str = ""
    """The projection onto the vocabulary (an nn.Linear without bias); empty if there is none.

    The model's forward returns its output unchanged. A loss in chunks replaces it.
    """

    def __str__(self) -> str:
        rows: list[tuple[str, str, str]] = []
        for part in _PRINTED:
            values = getattr(self, part)
            for key in values:
                style = repr(values[key]) if isinstance(values, Mapping) else ""
                rows.append((part, key if isinstance(key, str) else " + ".join(key), style))
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


_PRINTED = ("tensor", "replicate", "expert", "context", "shard", "checkpoint", "compile", "float8")
_WITH_STYLES = ("tensor", "context", "expert")
_NAMES = ("replicate", "checkpoint", "compile", "float8", "float8_except")


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan resolved for a model: module names replace the patterns."""

    tensor: list[tuple[str, ParallelStyle]]
    replicate: list[str]
    context: list[tuple[str, ParallelStyle]]
    expert: list[tuple[str, ParallelStyle]]
    shard: list[list[str]]
    checkpoint: list[str]
    compile: list[str]
    float8: list[str]
    float8_except: list[str]
    output: str
    pipeline: Pipeline | None
    heads: tuple[int, int] | None

    def without(self, modules: Iterable[str]) -> "ResolvedPlan":
        """Return what is left if ``modules``, with everything inside them, are on other ranks."""
        gone = frozenset(modules)

        def here(name: str) -> bool:
            return name not in gone and not inside(name, gone)

        units = [[name for name in unit if here(name)] for unit in self.shard]
        return replace(
            self,
            shard=[unit for unit in units if unit],
            **{part: [each for each in getattr(self, part) if here(each[0])] for part in _WITH_STYLES},
            **{part: [name for name in getattr(self, part) if here(name)] for part in _NAMES},
        )


def resolve(plan: Plan, model: nn.Module) -> ResolvedPlan:
    """Match every pattern of a plan with a model's modules; ConfigError has all problems."""
    names = [name for name, _ in model.named_modules() if name]
    problems: list[str] = []

    def match(part: str, pattern: str) -> list[str]:
        result, near = matching(pattern, names)
        if not result:
            problems.append(f"plan.{part}: pattern {pattern!r} matches no module{near}")
        return result

    def resolved(part: str) -> Any:
        patterns = getattr(plan, part)
        if part in _WITH_STYLES:
            return [(name, patterns[pattern]) for pattern in patterns for name in match(part, pattern)]
        if part in _NAMES:
            return [name for pattern in patterns for name in match(part, pattern)]
        if part == "output":
            return match(part, patterns) if patterns else []
        if part == "shard":
            units = []
            for unit in patterns:
                if isinstance(unit, str):
                    units += [[name] for name in match(part, unit)]
                else:
                    units.append([name for pattern in unit for name in match(part, pattern)])
            return units
        return patterns

    parts = {each.name: resolved(each.name) for each in fields(ResolvedPlan)}
    if problems:  # after a mistyped pattern, uncovered parameters are no news
        raise ConfigError(*problems)
    outputs = parts["output"]
    result = ResolvedPlan(**{**parts, "output": outputs[0] if outputs else ""})
    problems += _unfit_parameters(model)
    tensor, expert = [n for n, _ in result.tensor], [n for n, _ in result.expert]
    sharded = [n for unit in result.shard for n in unit]
    problems += _twice("tensor or replicate", tensor + result.replicate)
    problems += _twice("context", [n for n, _ in result.context])
    problems += _twice("expert", expert)
    problems += _twice("shard", sharded)
    if plan.tensor:
        placing = [n for n, s in result.tensor if not isinstance(s, _ACTIVATION_STYLES)]
        problems += _uncovered("tensor", _CURE, [*placing, *result.replicate, *expert], model)
        problems += _unfit_styles(result.tensor, model)
        problems += local_parallel.unfit(model, result.tensor)
    if plan.shard:
        problems += _uncovered("shard", "", sharded, model)
        problems += _unfit_units(result.shard, model)
    if plan.pipeline:
        problems += _unfit_pipeline(plan.pipeline, model)
    problems += _twice("float8", result.float8)
    problems += _unfit_float8(result.float8, result.float8_except, dict(result.tensor), model)
    problems += _unfit_output(outputs, model)
    if problems:
        raise ConfigError(*problems)
    return result


def _unfit_parameters(model: nn.Module) -> list[str]:
    """Return one line for each parameter that would lose something where it is copied or cut."""
    problems, names = [], dict[int, str]()
    for name, p in model.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            problems.append(
                f"parameter {name} has a hook, which its parts would not have; change the gradient"
                " after forward_backward, or by a torch.autograd.Function in forward"
            )
        kept = type(p) is nn.Parameter and not p.is_meta and p.numel()
        if kept and (first := names.setdefault(p.data_ptr(), name)) != name:
            problems.append(
                f"parameters {first} and {name} are two in one memory, which a copy separates; make"
                " them one parameter"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            problems.append(
                f"{name} has max_norm, by which forward changes its weight, and ranks would lose such"
                " changes; leave it out, and scale in forward what it returns"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            line = f"{name} has sparse gradients, which no sum over ranks takes; give it sparse=False"
            problems.append(line)
    named = [(name, p) for name, p in model.named_parameters() if type(p) is nn.Parameter]
    memory = {p.untyped_storage()._cdata: name for name, p in named}
    for path, module in model.named_modules():
        held = {**vars(module), "_parameters": None, "_buffers": None, **module._buffers}
        # Recurrent networks bring their lists up to date, and hooks what they compute.
        for key in held if not isinstance(module, nn.RNNBase) and not module._forward_pre_hooks else ():
            tensors = [x for x in tree_leaves(held[key]) if type(x) is Tensor and x.layout is strided]
            names = [memory.get(x.untyped_storage()._cdata) for x in tensors]
            problems += [
                f"parameter {name} and {f'{path}.{key}'.lstrip('.')} are in one memory, which a copy"
                " separates; compute that in forward"
                for name in names
                if name
            ][:1]
    return problems


def _unfit_styles(styles: Iterable[tuple[str, ParallelStyle]], model: nn.Module) -> list[str]:
    """Return one line for each module that PyTorch's column and row styles cannot cut."""
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
    """Return one line for each unit that ``fully_shard`` would refuse or silently handle wrongly."""
    problems = []
    unit_of = {name: unit for unit in units for name in unit}
    own = {id(model.get_submodule(name)): unit for name, unit in unit_of.items()}
    for name in unit_of:
        if isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
            problems.append(f"plan.shard: {name} is a list of modules; name them: {name}.*")
        if type(model.get_submodule(name)) in _LISTS:
            problems.append(
                f"plan.shard: {name} has no forward for which FSDP would gather it; name the module"
                " that uses it, or leave it out if that is the model"
            )
        outer = [other for other in unit_of if name.startswith(other + ".")]
        problems += [f"plan.shard: {name} is inside {other}, another unit" for other in outer]
    for names in tied_names(model):
        # A module of no unit belongs to the root's own. One that is there twice has two names.
        held = [[id(model.get_submodule(m)) for m in around(name)] for name in names]
        here = [next((own[module] for module in each if module in own), []) for each in held]
        if any(unit != here[0] for unit in here):
            problems.append(
                f"plan.shard: {' and '.join(names)} are one tied parameter;"
                " put their modules in one unit"
            )
    return problems


def _unfit_pipeline(pipeline: Pipeline, model: nn.Module) -> list[str]:
    """Return one line for each missing module, and each parameter that no stage would hold."""
    names = {name for name, _ in model.named_modules() if name}
    given = [*pipeline.first, pipeline.layers, *pipeline.last]
    problems = [
        f"plan.pipeline: there is no module {name!r}{did_you_mean(name, names)}"
        for name in given
        if name not in names
    ]
    if problems:
        return problems
    container = model.get_submodule(pipeline.layers)
    if len(container._modules) > len(list(container.children())):
        return [f"plan.pipeline: {pipeline.layers} holds a layer twice; make it two with tied weights"]
    if not list(container.children()):
        return [f"plan.pipeline: {pipeline.layers} holds no layers"]
    return [
        f"plan.pipeline: parameter {name} is of no stage; name its module in first or last"
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not inside(name, set(given))
    ]


def _unfit_float8(
    names: list[str], excepted: list[str], styles: Mapping[str, ParallelStyle], model: nn.Module
) -> list[str]:
    """Return one line for each module of float8 or float8_except that these cannot apply to."""
    problems = [
        f"plan.float8: {name} is {type(model.get_submodule(name)).__name__}: neither an nn.Linear nor a"
        " module with PrepareModuleInput"
        for name in names
        if not isinstance(model.get_submodule(name), nn.Linear)
        and not isinstance(styles.get(name), PrepareModuleInput)
    ]
    listed = {part for name in names for part in (name, *around(name))}
    return problems + [
        f"plan.float8_except: {name} has nothing that plan.float8 names"
        for name in excepted
        if name not in listed
    ]


def _unfit_output(names: list[str], model: nn.Module) -> list[str]:
    """Return one line if the output is several modules, or no nn.Linear without bias."""
    if len(names) > 1:
        return [f"plan.output: {' and '.join(names)} are several modules; name one"]
    modules = [model.get_submodule(name) for name in names]
    return [
        f"plan.output: {name} is no nn.Linear without bias: {module}"
        for name, module in zip(names, modules, strict=True)
        if not isinstance(module, nn.Linear) or module.bias is not None
    ]


def _twice(part: str, names: list[str]) -> list[str]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    return [f"plan.{part}: {name} is matched by more than one pattern" for name in repeated]


def _uncovered(part: str, also: str, modules: list[str], model: nn.Module) -> list[str]:
    """Return one line for each parameter that no module covers under any of its (tied) names."""
    within, covered = set(modules), set[int]()
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name.setdefault(id(parameter), name)
        if inside(name, within):
            covered.add(id(parameter))
    # No pattern can name the root's own parameters; FSDP's root unit takes them.
    holders = [model, *(m for m in model.children() if type(m) in _LISTS)] if part == "shard" else []
    own = {id(p) for holder in holders for p in holder.parameters(recurse=False)}
    lost = [name for key, name in first_name.items() if key not in covered | own]
    # Equal layers share one line.
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in lost)
    return [
        f"plan.{part}: parameter {name} is the model's own, which no pattern can name; move it into a"
        " module, and list that in replicate if its input is the same on all tp ranks"
        if "." not in name
        else f"plan.{part}: parameter {name}{f' ({count} of them)' if count > 1 else ''} is matched by"
        f" no pattern{also}"
        for name, count in counts.items()
    ]
