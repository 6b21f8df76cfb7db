"""Applies a Plan to a model and a mesh. All techniques meet here, in a fixed order."""

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parameter import UninitializedParameter

from compose.composition import Composition, Messages, Options
from compose.config.addons import provided
from compose.config.composition_rules import check_setup
from compose.config.setup import Setup
from compose.errors import ConfigError
from compose.memory.activation_checkpointing import apply_activation_checkpointing, recomputed_units
from compose.memory.activation_offload import ActivationOffload
from compose.memory.compilation import apply_compile
from compose.memory.float8 import Choice, apply_float8, float8_styles, select_layers
from compose.memory.segments import apply_segments, segments_of
from compose.ops.dropout import Masks, dropouts, refuse_functions
from compose.ops.tensors import gathered_objects, on_first_rank
from compose.parallel.context_parallel import Balance, ContextParallel, is_causal
from compose.parallel.data_parallel import DataParallel, Sharding, apply_data_parallel
from compose.parallel.expert_parallel import expert_mesh
from compose.parallel.hpz import hpz_groups
from compose.parallel.mesh import AXES, axis_size, check_same_degrees
from compose.parallel.output_projection import Output
from compose.parallel.step_rules import end_own_forward
from compose.parallel.tensor_parallel import Replicated, apply_tensor_parallel, sequence_ranks
from compose.pipeline.schedules import Schedule
from compose.pipeline.split import Stage
from compose.plan import Plan, ResolvedPlan, resolve

if TYPE_CHECKING:
    from compose.pipeline.pipeline_parallel import PipelineRunner


