"""Dropout whose masks are the same on every mesh.

Whether an element is dropped is a hash of the step's seed and number, the module's name, and the
element's place: its sample in the global batch, its token in the whole sequence, its other indices.
There is no generator with a state. So ranks, micro-batches, stages and recomputation draw the masks of
one process, and so does a run that resumes.

The hash is one of 32 bits and two multiplications of "Hash Prospector" (C. Wellons 2018), for each dim.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from compose.errors import ConfigError

SAMPLES = "dropout_samples"
"""The name under which a batch holds the numbers of its samples, (B,)."""


@dataclass(frozen=True)
class DropoutKey:
    """The masks of one optimizer step."""

    step: int
    """The step's number. Each step of a run needs another one, or it drops the same elements."""
    seed: int = 0
    """The run's seed."""
    first: int = 0
    """The number of the mesh's first sample, if several meshes share a global batch."""


class Masks:
    """The masks of one model's dropout, as this rank draws them."""

    def __init__(
        self, model: nn.Module, parts: Sequence[nn.Module], names: Sequence[str], functions: str = "tie"
    ) -> None:
        """Tie each nn.Dropout of ``model``, which is run by calls of ``parts``, its stages.

        ``names`` are the dropouts of the whole model. ``functions`` says what to do with calls of
        torch.nn.functional.dropout: "tie", "refuse" or "ignore" them.
        """
        self.model, self.names, self.functions = model, names, functions
        self.step = ""
        self.samples: Tensor | None = None
        self.places: Tensor | None = None
        # Stages run copies of the modules around the layers.
        named = [pair for one in (*parts, model) for pair in one.named_modules()]
        self.name_of = {id(module): name for name, module in named}
        self.recurrent = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase)]
        self.tied: list[Any] = []
        self.functional = False
        for module in model.modules():
            if type(module) is nn.Dropout:
                module.__class__ = _Dropout
                cast(_Dropout, module).masks = self
                self._tie(module)
        for part in parts:
            part.forward = self._numbered(part.forward)

    def begin(
        self, key: DropoutKey | None, samples: Tensor, places: Tensor | None
    ) -> dict[str, Tensor]:
        """Begin a step, and return an entry for the batch; none if the model is in evaluation mode.

        ``samples`` (B,) are the numbers of this rank's samples in the batch of the mesh. ``places``
        (L,) are those of its tokens in the sequence, if it has a part. ConfigError: there is no key.
        """
        if not self.model.training:
            return {}
        _refuse_recurrent(self.recurrent)
        if key is None:
            raise ConfigError(
                f"dropout: {self.names[0]} would drop the same elements in every step; give"
                " forward_backward dropout=DropoutKey(step), or call model.eval()"
            )
        self.step = f"{key.seed}/{key.step}"
        for module in self.tied:
            module.dropout_key.fill_(self._hashed(module))
        self.places = None if places is None else places.to(torch.int32)
        return {SAMPLES: (samples + key.first).to(torch.int32)}

    def in_recomputation(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` with the micro-batch of now, for when it runs again in backward."""
        if torch.compiler.is_compiling():  # a graph keeps the numbers as its inputs
            return forward
        samples, calls = self.samples, {module: module.dropout_calls for module in self.tied}

        def again(*args: Any, **kwargs: Any) -> Any:
            self.samples = samples
            for module in self.tied:
                module.dropout_calls = calls.get(module, 0)
            with _FunctionalDropout(self) if self.functional else nullcontext():
                return forward(*args, **kwargs)

        return again

    def _numbered(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        unseen = [] if self.functions == "ignore" else [forward]

        @wraps(forward)
        def numbered(*args: Any, **kwargs: Any) -> Any:
            self.samples = kwargs.pop(SAMPLES, None)
            for module in self.tied:
                module.dropout_calls = 0
            # A first forward shows whether it calls the function. The mode costs time at each operator.
            first = forward in unseen and self.samples is not None
            if first:
                unseen.remove(forward)
            with _FunctionalDropout(self) if first or self.functional else nullcontext():
                return forward(*args, **kwargs)

        return numbered

    def _tie(self, module: Any) -> None:
        # On the host: a number for the kernels, and for a compiler a tensor, so no constant.
        module.dropout_key = torch.full((), self._hashed(module), dtype=torch.int32, device="cpu")
        module.dropout_calls = 0
        self.tied.append(module)

    def _hashed(self, module: nn.Module) -> int:
        digest = hashlib.sha256(f"{self.step}/{self.name_of[id(module)]}".encode()).digest()
        return int.from_bytes(digest[:4], "big", signed=True)

    def function(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Take the place of ``torch.nn.functional.dropout``."""
        if not training or p == 0:
            return x
        module, self.functional = self.caller(), True
        if module not in self.tied:
            self._tie(module)
        if self.functions == "refuse" and not isinstance(x, DTensor):
            raise ConfigError(
                f"dropout: with tp, {type(module).__name__} calls torch.nn.functional.dropout, and no"
                " style says on which part of a tensor; use nn.Dropout with a style of plan.tensor"
            )
        return self.drop(x, p, module)

    def caller(self) -> Any:
        """Return the innermost module of the model in whose forward this is called."""
        frame = sys._getframe(1)
        while frame is not None:
            for name in ("self", "module"):  # the latter is that of functions of transformers
                if id(frame.f_locals.get(name)) in self.name_of:
                    return frame.f_locals[name]
            frame = frame.f_back
        return self.model

    def drop(self, x: Tensor, p: float, module: Any) -> Tensor:
        """Return ``x`` (samples, ...) without the elements that ``module`` drops in this call."""
        key = module.dropout_key
        key = _mixed(key + module.dropout_calls) if module.dropout_calls else key
        if not torch.compiler.is_compiling():  # a graph that recomputes may not count
            if _in_own_checkpoint():
                name = self.name_of[id(module)] or type(module).__name__
                raise ConfigError(
                    f"dropout: {name} runs inside the model's own checkpoint, which would drop other"
                    " elements when it computes again; leave that out, and use"
                    " activation_checkpoint.mode"
                )
            module.dropout_calls += 1
        if p == 1:
            return x * 0.0
        local, first, shape = x, [0] * x.ndim, x.shape
        if isinstance(x, DTensor):
            if x.placements[0].is_partial():
                x = x.redistribute(placements=[Replicate()])
            local, mesh, placement = x.to_local(), x.device_mesh, cast(Any, x.placements[0])
            if placement.is_shard():
                dim = placement.dim % x.ndim
                first[dim] = mesh.get_local_rank() * -(-x.shape[dim] // mesh.size())
        elif part := getattr(module, "dropout_part", None):
            first[-1], whole = part
            shape = (*x.shape[:-1], whole)
        parts = zip(self._indices(shape, module), first, local.shape, strict=True)
        samples, *others = [index.narrow(0, start, size) for index, start, size in parts]
        hashed = samples ^ key
        for index in others:
            hashed = _mixed(hashed)[..., None] ^ _mixed(index)
        # int32 is from -2^31 to 2^31 - 1.
        kept = _half_mixed(hashed) >= round(p * 2**32) - 2**31
        dropped = torch.where(kept, local / (1 - p), 0.0)
        if not isinstance(x, DTensor):
            return dropped
        return DTensor.from_local(
            dropped, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )

    def _indices(self, shape: Sequence[int], module: nn.Module) -> list[Tensor]:
        """Return the indices along each dim of a tensor that is whole but for its samples and cp."""
        if self.samples is None:
            raise ConfigError(
                f"dropout: {self.name_of[id(module)]} runs in training mode outside of"
                " forward_backward, which numbers its samples; call model.eval()"
            )
        known = [self.samples] if self.places is None else [self.samples, self.places]
        if list(shape[: len(known)]) != [len(index) for index in known]:
            wanted = ", ".join(str(len(index)) for index in known)
            raise ConfigError(
                f"dropout: {self.name_of[id(module)]} takes {tuple(shape)}, and masks belong to samples"
                f"{' and tokens' if len(known) > 1 else ''}: it should take ({wanted}, ...); reshape"
                " its input, or use p = 0"
            )
        whole = partial(torch.arange, dtype=torch.int32, device=self.samples.device)
        return known + [whole(size) for size in shape[len(known) :]]


def _in_own_checkpoint() -> bool:
    """Return whether a checkpoint of the model itself runs this, and not ``in_recomputation``."""
    frame = sys._getframe(1)
    while frame is not None:
        place = frame.f_globals.get("__name__")
        if place == "torch.utils.checkpoint":
            return True
        if place == __name__ and frame.f_code.co_name in ("again", "numbered"):
            return False
        frame = frame.f_back
    return False


class _Dropout(nn.Dropout):
    masks: Masks

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        return self.masks.drop(input, self.p, self)


_RATES = {
    F.dropout: "p",
    F.multi_head_attention_forward: "dropout_p",
    F.dropout1d: "p",
    F.dropout2d: "p",
    F.dropout3d: "p",
    F.alpha_dropout: "p",
    F.feature_alpha_dropout: "p",
}
"""Functions that drop, and the parameters that are their rates. A mode is off inside of a function."""


def _rate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the rate with which a call of ``func`` drops; 0 if it drops nothing."""
    if func is F.scaled_dot_product_attention:
        return kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if func not in _RATES:
        return 0.0
    call = signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments[_RATES[func]] if call.arguments["training"] else 0.0


@dataclass
class _FunctionalDropout(TorchFunctionMode):
    """Ties ``torch.nn.functional.dropout``, and refuses functions that drop where no mask reaches."""

    masks: Masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.masks.function(*args, **kwargs)
        if _rate(func, args, kwargs):
            module = self.masks.caller()
            name = self.masks.name_of[id(module)]
            if func is F.scaled_dot_product_attention:
                raise ConfigError(
                    f"dropout: {name} drops inside scaled_dot_product_attention, which takes no mask;"
                    ' have it drop nothing, or use attn_implementation="eager" of transformers'
                )
            raise ConfigError(
                f"dropout: {f'{type(module).__name__} {name}'.rstrip()} calls {func.__name__} with a"
                " rate above 0, which takes no mask; use nn.Dropout, or a rate of 0"
            )
        return func(*args, **kwargs)


class _RefusedDropout(TorchFunctionMode):
    """Refuses dropout by a function, in a model whose masks nothing ties to samples."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _rate(func, args, kwargs):
            raise ConfigError(
                f"dropout: the model calls {func.__name__} with a rate above 0 and has no nn.Dropout,"
                " so ranks would not drop what one process does; use nn.Dropout, or a rate of 0"
            )
        return func(*args, **kwargs)


def _refuse_recurrent(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse recurrent networks that drop between their layers, since one kernel runs all layers."""
    for name, m in named:
        if isinstance(m, nn.RNNBase) and m.training and m.dropout > 0 and m.num_layers > 1:
            raise ConfigError(
                f"dropout: {f'{type(m).__name__} {name}'.rstrip()} drops inside its kernel, which takes"
                " no mask; give it dropout=0, or one module for each layer and nn.Dropout between"
            )


def refuse_functions(parts: Sequence[nn.Module]) -> None:
    """Refuse dropout by functions in the first forward in training mode of each part of a model."""

    def watched(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        seen = False

        @wraps(forward)
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            if seen or not part.training:
                return forward(*args, **kwargs)
            _refuse_recurrent(part.named_modules())
            with _RefusedDropout():  # the mode costs time at each operator
                result = forward(*args, **kwargs)
            seen = True
            return result

        return looked_at

    for part in parts:
        part.forward = watched(part, part.forward)


def dropouts(model: nn.Module) -> list[str]:
    """Return the names of the modules of ``model`` that drop elements."""
    return [name for name, m in model.named_modules() if type(m) is nn.Dropout and m.p > 0]


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of each element, int32."""
    x = _half_mixed(x)
    return x ^ (x >> 15 & 0x1FFFF)


def _half_mixed(x: Tensor) -> Tensor:
    """Return a hash whose upper bits alone are good; products wrap, and masks make shifts unsigned."""
    x = _times(x ^ (x >> 16).bitwise_and_(0xFFFF), 0x21F0AAAD)
    return _times(x ^ (x >> 15).bitwise_and_(0x1FFFF), 0x735A2D97)


def _times(x: Tensor, factor: int) -> Tensor:
    """Return the lower 32 bits of a product, int32."""
    if torch.compiler.is_compiling():
        # Inductor writes C++, where int32 may not overflow: g++ then drops other elements.
        return (x.long() * factor).int()
    return x.mul_(factor)
