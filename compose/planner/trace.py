"""Runs a step of a composition as one rank of a fake world: its record, and the bytes that it sends."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import compose.pipeline.pipeline_parallel
from compose.apply import apply
from compose.build import build_optimizer, loss_function
from compose.composition import Composition
from compose.config.job import Job
from compose.config.models import batch_on_meta
from compose.data.datasets import task_of
from compose.ops import kernel_table
from compose.ops.dropout import DropoutKey
from compose.optim.optimizers import make_state
from compose.parallel.mesh import init_mesh
from compose.pipeline.schedules import placement
from compose.plan import ResolvedPlan, resolve
from compose.planner.fake_host import slots
from compose.planner.fake_world import OnMeta, fake_world
from compose.planner.few_layers import few_micro_batches, few_rows
from compose.planner.memory import STATE, WEIGHTS
from compose.planner.record import TracedStep
from compose.planner.record_cache import packed_rows
from compose.planner.recorder import Recorder
from compose.train.step import clip_grad_norm_, forward_backward, local_batch

if TYPE_CHECKING:
    from compose.compression.compressor import Compression


@dataclass(frozen=True)
class RankStep:
    """A step of one rank, to be traced."""

    job: Job
    rank: int = 0
    model: nn.Module | None = None
    """The model on meta, if it has fewer layers than the job's; it is changed."""
    pp_layers: tuple[int, ...] = ()
    """The layers of each stage of that model; empty: those of the job."""
    micro_batches: int = 3
    """All, or as many as :func:`few_micro_batches` chooses; 0 only finds the pipeline's stream."""
    device_type: str = "cuda"
    """The device whose kernels are chosen, "cpu" or "cuda"."""
    documents: bool = True
    """Whether the batch tells where documents begin, as that of a training run does."""
    capability: tuple[int, ...] = (8, 0)
    """The compute capability of that device, by which attention's kernel is chosen."""
    float8: bool = True
    """Whether that device has products of 8 bits."""
    objects: list[Any] | None = None
    """The objects that the rank of the first stage broadcast; None for that rank itself."""


def trace(step: RankStep) -> TracedStep:
    """Record one step: forward and backward of some micro-batches, clipping, and the optimizer."""
    job, device_type, micro_batches = step.job, step.device_type, step.micro_batches
    recorder, config = Recorder(device_type), job.config
    in_files = config.optimizer.offload == "nvme"
    model = buffers_on_meta(copy.deepcopy(job.model) if step.model is None else step.model)
    here = {name for name, _ in model.named_modules()}
    # A plan may name single layers, which are gone if layers were left out.
    resolved = job.resolved.without(n for n, _ in job.model.named_modules() if n not in here)
    world = fake_world(step.rank, job.world_size, recorder, device_type, step.objects, step.float8)
    planned = kernel_table.planned_for(step.capability, packed_rows(config.data))
    choice = mock.patch.object(kernel_table, "planned", return_value=planned)
    with choice, world as sent:
        mesh = init_mesh(job.degrees, device_type)
        # Operators are recorded one by one; the time model fuses them.
        options = replace(job.options, compile=replace(config.compile, mode="off", async_tp=False))
        if job.degrees.pp > 1:
            layers = step.pp_layers or job.degrees.pp_layers
            options = replace(options, parallel=replace(options.parallel, pp_layers=layers))
        # A run counts the bytes of a budget on meta tensors too, where norms are several operators.
        with OnMeta(["cuda"], kernels="cpu"):
            composition = apply(model, resolved, mesh, options)
            # Muon's products are in another type on a GPU, and files are not made.
            dtype = torch.float32 if device_type == "cpu" else None
            inside = replace(config.optimizer, offload="cpu") if in_files else config.optimizer
            own = replace(job, config=replace(config, optimizer=inside))
            optimizer = build_optimizer(composition, own, muon_dtype=dtype)
        on_gpu = device_type == "cuda"
        if composition.offload:
            recorder.to_host((p for _, p in composition.named_parameters()), WEIGHTS, on_gpu)
        recorder.note((p for _, p in composition.named_parameters()), "weights")
        with OnMeta():
            make_state(optimizer)
        if composition.offload or config.optimizer.offload != "none":
            state = "" if in_files else STATE
            pinned = on_gpu and not composition.offload
            recorder.to_host((each for each in _state(optimizer) if each.ndim), state, pinned)
        recorder.note(_state(optimizer), "optimizer")
        passed = slots(optimizer, device_type, in_files)
        recorder.note(passed, "optimizer")
        batch = step_batch(job, micro_batches, step.documents)
        recorder.note(batch.values(), "activations")
        _try_stream(composition, batch, config.train.micro_batch, device_type)
        if not micro_batches:
            return TracedStep(recorder.record_of, sent)
        if composition.compression:
            # A first step has no residuals yet, and no bases of differences.
            with _few(job, micro_batches), OnMeta(kernels=device_type):
                forward_and_backward(composition, batch, job, DropoutKey(0))
                optimizer.zero_grad()
            compression = cast("Compression", composition.compression)
            recorder.note(compression.state().values(), "communication")
        marked = marks(recorder, composition, resolved)
        order = _few(job, micro_batches)
        with marked, order, OnMeta(kernels=device_type, recorder=recorder), recorder:
            forward_and_backward(composition, batch, job, DropoutKey(1))
            recorder.begin((-1, "step", 0), "")
            gradients = (p.grad for _, p in composition.named_parameters())
            recorder.note((each for each in gradients if each is not None), "gradients")
            clip_grad_norm_(composition, config.train.max_norm)
            optimizer.step()
            recorder.begin((-1, "step", 1), "")
            optimizer.zero_grad()
        recorder.end()
    return TracedStep(recorder.record_of, sent)