def apply(
    model: nn.Module, plan: Plan | ResolvedPlan, mesh: DeviceMesh, options: Options | None = None
) -> Composition:
    """Parallelize ``model`` over ``mesh`` in place, by ``plan``.

    Make the optimizer afterwards, because the parameters are new objects. In a pipeline the model keeps
    only the modules of this rank's stages, under the same names. Train with ``forward_backward`` and
    ``clip_grad_norm_``, which take the returned composition. If you call ``backward()`` yourself, the
    gradients are not those of the global batch's mean loss: they are of this rank's samples, or a sum.

    Args:
        model: A model on the meta device, which ``compose.init_weights`` fills afterwards. Or a model
            with float32 weights; then every rank gets those of rank 0, as in DistributedDataParallel.
        plan: The model's parallelization, or the result of ``compose.plan.resolve`` for this model.
        mesh: A mesh that ``compose.init_mesh`` made.
        options: Further options. Their degrees must be those of ``mesh``. None takes the defaults with
            the degrees of ``mesh``.

    Returns:
        The composition, which holds ``model`` itself, not a wrapper.

    Raises:
        ConfigError: The plan does not fit the model, or the options do not fit the mesh.
    """
    options = with_degrees(options, mesh)
    parallel, precision, recompute = options.parallel, options.precision, options.activation_checkpoint
    zero, ep, offload = parallel.zero, parallel.ep, parallel.offload == "cpu"
    _check_types(model, precision.master_dtype)
    pp, cp, tp = (axis_size(mesh, axis) for axis in ("pp", "cp", "tp"))
    resolved = plan if isinstance(plan, ResolvedPlan) else resolve(plan, model)
    check_setup(Setup(model, resolved, options, mesh.size(), mesh.device_type))
    choice = select_layers(model, resolved, tp, precision.float8, mesh.device_type)
    _broadcast(model, mesh.device_type)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            # A frozen weight needs no float32 master: each use would round it to the same value.
            kept = precision.master_dtype if parameter.requires_grad else precision.param_dtype
            parameter.data = parameter.data.to(kept)
    before = [(name, weakref.ref(p)) for name, p in model.named_parameters() if p.grad is None]
    # Choose units from the whole model, so that every rank makes the same choice.
    recomputed = recomputed_units(model, resolved.checkpoint, recompute, options.sample)
    # Read the whole plan: also a stage without attention or norms must cut sequences like the others.
    rings = [(name, style) for name, style in resolved.context if isinstance(style, ContextParallel)]
    balance: Balance = rings[0][1].balance if rings else "headtail"
    causal = all(is_causal(model.get_submodule(name)) for name, _ in rings)
    shared_by = sequence_ranks(model, resolved.tensor, tp)
    # Making a process group is a collective, so ranks whose stage has no experts take part too. With
    # tp, experts are not split like other weights: they lie on other axes, even if ep is 1.
    over = expert_mesh(mesh, ep) if ep > 1 or (tp > 1 and resolved.expert) else None
    drops = dropouts(model)
    runner: PipelineRunner | None = None
    stages = [Stage(0, model, frozenset())]
    if pp > 1:
        assert resolved.pipeline is not None, "checked with the setup"
        from compose.pipeline.pipeline_parallel import apply_pipeline_parallel

        schedule = Schedule(parallel.pp_schedule, parallel.pp_virtual_stages, parallel.pp_layers)
        runner = apply_pipeline_parallel(model, resolved.pipeline, mesh["pp"], schedule, options.sample)
        stages = runner.stages
        resolved = resolved.without(frozenset.intersection(*(stage.absent for stage in stages)))
    modules = [stage.module for stage in stages]
    # Calls of F.dropout are intercepted by a mode, which a compiler cannot trace.
    functions = "ignore" if options.compile.mode != "off" else "refuse" if tp > 1 else "tie"
    dropout = Masks(model, modules, drops, functions) if drops else None
    if not drops and functions != "ignore" and mesh.size() > 1:
        refuse_functions(modules)
    apply_float8(model, choice, axis_size(mesh, "dp_shard") * cp, modules)
    compression = next((compress(options, mesh) for _, compress in provided("compress")), None)
    if tp > 1:
        _tensor(model, resolved, mesh["tp"], choice, compression)
        if runner:
            runner.check_ties()
    if over is not None:
        styles = compression.styles(resolved.expert, "ep") if compression else resolved.expert
        _parallelize(model, styles, over["ep"])
    if cp > 1:
        _parallelize(model, resolved.context, mesh["cp"])
    mine = {name: kept for name, kept in recomputed.items() if name in set(resolved.checkpoint)}
    again = dropout.in_recomputation if dropout else None
    if recompute.segment == 1:
        apply_activation_checkpointing(model, mine, again)
    experts = [name for name, _ in resolved.expert]
    apply_compile(model, modules, resolved.compile, experts, options.compile, mesh["tp"])
    if recompute.segment > 1:  # a graph of one layer cannot hold several
        for stage in stages:
            here = resolved.without(stage.absent).checkpoint
            apply_segments(model, segments_of(here, recompute.segment), again)
    activations = ActivationOffload(model) if recompute.offload else None
    if activations:
        for name in resolved.checkpoint:
            activations.wrap(model.get_submodule(name))
    hpz = hpz_groups(mesh, parallel.zero3_reshard, over)
    data = [DataParallel(stage.module, zero) for stage in stages]
    # One process in full precision has nothing to shard, reduce or cast.
    if mesh.size() > 1 or precision.param != "float32" or offload:
        for number, stage in enumerate(stages):
            how = Sharding(
                zero,
                precision.master_dtype,
                precision.param_dtype,
                precision.reduce_dtype,
                offload,
                options.comm.prefetch,
                hpz,
                over,
                compression.stage() if compression else None,
            )
            here = resolved.without(stage.absent)
            # Without an expert mesh, experts belong to the units of their layers.
            experts = [name for name, _ in here.expert] if over is not None else []
            is_last = runner is None or runner.is_last(stage)
            data[number] = apply_data_parallel(stage.module, here.shard, mesh, how, experts, is_last)
    if runner:
        runner.data = {stage.index: own for stage, own in zip(stages, data, strict=True)}
    elif isinstance(model, FSDPModule):
        model.register_forward_hook(partial(end_own_forward, data[0]))
    # A closure of the model may still use a former parameter: check_gradients looks for that.
    here_now = set(model.parameters())
    data[0].replaced = [(name, old) for name, old in before if old() not in here_now]
    output = None
    if resolved.output:
        here = runner is None or any(runner.is_last(stage) for stage in stages)
        output = Output(model.get_submodule(resolved.output) if here else nn.Identity())
    return Composition(
        model,
        mesh,
        zero=zero,
        balance=balance,
        causal=causal,
        sequence_ranks=shared_by,
        pipeline=runner,
        output=output,
        offload=offload,
        activations=activations,
        float8=choice,
        data=data,
        compression=compression,
        dropout=dropout,
    )


