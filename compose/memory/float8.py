"""Float8: products of linear layers in 8-bit floats, by torchao.

Weights stay in their own type. Each operand is scaled and rounded when it is used (Micikevicius et al.
2022, arXiv:2209.05433).

    tensorwise     a scale for each tensor; what FSDP and tensor parallel gather is sent in 8 bits too
    rowwise        a scale for each row of an operand: an outlier harms its own row only
    rowwise_gw_hp  the same, and the weight's gradient in the type of forward and backward

A device without the instructions emulates them: it rounds operands as they do, and
its products are float32's.
"""

import functools
import importlib.util
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from compose.errors import ConfigError
from compose.ops.tensors import tied_names
from compose.parallel.local_parallel import by_dtensors
from compose.parallel.lora_parallel import Adapter, AdapterParallel
from compose.parallel.name_patterns import inside, parent

if TYPE_CHECKING:
    from compose.plan import ResolvedPlan


Recipe = Literal["off", "tensorwise", "rowwise", "rowwise_gw_hp"]
_TORCHAO = {"rowwise_gw_hp": "rowwise_with_gw_hp"}  # torchao's name, where it is another

# The kernels need rows of a multiple of 16 bytes.
_MULTIPLE = 16

# Layers with at most so many outputs and at most so many inputs are no faster in float8. The numbers
# are from torchao's measurements of forward and backward on an H100 (torchao/float8/README.md, and the
# thresholds of float8_linear_utils.py in torchao 0.18, which has no own ones for rowwise_gw_hp).
CROSSOVERS: dict[str, tuple[tuple[float, float], ...]] = {
    "tensorwise": ((1024, 4096),),
    "rowwise": ((2048, inf), (inf, 1024), (4096, 2048)),
    "rowwise_gw_hp": ((2048, inf), (inf, 1024), (4096, 2048)),
}


EXCEPTED = "in the plan's float8_except"
"""The reason of layers that the plan leaves out."""


@dataclass(frozen=True)
class Choice:
    """The linear layers of a plan that compute in float8, by name, and the others with the reason."""

    recipe: Recipe
    emulated: bool
    """Whether the device emulates float8."""
    converted: Mapping[str, int]
    """The layers by name, each with the number of outputs of a tp rank's part."""
    left: Mapping[str, str]
    """The other layers, with the reason."""

    def __str__(self) -> str:
        how = "emulated here, for no gain in speed" if self.emulated else "by the device"
        count = len(self.converted)
        text = f"float8 {self.recipe} ({how}): {count} of {count + len(self.left)} linear layers"
        reasons = Counter(self.left.values())
        return "; ".join([text, *(f"{count} left out: {reason}" for reason, count in reasons.items())])


NOTHING = Choice("off", False, {}, {})


def emulated(device_type: str) -> bool:
    """Tell whether this machine has no float8 products; CUDA devices have them from 8.9 on."""
    if device_type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9)


def select_layers(
    model: nn.Module,
    plan: "ResolvedPlan",
    tp: int,
    recipe: Recipe,
    device_type: str,
    has_float8: bool | None = None,
) -> Choice:
    """Choose which linear layers of a plan compute in float8.

    ``has_float8`` tells whether the devices have its products; None: as this machine's have.
    A layer is left out if the plan excepts it, or if a side of the part that each tp rank holds is no
    multiple of 16. Unless float8 is emulated, it is left out too if CROSSOVERS has that part as too
    small to gain.
    """
    if recipe == "off":
        return NOTHING
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "precision.float8: needs torchao; pip install 'dtensor-compose[float8]', or use"
            ' precision.float8 = "off"'
        )
    emulate = emulated(device_type) if has_float8 is None else not has_float8
    placed = dict(plan.tensor) if tp > 1 else {}
    excepted = set(plan.float8_except)
    converted: dict[str, int] = {}
    left: dict[str, str] = {}
    for name in plan.float8:
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            continue
        style = placed.get(name)
        # A layer whose heads are shared by ranks stays whole. Its part is then taken as smaller than it
        # is.
        rows, columns = module.out_features, module.in_features
        if isinstance(style, RowwiseParallel):
            columns = columns / tp
        elif style is not None:
            rows = rows / tp
        shape = f"{rows:g} x {columns:g}"
        if name in excepted or inside(name, excepted):
            left[name] = EXCEPTED
        elif rows % _MULTIPLE or columns % _MULTIPLE:
            left[name] = f"{shape} is no multiple of {_MULTIPLE}"
        elif not emulate and any(rows <= n and columns <= k for n, k in CROSSOVERS[recipe]):
            left[name] = f"{shape} is too small to gain"
        else:
            converted[name] = int(rows)
    return Choice(recipe, emulate, converted, left)


