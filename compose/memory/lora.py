"""The table [model.lora]: gives a model adapters of low rank, and its plan the styles that cut them.

This is done once, to the model on meta, before anything else reads model or plan. So training, proof,
dry run and planner see one model whose weights are frozen but for the adapters.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from compose.errors import ConfigError, NonNegative
from compose.memory.quantized import Base, QuantizedLinear, quantize, weight_shape
from compose.object_storage import AnyPath
from compose.ops.tensors import tied_names
from compose.parallel.lora_parallel import Adapter, AdapterParallel
from compose.parallel.name_patterns import inside, matching
from compose.parallel.tensor_parallel import HeadParallel

if TYPE_CHECKING:
    from compose.plan import Plan


ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Lora:
    """The table [model.lora]: adapters of low rank, trained in place of the model's weights."""

    rank: NonNegative = 0
    """Rank of the adapters; the model's own weights are then frozen. 0: no adapters, all is trained."""
    alpha: Annotated[float, Field(ge=0)] = 0.0
    """An adapter's output is multiplied by alpha / rank; 0 is 2 x rank."""
    rslora: bool = False
    """Multiply by alpha / rank^0.5 instead (rsLoRA)."""
    dora: bool = False
    """Train the norm of each row of an adapted weight too, as a vector of its own (DoRA)."""
    targets: Literal["all-linear"] | tuple[str, ...] = ()
    """Patterns, as in a plan, of the linear layers with adapters: ["layers.*.attention.w*"]. Or
    "all-linear": all nn.Linear but the output projection, routers and gates."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the elements of an adapter's input that a training step drops."""
    base: Base = "full"
    """How frozen weights that "all-linear" names are kept: full: in precision.param; int8, nf4: in 8 or
    4 bits (QLoRA), by torchao."""
    load: AnyPath = ""
    """Folder of peft with the adapters that a new run begins with; empty: drawn."""

    @property
    def scale(self) -> float:
        """The factor of an adapter's output (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.effective_alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def effective_alpha(self) -> float:
        """``alpha``, or what stands for 0."""
        return self.alpha or 2.0 * self.rank


CHILD = "lora"
"""The name of an adapter in its layer."""
MAGNITUDE = f".{CHILD}.magnitude"
"""The end of the name of DoRA's vector."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter, by its name in the model, is part of an adapter."""
    return name.endswith((f".{CHILD}.A", f".{CHILD}.B", MAGNITUDE))


def adapt(model: nn.Module, plan: "Plan", lora: Lora, tp: int = 1) -> "Plan":
    """Give each target of ``lora`` an adapter, and freeze all other parameters, in place.

    A model that has its adapters already gets no others. Adapters of layers that have values, which are
    not on meta, are filled: the model computes what it did before.
    """
    if not lora.rank:
        if lora != Lora():
            raise ConfigError("model.lora.rank: 0 adapts nothing; use at least 1, or no [model.lora]")
        return plan
    names = [name for name, _ in model.named_modules() if name]
    targets = find_targets(model, plan, lora, names)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if lora.base != "full":
        quantize(model, linear_layers(model, plan), lora.base)
    for name in targets:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if not hasattr(layer, CHILD):
            adapter = Adapter(layer, lora.rank, lora.scale, lora.dropout, lora.dora)
            if not layer.weight.is_meta:
                _fill(adapter, layer, f"{name}.{CHILD}")
            layer.add_module(CHILD, adapter)
            adapter.attach(layer)
        layer.get_submodule(CHILD).requires_grad_(True)
    return replace(plan, tensor={**plan.tensor, **_styles(plan, targets, names, tp)})


