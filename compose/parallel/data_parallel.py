"""Data parallel: ZeRO stages 0 to 3 (Rajbhandari et al. 2020, arXiv:1910.02054) and HSDP.

FSDP2 serves all stages. The stages differ in when parameters are gathered and freed, and in when
gradients are reduced:

    zero  gradients reduced          parameters whole             sharded over dp_shard and cp
    0     once a step (all-reduce)   always                       nothing
    1     once a step                from first forward to last   optimizer state
    2     every micro-batch          backward of the step         ... and gradients
    3     every micro-batch          one unit at a time           ... and parameters

Over dp_replicate the (sharded) gradients are all-reduced once a step in every stage.

If there is nothing to shard and nothing to cast, FSDP would only copy. Then gradient_sum.py does the
all-reduce. It does so for parameters without dims or elements in any case.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function

from compose.ops.tensors import local_tensor
from compose.ops.torch_versions import before_fsdp_sends, finish_fsdp_backward
from compose.parallel.gradient_sum import DATA_AXES, GradientSum, cast_inputs, has_shards
from compose.parallel.hpz import HpzGather, HpzGroups
from compose.parallel.mesh import axis_size
from compose.parallel.step_rules import Changes, lost, without_gradient


class UnitMessages(Protocol):
    """Messages of a stage's units that an add-on sends in place of FSDP's own."""

    reduces: bool
    """Whether it sums gradients."""
    last: bool
    """Whether this is the last micro-batch of the step."""
    gathers: Mapping[nn.Module, Callable[..., Any]]
    """Its gathers of weights, by the units' first modules."""

    def see(self, model: nn.Module, units: Sequence[Sequence[str]]) -> None:
        """Note the units before they are cut; a unit inside another one comes before it."""
        ...

    def attach(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        replicas: DeviceMesh | None,
        dim_of: Callable[[Sequence[int]], int],
        own_mesh: bool = False,
    ) -> None:
        """Let the unit that begins with ``module``, which ``fully_shard`` has cut, send so.

        ``mesh`` are the ranks that share it, and ``replicas`` those that hold the same shard, if there
        are others. ``dim_of`` returns the dim along which a shape is cut. ``own_mesh``: it is of
        experts that are on a mesh of their own.
        """
        ...

    def whole(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
    ) -> Callable[[Tensor], None]:
        """Return the sum over ranks of a unit's gradients, a flat tensor, where FSDP cuts nothing."""
        ...


@dataclass(frozen=True)
class Sharding:
    """The settings of data parallel: the tensors that it shards, and how it moves the shards."""

    zero: int
    """The ZeRO stage. Stage 0 needs a mesh whose dp_shard is 1."""
    master_dtype: torch.dtype = torch.float32
    """Type of the parameters between steps."""
    param_dtype: torch.dtype = torch.float32
    """Type of gathered parameters, and of forward and backward."""
    reduce_dtype: torch.dtype = torch.float32
    offload: bool = False
    """Whether parameters and gradients are in host memory, pinned if there is a GPU. A unit's shards
    are copied to the device when the unit is gathered. The caller has to create the parameters in
    host memory."""
    prefetch: int = 0
    """Units whose gather begins before the unit ahead of them runs, in forward and in backward. With 0
    FSDP decides: it prefetches the next unit in backward. Where experts have a mesh, 0 is 1."""
    hpz: HpzGroups | None = None
    """Neighbours that gather a unit again in stage 3, after a step's first gather."""
    expert_mesh: DeviceMesh | None = None
    """The mesh over which experts are sharded, from ``expert_mesh`` in expert_parallel.py."""
    messages: UnitMessages | None = None
    """Sends weights and gradients in another way; None: FSDP sends them as they are."""