def apply_float8(
    model: nn.Module, choice: Choice, shards: int = 1, parts: Iterable[nn.Module] = ()
) -> None:
    """Make the chosen layers of a model torchao's Float8Linear, in place.

    FSDP cuts a weight over ``shards`` ranks. With tensorwise it gathers the weights of evenly cut
    layers in 8 bits: they become a subclass that does so (see ``local_tensor``). A tied weight stays
    one. ``parts`` are the model's stages, which have their own copies of the modules around layers.
    """
    if not choice.converted:
        return
    import_quietly()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    before = {name: m for name, m in model.named_modules() if name in choice.converted}
    base = Float8LinearConfig.from_recipe_name(_TORCHAO.get(choice.recipe, choice.recipe))
    # A weight's gradient is a sum over tokens, which may be any number.
    base = replace(base, emulate=choice.emulated, pad_inner_dim=not choice.emulated)
    _pad_where_needed()
    tied = {name for names in tied_names(model) for name in names}
    gathered = {
        name
        for name, rows in choice.converted.items()
        if choice.recipe == "tensorwise" and shards > 1 and rows % shards == 0
        if f"{name}.weight" not in tied
    }
    for names, gather in ((gathered, True), (choice.converted.keys() - gathered, False)):
        if not names:
            continue
        config = replace(base, enable_fsdp_float8_all_gather=gather)
        convert_to_float8_training(
            model, module_filter_fn=lambda _, name, names=names: name in names, config=config
        )
    # torchao's layers are new ones: stages get them too, and adapters go over to them.
    made = {old: model.get_submodule(name) for name, old in before.items()}
    for module in {module for part in parts for module in part.modules()}:
        held = module._modules
        held.update({name: made[child] for name, child in held.items() if child in made})
    for old, layer in made.items():
        for child, adapter in old.named_children():
            layer.add_module(child, adapter)
            if isinstance(adapter, Adapter):
                adapter.attach(layer)


@functools.cache
def _pad_where_needed() -> None:
    """Let torchao pad only operands with rows of an odd size; it would copy all others too."""
    from torchao.float8 import float8_ops

    pad = float8_ops.pad_tensor_for_matmul

    def pad_odd(tensor: Tensor, dims: int) -> Tensor:
        return pad(tensor, dims) if tensor.shape[dims] % _MULTIPLE else tensor

    float8_ops.pad_tensor_for_matmul = pad_odd


def float8_styles(
    styles: Iterable[tuple[str, ParallelStyle]], modules: Sequence[str], choice: Choice
) -> list[tuple[str, ParallelStyle]]:
    """Return the styles of tensor parallel with those of converted layers replaced by torchao's.

    torchao's styles send 8 bits: inputs in forward, and outputs' gradients in backward. A
    PrepareModuleInput of one of ``modules`` casts what it gathers, if all linear layers that are listed
    inside are converted. Scales of rows cannot be sent, so with other recipes than tensorwise PyTorch's
    styles stay as they are. In any case the styles of compose/parallel/local_parallel.py become
    PyTorch's.
    """
    if choice.recipe == "off":
        return list(styles)
    styles = by_dtensors(styles)
    if choice.recipe != "tensorwise":
        return styles
    if choice.emulated:
        send_as_bytes()
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    # An adapter reads the input of its layer too, and in its own type.
    adapted = {parent(n) for n, style in styles if isinstance(style, AdapterParallel)}
    listed, converted = set(modules), set(choice.converted) - adapted
    result: list[tuple[str, ParallelStyle]] = []
    for name, style in styles:
        lacking = any(other.startswith(f"{name}.") for other in {*choice.left, *adapted})
        if name in converted and type(style) in (ColwiseParallel, RowwiseParallel):
            column = type(style) is ColwiseParallel
            cast: Any = Float8ColwiseParallel if column else Float8RowwiseParallel
            (given,), (returned,) = style.input_layouts, style.output_layouts  # type: ignore[attr-defined]
            style = cast(
                input_layouts=given,
                output_layouts=returned,
                use_local_output=style.use_local_output,  # type: ignore[attr-defined]
            )
        elif name in listed and isinstance(style, PrepareModuleInput) and not lacking:
            style = PrepareFloat8ModuleInput(
                input_layouts=style.input_layouts,
                desired_input_layouts=style.desired_input_layouts,
                use_local_output=style.use_local_output,
            )
        result.append((name, style))
    return result


def send_as_bytes() -> None:
    """Make torchao gather 8-bit tensors as bytes, since gloo has no float8."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    def gather(operator: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        given = args[0]
        sent = given._data.contiguous().view(torch.uint8)
        data = operator(sent, *args[1:], **(kwargs or {})).view(given._data.dtype)
        config, role = given._linear_mm_config, given._gemm_input_role
        return Float8TrainingTensor(data, given._scale, given._orig_dtype, config, role)

    FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default] = gather


@contextmanager
def shared_scales(model: nn.Module, choice: Choice) -> Iterator[None]:
    """Let FSDP gather weights in 8 bits by scales that one collective has computed for all of them.

    Otherwise each gather computes its own scale, for each tp rank's part by itself. Weights must not
    change inside this context.
    """
    if choice.recipe != "tensorwise":
        yield
        return
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
    try:
        yield
    finally:
        for parameter in model.parameters():
            # torchao puts the scale here. to_local() makes a view, which has none.
            held: Any = getattr(parameter, "_local_tensor", parameter)
            if hasattr(held, "_precomputed_scale"):
                held._precomputed_scale = None


def import_quietly() -> None:
    """Import torchao without its warnings about unused kernels that this machine cannot load."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        import torchao.float8  # noqa: F401
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
