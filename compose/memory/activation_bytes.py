"""The bytes that each unit of a model would keep for backward, counted on meta tensors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from compose.errors import ConfigError
from compose.ops import attention as _attention
from compose.ops.batch import Sample, on_meta

_MATMULS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}
_ATTENTION = {_attention.attention_forward._opoverload.overloadpacket}


@dataclass(frozen=True)
class Level:
    """One way to treat a unit."""

    keep: tuple[str, ...] | None
    """Groups of operators whose results are kept; None is everything."""
    bytes: int
    """Bytes that are kept besides the input."""
    flops: float
    """FLOPs that need not be computed again."""


@dataclass
class UnitCost:
    """The cost of one sample's forward through a unit."""

    input: int = 0
    """Bytes of its inputs that have a gradient."""
    made: int = 0
    """Bytes of the tensors that autograd saves, without the input and weights."""
    bytes: dict[str, int] = field(default_factory=lambda: {"attention": 0, "matmul": 0})
    """Bytes of what operators return, by group."""
    flops: dict[str, float] = field(default_factory=lambda: {"attention": 0.0, "matmul": 0.0})
    """FLOPs of operators, by group."""

    @property
    def everything(self) -> int:
        """Bytes of the input and of all that autograd saves."""
        return self.input + self.made

    def levels(self) -> list[Level]:
        """Return the levels from keeping the input alone to keeping everything.

        A level that keeps more bytes than everything is left out.
        """
        sets = [(), ("attention",), ("matmul",), ("matmul", "attention")]
        some = [
            Level(keep, sum(self.bytes[g] for g in keep), sum(self.flops[g] for g in keep))
            for keep in sets
        ]
        everything = Level(None, self.made, sum(self.flops.values()))
        return [level for level in some if level.bytes < self.made or not level.keep] + [everything]


def unit_costs(model: nn.Module, units: Sequence[str], seq_len: Sample) -> dict[str, UnitCost]:
    """Count what one sample costs in each unit, on one device.

    Attention counts as the flash kernels do it: they save q, k, v, their output and its log-sum-exp.
    """
    costs = {name: UnitCost() for name in units}
    tensors = {
        name: torch.empty_like(t, device="meta", requires_grad=t.requires_grad)
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    counter = _Counter(tensors.values())
    handles = []
    for name, cost in costs.items():
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(counter.enter, cost)))
        handles.append(module.register_forward_hook(counter.leave))
    try:
        with torch.enable_grad(), counter.counting():
            torch.func.functional_call(model, tensors, *on_meta(seq_len), tie_weights=True)
    except Exception as error:
        raise ConfigError(
            f"activation_checkpoint.budget: cannot count the bytes of {type(model).__name__}"
            f' ({str(error).splitlines()[0]}); use another activation_checkpoint.mode, as "selective"'
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    return costs


class _Counter:
    """Adds what is saved and computed to the cost of the unit that is running."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        # Storages are told apart by address, so those seen must stay alive.
        self.seen = {storage._cdata: storage for storage in (t.untyped_storage() for t in given)}
        self.unit: UnitCost | None = None

    def enter(self, cost: UnitCost, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Begin to count for a unit."""
        self.unit = cost
        for value in arguments:
            if isinstance(value, Tensor):
                new = self._size_if_new(value)
                cost.input += new or value.nbytes if value.requires_grad else 0

    def leave(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """End to count for a unit."""
        self.unit = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors that autograd saves in this context."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)
        with hooks, _Products(self.computed):
            yield

    def computed(self, group: str, size: int, flops: float) -> None:
        """Add an operator's result and FLOPs to the unit that is running."""
        if self.unit:
            self.unit.bytes[group] += size
            self.unit.flops[group] += flops

    def _saved(self, tensor: Tensor) -> Tensor:
        if self.unit:
            self.unit.made += self._size_if_new(tensor)
        return tensor

    def _size_if_new(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self.seen:
            return 0
        self.seen[storage._cdata] = storage
        return storage.nbytes()


_Computed = Callable[[str, int, float], None]


class _Products(TorchDispatchMode):
    def __init__(self, computed: _Computed) -> None:
        super().__init__()
        self.computed = computed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        group = "matmul" if packet in _MATMULS else "attention" if packet in _ATTENTION else ""
        if group:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            self.computed(group, sum(x.nbytes for x in tree_leaves(out)), flops)
        return out