def with_degrees(options: Options | None, mesh: DeviceMesh) -> Options:
    """Return ``options``, or the defaults, with the degrees of ``mesh``."""
    if options is not None:
        check_same_degrees(options.parallel, mesh)
    options = options or Options()
    degrees = {axis: axis_size(mesh, axis) for axis in AXES}
    return replace(options, parallel=replace(options.parallel, **degrees))


def _check_types(model: nn.Module, master: torch.dtype) -> None:
    wide = torch.promote_types(torch.float32, master)
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name} is sparse, which messages do not take; hold its indices and values, and"
                " make it in forward"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"parameter {name} has no shape before the first forward; run the model once, on one"
                " sample, before compose.apply"
            )
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"parameter {name} is a DTensor: the model, or a part of it, was cut before; give"
                " compose.apply a new one"
            )
        if parameter.is_complex():
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}, which FSDP does not take; hold real numbers,"
                " and use torch.view_as_complex in forward"
            )
        if parameter.is_floating_point() and parameter.dtype not in (torch.float32, wide):
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}: master weights are float32; call"
                " model.float(), and give precision.param for forward and backward"
            )


def _broadcast(model: nn.Module, device_type: str) -> None:
    """Make all tensors contiguous, and equal to those of the first rank."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_contiguous():  # neither messages nor FSDP take it
            tensor.data = tensor.data.contiguous()
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # there are no weights yet, and buffers are the same on every rank
    _check_same(model)
    for tensor in (*model.parameters(), *model.buffers()):
        # NCCL cannot send from host memory.
        sent = tensor.detach().to(device_type)
        dist.broadcast(sent.flatten().view(torch.uint8), src=0)  # gloo does not know all types
        tensor.detach().copy_(sent)


def _check_same(model: nn.Module) -> None:
    """Raise ConfigError if a rank has other parameters or buffers than the first one; a collective."""
    own = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    digests = gathered_objects(zlib.crc32(repr(own).encode()))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0)
    if other:
        both = (on_first_rank(lambda: own, first=rank) for rank in (0, other))
        here, there = next(pair for pair in zip_longest(*both, fillvalue="none") if len({*pair}) > 1)
        raise ConfigError(
            f"model: rank 0 has {here} where rank {other} has {there}; make one model on all ranks"
        )


def _tensor(
    model: nn.Module,
    resolved: ResolvedPlan,
    mesh: DeviceMesh,
    choice: Choice,
    messages: Messages | None,
) -> None:
    replicated = [(name, Replicated()) for name in resolved.replicate]
    styles = float8_styles(resolved.tensor, resolved.float8, choice)
    styles = messages.styles(styles, "tp") if messages else styles
    apply_tensor_parallel(model, styles + replicated, mesh)
    elsewhere = {id(p) for name, _ in resolved.expert for p in model.get_submodule(name).parameters()}
    problems = [
        f"plan.tensor: no style placed the parameter {name} on the tp axis"
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) and id(p) not in elsewhere
    ]
    if problems:
        raise ConfigError(*problems)


def _parallelize(
    model: nn.Module, styles: Sequence[tuple[str, ParallelStyle]], mesh: DeviceMesh
) -> None:
    for name, style in styles:
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