def buffers_on_meta(model: nn.Module) -> nn.Module:
    """Move a model's buffers to meta, and return it."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to("meta"))
    return model


def forward_and_backward(
    composition: Composition, batch: Mapping[str, Tensor], job: Job, dropout: DropoutKey
) -> None:
    """Run forward and backward of a rank's batch, as a step of the job does."""
    forward_backward(
        composition,
        batch,
        micro_batch=job.config.train.micro_batch,
        loss_function=loss_function(job.config),
        dropout=dropout,
    )


def step_batch(job: Job, micro_batches: int, documents: bool = True) -> dict[str, Tensor]:
    """Return a rank's batch on meta."""
    samples = max(1, micro_batches) * job.config.train.micro_batch
    return batch_on_meta(task_of(job.config), job.config, samples, documents)


def _try_stream(
    composition: Composition, batch: Mapping[str, Tensor], micro_batch: int, device_type: str
) -> None:
    """Have a pipeline find what it sends, which it does once in a run, before the step is recorded."""
    pipeline = composition.pipeline
    if not pipeline:
        return
    local = local_batch(composition, {name: value[:micro_batch] for name, value in batch.items()})
    inputs = {name: value for name, value in local.items() if name != "targets"}
    with OnMeta(kernels=device_type):
        pipeline.stream(inputs.pop(pipeline.first_argument), inputs)
        if pipeline.placement[0] == pipeline.rank:
            composition.data[0].finish_backward(last=True)


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


@contextmanager
def marks(recorder: Recorder, composition: Composition, resolved: ResolvedPlan) -> Iterator[None]:
    """Tell the recorder where actions and units begin."""
    pipeline = composition.pipeline
    stages = [(s.index, s.module) for s in pipeline.stages] if pipeline else [(0, composition.model)]
    names = _units(composition.model, resolved)
    with ExitStack() as stack:
        for _, module in stages:
            inside = dict(module.named_modules(remove_duplicate=False))
            for name in names:
                if name in inside and not isinstance(inside[name], nn.Identity):
                    _mark_unit(stack, recorder, inside[name], name)
        for method, marked in _actions(recorder).items():
            stack.enter_context(mock.patch.object(PipelineStage, method, marked))
        if not pipeline:
            count = iter(range(1 << 30))

            def forward(*unused: Any) -> None:
                recorder.begin((0, "F", next(count)), "")

            stack.enter_context(composition.model.register_forward_pre_hook(forward, prepend=True))
        yield


