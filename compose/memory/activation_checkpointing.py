"""Activation checkpointing: what of a unit's forward is kept for backward, and what is computed again.

    full       keeps each unit's input alone (Chen et al. 2016, arXiv:1604.06174); with segment = k
               that of every k-th unit alone (compose/memory/segments.py)
    every_k    recomputes every k-th unit from its input; the others keep everything
    selective  keeps the input and the results of chosen operators: with products and attention kept,
               only cheap operations run again (after Korthikanti et al. 2022, arXiv:2205.05198,
               section 5)
    budget     uses one of the above for each unit, or keeps everything: as much as a share of all
               bytes allows

Values are the same in each: what runs again runs the same kernels on the same inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from compose.errors import ConfigError, Fraction, Positive, ReadWith, did_you_mean, refused_if
from compose.memory.segments import ChangedBuffers, Forward, Prepare
from compose.ops.attention import attention_forward
from compose.ops.batch import Sample, on_meta
from compose.ops.tensors import held_tensors
from compose.ops.torch_versions import bypass_saved_tensors_hooks

_MATMULS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}
_ATTENTION = {attention_forward._opoverload.overloadpacket}

Operators = frozenset[torch._ops.OpOverload]

# Operators of aten, or of another namespace, by the name of their group in ``keep``.
GROUPS: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "compose.attention_forward",
        "compose.ring_attention_forward",
    ),
    # Messages whose result is only a rank's part. To keep what an all-gather or an all-reduce brings
    # would take the memory that a sharded stream saves.
    "messages": (
        "_c10d_functional.reduce_scatter_tensor",
        "_c10d_functional.all_to_all_single",
        "compose.scatter_stream",
        "compose.exchange_counts",
    ),
}

_MODE = "is read in another mode; set {}"


@dataclass(frozen=True)
class ActivationCheckpoint:
    """The table [activation_checkpoint]."""

    mode: Literal["none", "full", "every_k", "selective", "budget"] = "none"
    """Recomputed in backward: full: each unit, from its input; every_k: every k-th unit; selective:
    all but the operators that keep names; budget: as little as possible, so that what is kept stays
    within budget."""
    every: Annotated[Positive, ReadWith(_MODE, mode=("every_k",))] = 2
    """With every_k: every k-th unit is recomputed, and the others keep everything."""
    keep: Annotated[tuple[str, ...], ReadWith(_MODE, mode=("selective",))] = (
        "matmul",
        "attention",
        "messages",
    )
    """With selective: the operators whose results are kept: matmul, attention, messages, or aten's by
    name."""
    budget: Annotated[Fraction, ReadWith(_MODE, mode=("budget",))] = 0.5
    """With budget: what may be kept as a fraction of what mode none keeps in the units."""
    offload: bool = False
    """Keep what units save for backward in host memory."""
    segment: Annotated[Positive, ReadWith(_MODE, mode=("full",))] = 1
    """With full: the number of units in a row that keep one input and are recomputed together."""


Recompute = ActivationCheckpoint
"""Its former name."""


def operators(names: Iterable[str]) -> Operators:
    """Return the operators that ``names`` (``matmul``, ``attention``, ``mm``, ``aten.mm``) stand for.

    Raises ConfigError if a name stands for none.
    """
    result = set[torch._ops.OpOverload]()
    for name in names:
        for operator in GROUPS.get(name, (name.removeprefix("aten."),)):
            space, _, short = operator.rpartition(".")
            packet = getattr(getattr(torch.ops, space or "aten"), short, None)
            if isinstance(packet, torch._ops.OpOverloadPacket):
                result.update(getattr(packet, overload) for overload in packet.overloads())
            elif name not in GROUPS:
                near = did_you_mean(name, [*GROUPS, *dir(torch.ops.aten)])
                raise ConfigError(
                    f"activation_checkpoint.keep: {name!r} is neither {' nor '.join(GROUPS)} nor an"
                    f" operator of aten{near}"
                )
    return frozenset(result)


def recomputed_units(
    model: nn.Module, units: Sequence[str], options: ActivationCheckpoint, seq_len: Sample
) -> dict[str, Operators]:
    """Return the units to recompute, and for each the operators whose results are kept.

    The result is the same on every rank, since it depends on the whole model alone. ``units`` are in
    the order in which they run.
    """
    if options.mode == "full":
        return dict.fromkeys(units, frozenset())
    if options.mode == "every_k":
        return dict.fromkeys(units[options.every - 1 :: options.every], frozenset())
    if options.mode == "selective":
        return dict.fromkeys(units, operators(options.keep))
    if options.mode == "budget":
        kept = within(unit_costs(model, units, seq_len), options.budget)
        return {name: operators(groups) for name, groups in kept.items() if groups is not None}
    return {}


@dataclass(frozen=True)
class RecomputeLevel:
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

    @property
    def everything(self) -> int:
        """Bytes of the input and of all that autograd saves."""
        return self.input + self.made

    def levels(self) -> list[RecomputeLevel]:
        """Return the levels from keeping the input alone to keeping everything.

        A level that keeps more bytes than everything is left out.
        """
        sets = [(), ("attention",), ("matmul",), ("matmul", "attention")]
        some = [
            RecomputeLevel(keep, sum(self.bytes[g] for g in keep), sum(self.flops[g] for g in keep))
            for keep in sets
        ]
        everything = RecomputeLevel(None, self.made, sum(self.flops.values()))
        return [level for level in some if level.bytes < self.made or not level.keep] + [everything]


def unit_costs(model: nn.Module, units: Sequence[str], seq_len: Sample) -> dict[str, UnitCost]:
    """Count what one sample costs in each unit, on one device.

    Attention counts as the flash kernels do it: they save q, k, v, their output and its log-sum-exp.
    """
    costs = {name: UnitCost() for name in units}
    tensors = {
        name: torch.empty_like(t, device="meta", requires_grad=t.requires_grad)
        for name, t in held_tensors(model).items()
    }
    counter = _Counter(tensors.values())
    saving = torch.autograd.graph.saved_tensors_hooks(counter.saved, lambda tensor: tensor)
    line = (
        f"activation_checkpoint.budget: cannot count the bytes of {type(model).__name__}"
        ' ({}); use another activation_checkpoint.mode, as "selective"'
    )
    with refused_if(line), ExitStack() as hooks, torch.enable_grad(), saving, counter:
        for name, cost in costs.items():
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(partial(counter.enter, cost)))
            hooks.enter_context(module.register_forward_hook(counter.leave))
        torch.func.functional_call(model, tensors, *on_meta(seq_len), tie_weights=False)
    return costs


class _Counter(TorchDispatchMode):
    """Adds what is saved and computed to the cost of the unit that is running."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        # Storages are known by address, so those seen must stay alive.
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

    def saved(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        if self.unit:
            self.unit.made += self._size_if_new(tensor)
        return tensor

    def _size_if_new(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self.seen:
            return 0
        self.seen[storage._cdata] = storage
        return storage.nbytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        group = "matmul" if packet in _MATMULS else "attention" if packet in _ATTENTION else ""
        if group and self.unit:
            self.unit.bytes[group] += sum(x.nbytes for x in tree_leaves(out))
            self.unit.flops[group] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


def within(costs: Mapping[str, UnitCost], budget: float) -> dict[str, tuple[str, ...] | None]:
    """Choose for each unit which results to keep, so that a share of all bytes is not exceeded.

    At least the input is kept, whatever ``budget`` says. In each step the choice changes for the unit
    that saves the most FLOPs of recomputation for each byte kept; among equal ones, for the first.
    """
    levels = {name: cost.levels() for name, cost in costs.items()}
    chosen = dict.fromkeys(costs, 0)
    left = budget * sum(cost.everything for cost in costs.values())
    left -= sum(cost.input for cost in costs.values())
    while True:
        best: tuple[float, str, int] | None = None
        for name, options in levels.items():
            now = options[chosen[name]]
            for number, level in enumerate(options):
                more = level.bytes - now.bytes
                gain = (level.flops - now.flops) / more if more > 0 else 0.0
                if 0 < more <= left and gain >= 0 and (best is None or gain > best[0]):
                    best = gain, name, number
        if best is None:
            return {name: levels[name][number].keep for name, number in chosen.items()}
        _, name, number = best
        left -= levels[name][number].bytes - levels[name][chosen[name]].bytes
        chosen[name] = number


def apply_activation_checkpointing(
    model: nn.Module, units: Mapping[str, Operators], prepare: Prepare | None = None
) -> None:
    """Recompute units of a model in backward, except the results of the operators that each keeps.

    ``prepare`` returns a unit's forward with what it depends on besides its inputs, as it is now.
    """
    for name, kept in units.items():
        module = model.get_submodule(name)
        options: dict[str, Any] = {"use_reentrant": False}
        if kept:
            options["context_fn"] = partial(_contexts, kept)
        # Only forward is wrapped, so that hooks and names stay where they are.
        module.forward = _recomputing(module, module.forward, prepare, options)


def _recomputing(
    module: nn.Module, forward: Forward, prepare: Prepare | None, options: Mapping[str, Any]
) -> Forward:
    buffers = ChangedBuffers(module)

    # A function, since torch.compile does not look into a partial of checkpoint, its own function.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        again = prepare(forward) if prepare else forward
        # A graph has its buffers as inputs.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            again = buffers.kept(again)
        return checkpoint(again, *args, **options, **kwargs)

    return recomputed


def _contexts(kept: Operators) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the context of the forward pass, which keeps, and of its repetition, which looks up."""
    keeping, finding = create_selective_checkpoint_contexts(partial(_policy, kept))
    if torch.compiler.is_compiling():  # the compiler asks for every operator whether it is kept
        return keeping, finding
    bypass_saved_tensors_hooks(keeping)
    return _KeptOperatorsOnly(kept, keeping), _KeptOperatorsOnly(kept, finding)


def _policy(
    kept: Operators, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


# Their results share memory with what they are given, and no counter of changes.
_PARTS = {torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default}


class _KeptOperatorsOnly(TorchDispatchMode):
    """Shows ``mode`` the operators that are kept, and no other.

    ``mode`` expects to see each operator again. But FSDP gathers a unit within this one, and does not
    run the same operators in both passes.
    """

    def __init__(self, kept: Operators, mode: TorchDispatchMode) -> None:
        super().__init__()
        self.kept, self.mode = kept, mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PARTS:  # what works in place on such parts, as a GRU, would change what is kept
            args = (args[0].clone(), *args[1:])
        if func not in self.kept:
            return func(*args, **(kwargs or {}))
        try:
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise ConfigError(
                f"activation_checkpoint.mode: forward works in place on a result of {func} that is kept"
                ' for backward; use mode = "full", or have forward make a new tensor'
            ) from None