class DataParallel:
    """The work of data parallel around forward and backward of a stage, or of the whole model."""

    def __init__(self, model: nn.Module, zero: int) -> None:
        """Take the ZeRO stage. Nothing happens until the model is cut or its gradients are summed."""
        self.model, self.zero = model, zero
        self.sums: GradientSum | None = None
        self.messages: UnitMessages | None = None
        self.gathers: list[HpzGather] = []
        self.staying: list[nn.Module] = []
        """Units that are gathered once in a step, with zero 3 too."""
        self.on_first: Callable[[nn.Module], None] | None = None
        """Called when the gradients of a step's first micro-batch, if it has several, are sums."""
        self.replaced: list[tuple[str, Any]] = []
        """Names of parameters, and weak references to what they were before the model was cut."""
        self.master: torch.dtype | None = None
        """Type of trained weights between steps, if it may be another than that of frozen ones."""
        self.lacking: list[str] = []
        """Parameters without a gradient where a step's gradients were sent, by "number/name"."""
        self.sums_copies_last = False
        """Whether each micro-batch is summed over shards, and the last one over their copies too."""
        self.kept: dict[str, dict[str, bool]] = {}
        """Which parameters of a unit have a gradient in its sum over shards, by its first parameter."""
        self.order, self.former_order = list[int](), list[int]()
        """Units that FSDP cuts, in the order of their forwards in this step and in the one before."""
        self.next_is_first, self.is_first, self.number, self.of_inputs = True, False, 0, False
        self.keeps_gathered, self.failed, self.is_new, self.changes = False, False, True, Changes()
        self.exchanges_tokens, self.micro_batches = False, 0
        """Whether ranks with other samples hold experts, and the micro-batches of the last step."""

    def note_forward(self, unit: int, *unused: Any) -> None:
        """Note that a unit's forward begins."""
        if not torch.compiler.is_compiling():
            self.order.append(unit)

    def gather(self) -> None:
        """Gather all parameters for code outside of forward and backward, and keep gradients.

        :meth:`finish_backward` ends it.
        """
        if self.sums:
            self.sums.begin(last=False)
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(False)
            self.model.set_reshard_after_backward(False)
        with record_function("FSDP::gather"):  # a profile shows whose memory it is by FSDP's own ranges
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()

    def finish_backward(self, last: bool, of_inputs: bool = False) -> None:
        """Do what ``backward()`` does at its end, after gradients were computed without it.

        It also serves after a forward that has no backward. Then it frees the gathered parameters, and
        it clears FSDP's record of the forward's order, by which the next backward would prefetch. After
        a backward ``of_inputs`` alone, that of the micro-batch's weights follows.
        """
        if isinstance(self.model, FSDPModule):
            first = self.next_is_first
            self.prepare_micro_batch(last, of_inputs)
            finish_fsdp_backward(self.model)
            self.end_micro_batch()
            self.next_is_first = first if of_inputs else last
        if self.sums and last:
            self.sums.finish()

    def prepare_micro_batch(self, last: bool, of_inputs: bool = False) -> None:
        """Prepare, before a micro-batch's forward, what is communicated in its backward."""
        if self.next_is_first:
            self.lacking = []
        self.number, self.of_inputs = self.number + 1, of_inputs
        first, self.next_is_first = self.next_is_first and not last, last
        self.is_first = first and self.on_first is not None
        complete = last or self.is_first
        if self.sums:
            self.sums.begin(complete)
        if self.messages:
            self.messages.last = last
        model, zero = self.model, self.zero
        if not isinstance(model, FSDPModule):
            return
        # set_is_last_backward(last) is made for pipelines. It would keep the order of prefetching over
        # micro-batches, and the last one would gather again a unit that it has just freed.
        model.set_requires_gradient_sync(complete or zero >= 2)
        model.set_requires_all_reduce(complete)
        model.set_reshard_after_backward(complete or zero == 3)
        for unit in self.staying:
            cast(FSDPModule, unit).set_reshard_after_backward(complete, recurse=False)

    def end_micro_batch(self) -> None:
        """Complete sums, and note that a micro-batch's backward has ended."""
        if self.sums and self.sums.last:
            self.sums.finish()
        if self.on_first and self.is_first:
            self.lacking += without_gradient(self.model)
            self.on_first(self.model)

    def note_gradients(self, gradients: dict[str, bool]) -> None:
        """Note which parameters of a unit have a gradient where it sends its gradients.

        The sum over copies of shards follows a step's last backward, and is then of one tensor for each
        unit. Raise ConfigError if it would add up gradients of other parameters, or be left out.
        """
        if self.of_inputs:  # weights' gradients follow
            return
        self.lacking += [f"{self.number}/{name}" for name, given in gradients.items() if not given]
        unit, complete = next(iter(gradients), ""), self.next_is_first or self.is_first
        kept = self.kept.pop(unit, gradients)
        if kept != gradients and (complete or any(gradients.values())):
            raise lost(next(name for name in gradients if gradients[name] != kept[name]), self.zero)
        if self.sums_copies_last and not complete and any(kept.values()):
            self.kept[unit] = kept