def _units(model: nn.Module, resolved: ResolvedPlan) -> list[str]:
    """Return the layers and the modules of the model's ends."""
    if resolved.pipeline is None:
        return [name for unit in resolved.shard for name in unit]
    layers = resolved.pipeline.layers
    inside = [f"{layers}.{name}" for name, _ in model.get_submodule(layers).named_children()]
    return [*resolved.pipeline.first, *inside, *resolved.pipeline.last]


def _mark_unit(stack: ExitStack, recorder: Recorder, unit: nn.Module, name: str) -> None:
    def before(*unused: Any) -> None:
        recorder.begin(unit=name)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        recorder.begin(unit="")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: recorder.begin(unit=name))

    stack.enter_context(unit.register_forward_pre_hook(before, prepend=True))
    stack.enter_context(unit.register_forward_hook(after))


def _actions(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Return methods of a pipeline's stage that tell the recorder which action runs."""

    def marked(name: str, kind: Callable[[bool], str]) -> Callable[..., Any]:
        method = getattr(PipelineStage, name)

        def call(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            recorder.begin((stage.stage_index, kind(kwargs.get("full_backward", True)), number), "")
            return method(stage, number, *args, **kwargs)

        return call

    return {
        "forward_one_chunk": marked("forward_one_chunk", lambda full: "F"),
        "backward_one_chunk": marked("backward_one_chunk", lambda full: "B" if full else "I"),
        "backward_weight_one_chunk": marked("backward_weight_one_chunk", lambda full: "W"),
    }


@contextmanager
def _few(job: Job, micro_batches: int) -> Iterator[None]:
    """Have a pipeline run its schedule's table with some of the micro-batches.

    Those are of :func:`few_micro_batches`, if they are fewer than all.
    """
    if job.degrees.pp == 1 or micro_batches != len(few_micro_batches(job)):
        yield
        return

    pipeline = compose.pipeline.pipeline_parallel
    with mock.patch.object(pipeline, "build_table", return_value=few_rows(job)):
        yield


# Micro-batches that are run to count messages; of more, each sends what the last of these does.
_MOST = 4


def sent_bytes(job: Job, rank: int) -> dict[tuple[str, str], int]:
    """Return the compressed bytes that ``rank`` sends in a step, as ``Traffic.take`` does.

    It is not the first step, whose differences have no base yet.
    """
    count = job.micro_batches
    if job.degrees.pp > 1 or count <= _MOST:
        return _counted(job, rank, count)
    less, most = (_counted(job, rank, number) for number in (_MOST - 1, _MOST))
    return {key: size + (count - _MOST) * (size - less.get(key, 0)) for key, size in most.items()}


def _counted(job: Job, rank: int, micro_batches: int) -> dict[tuple[str, str], int]:
    kernels, parallel, first, objects = job.device_type, job.degrees, rank, None
    if parallel.pp > 1:
        each = job.world_size // parallel.pp
        where = placement(parallel.pp_schedule, parallel.pp, parallel.pp_virtual_stages)
        first = where[0] * each + rank % each
    if rank != first:  # the rank of the first stage tells the others what stages send
        objects = trace(RankStep(job, first, micro_batches=0, device_type=kernels)).broadcast
    model = buffers_on_meta(copy.deepcopy(job.model))
    with fake_world(rank, job.world_size, Recorder(kernels), kernels, objects):
        mesh = init_mesh(job.degrees, kernels)
        with OnMeta(["cuda"], kernels="cpu"):
            composition = apply(model, resolve(job.plan, model), mesh, job.options)
            optimizer = build_optimizer(composition, job)
        batch = step_batch(job, micro_batches)
        compression = cast("Compression", composition.compression)
        for _ in range(2):
            compression.progress.step = job.config.comm.start_step
            compression.traffic.take()
            with OnMeta(kernels=kernels):
                forward_and_backward(composition, batch, job, DropoutKey(0))
            optimizer.zero_grad()
        return compression.traffic.take()
