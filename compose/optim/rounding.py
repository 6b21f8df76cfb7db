"""Stochastic rounding to bfloat16, with random bits that depend on an element's place alone.

bfloat16 keeps 8 bits of a number. Rounding to nearest loses every step that is smaller than half of the
last bit. Stochastic rounding moves the number up or down with a probability that makes the result right
on average (Gupta et al. 2015, arXiv:1502.02551).

The bits of an element are a hash of the seed, the step, the parameter's name and the element's place in
the whole parameter. So they are the same on every rank that holds a copy, on every mesh, and in a
resumed run. Places are regions: boxes of the whole parameter, with one slice for each dim.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from compose.ops.operators import compiles, run_compiled
from compose.ops.tensors import local_tensor

Region = tuple[slice, ...]

# Elements worked on at once. An element-wise step needs float32 copies of these and no other memory.
CHUNK = 2**22


def local(tensor: Tensor | None) -> Tensor:
    """Return this rank's part of a tensor, with at least one dim; the part shares its memory."""
    assert tensor is not None
    part = local_tensor(tensor)
    return part if part.ndim else part.unsqueeze(0)


def lengths(region: Sequence[slice]) -> list[int]:
    """Return the length of each dim."""
    return [max(0, held.stop - held.start) for held in region]


def size(region: Sequence[slice]) -> int:
    """Return the number of elements."""
    return math.prod(lengths(region))


def within(region: Sequence[slice], outer: Sequence[slice]) -> Region:
    """Return the places of a region counted from where another region begins."""
    return tuple(
        slice(held.start - base.start, held.stop - base.start)
        for held, base in zip(region, outer, strict=True)
    )


def chunks(region: Sequence[slice]) -> Iterator[Region]:
    """Yield regions of at most ``CHUNK`` elements that together make up ``region``."""
    count = size(region)
    if count <= CHUNK:
        yield tuple(region)
        return
    dim, length = next((dim, length) for dim, length in enumerate(lengths(region)) if length > 1)
    each = max(1, CHUNK * length // count)
    for start in range(region[dim].start, region[dim].stop, each):
        part = slice(start, min(start + each, region[dim].stop))
        yield from chunks((*region[:dim], part, *region[dim + 1 :]))


def check_named(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless the parameters of an optimizer's groups have names, for random bits."""
    if not all("param_names" in group for group in groups):
        raise ValueError("the parameters have no names; give model.named_parameters()")


class FixedGroups(torch.optim.Optimizer):
    """An optimizer that deals with its parameters once, when it is made."""

    made = False

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is made; raise ValueError later: it would not be trained."""
        if self.made:
            raise ValueError(
                f"add_param_group: {type(self).__name__} would not train parameters that are added to"
                " it later; make a new one with all of them"
            )
        super().add_param_group(param_group)


def steps(update: Callable[[Any], None]) -> Callable[..., Any]:
    """Return ``update`` as an optimizer's step: a closure, if one is given, computes gradients first.

    The step returns the closure's loss, as torch's optimizers do. ``update`` runs without gradients.
    """

    @wraps(update)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            update(self)
        return loss

    return step


@torch.no_grad()
def load_state(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Fill the state of an optimizer, in its own types and memory, and its groups' options.

    torch's ``load_state_dict`` puts tensors of the parameters' types, on their device, in the place of
    the state, and other groups in the place of those that the optimizer knows. ValueError: the groups
    are others.
    """
    groups, given = optimizer.param_groups, state_dict["param_groups"]
    sizes, others = ([len(group["params"]) for group in each] for each in (groups, given))
    if sizes != others:
        raise ValueError(f"the state is of groups of {others} parameters, the optimizer has {sizes}")
    for group, options in zip(groups, given, strict=True):
        for number, parameter in zip(options["params"], group["params"], strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                local_tensor(optimizer.state_of(parameter)[key]).copy_(local_tensor(value))
        group.update({key: x for key, x in options.items() if key not in ("params", "param_names")})


def random_bits(
    seed: int, purpose: str, region: Sequence[slice], shape: Sequence[int], like: Tensor
) -> Tensor:
    """Return 32 random bits, int32, for each element in a region of a tensor."""
    device = like.device
    if like.dtype != torch.bfloat16:
        return torch.zeros((), dtype=torch.int32, device=device)
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    key = int.from_bytes(digest[:4], "big", signed=True)
    row = torch.zeros((1,) * len(shape), dtype=torch.int32, device=device)
    for dim, (held, size) in enumerate(zip(region[:-1], shape[:-1], strict=True)):
        place = torch.arange(held.start, held.stop, dtype=torch.int32, device=device)
        row = row * size + place.view([-1 if d == dim else 1 for d in range(len(shape))])
    last = torch.arange(region[-1].start, region[-1].stop, dtype=torch.int32, device=device)
    return _mix(_mix(row ^ key) + last)


def store(target: Tensor, value: Tensor, bits: Tensor) -> None:
    """Copy float32 values into a tensor, and round them if it is bfloat16."""
    if target.dtype == torch.bfloat16:
        if compiles(target) and target.is_contiguous() and value.shape == bits.shape:
            run_compiled(_round_into, *(x.flatten() for x in (target, value, bits)))
        else:
            _round_into(target, value, bits)
    else:
        target.copy_(value)


def _round_into(target: Tensor, value: Tensor, bits: Tensor) -> None:
    # The upper half of a float32 is a bfloat16. The lower half over 2^16 is the probability of rounding
    # up.
    raised = value.view(torch.int32) + (bits & 0xFFFF)
    rounded = (raised & ~0xFFFF).view(torch.float32)
    # CUDA's NaN has all bits but the sign: a sum with it would wrap around to zero.
    target.copy_(torch.where(value.isnan(), value, rounded))


def _mix(x: Tensor) -> Tensor:
    return run_compiled(_mix_, x.flatten()).view(x.shape) if compiles(x) else _mix_(x)


def _mix_(x: Tensor) -> Tensor:
    """Hash each int32 in place, by the 32-bit finalizer "lowbias32".

    It is from Wellons 2018 (nullprogram.com/blog/2018/07/31). Products wrap around; a shifted sign is
    masked off.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        x ^= (x >> shift) & (2 ** (32 - shift) - 1)
        x *= factor
    return x