def apply_data_parallel(
    model: nn.Module,
    units: Sequence[Sequence[str]],
    mesh: DeviceMesh,
    how: Sharding,
    experts: Sequence[str] = (),
    is_last_stage: bool = True,
) -> DataParallel:
    """Apply ``fully_shard`` to each unit, then to the model, over the data axes of ``mesh``.

    If that would shard and cast nothing, only let gradients be summed.

    Parameters are sharded over dp_shard and cp together, and replicated over dp_replicate. Gradients
    are summed over ranks and not averaged: the loss is already divided by the number of target tokens
    in the global batch. Each of ``experts`` is a unit within another, sharded over ``how.expert_mesh``.
    The loss follows the last unit if ``is_last_stage``.
    """
    zero, hpz, data = how.zero, how.hpz, DataParallel(model, how.zero)
    copies, shards = _data_meshes(mesh, zero)
    one_type = how.master_dtype == how.param_dtype == how.reduce_dtype
    # Then whole parameters serve forward, backward and optimizer.
    if shards.size() == 1 and one_type and not how.offload and how.expert_mesh is None:
        groups = [copies.get_group()] if copies else []
        reduce = how.messages.whole if how.messages and how.messages.reduces else None
        data.sums = GradientSum(model, units, groups, reduce)
        model.register_forward_pre_hook(partial(cast_inputs, how.param_dtype), with_kwargs=True)
        return data
    scalars = {parameter for parameter in model.parameters() if not has_shards(parameter)}
    if scalars:
        over = [mesh.get_group(axis) for axis in DATA_AXES if axis_size(mesh, axis) > 1]
        data.sums = GradientSum(model, (), over, scalars=True)
    data.sums_copies_last, data.master = copies is not None and zero >= 2, how.master_dtype
    data_mesh = shards
    messages = data.messages = how.messages
    if messages:
        messages.see(model, [*([e] for e in experts), *units, [""]])
    # FSDP's own all-reduce over copies cannot be replaced. Without copies in the mesh, a hook does it.
    hooked = messages is not None and messages.reduces
    if copies and not hooked:
        # No public call joins a flattened axis to another; this one is in torch 2.11 to 2.15.
        data_mesh, copies = DeviceMesh._concatenate([copies, shards]), None
    where = OffloadPolicy()
    if how.offload:
        where = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")

    stacked = partial(_stacked_dim, shards.size())

    def shard(
        modules: nn.Module | list[nn.Module],
        reshard: bool,
        mesh: DeviceMesh = data_mesh,
        dim_of: Callable[[Sequence[int]], int] = stacked,
    ) -> None:
        # Only the model's own inputs are cast. A float32 tensor between its parts is so on purpose.
        policy = MixedPrecisionPolicy(
            how.param_dtype, how.reduce_dtype, cast_forward_inputs=modules is model
        )
        fully_shard(
            modules,  # type: ignore[arg-type]
            mesh=mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda p: Shard(dim_of(local_tensor(p).shape)),
            mp_policy=policy,
            offload_policy=where,
            ignored_params=scalars,
        )
        # A list is one unit, with one state.
        unit = cast(FSDPModule, modules[0] if isinstance(modules, list) else modules)
        if mesh.size() > 1:  # else nothing is divided, and a factor would be a pass over all gradients
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum

    def gather_by_hpz(module: nn.Module, group: dist.ProcessGroup | None) -> None:
        if group is not None and isinstance(module, FSDPModule):
            first = messages.gathers.get(module) if messages else None
            data.gathers.append(HpzGather(group, first))
            module.set_custom_all_gather(cast(Any, data.gathers[-1]))

    expert_mesh = how.expert_mesh
    if expert_mesh is not None:
        over, expert_copies = expert_mesh["expert_shard"], None
        if axis_size(expert_mesh, "expert_replicate") > 1:
            expert_copies = expert_mesh["expert_replicate"] if hooked else None
            over = over if hooked else expert_mesh["expert_replicate", "expert_shard"]
        even = partial(_even_dim, axis_size(expert_mesh, "expert_shard"))
        same = axis_size(mesh, "cp") * axis_size(mesh, "tp")  # neighbours that run the same samples
        data.exchanges_tokens = same % axis_size(expert_mesh, "ep") > 0
        stay = hpz is not None and hpz.experts_stay
        for name in experts:
            module = model.get_submodule(name)
            shard(module, zero == 3 and not stay, over, even)
            data.staying += [module] * stay
            if messages:
                messages.attach(module, expert_mesh["expert_shard"], expert_copies, even, own_mesh=True)
            gather_by_hpz(module, hpz and hpz.experts)

    for i, unit in enumerate(units):
        modules = [model.get_submodule(name) for name in unit]
        # The last unit's backward follows its forward at once.
        keep = is_last_stage and i == len(units) - 1
        shard(modules if len(modules) > 1 else modules[0], zero == 3 and not keep)
        modules[0].register_forward_pre_hook(partial(data.note_forward, i))
        if messages:
            messages.attach(modules[0], shards, copies, stacked)
        if not keep:
            gather_by_hpz(modules[0], hpz and hpz.shards)
    shard(model, False)
    before_fsdp_sends(model, data.note_gradients)
    if messages:
        messages.attach(model, shards, copies, stacked)
    # FSDP's own choice in backward is one unit: experts, or what is around them, but not both. And in
    # forward the host waits for the sizes of the experts' messages, so it is late for the next unit.
    ahead = how.prefetch or int(expert_mesh is not None)
    if ahead:
        _prefetch([model.get_submodule(unit[0]) for unit in units], ahead)
    return data


