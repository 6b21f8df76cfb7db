"""Data parallel of whole parameters: each rank's gradients are summed once a step, during backward.

It serves where nothing is sharded and nothing is cast. FSDP2 would copy every parameter into a buffer
and out of it, and every gradient twice. Here parameters stay what they are. A unit's gradients are
copied once, into the buffer that is sent; afterwards they are parts of it, as with
``gradient_as_bucket_view`` of DistributedDataParallel (Li et al. 2020, arXiv:2006.15704). The message
of a unit travels while the units before it run backward.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.profiler import record_function

from compose.errors import ConfigError
from compose.ops.tensors import local_tensor
from compose.parallel.mesh import BATCH_AXES

DATA_AXES = (*BATCH_AXES, "cp")
"""The axes over which gradients are summed."""

Reduce = Callable[..., Callable[[Tensor], None]]
"""Returns what sums a flat tensor of gradients, for a model, parameters by name and a group."""
USE_ALL = (
    "let each forward use every parameter, as by adding 0.0 * parameter.sum() to its output, or use"
    ' comm.gradients = "off"'
)


def has_shards(parameter: Tensor) -> bool:
    """Return whether FSDP can cut a parameter: one without dims, or without elements, stays whole."""
    return bool(parameter.ndim and parameter.numel())


class GradientSum:
    """The sum of one model's gradients over ranks, at the end of each step's backward.

    Gradients that it had before a step are sums already. A gradient that is a DTensor and a partial sum
    is completed too, whatever the groups are.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Sequence[str]],
        groups: Sequence[dist.ProcessGroup],
        reduce: Reduce | None = None,
        scalars: bool = False,
    ) -> None:
        """Take a stage, or the whole model, which may still be on meta.

        ``units`` are the names of each unit's modules, in order of use. Parameters of no unit form the
        last one. ``groups`` are the ranks with a copy of the parameters; if they are several, the sum
        goes over one after the other. If a gradient is None on one rank, it must be None on all.
        ``reduce`` makes another sum over the first group. With ``scalars`` only parameters that have no
        shards are summed, since FSDP shards all others.
        """
        modules = [[model.get_submodule(name) for name in unit] for unit in units]
        # Backward runs the units in this order.
        self.modules = [[model], *modules][::-1]
        self.model, self.groups, self.scalars = model, groups, scalars
        self.units: list[list[nn.Parameter]] = []
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.begun = self.last = False
        self.earlier: dict[nn.Parameter, Tensor] = {}
        self.missing: list[set[nn.Parameter]] = []  # those without a gradient yet, of each unit
        self.sent: list[tuple[list[nn.Parameter], Tensor, dist.Work | None]] = []
        self.reduce = partial(reduce, model, group=groups[0]) if reduce and groups else None
        self.reductions: dict[int, Callable[[Tensor], None]] = {}  # by unit
        self.known: dict[int, list[bool]] = {}  # which parameters of these units have gradients

    def begin(self, last: bool) -> None:
        """Prepare for a backward; after the ``last`` one of the step gradients are sums."""
        if not self.begun:
            self._hook()
            self.begun = True
            self.missing = [set(unit) for unit in self.units]
            for parameter in self._parameters():
                if parameter.grad is not None:
                    self.earlier[parameter], parameter.grad = parameter.grad, None
        self.last = last

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the sums; do nothing if no step has begun."""
        if not self.begun:
            return
        while len(self.sent) < len(self.units):
            self._send()
        for parameters, flat, work in self.sent:
            if work is not None:
                work.wait()
                _put(parameters, flat)
        _complete([p for p in self._parameters() if isinstance(p.grad, DTensor)])
        for parameter, earlier in self.earlier.items():
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self.sent, self.earlier = [], {}
        self.begun = self.last = False

    def _parameters(self) -> Iterator[nn.Parameter]:
        for unit in self.units:
            yield from unit

    def _hook(self) -> None:
        """Watch the parameters, which are new objects after they were on meta."""
        seen: set[nn.Parameter] = set()
        units = []
        for modules in self.modules:
            result = dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad)
            units.append([p for p in result if p not in seen and not (self.scalars and has_shards(p))])
            seen |= set(result)
        units = [unit for unit in units if unit]
        if [list(map(id, unit)) for unit in units] == [list(map(id, unit)) for unit in self.units]:
            return
        for handle in self.handles:
            handle.remove()
        self.units = units
        self.handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, number))
            for number, unit in enumerate(units)
            for parameter in unit
        ]

    @torch.no_grad()
    def _ready(self, number: int, parameter: Tensor) -> None:
        if not (self.begun and self.last):
            return
        if number < len(self.sent):
            raise ConfigError(
                "model: a backward adds to a gradient again after it was complete, as checkpoint does"
                " with use_reentrant=True for a module that runs twice; use use_reentrant=False"
            )
        self.missing[number].discard(cast(nn.Parameter, parameter))
        # All ranks have to send in one order.
        while len(self.sent) < len(self.units) and not self.missing[len(self.sent)]:
            self._send()

    def _send(self) -> None:
        number, flat, work = len(self.sent), torch.empty(0), None
        parameters = [p for p in self.units[number] if p.grad is not None]
        if self.groups and parameters:
            with record_function("compose::sum_gradients"):
                flat = _flat(parameters)
                if self.reduce:
                    here = [p.grad is not None for p in self.units[number]]
                    names = {} if here == self.known.get(number) else _names(self.model)
                    if number not in self.reductions:
                        self.known[number] = here
                        self.reductions[number] = self.reduce({names[p]: p for p in parameters})
                    elif names:
                        pairs = zip(self.units[number], here, self.known[number], strict=True)
                        raise ConfigError(
                            f"model: {next(names[p] for p, now, was in pairs if now != was)} has a"
                            " gradient in some steps alone, and comm.gradients codes those of a unit"
                            f" together; {USE_ALL}"
                        )
                    self.reductions[number](flat)
                    _put(parameters, flat)
                else:
                    for group in self.groups[:-1]:
                        dist.all_reduce(flat, group=group)
                    work = dist.all_reduce(flat, group=self.groups[-1], async_op=True)
        self.sent.append((parameters, flat, work))


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients in one buffer (N,)."""
    parts = [local_tensor(p.grad).reshape(-1) for p in parameters if p.grad is not None]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _put(parameters: Sequence[nn.Parameter], flat: Tensor, complete: bool = False) -> None:
    """Make the parts of a buffer the gradients; ``complete`` ones are placed as their parameters."""
    sizes = [local_tensor(p.grad).numel() for p in parameters if p.grad is not None]
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        gradient, new = parameter.grad, part.view(local_tensor(parameter).shape)
        if isinstance(gradient, DTensor):
            placed: Any = parameter if complete else gradient
            form = {"shape": parameter.shape, "stride": parameter.stride()}
            new = DTensor.from_local(
                new, gradient.device_mesh, placed.placements, run_check=False, **form
            )
        parameter.grad = new


def _complete(parameters: Sequence[nn.Parameter]) -> None:
    """Give gradients the placements of their parameters; those of whole ones make one message."""
    # By mesh, in the order of parameters, which is the same on every rank. A mesh may be several equal
    # objects, on some ranks alone: DTensor's caches return the one that a rank has seen first.
    whole: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        placed, wanted = parameter.grad.placements, parameter.placements
        if placed == (Partial(),) and wanted[0].is_replicate():
            whole.setdefault(parameter.device_mesh, []).append(parameter)
        elif placed != wanted:
            parameter.grad = parameter.grad.redistribute(placements=wanted)
    for mesh, partial_sums in whole.items():
        flat = _flat(partial_sums)
        dist.all_reduce(flat, group=mesh.get_group())
        _put(partial_sums, flat, complete=True)


def cast_inputs(
    dtype: torch.dtype, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give floats among a model's inputs its parameters' type, as FSDP2 does."""

    def cast_one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(map(cast_one, args)), {name: cast_one(x) for name, x in kwargs.items()}
