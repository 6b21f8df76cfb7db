"""A proof's questions to a model before anything is compared: one process, run twice and in float64.

A model that gives another result each time cannot be compared with anything. And ordinary code may mix
float32 into float64: a buffer in a product, a loss with a tensor of weights, a cast for a norm.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from compose.errors import ConfigError
from compose.ops.cross_entropy import LossFunction
from compose.proof.one_process import EXACT, Arithmetic, OneProcess, Widened
from compose.proof.optimizers import Named


def _check_sum(loss_function: LossFunction, output: object, targets: Tensor) -> None:
    """Raise ConfigError if the loss is a mean: only a sum doubles when all targets come twice."""
    if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != len(targets):
        return
    with torch.no_grad():
        once = float(loss_function(output, targets))
        twice = float(loss_function(torch.cat([output, output]), torch.cat([targets, targets])))
    if abs(twice - 2 * once) > 1e-2 * abs(once):
        ratio = twice / once if once else float("inf")
        raise ConfigError(
            f"loss_function: all targets twice give {ratio:.3g} times the loss, not 2: it has to return"
            ' the sum over targets, not their mean; with PyTorch\'s losses, reduction="sum"'
        )


def examine(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss_function: LossFunction,
    micro_batch: int | None,
) -> tuple[bool, str]:
    """Check that a model and a loss can be compared, and return whether they run in float64."""

    def run(kind: Arithmetic) -> tuple[OneProcess, Mapping[str, Tensor]]:
        one = OneProcess(
            model, kind, loss_function, _none, max_norm=0.0, micro_batch=1, loss_scale=1.0, tie=0.0
        )
        return one, one.begin(batch)

    one, given = run(Arithmetic())
    inputs = {name: value[:micro_batch] for name, value in given.items() if name != "targets"}
    check_repeats(one.model, lambda: one.forward(inputs))
    with torch.no_grad():
        _check_sum(loss_function, one.forward(inputs), batch["targets"][:micro_batch])
    exact, given = run(EXACT)
    sample = {name: value[:1] for name, value in given.items()}
    count = torch.ones((), device=batch["targets"].device)
    return float64_problem(lambda: exact.accumulate(sample, count))


def _none(arithmetic: Arithmetic, named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


def float64_problem(train: Callable[[], object]) -> tuple[bool, str]:
    """Return whether a model needs ``Widened`` for float64, and why it cannot run in float64 at all."""
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
    """Check that a model gives the same bits twice, and does not depend on how a batch is cut."""
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