def _prefetch(units: Sequence[nn.Module], ahead: int) -> None:
    """Let each of ``units``, in order of use, begin the gathers of the next ``ahead`` before it runs.

    A unit within another, as experts are, is gathered with the outer one.
    """
    inner = [[m for m in unit.modules() if isinstance(m, FSDPModule)] for unit in units]
    for i, (own, *within) in enumerate(inner):
        before, after = inner[max(0, i - ahead) : i], inner[i + 1 : i + 1 + ahead]
        own.set_modules_to_forward_prefetch([*within, *(m for unit in after for m in unit)])
        # An empty list would leave the choice to FSDP, which may be the wrong unit in a pipeline. So
        # the unit prefetches itself.
        back: list[FSDPModule] = [*within, *(m for unit in reversed(before) for m in unit)]
        own.set_modules_to_backward_prefetch(back if back else [own])
        for module in within:
            module.set_modules_to_backward_prefetch([module])


def _even_dim(ranks: int, shape: Sequence[int]) -> int:
    """Return the first dim that ``ranks`` divide: few experts may be left, and FSDP pads only dim 0."""
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def _stacked_dim(ranks: int, shape: Sequence[int]) -> int:
    """Return the dim along which a parameter is cut: the first, if it is no stack of matrices.

    A stack, as of experts, may have fewer matrices than there are ranks.
    """
    return _even_dim(ranks, shape) if len(shape) == 3 else 0


def cuts_stacks(model: nn.Module) -> bool:
    """Return whether a stack of matrices is cut along another dim than the first, on the data axes.

    State that a checkpoint keeps by rank is of no use under the other cut.
    """
    stacks = [p for p in model.parameters() if p.ndim == 3 and isinstance(p, DTensor)]
    return any(
        isinstance(placement, Shard) and placement.dim > 0
        for stack in stacks
        if "expert_shard" not in (stack.device_mesh.mesh_dim_names or ())
        for placement in stack.placements
    )


def _data_meshes(mesh: DeviceMesh, zero: int) -> tuple[DeviceMesh | None, DeviceMesh]:
    """Return the meshes of the ranks that hold the same shard, and of those that share parameters.

    They are dp_replicate, None if it has one rank, and dp_shard x cp. With ZeRO's stage 0 they are
    dp_replicate x cp, and dp_shard, which has one rank.
    """
    copies, parts = ["dp_replicate"], ["dp_shard", "cp"]
    if zero == 0:
        copies, parts = ["dp_replicate", "cp"], ["dp_shard"]
    shard = _joined(mesh, [axis for axis in parts if axis_size(mesh, axis) > 1] or parts[:1])
    over = [axis for axis in copies if axis_size(mesh, axis) > 1]
    return _joined(mesh, over) if over else None, shard


def _joined(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    return mesh[axes[0]] if len(axes) == 1 else mesh[tuple(axes)]._flatten("_".join(axes))
