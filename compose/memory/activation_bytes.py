"""What each unit of a model would keep for backward, counted as the model runs on meta tensors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from compose.errors import ConfigError

_MATMULS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}


@dataclass(frozen=True)
class Level:
    """One way to treat a unit. keep: groups of operators; None is everything. bytes: kept besides the
    input. flops: of what need not be computed again."""

    keep: tuple[str, ...] | None
    bytes: int
    flops: float


@dataclass
class UnitCost:
    """Of one sample's forward through a unit. input: bytes of what it is given that has a gradient.
    made: bytes of the tensors that autograd saves, without the input and weights. bytes, flops: of what
    operators return, by group."""

    input: int = 0
    made: int = 0
    bytes: dict[str, int] = field(default_factory=lambda: {"attention": 0, "matmul": 0})
    flops: dict[str, float] = field(default_factory=lambda: {"attention": 0.0, "matmul": 0.0})

    @property
    def everything(self) -> int:
        return self.input + self.made

    def levels(self) -> list[Level]:
        """From keeping the input alone to keeping everything; what costs more than that is left out."""
        sets = [(), ("attention",), ("matmul",), ("matmul", "attention")]
        some = [
            Level(keep, sum(self.bytes[g] for g in keep), sum(self.flops[g] for g in keep))
            for keep in sets
        ]
        everything = Level(None, self.made, sum(self.flops.values()))
        return [level for level in some if level.bytes < self.made or not level.keep] + [everything]


def unit_costs(model: nn.Module, units: Sequence[str], seq_len: int) -> dict[str, UnitCost]:
    """What one sample of ``seq_len`` tokens costs in each of ``units``, on one device.

    Attention counts as the flash kernels do it: they save q, k, v, their output and its log-sum-exp.
    The model's first argument must be token ids (B, L).
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
    tokens = torch.empty((1, seq_len), dtype=torch.int64, device="meta")
    try:
        with torch.enable_grad(), counter.counting():
            torch.func.functional_call(model, tensors, (tokens,), tie_weights=True)
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
        # Storages are told apart by address, so those seen are held on to.
        self.seen = {storage._cdata: storage for storage in (t.untyped_storage() for t in given)}
        self.unit: UnitCost | None = None

    def enter(self, cost: UnitCost, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.unit = cost
        for value in arguments:
            if isinstance(value, Tensor):
                new = self._size_if_new(value)
                cost.input += new or value.nbytes if value.requires_grad else 0

    def leave(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self.unit = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)
        with hooks, _Products(self.computed), _Attention(self.computed):
            yield

    def computed(self, group: str, size: int, flops: float) -> None:
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
        if func.overloadpacket in _MATMULS:
            flops = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
            self.computed("matmul", out.nbytes, flops)
        return out


class _Attention(TorchFunctionMode):
    """On meta tensors PyTorch would take attention apart, into products with scores (L, L)."""

    def __init__(self, computed: _Computed) -> None:
        super().__init__()
        self.computed = computed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        out, lse = _Flash.apply(*args[:3])
        pairs = out.shape[-2] * (out.shape[-2] + 1) / 2
        flops = 2 * pairs * out.shape[:-2].numel() * (args[0].shape[-1] + out.shape[-1])
        self.computed("attention", out.nbytes + lse.nbytes, flops)
        return out


class _Flash(torch.autograd.Function):
    """The shapes of a flash kernel: (B, H, L, K) and (B, H, L); q (B, H, L, K), v (B, G, L, K)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError("a forward pass alone is counted")