def find_targets(model: nn.Module, plan: "Plan", lora: Lora, names: Sequence[str]) -> list[str]:
    """Return the layers that get adapters, in the model's order."""
    key = "model.lora.targets"
    if not lora.targets:
        raise ConfigError(
            f'{key}: [] names no layer; give patterns of linear layers, as ["layers.*.attention.w*"],'
            ' or "all-linear"'
        )
    problems: list[str] = []
    results: set[str] = set()
    experts = {name for pattern in plan.expert for name in matching(pattern, names)[0]}
    weights = [name for name, _ in model.named_parameters() if inside(name, experts)]
    if lora.targets == ALL_LINEAR:
        results = set(linear_layers(model, plan))
        if not results:
            raise ConfigError(f'{key}: "all-linear" finds no nn.Linear before the output projection')
    for pattern in () if lora.targets == ALL_LINEAR else lora.targets:
        modules, near = matching(pattern, names)
        linear = {name for name in modules if _is_linear(model.get_submodule(name), name)}
        stacked = [n for n in modules if n in experts or inside(n, experts)]
        stacked += matching(pattern, weights)[0]
        if stacked:
            problems.append(
                f"{key}: pattern {pattern!r} names {stacked[0]}, whose weights are stacks of experts,"
                " and no nn.Linear; name layers of attention, or dense ones"
            )
        elif not modules:
            problems.append(f"{key}: pattern {pattern!r} matches no module{near}")
        elif not linear:
            kind = type(model.get_submodule(modules[0])).__name__
            inner = [n for n, m in model.get_submodule(modules[0]).named_modules() if _is_linear(m, n)]
            cure = f"; did you mean {pattern}.{inner[0]}?" if inner else ""
            problems.append(
                f"{key}: pattern {pattern!r} matches no nn.Linear: {modules[0]} is {kind}{cure}"
            )
        results |= linear
    if plan.output in results:
        problems.append(
            f"{key}: {plan.output} is the projection onto the vocabulary, which the loss may compute"
            " itself; name layers before it"
        )
    # A merged weight would be the embedding's too, which has no adapter.
    shared = {name.removesuffix(".weight") for group in tied_names(model) for name in group}
    if tied := sorted(results & shared - {plan.output}):
        problems.append(
            f"{key}: {tied[0]} shares its weight with another module, which an adapter would not"
            " change; name others"
        )
    small = {
        n: m
        for n in names
        if n in results and (m := model.get_submodule(n)) and lora.rank > min(weight_shape(m))
    }
    if small:
        name = min(small, key=lambda n: min(weight_shape(small[n])))
        rows, columns = weight_shape(small[name])
        problems.append(
            f"model.lora.rank: {lora.rank} is more than {name} has, which is {rows} x {columns};"
            f" nearest: {min(rows, columns)}"
        )
    if problems:
        raise ConfigError(*problems)
    return [name for name in names if name in results]


def linear_layers(model: nn.Module, plan: "Plan") -> list[str]:
    """Return every nn.Linear but the output projection and gates, which have one output.

    Routers and experts are of other classes. Where logits are capped, Plan.output does not name the
    projection; it is among the modules after the last layer.
    """
    ends = {plan.output, *(plan.pipeline.last if plan.pipeline else ())}
    linear = {name: m for name, m in model.named_modules() if _is_linear(m, name) and name not in ends}
    return [name for name, layer in linear.items() if weight_shape(layer)[0] > 1]


def _is_linear(module: nn.Module, name: str) -> bool:
    return bool(name) and type(module) in (nn.Linear, QuantizedLinear)


def _styles(
    plan: "Plan", targets: Sequence[str], names: Sequence[str], tp: int
) -> dict[str, ParallelStyle]:
    """Return the styles of the adapters, by patterns where the plan has them."""
    if not plan.tensor:
        return {}
    wanted, styles = set(targets), dict[str, ParallelStyle]()
    placed = [*plan.tensor.items(), *((pattern, None) for pattern in plan.replicate)]
    for pattern, style in placed:
        matched = matching(pattern, names)[0]
        here = [name for name in matched if name in wanted]
        if not here:
            continue
        whole = [pattern] if len(here) == len(matched) else here
        styles |= {f"{name}.{CHILD}": _style_of(here[0], style, tp) for name in whole}
    return styles


def _style_of(name: str, style: ParallelStyle | None, tp: int) -> AdapterParallel:
    if style is None:
        return AdapterParallel("nothing")
    if tp == 1 and not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return AdapterParallel("nothing")  # it is not used
    if isinstance(style, HeadParallel):
        shared = style.n_heads % tp != 0
        return AdapterParallel("heads", style.n_heads) if shared else AdapterParallel("rows")
    if isinstance(style, ColwiseParallel):
        return AdapterParallel("rows")
    if isinstance(style, RowwiseParallel):
        return AdapterParallel("columns")
    raise ConfigError(
        f"model.lora.targets: {name} has the style {type(style).__name__} under plan.tensor, from which"
        " no cut of an adapter follows; name other layers, or give it ColwiseParallel, RowwiseParallel"
        " or HeadParallel"
    )


@torch.no_grad()
def init_adapter(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a whole parameter of an adapter as peft does: A as nn.Linear's weight, B with zeros.

    A is uniform in +-1 / in_features^0.5 (He et al. 2015, arXiv:1502.01852, with a = 5^0.5). DoRA's
    vector follows the weights: ``compose.weights.fill_from_rows`` fills it.
    """
    if name.endswith(".A"):
        bound = tensor.shape[1] ** -0.5
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        tensor.zero_()


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row, (N,) of (N, D), in float32.

    In float64 a sum's order shows in no bit of the result, so it is that of every mesh.
    """
    return weight.double().norm(dim=1).float()


@torch.no_grad()
def _fill(adapter: Adapter, layer: nn.Linear, name: str) -> None:
    """Fill a new adapter of a layer with values; A follows from the name, as ranks must agree on it."""
    generator = torch.Generator(layer.weight.device).manual_seed(zlib.crc32(name.encode()))
    init_adapter(f"{name}.A", adapter.A, generator)
    init_adapter(f"{name}.B", adapter.B, generator)
    if adapter.magnitude is not None:
        kept = isinstance(layer, QuantizedLinear)
        adapter.magnitude.copy_(row_norms(layer.dequantized(torch.float32) if kept else layer.weight))
