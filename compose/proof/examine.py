"""A proof's questions to a model before anything is compared: one process, run twice and in float64.

A model that gives another result each time cannot be compared with anything. And ordinary code may mix
float32 into float64: a buffer in a product, a loss with a tensor of weights, a cast for a norm.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_map

from compose.errors import ConfigError


class Widened(TorchFunctionMode):
    """Within this mode float32 that meets float64 becomes float64, and casts to float32 do nothing.

    With ``widens`` false it only notes in ``narrowed`` which functions round float64 to fewer bits.
    """

    def __init__(self, widens: bool = True) -> None:
        super().__init__()
        self.widens = widens
        self.narrowed: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function on float64 where any of its arguments is float64."""
        named = dict(kwargs or {})
        given = [x for x in tree_flatten((args, named))[0] if isinstance(x, Tensor)]
        if not any(x.dtype == torch.float64 for x in given):
            return func(*args, **named)
        if self.widens:
            name = getattr(func, "__name__", "")
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            if not (name.endswith("_") and not name.endswith("__")):  # those work in place
                args, named = tree_map(_widened, (tuple(args), named))
        result = func(*args, **named)
        if any(x.requires_grad and x.dtype == torch.float64 for x in given):
            self.narrowed += [
                resolve_name(func) or str(func)
                for x in tree_flatten(result)[0]
                if isinstance(x, Tensor) and x.requires_grad and x.dtype.itemsize < 8
            ]
        return result


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.double()
    return torch.float64 if value is torch.float32 else value


def in_float64(widens: bool) -> AbstractContextManager[Any]:
    """Return the context in which a model computes in float64."""
    return Widened() if widens else nullcontext()


def float64_problem(train: Callable[[], object]) -> tuple[bool, str]:
    """Return whether a model needs ``Widened`` for float64, and why it cannot run in float64 at all.

    Args:
        train: Runs forward and backward on one process, in float64.

    Returns:
        The answer, and the reason; an empty one if it can.
    """
    reason = ""
    for widens in (False, True):
        mode = Widened(widens)
        try:
            with mode:
                train()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            continue
        if not mode.narrowed:
            return widens, ""
        reason = f"{mode.narrowed[0]} rounds float64 to fewer bits"
    return False, reason


def check_repeats(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Check that a model gives the same bits twice, and does not depend on how a batch is cut.

    Raises:
        ConfigError: A module draws random numbers, or keeps statistics of the batch.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ConfigError(
                f"model: {name or 'the model'} is {type(module).__name__}, whose result depends on"
                " which samples are in one forward, so that meshes differ; use GroupNorm or LayerNorm,"
                " or call its eval()"
            )
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        first, again = (_tensors(forward()) for _ in range(2))
        moved = [name for name, b in model.named_buffers() if not _same([before[name]], [b])]
        if moved:
            raise ConfigError(
                f"model: forward changes the buffer {moved[0]}, so that results depend on how a batch"
                " is cut into forwards; change it outside of forward"
            )
        if _same(first, again):
            return
        name = _first_random(model, forward)
    module = model.get_submodule(name)
    raise ConfigError(
        f"model: {name or 'the forward'} ({type(module).__name__}) is random: one process gives two"
        " results for the same batch, so that nothing can be compared; use nn.Dropout, whose masks do"
        " not depend on the mesh, or call its eval()"
    )


def _first_random(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Return the name of the first module that gives other outputs for the same inputs."""
    runs: list[list[tuple[str, list[Tensor], list[Tensor]]]] = [[], []]
    for run in runs:
        handles = []
        for name, module in model.named_modules():

            def see(_: Any, args: Any, kwargs: Any, out: Any, name: str = name, run: Any = run) -> None:
                run.append((name, _tensors((args, kwargs)), _tensors(out)))

            handles.append(module.register_forward_hook(see, with_kwargs=True))
        forward()
        for handle in handles:
            handle.remove()
    for (name, given, result), (_, given_again, result_again) in zip(*runs, strict=False):
        if _same(given, given_again) and not _same(result, result_again):
            return name
    return ""


def _tensors(tree: Any) -> list[Tensor]:
    """Return copies of all tensors in an output; that of transformers is a dict with attributes."""
    leaves = tree_flatten(dict(tree) if isinstance(tree, Mapping) else tree)[0]
    inner = [x for leaf in leaves for x in ([leaf] if isinstance(leaf, Tensor) else _held(leaf))]
    return [x.detach().clone() for x in inner]


def _held(leaf: Any) -> list[Tensor]:
    return [x for x in getattr(leaf, "__dict__", {}).values() if isinstance(x, Tensor)]


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(one, other, strict=True)
    )
